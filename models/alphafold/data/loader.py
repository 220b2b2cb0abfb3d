"""Loads training examples in parallel and ahead of time, with grain, reproducibly.

Example number n of a run is a pure function of (seed, n): which protein it is comes from grain's
seeded shuffle of each epoch, and its random choices from the same pair. So the position of a run
is one integer, and a run resumes exactly at any position, with any number of workers. Bad proteins
travel from the workers to the consumer as values and are counted there, in one process. The traps:
grain starts worker processes by spawn, so a script that uses workers needs the usual
`if __name__ == "__main__":`, and grain's worker code wants absl flags parsed, which is done here
for programs that do not use absl.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from models.alphafold.data.datasets import ProteinDataset
from models.alphafold.data.errors import DataError, SkipCounter, unforeseen
from models.alphafold.data.examples import Features, Protein, make_example
from models.alphafold.data.feature_config import FeatureConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One loaded example.

    Attributes:
        name: of the protein.
        index: number of the example in the run, from 0.
        epoch: how often the data set was gone through before.
        features: arrays by the field's names.
    """

    name: str
    index: int
    epoch: int
    features: Features


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """How examples are ordered and loaded.

    Attributes:
        seed: of the order and of every example's random choices.
        shuffle: a new order in each epoch; False keeps the data set's.
        num_epochs: stop after so many; None never stops.
        num_workers: worker processes; 0 loads in threads of this process, which starts at once
            and is enough for small models.
        num_threads: threads that make examples, in this process or in each worker.
        prefetch: examples ready ahead of time, for this process or for each worker.
        cached_proteins: parsed proteins kept in memory, for this process or for each worker.
    """

    seed: int = 0
    shuffle: bool = True
    num_epochs: int | None = None
    num_workers: int = 0
    num_threads: int = 2
    prefetch: int = 4
    cached_proteins: int = 16


@dataclasses.dataclass(frozen=True, eq=False)
class _Maker:
    """Makes example `index` from the protein the shuffle chose. Sent to workers by pickle."""

    dataset: ProteinDataset
    features: FeatureConfig
    loading: LoaderConfig

    @functools.cached_property
    def _protein(self) -> Any:
        return functools.lru_cache(maxsize=self.loading.cached_proteins)(self.dataset.__getitem__)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cache behind: each process fills its own."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __call__(self, index: int, chosen: int) -> dict[str, Any]:
        # A dictionary, because grain sends the arrays of a tree it knows through shared memory;
        # anything else goes through a pipe, slowly, and a worker stuck in it cannot be stopped.
        try:
            protein: Protein = self._protein(int(chosen))
            features = make_example(
                protein, self.features, seed=self.loading.seed, index=int(index)
            )
        except DataError as error:
            return {"error": error}
        # One odd protein among thousands must not end a run that skips bad files, whatever its
        # oddity is. Where the fault is the program's, every protein has it, and that ends the run.
        except Exception as error:
            name = self.dataset.name(int(chosen))
            return {"error": unforeseen(error, name)}
        return {
            "name": protein.name,
            "index": int(index),
            "features": features,
            "faults": protein.template_faults,
        }


class ExampleLoader(Iterator[Example]):
    """Iterates over the examples of a run from a given position.

    Not restartable: `position` says where it stands, and a new loader with `start=position` goes
    on from there with the same examples.
    """

    def __init__(
        self,
        dataset: ProteinDataset,
        features: FeatureConfig,
        loading: LoaderConfig | None = None,
        *,
        start: int = 0,
        weights: Sequence[float] | None = None,
        counter: SkipCounter | None = None,
        template_counter: SkipCounter | None = None,
    ) -> None:
        """Set up the pipeline; nothing is read before the first `next`.

        Args:
            dataset: the proteins.
            features: sizes and probabilities of feature making.
            loading: order, workers and prefetch.
            start: number of the first example, from `position` of an earlier loader.
            weights: relative frequency of each protein; examples are then drawn with replacement.
                None goes through all proteins in each epoch.
            counter: what to do with unusable proteins; None raises.
            template_counter: what to do with unusable templates that the data set passed over;
                None skips them, counting.

        Raises:
            DataError: the data set is empty.
        """
        loading = loading or LoaderConfig()
        if len(dataset) == 0:
            raise DataError("there are no proteins to load", source="data set", kind="empty")
        if weights is not None and len(weights) != len(dataset):
            raise ValueError(f"{len(weights)} weights for {len(dataset)} proteins")
        self.counter = counter or SkipCounter()
        self.template_counter = template_counter or SkipCounter(policy="skip")
        self.position = start
        self._dataset = dataset
        self._skipped_in_a_row = 0
        order = grain.MapDataset.range(len(dataset)).seed(loading.seed)
        if weights is not None:
            order = order.random_map(_WeightedChoice(tuple(weights)))
        elif loading.shuffle:
            order = order.shuffle()
        pipeline = order.repeat(loading.num_epochs).map_with_index(
            _Maker(dataset, features, loading)
        )
        threads = grain.ReadOptions(
            num_threads=loading.num_threads, prefetch_buffer_size=loading.prefetch
        )
        stream = pipeline[start:].to_iter_dataset(threads)
        if loading.num_workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            stream = stream.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=loading.num_workers, per_worker_buffer_size=loading.prefetch
                )
            )
        self._stream = stream
        self._iterator: Any = None

    def __iter__(self) -> ExampleLoader:
        return self

    def __next__(self) -> Example:
        """The next usable example.

        Raises:
            DataError: a protein cannot be used and the counter's policy is to raise, or every
                protein was skipped for as many examples as the data set has proteins.
            StopIteration: after the last epoch.
        """
        if self._iterator is None:
            self._iterator = iter(self._stream)
        while True:
            item = next(self._iterator)
            self.position += 1
            if "error" not in item:
                self._skipped_in_a_row = 0
                for fault in item["faults"]:
                    self.template_counter.handle_once(fault)
                epoch = item["index"] // len(self._dataset)
                return Example(item["name"], item["index"], epoch, item["features"])
            self.counter.handle(item["error"])
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= len(self._dataset):
                raise DataError(
                    f"{self._skipped_in_a_row} proteins in a row were unusable "
                    f"({self.counter.summary()}): no training data is left",
                    source="data set",
                    kind="empty",
                )

    def close(self) -> None:
        """Stop workers and threads. The loader cannot be used afterwards."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()


@dataclasses.dataclass(frozen=True)
class _WeightedChoice:
    weights: tuple[float, ...]

    def __call__(self, _: int, rng: np.random.Generator) -> int:
        probabilities = np.asarray(self.weights, dtype=np.float64)
        return int(rng.choice(len(probabilities), p=probabilities / probabilities.sum()))


def stack_examples(examples: Sequence[Example]) -> Features:
    """Stack the features of equally shaped examples along a new leading batch axis."""
    names = examples[0].features.keys()
    return {name: np.stack([example.features[name] for example in examples]) for name in names}
