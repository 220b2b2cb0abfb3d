"""Loading: the same examples with any workers, from any position, bad files counted."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from models.alphafold.data.alignment import single_sequence
from models.alphafold.data.chains import Chain
from models.alphafold.data.datasets import InMemory
from models.alphafold.data.errors import DataError, SkipCounter, SkippedDataWarning
from models.alphafold.data.examples import Protein
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.loader import Example, ExampleLoader, LoaderConfig, stack_examples

CONFIG = FeatureConfig(crop_size=8, max_msa_clusters=4, max_extra_msa=4, max_templates=1)
LOADING = LoaderConfig(seed=11)


def made_protein(name: str, sequence: str) -> Protein:
    length = len(sequence)
    chain = Chain(
        name=name,
        chain_id="A",
        sequence=sequence,
        all_atom_positions=np.ones((length, 37, 3), np.float32),
        all_atom_mask=np.ones((length, 37), np.float32),
        b_factors=np.zeros((length, 37), np.float32),
        author_numbers=("",) * length,
        resolution=2.0,
        rank=0,
        has_full_sequence=True,
        release_date="",
        source=name,
    )
    return Protein(name, chain, single_sequence(sequence, source=name))


DATASET = InMemory(tuple(made_protein(f"p{n}", "ACDEFGHIKLMNPQRS"[: 9 + n]) for n in range(7)))


@dataclasses.dataclass(frozen=True)
class WithBadFiles:
    """A data set in which the proteins of some indices cannot be read, and some in a new way."""

    bad: tuple[int, ...]
    odd: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(DATASET)

    def __getitem__(self, index: int) -> Protein:
        if index in self.odd:
            raise IndexError("list index out of range")
        if index in self.bad:
            raise DataError("row too short", source=f"p{index}.a3m", line=3, kind="row-length")
        return DATASET[index]

    def name(self, index: int) -> str:
        return DATASET.name(index)


def take(loader: ExampleLoader, count: int) -> list[Example]:
    examples = list(itertools.islice(loader, count))
    loader.close()
    return examples


def assert_same(first: list[Example], second: list[Example]) -> None:
    assert [(e.name, e.index, e.epoch) for e in first] == [
        (e.name, e.index, e.epoch) for e in second
    ]
    for one, two in zip(first, second, strict=True):
        assert one.features.keys() == two.features.keys()
        for name, value in one.features.items():
            np.testing.assert_array_equal(value, two.features[name], err_msg=name)


def test_every_epoch_sees_every_protein_once_in_a_new_order() -> None:
    examples = take(ExampleLoader(DATASET, CONFIG, LOADING), 21)
    orders = [[e.name for e in examples[start : start + 7]] for start in (0, 7, 14)]
    for order in orders:
        assert sorted(order) == [f"p{n}" for n in range(7)]
    assert orders[0] != orders[1] != orders[2]
    assert [e.epoch for e in examples[::7]] == [0, 1, 2]
    assert [e.index for e in examples] == list(range(21))


def test_a_run_resumes_exactly_from_its_position() -> None:
    whole = take(ExampleLoader(DATASET, CONFIG, LOADING), 20)
    loader = ExampleLoader(DATASET, CONFIG, LOADING)
    first = list(itertools.islice(loader, 9))
    assert loader.position == 9
    loader.close()
    rest = take(ExampleLoader(DATASET, CONFIG, LOADING, start=loader.position), 11)
    assert_same(whole, first + rest)


def test_worker_processes_give_the_same_examples() -> None:
    here = take(ExampleLoader(DATASET, CONFIG, LOADING, start=3), 6)
    parallel = dataclasses.replace(LOADING, num_workers=2, num_threads=1)
    assert_same(here, take(ExampleLoader(DATASET, CONFIG, parallel, start=3), 6))


def test_one_thread_or_four_give_the_same_examples() -> None:
    one = dataclasses.replace(LOADING, num_threads=1, prefetch=1)
    four = dataclasses.replace(LOADING, num_threads=4, prefetch=9)
    assert_same(
        take(ExampleLoader(DATASET, CONFIG, one), 9), take(ExampleLoader(DATASET, CONFIG, four), 9)
    )


def test_a_bad_file_is_raised_with_its_place_by_default() -> None:
    loader = ExampleLoader(WithBadFiles((2,)), CONFIG, LOADING)
    with pytest.raises(DataError, match=r"p2\.a3m:3: row too short"):
        take(loader, 7)
    loader.close()


def test_bad_files_are_skipped_and_counted_on_request() -> None:
    counter = SkipCounter(policy="skip")
    once = dataclasses.replace(LOADING, num_epochs=2)
    loader = ExampleLoader(WithBadFiles((2, 5)), CONFIG, once, counter=counter)
    with pytest.warns(SkippedDataWarning, match=r"row-length, \d skipped so far"):
        examples = take(loader, 100)
    assert len(examples) == 10
    assert counter.counts == {"row-length": 4}
    assert counter.summary() == "4 skipped (row-length: 4)"
    assert loader.position == 14


@pytest.mark.parametrize("workers", [0, 2])
def test_what_no_reader_foresaw_is_counted_too(workers: int) -> None:
    counter = SkipCounter(policy="skip")
    once = dataclasses.replace(LOADING, num_epochs=1, num_workers=workers)
    loader = ExampleLoader(WithBadFiles((2,), odd=(4,)), CONFIG, once, counter=counter)
    with pytest.warns(SkippedDataWarning) as found:
        assert len(take(loader, 100)) == 5
    said = " ".join(str(warning.message) for warning in found)
    assert "p4: cannot be used (IndexError: list index out of range)" in said
    assert counter.counts == {"row-length": 1, "unforeseen": 1}


@dataclasses.dataclass(frozen=True)
class WithBadTemplates:
    """The data set, each protein with the same bad template and one of its own."""

    def __len__(self) -> int:
        return len(DATASET)

    def __getitem__(self, index: int) -> Protein:
        faults = [
            DataError("cut short", source=f"{name}.cif", kind="truncated")
            for name in ("all", f"of_{index}")
        ]
        return dataclasses.replace(DATASET[index], template_faults=tuple(faults))

    def name(self, index: int) -> str:
        return DATASET.name(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_templates_are_counted_once_each_in_one_process(workers: int) -> None:
    counter = SkipCounter(policy="skip")
    twice = dataclasses.replace(LOADING, num_epochs=2, num_workers=workers)
    loader = ExampleLoader(WithBadTemplates(), CONFIG, twice, template_counter=counter)
    with pytest.warns(SkippedDataWarning) as found:
        assert len(take(loader, 100)) == 14
    assert counter.counts == {"truncated": 8}
    assert len(found) == 8


def test_when_every_file_is_bad_the_run_ends_with_an_error() -> None:
    loader = ExampleLoader(
        WithBadFiles(tuple(range(7))), CONFIG, LOADING, counter=SkipCounter(policy="skip")
    )
    with (
        pytest.warns(SkippedDataWarning),
        pytest.raises(DataError, match="no training data is left"),
    ):
        take(loader, 1)
    loader.close()


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="no proteins"):
        ExampleLoader(InMemory(()), CONFIG)


def test_weights_draw_proteins_in_proportion() -> None:
    loader = ExampleLoader(DATASET, CONFIG, LOADING, weights=[0, 0, 1, 0, 3, 0, 0])
    names = [example.name for example in take(loader, 200)]
    assert set(names) == {"p2", "p4"}
    assert names.count("p4") == pytest.approx(150, abs=25)
    # A new epoch is drawn anew.
    assert names[:7] != names[7:14]
    with pytest.raises(ValueError, match="2 weights for 7 proteins"):
        ExampleLoader(DATASET, CONFIG, LOADING, weights=[1, 1])


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    plain = dataclasses.replace(LOADING, shuffle=False, num_epochs=1)
    names = [example.name for example in ExampleLoader(DATASET, CONFIG, plain)]
    assert names == [f"p{n}" for n in range(7)]


def test_examples_stack_into_a_batch() -> None:
    examples = take(ExampleLoader(DATASET, CONFIG, LOADING), 3)
    batch = stack_examples(examples)
    assert batch["msa_feat"].shape == (3, 4, 8, 49)
    np.testing.assert_array_equal(batch["aatype"][1], examples[1].features["aatype"])
