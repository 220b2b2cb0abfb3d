"""Parts of the model: chunks, dropout, precision, options, symmetries of the losses."""

from __future__ import annotations

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("ml_collections")

from models.alphafold.config import model_config
from models.alphafold.losses.fape import frame_aligned_point_error
from models.alphafold.losses.plddt import lddt
from models.alphafold.network.chunking import map_row_chunks
from models.alphafold.network.layers import dropout
from models.alphafold.network.msa import MSARowAttentionWithPairBias
from models.alphafold.network.settings import Settings
from models.alphafold.network.triangle import TriangleMultiplication
from models.alphafold.structure import quaternion, rigid
from tests.alphafold.small_model import compile_quickly, random_params

SETTINGS = Settings(deterministic=True)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("chunk", "checkpoint"), [(1, False), (3, False), (3, True), (7, True), (None, False)]
)
def test_chunks_equal_the_whole(chunk: int | None, checkpoint: bool) -> None:
    rows = {"x": normal(7, 3), "y": normal(7, seed=1)}

    def fun(rows):
        return {"z": jnp.sin(rows["x"]) * rows["y"][:, None], "s": rows["x"].sum(-1)}

    def chunked(rows):
        return map_row_chunks(fun, rows, chunk, checkpoint=checkpoint)

    def with_gradient(fun):
        def loss(rows):
            out = fun(rows)
            return jnp.sum(out["z"] ** 2) + jnp.sum(out["s"]), out

        return compile_quickly(jax.grad(loss, has_aux=True), rows)(rows)

    gradient, out = with_gradient(chunked)
    whole_gradient, whole = with_gradient(fun)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), out, whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient, whole_gradient)


def dropped(shape: tuple[int, ...], axis: int | None, active: bool = True) -> np.ndarray:
    network = hk.transform(lambda: dropout(jnp.ones(shape), 0.25, active=active, shared_axis=axis))
    return np.asarray(jax.jit(network.apply)({}, jax.random.key(0)))


def test_dropout_is_shared_along_its_axis_and_keeps_the_mean() -> None:
    out = dropped((40, 50, 3), axis=0)
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert np.all(out == out[:1])
    assert abs(dropped((400, 50, 3), axis=None).mean() - 1.0) < 0.02
    np.testing.assert_array_equal(dropped((4, 5), axis=None, active=False), np.ones((4, 5)))


def test_dropout_needs_training_and_obeys_deterministic() -> None:
    assert not Settings(is_training=False).uses_dropout
    assert Settings(is_training=True).uses_dropout
    assert Settings(eval_dropout=True).uses_dropout
    assert not Settings(is_training=True, deterministic=True).uses_dropout


def test_unknown_settings_are_refused_and_synonyms_are_read() -> None:
    with pytest.raises(ValueError, match="unknown fields"):
        Settings.from_config({"atention_chunk_size": 3})
    with pytest.raises(ValueError, match="monomer"):
        Settings.from_config({"multimer_mode": True})
    settings = Settings.from_config({"subbatch_size": 4, "use_remat": True})
    assert settings.attention_chunk_size == 4
    assert settings.checkpoint_blocks


def test_unknown_preset_and_model_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown config preset 'final'"):
        model_config("final")
    with pytest.raises(ValueError, match="Unknown model 'model_9'"):
        model_config(model="model_9")


def test_fused_projections_equal_separate_ones() -> None:
    config = model_config("demo").model.embeddings_and_evoformer.evoformer
    config = config.triangle_multiplication_incoming.copy_and_resolve_references()
    config.num_intermediate_channel = 6
    pair, mask = normal(5, 5, 4), jnp.ones((5, 5)).at[:, 3].set(0.0)
    name = "triangle_multiplication_incoming"

    def build(pair, mask):
        return TriangleMultiplication(config, SETTINGS, name)(pair, mask)

    separate = hk.without_apply_rng(hk.transform(build))
    params = random_params(jax.eval_shape(separate.init, jax.random.key(0), pair, mask))
    expected = compile_quickly(separate.apply, params, pair, mask)(params, pair, mask)

    def both(part: str) -> dict[str, jax.Array]:
        left, right = (params[f"{name}/{side}_{part}"] for side in ("left", "right"))
        return {k: jnp.concatenate([left[k], right[k]], axis=-1) for k in left}

    fused_params = {
        f"{name}/left_norm_input": params[f"{name}/layer_norm_input"],
        f"{name}/projection": both("projection"),
        f"{name}/gate": both("gate"),
        f"{name}/center_norm": params[f"{name}/center_layer_norm"],
        f"{name}/output_projection": params[f"{name}/output_projection"],
        f"{name}/gating_linear": params[f"{name}/gating_linear"],
    }
    config.fuse_projection_weights = True
    fused = hk.without_apply_rng(hk.transform(build))
    out = compile_quickly(fused.apply, fused_params, pair, mask)(fused_params, pair, mask)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_bfloat16_activations_stay_near_float32_ones() -> None:
    config = model_config("demo").model.embeddings_and_evoformer.evoformer
    config = config.msa_row_attention_with_pair_bias
    args = (normal(3, 5, 8), jnp.ones((3, 5)), normal(5, 5, 4))

    attention = hk.without_apply_rng(
        hk.transform(lambda *xs: MSARowAttentionWithPairBias(config, SETTINGS, "row")(*xs))
    )
    run = jax.jit(attention.apply)
    params = random_params(jax.eval_shape(attention.init, jax.random.key(0), *args))
    wide = run(params, *args)
    narrow = run(params, args[0].astype(jnp.bfloat16), args[1], args[2].astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    difference = np.abs(np.asarray(narrow, np.float32) - wide).max()
    assert 0 < difference < 0.05 * np.abs(wide).max()


def test_frame_aligned_error_ignores_how_the_prediction_lies_in_space() -> None:
    @functools.partial(jax.jit, static_argnames="shape")
    def drawn(vector, shape):
        return quaternion.update(quaternion.identity(shape), vector).rigid

    frames = drawn(normal(4, 6), (4,))
    other = drawn(normal(4, 6, seed=1), (4,))
    points, true_points = normal(9, 3, seed=2) * 5, normal(9, 3, seed=3) * 5
    motion = drawn(normal(6, seed=4), ())
    moved = rigid.compose(motion, frames), rigid.apply(motion, points)

    @functools.partial(jax.jit, static_argnames=("clamp_distance", "chunk_size"))
    def error(frames, points, **options):
        ones = jnp.ones(4), jnp.ones(9)
        return frame_aligned_point_error(
            frames, other, ones[0], points, true_points, ones[1], length_scale=10.0, **options
        )

    still = error(frames, points, clamp_distance=None)
    np.testing.assert_allclose(error(*moved, clamp_distance=None), still, rtol=1e-5)
    np.testing.assert_allclose(
        error(frames, points, clamp_distance=None, chunk_size=3), still, rtol=1e-6
    )
    assert error(frames, points, clamp_distance=1.0) < still


def test_lddt_of_the_truth_is_one_and_falls_with_distance() -> None:
    true = normal(12, 3) * 4
    mask = jnp.ones(12)
    score = jax.jit(lddt)
    assert float(score(true, true, mask)) == pytest.approx(1.0)
    scores = [float(score(true + s * normal(12, 3, seed=5), true, mask)) for s in (0.1, 1.0, 5.0)]
    assert scores == sorted(scores, reverse=True)
    assert lddt(true, true, mask, per_residue=True).shape == (12,)
