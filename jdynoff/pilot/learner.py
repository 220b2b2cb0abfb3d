"""Learning while training: prediction and update as pure functions of one flat array.

The pilot is compiled with the train step, whose call time grows with each array that it carries, so
all that it knows is raveled into one f32 array: parameters, optimizer, a ring of recent steps,
running statistics, the last path. Integers are exact in it below 2^24.

An update puts the finished step into the ring and takes a few optimizer steps on samples of it; one
step alone would teach the network the latest path and little else. The trap: nothing here may fail
or spoil the state, whatever the batch holds, since a wrong prediction costs time only: features are
clipped, a step with features that are not finite is not learned from, and parameters that a user's
module drives to infinity are not taken over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdynoff.errors import ConfigurationError
from jdynoff.pilot import recall
from jdynoff.pilot.counts import Classes, classes
from jdynoff.pilot.features import finite
from jdynoff.pilot.network import Network

FORMAT = 2  # of the raveled state and of its fingerprint
MOST_BYTES = 2**20
_LARGEST_FEATURE = 1e15  # whose square is still finite
_LARGEST_STANDARDISED = 5.0
_STATISTICS_WINDOW = 1000  # steps over which features are standardised
_FORGETTING = 0.95  # of how well module and recalling have predicted
_IMPOSSIBLE = -1e9


@dataclasses.dataclass(frozen=True, eq=False)
class Described:
    """A block whose count is to be learned.

    Attributes:
        name: for messages; unique in the program.
        description: f32[D], what it does and where it stands.
        most: the largest possible count; None where nothing bounds it.
    """

    name: str
    description: np.ndarray
    most: int | None


class _State(NamedTuple):
    parameters: jax.Array  # f32[P], of `_Parameters`
    optimizer: Any  # of `parameters`
    scores: jax.Array  # f32[2], recent log-likelihoods: of the module, of recalling
    features: jax.Array  # f32[window, F], raw
    paths: jax.Array  # f32[window, 2, B]: the path before, the path itself
    mean: jax.Array  # f32[F + B], of features and of log1p of the path before
    variance: jax.Array  # f32[F + B]
    previous: jax.Array  # f32[B]
    steps: jax.Array  # i32[], learned from


class _Parameters(NamedTuple):
    module: Any
    metric: jax.Array  # f32[F + B] of `recall.attention`
    fading: jax.Array  # f32[] of `recall.attention`
    reach: jax.Array  # f32[B] of `recall.carried`


class Learner:
    """The pilot of one program.

    Attributes:
        size: numbers in the raveled state.
        fingerprint: equal for states that can be exchanged.
    """

    def __init__(
        self,
        blocks: Sequence[Described],
        feature_count: int,
        module: nn.Module | None = None,
        *,
        window: int = 128,
        learning_rate: float = 5e-3,
        optimizer_steps: int = 4,
        samples: int = 16,
        recalls: bool | None = None,
        seed: int = 0,
    ) -> None:
        """Builds a pilot.

        Args:
            blocks: the B blocks to predict, in the order of their counts.
            feature_count: F.
            module: a Flax module with the call of `Network`; None for `Network` itself.
            window: steps to learn from.
            learning_rate: of Adam.
            optimizer_steps: in one update.
            samples: of the window in one optimizer step, the latest always among them.
            recalls: whether similar steps of the window predict as well, as `jdynoff.pilot.recall`
                says; None for without a module of one's own only.
            seed: of the first parameters and of the samples.

        Raises:
            ConfigurationError: the module's results or its size are not what they must be.
        """
        if not blocks:
            raise ConfigurationError(
                "A pilot needs at least one block to predict, and got none. Leave it off for a "
                "program whose blocks are all constant or sliced."
            )
        self.blocks = tuple(blocks)
        self.feature_count = feature_count
        self.classes: Classes = classes([block.most for block in blocks])
        self._descriptions = np.stack([block.description for block in blocks]).astype(np.float32)
        given, module = module, Network() if module is None else module
        if hasattr(module, "classes"):
            module = module.clone(classes=self.classes.number)
        self.module = module
        self._window = window
        self._optimizer = optax.adam(learning_rate)
        self._optimizer_steps = optimizer_steps
        self._samples = samples
        self._seed = seed
        self._recalls = given is None if recalls is None else recalls
        self._parameters = _Layout(self._initial_parameters())
        self._layout = _Layout(jax.eval_shape(self._initial_state))
        self.size = self._layout.size
        if 4 * self.size > MOST_BYTES:
            raise ConfigurationError(
                f"The pilot's state takes {4 * self.size} bytes: {self._parameters.size} "
                f"parameters three times and {window} steps of {feature_count} features and "
                f"{len(blocks)} blocks. It may take {MOST_BYTES}; give a smaller module, or "
                "fewer features."
            )
        described = json.dumps(self.described(), sort_keys=True)
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    def described(self) -> dict[str, Any]:
        """What the state depends on, and so what the fingerprint is made from; fit for JSON."""
        return {
            "format": FORMAT,
            "size": self.size,
            "window": self._window,
            "features": self.feature_count,
            "module": re.sub(r" at 0x[0-9a-f]+", "", repr(self.module)),
            "blocks": [
                [block.name, block.most, row.tolist()]
                for block, row in zip(self.blocks, self._descriptions, strict=True)
            ],
        }

    def initial(self) -> np.ndarray:
        """The state that has seen nothing: f32[size]."""
        return np.asarray(jax.jit(lambda: self._layout.pack(self._initial_state()))())

    def predict(self, state: jax.Array, features: jax.Array) -> jax.Array:
        """Predicts how often each block will run. Traceable.

        Args:
            state: f32[size].
            features: f32[F] of the step to come; what is not finite counts as 0.

        Returns:
            i32[B], each at most what the block can have.
        """
        unpacked = self._layout.unpack(state)
        parameters = self._parameters.unpack(unpacked.parameters)
        features = _bounded(finite(features)[0])
        inputs = self._standardised(unpacked, features[None], unpacked.previous[None])
        chances = jax.nn.softmax(self._logits(parameters, inputs)[0])
        if self._recalls:
            window = self._standardised(unpacked, unpacked.features, unpacked.paths[:, 0])
            filled = jnp.arange(self._window) < unpacked.steps
            ages = unpacked.steps - self._times(unpacked.steps)
            attention = recall.attention(
                parameters.metric,
                parameters.fading,
                inputs,
                window,
                ages[None].astype(jnp.float32),
                filled[None],
            )[0]
            seen = self.classes.to_class(unpacked.paths[:, 1])
            recalled = recall.probabilities(attention, parameters.reach, seen, self.classes.number)
            of_module, of_recall = jax.nn.softmax(unpacked.scores)
            chances = of_module * chances + of_recall * recalled
        chances = jnp.where(self.classes.possible, chances, -1)
        return self.classes.to_count(jnp.argmax(chances, axis=-1))

    def has_learned(self, state: jax.Array) -> jax.Array:
        """Whether any step was learned from, bool[]; before, predictions mean nothing."""
        return self._layout.unpack(state).steps > 0

    def update(self, state: jax.Array, features: jax.Array, counts: jax.Array) -> jax.Array:
        """Learns from a finished step. Traceable.

        Args:
            state: f32[size].
            features: f32[F] of the step.
            counts: i32[B], how often each block ran.

        Returns:
            f32[size]. Of a step with features that are not finite it keeps the path only.
        """
        old = self._layout.unpack(state)
        path = jnp.clip(counts, 0, self.classes.most).astype(jnp.float32)
        features, usable = finite(features)
        features = _bounded(features)
        row = old.steps % self._window
        new = self._with_statistics(old, features)._replace(
            features=old.features.at[row].set(features),
            paths=old.paths.at[row].set(jnp.stack([old.previous, path])),
            steps=old.steps + 1,
        )
        new = self._optimized(new, row)
        usable &= jnp.all(jnp.isfinite(new.parameters))
        kept = jnp.where(usable, self._layout.pack(new._replace(previous=path)), state)
        return self._layout.replace(kept, "previous", path)

    def _with_statistics(self, state: _State, features: jax.Array) -> _State:
        """Running mean and variance, exact at first, then over the latest steps."""
        rate = 1 / jnp.minimum(state.steps + 1, _STATISTICS_WINDOW)
        difference = jnp.concatenate([features, jnp.log1p(state.previous)]) - state.mean
        return state._replace(
            mean=state.mean + rate * difference,
            variance=(1 - rate) * (state.variance + rate * difference**2),
        )

    def _optimized(self, state: _State, row: jax.Array) -> _State:
        latest = jnp.full((self._optimizer_steps, 1), row)
        drawn = jax.random.randint(
            jax.random.fold_in(jax.random.key(self._seed), state.steps),
            (self._optimizer_steps, self._samples - 1),
            0,
            jnp.minimum(state.steps, self._window),
        )
        rows = jnp.concatenate([latest, drawn], axis=1)
        inputs = self._standardised(state, state.features, state.paths[:, 0])
        observed = self.classes.to_class(state.paths[:, 1])
        others = jnp.arange(self._window)
        filled = others < state.steps
        times = self._times(state.steps)

        def losses(parameters: _Parameters, rows: jax.Array) -> jax.Array:
            logits = self._logits(parameters, inputs[rows])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, observed[rows])
            if not self._recalls:
                return loss[None]
            # Later steps as well: with the earlier ones alone there is too little to learn from.
            apart = jnp.abs(times[rows][:, None] - times).astype(jnp.float32)
            allowed = filled & (apart > 0)
            attention = recall.attention(
                parameters.metric, parameters.fading, inputs[rows], inputs, apart, allowed
            )
            recalled = recall.log_likelihood(attention, parameters.reach, observed[rows], observed)
            return jnp.stack([loss, -recalled])

        def loss(parameters: _Parameters, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = losses(parameters, rows)
            return jnp.sum(jnp.mean(found, axis=(1, 2))), found

        def step(carry: tuple[Any, Any], rows: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
            parameters, optimizer = carry
            # By leaf, then raveled: Adam on one array is one loop for XLA.
            unpacked = self._parameters.unpack(parameters)
            gradient, found = jax.grad(loss, has_aux=True)(unpacked, rows)
            gradient = self._parameters.pack(gradient)
            change, optimizer = self._optimizer.update(gradient, optimizer, parameters)
            return (optax.apply_updates(parameters, change), optimizer), found[:, 0]

        # A scan, not unrolled: the pilot is compiled with every train step.
        carry = (state.parameters, state.optimizer)
        (parameters, optimizer), found = jax.lax.scan(step, carry, rows)
        # Before the first of them the latest step was not learned from: an honest test.
        scores = _FORGETTING * state.scores - jnp.mean(found[0], axis=1)
        return state._replace(parameters=parameters, optimizer=optimizer, scores=scores)

    def _times(self, steps: jax.Array) -> jax.Array:
        """At which step each row of the window was learned from, i32[window]."""
        return steps - 1 - (steps - 1 - jnp.arange(self._window)) % self._window

    def _standardised(self, state: _State, features: jax.Array, before: jax.Array) -> jax.Array:
        """Inputs of n samples: f32[n, F + B]."""
        raw = jnp.concatenate([features, jnp.log1p(before)], axis=1)
        # Relative to the mean as well: the last bits of a constant are no information.
        scale = jnp.sqrt(state.variance + (1e-5 * state.mean) ** 2 + 1e-20)
        inputs = (raw - state.mean) / scale
        return jnp.clip(inputs, -_LARGEST_STANDARDISED, _LARGEST_STANDARDISED)

    def _logits(self, parameters: _Parameters, inputs: jax.Array) -> jax.Array:
        """Logits of n samples, f32[n, B, K]; those of impossible classes are out of reach."""
        logits: Any = self.module.apply(
            {"params": parameters.module},
            inputs[:, : self.feature_count],
            jnp.asarray(self._descriptions),
            inputs[:, self.feature_count :],
        )
        return jnp.where(self.classes.possible, logits.astype(jnp.float32), _IMPOSSIBLE)

    def _initial_parameters(self) -> _Parameters:
        """Initialises the module and checks its results."""
        inputs = (
            jax.ShapeDtypeStruct((2, self.feature_count), jnp.float32),
            jax.ShapeDtypeStruct(self._descriptions.shape, jnp.float32),
            jax.ShapeDtypeStruct((2, len(self.blocks)), jnp.float32),
        )
        key = jax.random.key(self._seed)
        name = type(self.module).__name__
        logits, variables = jax.eval_shape(
            lambda: self.module.init_with_output(key, *_zeros(inputs))
        )
        wanted = (2, len(self.blocks), self.classes.number)
        if getattr(logits, "shape", None) != wanted:
            raise ConfigurationError(
                f"{name} returned {logits} for 2 samples. A pilot's module must return logits of "
                f"shape (samples, blocks, classes), here {wanted}; a field `classes` is set to the "
                "number of classes."
            )
        if set(variables) - {"params"}:
            raise ConfigurationError(
                f"{name} has variables {sorted(variables)}. A pilot's module may have 'params' "
                "only; leave out batch statistics and caches."
            )
        variables = jax.jit(lambda: self.module.init(key, *_zeros(inputs)))()
        return _Parameters(
            module=variables.get("params", {}),
            metric=jnp.zeros(self.feature_count + len(self.blocks) if self._recalls else 0),
            fading=jnp.zeros(()),
            reach=jnp.zeros(len(self.blocks) if self._recalls else 0),
        )

    def _initial_state(self) -> _State:
        blocks = len(self.blocks)
        parameters = self._parameters.pack(self._initial_parameters())
        return _State(
            parameters=parameters,
            optimizer=self._optimizer.init(parameters),
            scores=jnp.zeros(2 if self._recalls else 1),
            features=jnp.zeros((self._window, self.feature_count)),
            paths=jnp.zeros((self._window, 2, blocks)),
            mean=jnp.zeros(self.feature_count + blocks),
            variance=jnp.zeros(self.feature_count + blocks),
            previous=jnp.zeros(blocks),
            steps=jnp.zeros((), jnp.int32),
        )


class _Layout:
    """Where the leaves of a tree lie in one flat f32 array."""

    def __init__(self, tree: Any) -> None:
        paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._names = [jax.tree_util.keystr(path) for path, _ in paths]
        self._types = [(leaf.shape, leaf.dtype) for _, leaf in paths]
        sizes = [math.prod(shape) for shape, _ in self._types]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.size = sum(sizes)

    def pack(self, tree: Any) -> jax.Array:
        leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate(leaves) if leaves else jnp.zeros((0,), jnp.float32)

    def unpack(self, flat: jax.Array) -> Any:
        leaves = [
            flat[start : start + math.prod(shape)].reshape(shape).astype(dtype)
            for start, (shape, dtype) in zip(self._starts, self._types, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def replace(self, flat: jax.Array, field: str, value: jax.Array) -> jax.Array:
        """A copy with another value of a field that is one array."""
        start = self._starts[self._names.index(f".{field}")]
        return jax.lax.dynamic_update_slice(flat, jnp.ravel(value), (start,))


def _bounded(features: jax.Array) -> jax.Array:
    return jnp.clip(features.astype(jnp.float32), -_LARGEST_FEATURE, _LARGEST_FEATURE)


def _zeros(structs: Sequence[Any]) -> list[jax.Array]:
    return [jnp.zeros(struct.shape, struct.dtype) for struct in structs]
