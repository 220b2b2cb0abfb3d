"""A training run: examples in; checkpoints, scores, files and curves out.

For the training script, which chooses data and configuration and may pass a `wrap_step` that
changes how the step is run (jitted, or managed within a memory budget) but not what it computes.
The trap is resuming: examples, randomness, schedule and averages all follow from the seed, the step
and the loader's position, so a resumed run equals one that was never interrupted, and the loader
must go on from the checkpoint's position rather than from the beginning of an epoch. What the
configuration or the data are now that they were not then is said in a warning.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from rich.console import Console

from models.alphafold.data.datasets import ProteinDataset
from models.alphafold.data.errors import BadFilePolicy, SkipCounter
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.loader import Example, ExampleLoader, LoaderConfig, stack_examples
from models.alphafold.training import display, process_memory
from models.alphafold.training.checkpoints import (
    FOLDER,
    CheckpointError,
    Checkpoints,
    find_checkpoint,
    restore_from,
)
from models.alphafold.training.logbook import Logbook
from models.alphafold.training.predictions import write_predictions
from models.alphafold.training.settings import changed_options, recorded_options
from models.alphafold.training.train_step import (
    ZEROED,
    Training,
    TrainState,
    make_training,
    samples_per_step,
)
from models.alphafold.training.validation import Validation, make_validator

Step = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Mapping[str, jax.Array]]]
CompilerOptions = Mapping[str, bool | int | str] | None


class ZeroedTermWarning(UserWarning):
    """A loss term was not finite and counted as zero; the text says which, where, how often."""


class ResumedDifferentlyWarning(UserWarning):
    """A run goes on with another configuration or other data; the text says what differs."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        train: proteins to learn from.
        validation: proteins to score; None for no validation.
        weights: relative frequency of each training protein; None goes through all in each epoch.
        skip_bad_files: count and leave out proteins and templates that cannot be used, instead of
            stopping.
        validation_name: what the validated chains are, for tables and figures.
    """

    train: ProteinDataset
    validation: ProteinDataset | None = None
    weights: Sequence[float] | None = None
    skip_bad_files: bool = True
    validation_name: str = "validation"


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        state: of training.
        losses: of the steps of this call.
        validation: the last one, if any.
        zeroed: how often each loss term was not finite.
        skipped: what was left out, in words, by what it is: proteins, templates, ...
    """

    state: TrainState
    losses: tuple[float, ...]
    validation: Validation | None
    zeroed: Mapping[str, int]
    skipped: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Skipped:
    """Counts of what a run leaves out."""

    proteins: SkipCounter
    validation_chains: SkipCounter
    templates: SkipCounter

    @classmethod
    def counting(cls, data: Data) -> _Skipped:
        policy: BadFilePolicy = "skip" if data.skip_bad_files else "raise"
        return cls(SkipCounter(policy), SkipCounter(policy), SkipCounter(policy))

    def words(self) -> dict[str, str]:
        return {
            field.name.replace("_", " "): getattr(self, field.name).summary()
            for field in dataclasses.fields(self)
        }


def steps_per_epoch(config: ml_collections.ConfigDict) -> int:
    """Optimiser steps that go through `train_epoch_len` samples."""
    return -(-config.train.train_epoch_len // samples_per_step(config))


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Optimiser steps of a whole run: `max_epochs` times `train_epoch_len` samples."""
    return config.train.max_epochs * steps_per_epoch(config)


def jitted(step: Step, compiler_options: CompilerOptions = None) -> Step:
    """The step as plain JAX runs it, with its state donated.

    Args:
        step: of training.
        compiler_options: of XLA; None for the usual ones.
    """
    options = None if compiler_options is None else dict(compiler_options)
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def train(
    config: ml_collections.ConfigDict,
    data: Data,
    folder: Path,
    *,
    steps: int | None = None,
    resume_from: Path | None = None,
    initial_params: Any = None,
    wrap_step: Callable[[Step], Step] = jitted,
    validation_compiler_options: CompilerOptions = None,
    console: Console | None = None,
) -> Result:
    """Train, and leave everything about it in a folder.

    Args:
        config: a tree of `models.alphafold.training.settings.training_config`.
        data: proteins.
        folder: gets `config.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/`,
            `predictions/` and `curves.png`.
        steps: train until so many steps are done in all; None for `total_steps(config)`.
        resume_from: go on from this checkpoint: state, averages, optimiser, step and position in
            the data. It is `folder` itself, another run's, or one step of a run, see
            `checkpoints.find_checkpoint`; None begins a new run.
        initial_params: begin with these parameters, e.g. published ones.
        wrap_step: makes the callable that runs the step.
        validation_compiler_options: of XLA for validation; None for the usual ones.
        console: where to show progress; None shows nothing.

    Returns:
        The last state and figures of this call.

    Raises:
        CheckpointError: `resume_from` has no checkpoint that fits, or `folder` has checkpoints
            that this run does not follow.
        DataError: a protein cannot be used and bad files are not skipped, or none is left.
    """
    console = console or Console(quiet=True)
    last = total_steps(config) if steps is None else steps
    training = make_training(config)
    skipped = _Skipped.counting(data)
    record = {"config": recorded_options(config), "data": _described(data)}
    every_epoch = steps_per_epoch(config) if config.train.checkpoint_every_epoch else None
    with Checkpoints(
        folder / FOLDER, kept=config.train.checkpoints_kept, kept_period=every_epoch
    ) as checkpoints:
        state, position = _begin(training, checkpoints, resume_from, initial_params, record)
        done = int(state.step)
        (folder / "config.json").write_text(config.to_json_best_effort(indent=1))
        validate = None
        if data.validation is not None and config.train.max_validation_chains:
            validate = make_validator(
                config,
                data.validation,
                counter=skipped.validation_chains,
                template_counter=skipped.templates,
                compiler_options=validation_compiler_options,
            )
        loop = _Loop(
            config=config,
            folder=folder,
            console=console,
            step=wrap_step(training.step),
            validate=validate,
            validation_name=data.validation_name,
            save=lambda state, position: checkpoints.save(state, position, record),
        )
        resumed = None if resume_from is None else find_checkpoint(resume_from)[0].parent
        with Logbook(
            folder, resumed_step=None if resumed is None else done, resumed_folder=resumed
        ) as logbook:
            examples = ExampleLoader(
                data.train,
                FeatureConfig.from_config(config, recycling_axis=True),
                LoaderConfig(seed=config.train.seed, num_workers=config.train.num_workers),
                start=position,
                weights=data.weights,
                counter=skipped.proteins,
                template_counter=skipped.templates,
            )
            try:
                state, losses = loop.run(state, examples, training.spec, done, last, logbook)
            finally:
                examples.close()
    return Result(state, losses, loop.validation, dict(loop.zeroed), skipped.words())


def _begin(
    training: Training,
    checkpoints: Checkpoints,
    resume_from: Path | None,
    initial_params: Any,
    record: Mapping[str, Any],
) -> tuple[TrainState, int]:
    """The state and the position in the data to begin with; refuses a folder in use."""
    newest = checkpoints.latest_step
    if resume_from is None:
        if newest is not None:
            raise CheckpointError(
                f"{checkpoints.folder} has checkpoints, the newest of step {newest}, and a new run "
                "would mix with them. Go on from there with --resume_from_ckpt, choose another "
                "output folder, or remove this one."
            )
        if initial_params is None:
            return training.init(), 0
        return training.state_of(jax.tree.map(jax.numpy.asarray, initial_params)), 0
    if initial_params is not None:
        raise ValueError("resume_from and initial_params exclude each other; give one.")
    restored = restore_from(resume_from, training.state_shapes())
    step = int(restored.state.step)
    same_folder = find_checkpoint(resume_from)[0].resolve() == checkpoints.folder.resolve()
    if newest is not None and not (same_folder and newest == step):
        raise CheckpointError(
            f"{checkpoints.folder} has a checkpoint of step {newest}, and the run that goes on "
            f"from step {step} of {resume_from} would mix with it. Resume from the newest "
            "checkpoint of that folder, or choose another output folder."
        )
    _warn_of_changes(restored.record, record, resume_from)
    return restored.state, restored.position


def _warn_of_changes(then: Mapping[str, Any], now: Mapping[str, Any], source: Path) -> None:
    if "config" not in then:
        changes = ["it holds no record of its configuration, so nothing could be compared"]
    else:
        changes = changed_options(then["config"], now["config"])
        if then["data"] != now["data"]:
            changes.append(f"data: {then['data']} -> {now['data']}")
    if changes:
        warnings.warn(
            f"the run does not go on exactly as {source} would have: {'; '.join(changes)}",
            ResumedDifferentlyWarning,
            stacklevel=4,
        )


def _described(data: Data) -> dict[str, int]:
    """What decides which protein is example number n, for comparison at resuming."""
    names = "\n".join(data.train.name(index) for index in range(len(data.train)))
    weights = "" if data.weights is None else repr([float(weight) for weight in data.weights])
    return {"proteins": len(data.train), "crc32": zlib.crc32(f"{names}\n{weights}".encode())}


@dataclasses.dataclass
class _Loop:
    """The loop over steps, with what it needs at its milestones."""

    config: ml_collections.ConfigDict
    folder: Path
    console: Console
    step: Step
    validate: Callable[[Any], Validation] | None
    validation_name: str
    save: Callable[[TrainState, int], None]
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
    ) -> tuple[TrainState, tuple[float, ...]]:
        losses: list[float] = []
        train = self.config.train
        epoch = steps_per_epoch(self.config)
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
                epoch_ended = train.checkpoint_every_epoch and done % epoch == 0
                if finished or epoch_ended or done % train.checkpoint_every_n_steps == 0:
                    self.save(state, examples.position)
                if finished or done % train.validate_every_n_steps == 0:
                    self._validate(state, done, logbook)
        return state, tuple(losses)

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
            self.console.print(
                display.validation_table(step, self.validation, self.validation_name)
            )
        of = "" if self.validate is None else f"; val/: {self.validation_name}"
        logbook.draw(f"{self.config.preset}, {step} steps{of}")


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
