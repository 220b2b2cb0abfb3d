"""A training run: examples in; checkpoints, scores, files and curves out.

For the training script, which chooses data and configuration and may pass a `wrap_step` that
changes how the step is run (jitted, or managed within a memory budget) but not what it computes.
The trap is resuming: examples, randomness, schedule and averages all follow from the seed, the step
and the loader's position, so a resumed run equals one that was never interrupted, and the loader
must go on from the checkpoint's position rather than from the beginning of an epoch.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from rich.console import Console

from models.alphafold.data.datasets import ProteinDataset
from models.alphafold.data.errors import SkipCounter
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.loader import Example, ExampleLoader, LoaderConfig, stack_examples
from models.alphafold.training import display, process_memory
from models.alphafold.training.checkpoints import Checkpoints
from models.alphafold.training.logbook import Logbook
from models.alphafold.training.predictions import write_predictions
from models.alphafold.training.train_step import (
    ZEROED,
    Training,
    TrainState,
    make_training,
    samples_per_step,
)
from models.alphafold.training.validation import Validation, make_validator

Step = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Mapping[str, jax.Array]]]


class ZeroedTermWarning(UserWarning):
    """A loss term was not finite and counted as zero; the text says which, where, how often."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        train: proteins to learn from.
        validation: proteins to score; None for no validation.
        weights: relative frequency of each training protein; None goes through all in each epoch.
        skip_bad_files: count and leave out proteins that cannot be used, instead of stopping.
    """

    train: ProteinDataset
    validation: ProteinDataset | None = None
    weights: Sequence[float] | None = None
    skip_bad_files: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        state: of training.
        losses: of the steps of this call.
        validation: the last one, if any.
        zeroed: how often each loss term was not finite.
        skipped: proteins left out, in words.
    """

    state: TrainState
    losses: tuple[float, ...]
    validation: Validation | None
    zeroed: Mapping[str, int]
    skipped: str


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Optimiser steps of a whole run: `max_epochs` times `train_epoch_len` samples."""
    return config.train.max_epochs * -(-config.train.train_epoch_len // samples_per_step(config))


def jitted(step: Step) -> Step:
    """The step as plain JAX runs it, with its state donated."""
    return jax.jit(step, donate_argnums=0)


def train(
    config: ml_collections.ConfigDict,
    data: Data,
    folder: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    initial_params: Any = None,
    wrap_step: Callable[[Step], Step] = jitted,
    validation_compiler_options: Mapping[str, bool | int | str] | None = None,
    console: Console | None = None,
) -> Result:
    """Train, and leave everything about it in a folder.

    Args:
        config: a tree of `models.alphafold.training.settings.training_config`.
        data: proteins.
        folder: gets `config.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/`,
            `predictions/` and `curves.png`.
        steps: train until so many steps are done in all; None for `total_steps(config)`.
        resume: go on from the newest checkpoint of `folder`.
        initial_params: start from these parameters, e.g. published ones.
        wrap_step: makes the callable that runs the step.
        validation_compiler_options: of XLA for validation; None for the usual ones.
        console: where to show progress; None shows nothing.

    Returns:
        The last state and figures of this call.

    Raises:
        CheckpointError: `resume` without a checkpoint that fits.
        DataError: a protein cannot be used and bad files are not skipped, or none is left.
    """
    console = console or Console(quiet=True)
    last = total_steps(config) if steps is None else steps
    training = make_training(config)
    counter = SkipCounter(policy="skip" if data.skip_bad_files else "raise")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json_best_effort(indent=1))
    validate = None
    if data.validation is not None:
        validate = make_validator(
            config,
            data.validation,
            counter=SkipCounter(counter.policy),
            compiler_options=validation_compiler_options,
        )
    with Checkpoints(folder / "checkpoints", kept=config.train.checkpoints_kept) as checkpoints:
        state, position = _begin(training, checkpoints, resume, initial_params)
        done = int(state.step)
        loop = _Loop(config, folder, console, wrap_step(training.step), validate, checkpoints)
        with Logbook(folder, resumed_step=done if resume else None) as logbook:
            examples = ExampleLoader(
                data.train,
                FeatureConfig.from_config(config, recycling_axis=True),
                LoaderConfig(seed=config.train.seed, num_workers=config.train.num_workers),
                start=position,
                weights=data.weights,
                counter=counter,
            )
            try:
                return loop.run(state, examples, training.spec, done, last, logbook)
            finally:
                examples.close()


def _begin(
    training: Training, checkpoints: Checkpoints, resume: bool, initial_params: Any
) -> tuple[TrainState, int]:
    if resume:
        restored = checkpoints.restore(training.state_shapes())
        return restored.state, restored.position
    if initial_params is not None:
        return training.state_of(jax.tree.map(jax.numpy.asarray, initial_params)), 0
    return training.init(), 0


@dataclasses.dataclass
class _Loop:
    """The loop over steps, with what it needs at its milestones."""

    config: ml_collections.ConfigDict
    folder: Path
    console: Console
    step: Step
    validate: Callable[[Any], Validation] | None
    checkpoints: Checkpoints
    zeroed: Counter[str] = dataclasses.field(default_factory=Counter)
    validation: Validation | None = None

    def run(
        self,
        state: TrainState,
        examples: ExampleLoader,
        spec: Mapping[str, jax.ShapeDtypeStruct],
        done: int,
        last: int,
        logbook: Logbook,
    ) -> Result:
        losses: list[float] = []
        train = self.config.train
        with display.progress_bar(self.console) as bar:
            task = bar.add_task("training", total=last, completed=done, loss="", rate="")
            for batch, names in _batches(examples, spec):
                if done >= last:
                    break
                started = time.perf_counter()
                state, device_metrics = self.step(state, batch)
                metrics = {name: float(value) for name, value in device_metrics.items()}
                seconds = time.perf_counter() - started
                done += 1
                losses.append(metrics["loss"])
                self._count_zeroed(metrics, done, names)
                if done % train.log_every_n_steps == 0:
                    logbook.write(done, _scalars(metrics, seconds))
                bar.update(
                    task,
                    completed=done,
                    loss=display.losses_text(metrics),
                    rate=f"{seconds:.1f} s/step",
                )
                finished = done == last
                if finished or done % train.checkpoint_every_n_steps == 0:
                    self.checkpoints.save(state, examples.position)
                if finished or done % train.validate_every_n_steps == 0:
                    self._validate(state, done, logbook)
        return Result(
            state, tuple(losses), self.validation, dict(self.zeroed), examples.counter.summary()
        )

    def _count_zeroed(self, metrics: dict[str, float], step: int, names: Sequence[str]) -> None:
        for name in [name for name in metrics if name.startswith(ZEROED)]:
            count = int(metrics.pop(name))
            if count:
                term = name.removeprefix(ZEROED)
                self.zeroed[term] += count
                warnings.warn(
                    f"loss term {term} was not finite in step {step} ({', '.join(names)}) and "
                    f"counts as zero; {self.zeroed[term]} times so far",
                    ZeroedTermWarning,
                    stacklevel=2,
                )

    def _validate(self, state: TrainState, step: int, logbook: Logbook) -> None:
        if self.validate is not None:
            self.validation = self.validate(state.ema_params)
            scores = self.validation.scores
            logbook.write(step, {f"val/{name}": value for name, value in scores.items()})
            write_predictions(self.folder / "predictions", self.validation.predictions, step)
            self.console.print(display.validation_table(step, self.validation))
        logbook.draw(f"{self.config.preset}, {step} steps")


def _batches(
    examples: ExampleLoader, spec: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[dict[str, np.ndarray], list[str]]]:
    """Batches of examples with the features that the step reads, and the proteins' names."""
    samples = next(iter(spec.values())).shape[0]
    while True:
        chosen: list[Example] = []
        for example in examples:
            chosen.append(example)
            if len(chosen) == samples:
                break
        if len(chosen) < samples:
            return
        stacked = stack_examples(chosen)
        yield {name: stacked[name] for name in spec}, [example.name for example in chosen]


def _scalars(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {
        **{f"train/{name}": value for name, value in metrics.items()},
        "train/seconds_per_step": seconds,
        "system/peak_memory_bytes": float(process_memory.peak_bytes()),
    }
