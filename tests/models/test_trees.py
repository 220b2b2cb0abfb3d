"""The Tree-LSTM over syntax trees."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from models.training import accuracy, endless
from models.trees import data
from models.trees.network import TreeLstm, initial_parameters, log_odds
from models.trees.syntax import ABSENT, Tree, functions, returns_value, tree_of
from models.trees.train import SIZES, make
from tests.models.workloads import (
    assert_batches_are_static_and_deterministic,
    assert_managed_is_plain,
    trained,
)

SHAPE = SIZES["small"].shape
SOURCE = """
def plain(a, b):
    if a:
        {statement}
    while b:
        a += 1
    {statement}

class Kind:
    def method(self):
        def inner():
            return 1
        return
"""


def plain_tree(statement: str) -> Tree:
    found = {one.name: one for one in functions(SOURCE.format(statement=statement))}
    return tree_of(found["plain"])


def test_methods_are_functions_and_what_they_hold_is_not() -> None:
    found = {one.name: returns_value(one) for one in functions(SOURCE.format(statement="return 1"))}
    assert found == {"plain": True, "method": False}


def test_a_tree_does_not_say_what_it_is_asked() -> None:
    trees = [plain_tree(text) for text in ("return a", "return f(a) + 1", "return", "pass", "f(a)")]
    assert [tree.answer for tree in trees] == [1, 1, 0, 0, 0]
    for tree in trees[1:]:
        np.testing.assert_array_equal(tree.labels, trees[0].labels)
        np.testing.assert_array_equal(tree.children, trees[0].children)
    (annotated,) = functions("def f(a) -> int: pass")
    (bare,) = functions("def f(a): pass")
    np.testing.assert_array_equal(tree_of(annotated).labels, tree_of(bare).labels)


def test_trees_are_binary_and_shallow() -> None:
    body = "\n".join("    a += 1" for _ in range(64))
    (function,) = functions(f"def f(a):\n{body}")
    tree = tree_of(function)
    assert tree.heights[-1] <= 10
    numbers = np.arange(len(tree.labels))
    assert (tree.children < numbers[:, None]).all()
    below = np.where(tree.children == ABSENT, -1, tree.heights[tree.children])
    np.testing.assert_array_equal(tree.heights, below.max(axis=1) + 1)
    assert len(tree.labels) == 1 + sum(  # each but the root is a child once
        int((tree.children == number).sum()) for number in numbers
    )


def test_no_tree_of_the_test_is_one_of_training() -> None:
    training, testing = (
        [(tree.labels.tobytes(), tree.children.tobytes()) for tree in data.trees(split, SHAPE)]
        for split in ("train", "test")
    )
    assert len(training) > len(testing) > 50
    assert not set(training) & set(testing)


def test_rows_hold_every_node_once_behind_its_children() -> None:
    for batch in itertools.islice(data.batches("train", SHAPE, 0), 5):
        bucket, width = batch.labels.shape
        absent = bucket * width
        there = np.concatenate([batch.roots[batch.weights > 0], batch.children.ravel()])
        there = there[there != absent]
        assert len(np.unique(there)) == len(there)
        row_of_child = np.where(batch.children == absent, -1, batch.children // width)
        assert (row_of_child < np.arange(bucket)[:, None, None]).all()
        assert there.max() < batch.rows * width


def test_groups_that_fit_no_bucket_say_so() -> None:
    trees = data.trees("train", SHAPE)
    small = data.Shape(files=None, nodes=64, trees=16, width=32, buckets=(1,))
    with pytest.raises(ValueError, match="largest bucket has 1"):
        data.collate(trees[:16], small)


def test_batches_are_static_and_deterministic() -> None:
    assert_batches_are_static_and_deterministic(make(), len(SHAPE.buckets))


def recursive(model: TreeLstm, parameters: Any, tree: Tree) -> float:
    """The same network, node by node."""
    node = jax.jit(partial(model.apply, method="node"))
    states = np.zeros((len(tree.labels) + 1, 2, model.features), np.float32)
    for number, (label, children) in enumerate(zip(tree.labels, tree.children, strict=True)):
        states[number] = node(parameters, label[None], states[children][None])[0]
    return float(model.apply(parameters, states[-2, 1][None], method="read")[0])


@pytest.mark.parametrize("form", ["scan", "while"])
def test_a_batch_is_its_trees_node_by_node(form: str) -> None:
    model = TreeLstm(8)
    parameters = initial_parameters(model, jax.random.key(0))
    group = data.trees("train", SHAPE)[:3]
    got, path = log_odds(model, parameters, data.collate(group, SHAPE), form)
    want = [recursive(model, parameters, tree) for tree in group]
    np.testing.assert_allclose(got[:3], want, atol=1e-5)
    rows = data.collate(group, SHAPE).rows
    assert path.sum() == rows < SHAPE.buckets[0]


def test_both_forms_take_the_same_steps() -> None:
    forms = [make(form=form) for form in ("scan", "while")]
    states = [workload.state for workload in forms]
    steps = [jax.jit(workload.step) for workload in forms]
    for batch in itertools.islice(endless(forms[0], 0), 3):
        states, metrics = zip(
            *(step(state, batch) for step, state in zip(steps, states, strict=True)), strict=True
        )
        np.testing.assert_allclose(metrics[0]["loss"], metrics[1]["loss"], rtol=1e-5)
        assert metrics[0]["path"].sum() == metrics[1]["path"] == batch.rows
    with pytest.raises(ValueError, match="'until'"):
        make(form="until").score(states[0].parameters, batch)


def test_it_learns() -> None:
    workload = make()
    assert accuracy(workload, trained(workload, 100).parameters, "train") > 0.62


@pytest.mark.parametrize("form", ["scan", "while"])
def test_managed_training_takes_the_same_paths_to_the_same_results(form: str) -> None:
    workload = make(form=form)
    paths = assert_managed_is_plain(workload, workload.state)
    assert len({path.tobytes() for path in paths}) > 1
