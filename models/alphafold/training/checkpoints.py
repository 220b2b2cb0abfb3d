"""Orbax checkpoints that resume a run exactly: the state, and where the data stood.

A checkpoint holds the train state and the number of examples consumed; since example number n and
the randomness of step k are functions of the seed alone, nothing else is needed, and 10 + 10 steps
equal 20. The trap: a checkpoint of another configuration restores into a state of other shapes, so
the shapes are compared first and the difference is named.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.alphafold.training.train_step import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, or that is of another configuration."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds.

    Attributes:
        state: of training.
        position: examples consumed by the loader.
    """

    state: TrainState
    position: int


class Checkpoints:
    """The checkpoints of one run, in a folder; a context manager, to be closed after the run."""

    def __init__(self, folder: Path, *, kept: int = 3) -> None:
        """Open the folder, making it if needed.

        Args:
            folder: of the checkpoints, one sub-folder a step.
            kept: the newest so many stay.
        """
        self.folder = folder.absolute()
        # Not in the background: the next step gets the state donated, and would overwrite it.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept, create=True, enable_async_checkpointing=False
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

    def save(self, state: TrainState, position: int) -> None:
        """Save a state under its step; does nothing where that step is saved already."""
        step = int(state.step)
        if step == self.latest_step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()),
                run=ocp.args.JsonSave({"position": position}),
            ),
        )

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Restore a checkpoint.

        Args:
            like: a state of the run's configuration, as arrays or `jax.ShapeDtypeStruct`s.
            step: which; None for the newest.

        Raises:
            CheckpointError: there is none, or it was made with another configuration.
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
        restored = self._manager.restore(
            chosen,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore()
            ),
        )
        return Restored(TrainState(**restored["state"]), int(restored["run"]["position"]))

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
