"""Orbax checkpoints that resume a run exactly: the state, and where the data stood.

A checkpoint holds the train state, the number of examples consumed and a record of what the run was
(its configuration and data); since example number n and the randomness of step k are functions of
the seed alone, nothing else is needed, and 10 + 10 steps equal 20. The traps: a checkpoint of
another configuration restores into a state of other shapes, so the shapes are compared first and
the difference is named; and Orbax passes over a step that is not after the newest one on disk, so
a new run in a used folder would save nothing, which is an error here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.alphafold.training.train_step import TrainState

#: Name of the checkpoints' folder in the folder of a run.
FOLDER = "checkpoints"


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, is of another configuration, or cannot be saved."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds.

    Attributes:
        state: of training.
        position: examples consumed by the loader.
        record: what `Checkpoints.save` was told about the run; {} where it was told nothing.
    """

    state: TrainState
    position: int
    record: Mapping[str, Any]


def find_checkpoint(path: Path) -> tuple[Path, int | None]:
    """Say which folder of checkpoints a user means, and which step.

    Args:
        path: the folder of a run, its `checkpoints` folder, or the folder of one step in it.

    Returns:
        The folder of checkpoints, and the step or None for the newest.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder. Name the folder of a run, its {FOLDER} folder, or one step's "
            "folder in that."
        )
    if (path / FOLDER).is_dir():
        return path / FOLDER, None
    return (path.parent, int(path.name)) if path.name.isdecimal() else (path, None)


class Checkpoints:
    """The checkpoints of one run, in a folder; a context manager, to be closed after the run."""

    def __init__(
        self,
        folder: Path,
        *,
        kept: int = 3,
        kept_period: int | None = None,
        read_only: bool = False,
    ) -> None:
        """Open the folder.

        Args:
            folder: of the checkpoints, one sub-folder a step; made if needed.
            kept: the newest so many stay.
            kept_period: and those of steps divisible by this; None for no others.
            read_only: nothing is made, saved or removed.
        """
        self.folder = folder.absolute()
        # Not in the background: the next step gets the state donated, and would overwrite it.
        # Nothing is written by a manager that makes, keeps and saves nothing; Orbax's own
        # `read_only` does no more, and warns of itself.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else kept,
            keep_period=None if read_only else kept_period,
            create=not read_only,
            enable_async_checkpointing=False,
        )
        # Named here, so that a checkpoint can be inspected before anything was saved.
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "run": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(
        self, state: TrainState, position: int, record: Mapping[str, Any] | None = None
    ) -> None:
        """Save a state under its step.

        Args:
            state: of training.
            position: examples consumed by the loader.
            record: what the run is, as JSON values.

        Raises:
            CheckpointError: nothing was saved, because a checkpoint of this or a later step is
                there.
        """
        step = int(state.step)
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()),
                run=ocp.args.JsonSave({"position": position, **(record or {})}),
            ),
        )
        if not saved:
            raise CheckpointError(
                f"Step {step} was not saved: {self.folder} has a checkpoint of step "
                f"{self.latest_step}, and a step must come after the newest. Is another run "
                "writing into this folder? Give each run its own."
            )

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Restore a checkpoint.

        Args:
            like: a state of the run's configuration, as arrays or `jax.ShapeDtypeStruct`s.
            step: which; None for the newest.

        Raises:
            CheckpointError: there is none, it was made with another configuration, or it cannot
                be read.
        """
        chosen = self.latest_step if step is None else step
        if chosen is None or chosen not in self._manager.all_steps():
            present = sorted(self._manager.all_steps())
            raise CheckpointError(
                f"{self.folder} has no checkpoint{'' if step is None else f' of step {step}'}; "
                f"there are {present or 'none'}."
            )
        wanted = jax.tree.map(_struct, like._asdict())
        self._check(chosen, wanted)
        try:
            restored = self._manager.restore(
                chosen,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore()
                ),
            )
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{self.folder / str(chosen)} cannot be read ({error}). Resume from another step: "
                f"there are {sorted(self._manager.all_steps())}."
            ) from error
        record = dict(restored["run"])
        position = int(record.pop("position"))
        return Restored(TrainState(**restored["state"]), position, record)

    def _check(self, step: int, wanted: Any) -> None:
        found = self._manager.item_metadata(step)["state"]
        if found is None:
            raise CheckpointError(f"{self.folder / str(step)} holds no train state.")
        saved = _shapes(found)
        expected = _shapes(wanted)
        differing = sorted(
            name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name)
        )
        if differing:
            name = differing[0]
            raise CheckpointError(
                f"The checkpoint {self.folder / str(step)} is of another configuration: "
                f"{len(differing)} arrays differ, first {name}: saved {saved.get(name)}, "
                f"configured {expected.get(name)}. Resume with the configuration of that run."
            )


def restore_from(path: Path, like: Any) -> Restored:
    """Restore the checkpoint that a user names, see `find_checkpoint`, and change nothing there.

    Args:
        path: of a run, of its checkpoints, or of one of them.
        like: a state of the run's configuration, as arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        CheckpointError: as of `find_checkpoint` and `Checkpoints.restore`.
    """
    folder, step = find_checkpoint(path)
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(like, step)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every array by its path, whatever containers it is in."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(map(_key, path)): tuple(leaf.shape) for path, leaf in flat}


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
