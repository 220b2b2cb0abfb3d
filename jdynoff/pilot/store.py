"""Saves what a pilot has learned, for a warm start of a later run.

A save is an Orbax checkpoint: arrays and JSON, no pickle. Next to the state lie the fingerprint and
what it was made from, so that a refusal can say what differs. A new save is complete before the
previous one is deleted, so a crash at any moment leaves one that can be restored.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jdynoff.errors import ConfigurationError
from jdynoff.pilot.learner import Learner


def save(directory: str | os.PathLike[str], learner: Learner, state: Any) -> None:
    """Saves a pilot's state; a previous save in the directory is replaced.

    Args:
        directory: of this pilot alone; made if need be.
        learner: that the state belongs to.
        state: f32[learner.size].
    """
    checkpoint = _orbax()
    with _manager(checkpoint, directory, create=True) as manager:
        latest = manager.latest_step()
        manager.save(
            0 if latest is None else latest + 1,
            args=checkpoint.args.Composite(
                state=checkpoint.args.StandardSave({"state": np.asarray(state, np.float32)}),
                program=checkpoint.args.JsonSave(
                    {"fingerprint": learner.fingerprint, **learner.described()}
                ),
            ),
        )
        manager.wait_until_finished()


def restore(directory: str | os.PathLike[str], learner: Learner) -> np.ndarray:
    """Restores a pilot's state.

    Args:
        directory: given to `save`.
        learner: of the program that is to go on with it.

    Returns:
        f32[learner.size], bit for bit what was saved.

    Raises:
        ConfigurationError: there is no pilot, or it was saved for another program; the message
            says what differs.
    """
    checkpoint = _orbax()
    if not os.path.isdir(directory):
        raise _missing(directory)
    with _manager(checkpoint, directory, create=False) as manager:
        latest = manager.latest_step()
        if latest is None:
            raise _missing(directory)
        # The program first: a state of another size could not even be read.
        saved = manager.restore(
            latest, args=checkpoint.args.Composite(program=checkpoint.args.JsonRestore())
        ).program
        if saved["fingerprint"] != learner.fingerprint:
            raise ConfigurationError(
                f"The pilot in {os.fspath(directory)} was saved for another program: "
                f"{_difference(saved, learner.described())}. A pilot can be restored for the "
                "program that it has learned only; start a new one, and save it elsewhere."
            )
        template = {"state": np.zeros(learner.size, np.float32)}
        restored = manager.restore(
            latest,
            args=checkpoint.args.Composite(state=checkpoint.args.StandardRestore(template)),
        )
    return np.asarray(restored.state["state"], np.float32)


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ConfigurationError(
            "Saving and restoring a pilot needs orbax-checkpoint, which Flax installs. Run "
            "pip install orbax-checkpoint."
        ) from error
    return orbax.checkpoint


def _manager(checkpoint: Any, directory: str | os.PathLike[str], *, create: bool) -> Any:
    options = checkpoint.CheckpointManagerOptions(
        max_to_keep=1, create=create, enable_async_checkpointing=False
    )
    return checkpoint.CheckpointManager(os.path.abspath(directory), options=options)


def _missing(directory: str | os.PathLike[str]) -> ConfigurationError:
    return ConfigurationError(
        f"There is no pilot in {os.fspath(directory)}. Give a directory that one was saved to."
    )


def _difference(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
    before = {name: [most, row] for name, most, row in saved["blocks"]}
    now = {name: [most, row] for name, most, row in wanted["blocks"]}
    found = []
    if missing := [name for name in before if name not in now]:
        found.append(f"this program has no {_listed(missing)}")
    if new := [name for name in now if name not in before]:
        found.append(f"the saved one has no {_listed(new)}")
    if changed := [name for name in now if name in before and now[name] != before[name]]:
        found.append(f"{_listed(changed)} have another description or largest count")
    if not found and list(before) != list(now):
        found.append("its blocks stand in another order")
    for key in wanted:
        if key != "blocks" and saved.get(key) != wanted[key]:
            found.append(f"{key}: {saved.get(key)} there, {wanted[key]} here")
    return "; ".join(found)


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return "blocks " + ", ".join(names[:4]) + rest
