"""The structure module: from representations to atoms (Algorithm 20).

All layers share their weights and run in a scan. Lengths inside are in units of `position_scale`
Angstrom; results are in Angstrom. The traps: orientations carry no gradient from layer to layer
(translations do), and the side-chain network reads the layer-normalised single representation, not
its projection.
"""

from __future__ import annotations

from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.layers import LayerNorm, Linear, dropout, final_linear
from models.alphafold.network.settings import Settings
from models.alphafold.network.stack import lift_function
from models.alphafold.structure import all_atom, quaternion, rigid
from models.alphafold.structure.ipa import InvariantPointAttention
from models.alphafold.structure.quaternion import Affine

# Outputs of one layer, each with the residues as its leading axis.
LayerOutput = dict[str, jax.Array]
_LayerResult = tuple[jax.Array, Affine, LayerOutput]


class RigidSidechain(hk.Module):
    """Torsion angles and atoms from the single representation (Algorithm 20, lines 11 to 14).

    Args:
        config: the `sidechain` tree.
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        name: str = "rigid_sidechain",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(
        self, act: jax.Array, initial_act: jax.Array, aatype: jax.Array, backbone: Affine
    ) -> LayerOutput:
        """Compute angles, frames and atoms.

        Args:
            act: [residues, channels].
            initial_act: single representation after its layer norm, [residues, channels].
            aatype: residue types [residues].
            backbone: frames [residues], Angstrom.

        Returns:
            `angles_sin_cos` and `unnormalized_angles_sin_cos` [residues, 7, 2], `atom14_pos`
            [residues, 14, 3] and `frames` [residues, 8, 12] (rotation row by row, translation).
        """
        c = self._config
        hidden = 0.0
        for source, name in ((act, "input_projection"), (initial_act, "input_projection_1")):
            hidden = hidden + Linear(c.num_channel, name=name)(jax.nn.relu(source))
        for block in range(c.num_residual_block):
            suffix = f"_{block}" if block else ""
            first = Linear(c.num_channel, "relu", name=f"resblock1{suffix}")
            second = final_linear(c.num_channel, self._settings.zero_init, f"resblock2{suffix}")
            hidden = hidden + second(jax.nn.relu(first(jax.nn.relu(hidden))))
        raw = Linear(14, name="unnormalized_angles")(jax.nn.relu(hidden))
        raw = raw.reshape(-1, 7, 2)
        angles = normalize_angles(raw)
        frames = all_atom.torsions_to_frames(aatype, backbone.rigid, angles)
        return {
            "angles_sin_cos": angles,
            "unnormalized_angles_sin_cos": raw,
            "atom14_pos": all_atom.frames_to_atom14(aatype, frames),
            "frames": rigid.to_flat12(frames),
        }


def normalize_angles(sin_cos: jax.Array) -> jax.Array:
    """Scale (sin, cos) pairs [..., 2] to unit length."""
    squared = jnp.sum(jnp.square(sin_cos), axis=-1, keepdims=True)
    return sin_cos / jnp.sqrt(jnp.maximum(squared, 1e-12))


class FoldIteration(hk.Module):
    """One layer of the structure module (Algorithm 20, lines 6 to 21).

    Args:
        config: the `structure_module` tree.
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, settings: Settings, name: str = "fold_iteration"
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(
        self,
        act: jax.Array,
        affine: Affine,
        initial_act: jax.Array,
        pair: jax.Array,
        seq_mask: jax.Array,
        aatype: jax.Array,
    ) -> tuple[jax.Array, Affine, LayerOutput]:
        """Update representation, backbone and side chains.

        Args:
            act: single representation [residues, channels].
            affine: backbone frames [residues], internal unit.
            initial_act: single representation at the start, [residues, channels].
            pair: pair representation after its layer norm, [residues, residues, c_z].
            seq_mask: [residues].
            aatype: residue types [residues].

        Returns:
            The new `act` and `affine` (internal unit), and this layer's side-chain outputs
            (Angstrom).
        """
        c, settings = self._config, self._settings

        def dropped(x: jax.Array) -> jax.Array:
            return dropout(x, c.dropout, active=settings.uses_dropout)

        attention = InvariantPointAttention(c, settings)
        act = act + attention(act, pair, seq_mask[:, None], affine.rigid)
        act = LayerNorm("attention_layer_norm")(dropped(act))

        update = act
        for layer in range(c.num_layer_in_transition):
            name = f"transition_{layer}" if layer else "transition"
            if layer < c.num_layer_in_transition - 1:
                update = jax.nn.relu(Linear(c.num_channel, "relu", name=name)(update))
            else:
                update = final_linear(c.num_channel, settings.zero_init, name)(update)
        act = LayerNorm("transition_layer_norm")(dropped(act + update))

        change = final_linear(6, settings.zero_init, "affine_update")(act)
        affine = quaternion.update(affine, change)
        backbone = quaternion.scale_translation(affine, c.position_scale)
        sidechain = RigidSidechain(c.sidechain, settings)(act, initial_act, aatype, backbone)
        return act, affine, sidechain


class StructureModule(hk.Module):
    """The whole module.

    Args:
        config: the `structure_module` tree.
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, settings: Settings, name: str = "structure_module"
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(
        self, representations: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Predict a structure.

        Args:
            representations: `single` [residues, c_s] and `pair` [residues, residues, c_z].
            batch: `seq_mask`, `aatype`, `atom14_atom_exists`, `atom37_atom_exists` and
                `residx_atom37_to_atom14`.

        Returns:
            `act` [residues, channels]; `traj` [layers, residues, 7] and the layers'
            `angles_sin_cos`, `unnormalized_angles_sin_cos`, `atom14_pos` and `frames`, all with
            a leading layer axis; `final_affines` [residues, 7], `final_atom14_positions`
            [residues, 14, 3], `final_atom_positions` [residues, 37, 3] and `final_atom_mask`
            [residues, 37]. Lengths in Angstrom.
        """
        c, settings = self._config, self._settings
        seq_mask, aatype = batch["seq_mask"], batch["aatype"]
        single = representations["single"].astype(jnp.float32)
        initial_act = LayerNorm("single_layer_norm")(single)
        act = Linear(c.num_channel, name="initial_projection")(initial_act)
        pair = LayerNorm("pair_layer_norm")(representations["pair"].astype(jnp.float32))
        affine = quaternion.identity(seq_mask.shape)

        def layer(act: jax.Array, affine: Affine, *constants: jax.Array) -> _LayerResult:
            return FoldIteration(c, settings)(act, affine, *constants)

        constants = (initial_act, pair, seq_mask, aatype)
        params, apply = lift_function(layer, act, affine, *constants)
        rngs = jax.random.split(hk.next_rng_key(), c.num_layer) if settings.uses_dropout else None

        def step(
            carry: tuple[jax.Array, Affine], rng: jax.Array | None
        ) -> tuple[tuple[jax.Array, Affine], LayerOutput]:
            act, affine, sidechain = apply(params, rng, *carry, *constants)
            traj = quaternion.scale_translation(affine, c.position_scale).to_tensor()
            return (act, quaternion.stop_rotation_gradient(affine)), {**sidechain, "traj": traj}

        (act, _), out = jax.lax.scan(step, (act, affine), rngs, length=c.num_layer)
        atom14 = out["atom14_pos"][-1] * batch["atom14_atom_exists"][..., None]
        atom37_exists = batch["atom37_atom_exists"]
        atom37 = all_atom.atom14_to_atom37(atom14, batch["residx_atom37_to_atom14"], atom37_exists)
        return {
            **out,
            "act": act,
            "final_affines": out["traj"][-1],
            "final_atom14_positions": atom14,
            "final_atom_positions": atom37,
            "final_atom_mask": atom37_exists,
        }
