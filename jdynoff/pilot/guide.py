"""The pilot of one traced step: what it predicts, from what, inside the step's own program.

Before the step's first operation the guide computes the batch's features, the counters that can be
sliced, and the pilot's prediction of the others; the bytes that this path needs go to the manager
with `begin`. After the last one the pilot learns from what was counted. All of it is traced into
the step's executable, so it costs no call and no synchronisation.

The trap: the state must survive a step that fails. `Managed` therefore hands in the state that the
last *completed* step returned, never one that is still in flight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff import jax_compat
from jdynoff._native import PAGE_BYTES
from jdynoff.pilot.features import Argument, batch_features, batch_positions, finite
from jdynoff.pilot.idioms import IDIOMS, idioms, position
from jdynoff.pilot.learner import Described, Learner
from jdynoff.pilot.slicing import Slice
from jdynoff.planning.by_path import Linear
from jdynoff.primitives.transfer import AS_OPENED
from jdynoff.program.blocks import Block, Blocks
from jdynoff.program.graph import Operation

# What the manager takes for a number of pages; the largest one has another meaning.
_MOST_PAGES = np.float32(2**31)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Foreseen:
    """What is known of a step before it runs.

    Attributes:
      features: f32[F] of the batch.
      usable: bool[], whether all of them are finite.
      counters: i32[n], predicted, in the order of `Blocks.learned`.
      has_learned: bool[], whether the predictions mean anything yet.
    """

    features: jax.Array
    usable: jax.Array
    counters: jax.Array
    has_learned: jax.Array

    def expected_pages(self, needed: Linear) -> jax.Array:
        """Pages (u32[]) that the manager will probably be given."""
        per_count = jnp.asarray(needed.per_count / PAGE_BYTES, np.float32)
        pages = needed.fixed / PAGE_BYTES + jnp.dot(per_count, self.counters.astype(np.float32))
        expected = jnp.clip(jnp.ceil(pages), 0, _MOST_PAGES).astype(np.uint32)
        return jnp.where(self.has_learned, expected, AS_OPENED)


class Guide:
    """Predicts the counters of one program.

    Attributes:
      slices: the counters that are computed instead of predicted.
      learned: the blocks that the pilot predicts.
      learner: the pilot; None if there is nothing left to predict.
    """

    def __init__(
        self,
        blocks: Blocks,
        slices: dict[Operation, Slice],
        arguments: Sequence[Argument],
        outputs: Sequence[Any],
        *,
        module: Any = None,
        features: Callable[[Sequence[Any]], jax.Array] | None = None,
        told: bool = False,
    ) -> None:
        """Chooses the batch's arrays and builds the pilot.

        Args:
          blocks: of the program.
          slices: of some of its counted operations.
          arguments: the step's flat arguments: path, abstract value, whether it is donated.
          outputs: abstract values of its flat outputs.
          module: a Flax module in the place of the pilot's own network.
          told: whether the state *is* the prediction, f32[n], and nothing is learned; for
            experiments, which set it before each step.
          features: f32[F] from the step's flat arguments; None for the batch's statistics.

        Raises:
          ConfigurationError: for a module or a function of features that returns the wrong thing.
        """
        self.blocks = blocks
        self.slices = slices
        self.told = told
        self.learned = [block for block in blocks.learned if _counter(block)[0] not in slices]
        positions = batch_positions(arguments, outputs)
        self.features = features or (
            lambda leaves: batch_features([leaves[number] for number in positions])
        )
        self.learner: Learner | None = None
        if self.learned:
            structs = [jax_compat.struct_of(aval) for _, aval, _ in arguments]
            count = int(jax.eval_shape(self.features, structs).shape[0])
            described = [
                Described(block.name, describe(block, number, len(self.learned)), block.most)
                for number, block in enumerate(self.learned)
            ]
            self.learner = Learner(described, count, module)

    def foresee(self, state: Any, leaves: Sequence[Any]) -> Foreseen:
        """Predicts the path of a step. Traceable.

        Args:
          state: f32[n] of the pilot; None without one.
          leaves: the step's flat arguments.
        """
        features, usable = jnp.zeros(0), jnp.bool_(True)
        if self.told:
            return Foreseen(features, usable, jnp.asarray(state, np.int32), jnp.bool_(True))
        if self.learner is not None:
            features, usable = finite(self.features(leaves))
        computed = {operation: piece.evaluate(leaves) for operation, piece in self.slices.items()}
        known: dict[Block, jax.Array] = {}
        for block in self.blocks.learned:
            operation, position_in = _counter(block)
            if operation in computed:
                known[block] = computed[operation][position_in]
        has_learned = jnp.bool_(True)
        if self.learner is not None:
            known.update(zip(self.learned, self.learner.predict(state, features), strict=True))
            has_learned = self.learner.has_learned(state)
        counters = jnp.stack([known[block] for block in self.blocks.learned])
        return Foreseen(features, usable, counters.astype(np.int32), has_learned)

    def learn(self, state: Any, foreseen: Foreseen, counters: jax.Array) -> Any:
        """The pilot's next state, from what was counted (i32[n]). Traceable."""
        if self.learner is None or self.told:
            return state
        mine = [
            number
            for number, block in enumerate(self.blocks.learned)
            if _counter(block)[0] not in self.slices
        ]
        # What is not finite was replaced for the prediction; the pilot learns nothing from it.
        features = jnp.where(foreseen.usable, foreseen.features, jnp.nan)
        return self.learner.update(state, features, counters[np.asarray(mine)])


def describe(block: Block, number: int, total: int) -> np.ndarray:
    """f32[D]: the idioms of a block, and where it stands."""
    kinds = np.zeros(len(IDIOMS)) if block.region is None else idioms(block.region)
    place = [float(_depth(block)), np.log1p(block.most or 0.0)]
    return np.concatenate([kinds, position(number, total), place]).astype(np.float32)


def _depth(block: Block) -> int:
    return 0 if block.parent is None else 1 + _depth(block.parent)


def _counter(block: Block) -> tuple[Operation, int]:
    assert block.counter is not None
    return block.counter


__all__ = ["Foreseen", "Guide"]
