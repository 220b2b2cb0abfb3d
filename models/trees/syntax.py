"""Syntax trees of functions, as binary trees of labels, without what gives the answer away.

The question is whether a function returns a value: whether its own body (nested functions and
classes aside) holds a `return` with an expression. So statements that return, that only evaluate
an expression, and `pass` become one leaf of one label, and the annotation of the result is left
out. What remains is the shape of everything else: arguments, branches, loops, assignments, calls.
There are no names. The trap: a node with more than two children needs inner nodes to have two, and
halving the list of children keeps the tree shallow, where a chain would be as deep as it is long.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_MASKED = (ast.Return, ast.Expr, ast.Pass)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_KINDS = sorted(
    name for name, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST)
)
_LABELS = {name: number for number, name in enumerate(["<statement>", "<children>", *_KINDS])}
LABELS = len(_LABELS)
ABSENT = -1  # as a child


class Tree(NamedTuple):
    """A binary tree; children come before their parents, the root is last."""

    labels: np.ndarray  # int32[nodes]
    children: np.ndarray  # int32[nodes, 2], ABSENT where there is none
    heights: np.ndarray  # int32[nodes], 0 for leaves
    answer: int  # 1 if the function returns a value


def functions(text: str) -> Iterator[ast.FunctionDef]:
    """The functions of a source file that are no other function's, methods included."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            yield node
        elif not isinstance(node, _OWN_SCOPE) or isinstance(node, ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def returns_value(function: ast.FunctionDef) -> bool:
    """Whether its own body holds a `return` with an expression."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            return True
        if not isinstance(node, _OWN_SCOPE):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def tree_of(function: ast.FunctionDef) -> Tree:
    """The binary tree of a function."""
    labels: list[int] = []
    children: list[tuple[int, int]] = []
    heights: list[int] = []

    def add(name: str, below: list[int]) -> int:
        while len(below) > 2:
            middle = len(below) // 2
            halves = below[:middle], below[middle:]
            below = [half[0] if len(half) == 1 else add("<children>", half) for half in halves]
        left, right = [*below, ABSENT, ABSENT][:2]
        labels.append(_LABELS[name])
        children.append((left, right))
        heights.append(1 + max((heights[child] for child in below), default=-1))
        return len(labels) - 1

    def visit(node: ast.AST) -> int:
        if isinstance(node, _MASKED):
            return add("<statement>", [])
        below = [
            visit(child)
            for name, value in ast.iter_fields(node)
            if name != "returns"
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context)
        ]
        return add(type(node).__name__, below)

    visit(function)
    return Tree(
        np.array(labels, np.int32),
        np.array(children, np.int32),
        np.array(heights, np.int32),
        int(returns_value(function)),
    )
