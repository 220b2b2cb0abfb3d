"""Options that no stored numbers cover, against the same mathematics written in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from models.alphafold.compiling import run_once
from models.alphafold.config import model_config
from models.alphafold.data.labels import rigid_group_labels
from models.alphafold.network.attention import Attention, GlobalAttention
from models.alphafold.network.evoformer import EvoformerIteration
from models.alphafold.network.msa import Transition
from models.alphafold.network.settings import Settings
from models.alphafold.network.templates import SingleTemplateEmbedding, template_torsion_rows
from models.alphafold.structure.residue_constants import ATOM_ORDER
from tests.alphafold.small_model import compile_quickly, random_params

SETTINGS = Settings(deterministic=True)
ALANINE = 0
N, CA, C = (ATOM_ORDER[name] for name in ("N", "CA", "C"))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def network(config: dict[str, Any]) -> ml_collections.ConfigDict:
    """The `embeddings_and_evoformer` tree of a few channels, with changes."""
    tree = model_config("demo").model.embeddings_and_evoformer
    tree.update(config)
    return tree


def drawn(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Random parameters of a Haiku function, and its result with them."""
    transformed = hk.without_apply_rng(hk.transform(fun))
    params = random_params(jax.eval_shape(transformed.init, jax.random.key(0), *args))
    params = jax.tree.map(np.asarray, params)
    with jax.default_matmul_precision("highest"):
        return params, compile_quickly(transformed.apply, params, *args)(params, *args)


def assert_close(actual: Any, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


def linear(x: np.ndarray, p: dict[str, np.ndarray]) -> np.ndarray:
    return x @ p["weights"] + p["bias"]


def layer_norm(x: np.ndarray, p: dict[str, np.ndarray]) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["offset"]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(
    query: np.ndarray,
    memory: np.ndarray,
    mask: np.ndarray,
    p: dict[str, np.ndarray],
    bias: np.ndarray | float = 0.0,
) -> np.ndarray:
    """One head after the other; gated if there are weights for it."""
    out = np.zeros((*query.shape[:-1], p["output_w"].shape[-1]))
    for head in range(p["query_w"].shape[1]):
        q, k, v = (
            x @ p[f"{name}_w"][:, head]
            for x, name in ((query, "query"), (memory, "key"), (memory, "value"))
        )
        logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        logits = logits + (bias[head] if isinstance(bias, np.ndarray) else bias)
        average = softmax(np.where(mask[:, None, :] > 0, logits, -1e9)) @ v
        if "gating_w" in p:
            gate = query @ p["gating_w"][:, head] + p["gating_b"][head]
            average = average / (1 + np.exp(-gate))
        out = out + average @ p["output_w"][head]
    return out + p["output_b"]


@pytest.mark.parametrize("gating", [True, False])
def test_attention_with_and_without_gates(gating: bool) -> None:
    config = ml_collections.ConfigDict(
        {"num_head": 2, "gating": gating, "key_dim": 4, "value_dim": 6}
    )
    query, memory, bias = normal(3, 4, 8), normal(3, 5, 7, seed=1), normal(2, 4, 5, seed=2)
    mask = np.ones((3, 5), np.float32)
    mask[1, 2:] = 0.0

    def fun(*args: Any) -> jax.Array:
        return Attention(config, SETTINGS, 9, name="attention")(*args)

    params, out = drawn(fun, query, memory, mask, bias)
    assert ("gating_w" in params["attention"]) == gating
    assert_close(out, attention(query, memory, mask, params["attention"], bias))


@pytest.mark.parametrize("gating", [True, False])
def test_global_attention_without_gates_has_one_row(gating: bool) -> None:
    config = ml_collections.ConfigDict({"num_head": 2, "gating": gating})
    data, mask = normal(3, 5, 8), np.ones((3, 5), np.float32)
    mask[1, 2:] = 0.0

    def fun(*args: Any) -> jax.Array:
        return GlobalAttention(config, SETTINGS, 6, name="attention")(*args)

    params, out = drawn(fun, data, mask)
    p = params["attention"]
    mean = (data * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    expected = np.zeros((3, 5 if gating else 1, 6))
    for head in range(2):
        logits = np.einsum("bc,bkc->bk", mean @ p["query_w"][:, head], data @ p["key_w"]) / 2.0
        weights = softmax(np.where(mask > 0, logits, -1e9))
        average = np.einsum("bk,bkc->bc", weights, data @ p["value_w"])[:, None]
        if gating:
            gate = data @ p["gating_w"][:, head] + p["gating_b"][head]
            average = average / (1 + np.exp(-gate))
        expected = expected + average @ p["output_w"][head]
    assert_close(out, expected + p["output_b"])


def block_options(**outer_product_mean: Any) -> ml_collections.ConfigDict:
    config = network({}).evoformer
    config.outer_product_mean.update({"num_outer_channel": 3, **outer_product_mean})
    for name in ("outgoing", "incoming"):
        config[f"triangle_multiplication_{name}"].num_intermediate_channel = 4
    return config


@pytest.mark.parametrize("first", [True, False])
def test_outer_product_mean_is_first_or_after_the_msa_updates(first: bool) -> None:
    config = block_options(first=first)
    msa, pair = normal(3, 5, 8), normal(5, 5, 4, seed=1)
    msa_mask, pair_mask = np.ones((3, 5), np.float32), np.ones((5, 5), np.float32)
    msa_mask[2, 1] = 0.0
    block = hk.without_apply_rng(
        hk.transform(
            lambda activations, masks: EvoformerIteration(config, SETTINGS, False, "block")(
                activations, masks
            )
        )
    )
    args = {"msa": msa, "pair": pair}, {"msa": msa_mask, "pair": pair_mask}
    params = random_params(jax.eval_shape(block.init, jax.random.key(0), *args))
    # Only row attention, MSA transition and outer product mean: they depend on the order.
    for path, values in params.items():
        silent = ("column_attention", "triangle", "pair_transition/transition2")
        if any(word in path for word in silent):
            params[path] = {name: jnp.zeros_like(value) for name, value in values.items()}
    params = jax.tree.map(np.asarray, params)
    with jax.default_matmul_precision("highest"):
        out = compile_quickly(block.apply, params, *args)(params, *args)

    def part(name: str) -> dict[str, np.ndarray]:
        return params[f"block/{name}"]

    def outer_product_mean(msa: np.ndarray) -> np.ndarray:
        name = "outer_product_mean"
        act = layer_norm(msa, part(f"{name}/layer_norm_input"))
        left, right = (
            linear(act, part(f"{name}/{side}_projection")) * msa_mask[..., None]
            for side in ("left", "right")
        )
        product = np.einsum("sic,sjd->ijcd", left, right)
        update = np.einsum("ijcd,cde->ije", product, part(name)["output_w"])
        count = msa_mask.T @ msa_mask
        return (update + part(name)["output_b"]) / (1e-3 + count[..., None])

    if first:
        pair = pair + outer_product_mean(msa)
    name = "msa_row_attention_with_pair_bias"
    act = layer_norm(msa, part(f"{name}/query_norm"))
    bias = layer_norm(pair, part(f"{name}/feat_2d_norm")) @ part(name)["feat_2d_weights"]
    msa = msa + attention(act, act, msa_mask, part(f"{name}/attention"), np.moveaxis(bias, -1, 0))
    act = layer_norm(msa, part("msa_transition/input_layer_norm"))
    hidden = np.maximum(linear(act, part("msa_transition/transition1")), 0.0)
    msa = msa + linear(hidden, part("msa_transition/transition2"))
    if not first:
        pair = pair + outer_product_mean(msa)
    assert_close(out["msa"], msa)
    assert_close(out["pair"], pair)


def test_an_extra_msa_block_without_gates_updates_every_row_alike() -> None:
    config = block_options()
    config.msa_column_attention.gating = False
    args = (
        {"msa": normal(3, 5, 8), "pair": normal(5, 5, 4, seed=1)},
        {"msa": np.ones((3, 5), np.float32), "pair": np.ones((5, 5), np.float32)},
    )
    for chunk in (None, 2):
        settings = Settings(deterministic=True, attention_chunk_size=chunk)
        _, out = drawn(lambda a, m, s=settings: EvoformerIteration(config, s, True)(a, m), *args)
        assert out["msa"].shape == (3, 5, 8)
        if chunk is None:
            whole = out
    assert_close(out["msa"], np.asarray(whole["msa"]))


def test_a_factor_of_hidden_channels_may_be_a_fraction() -> None:
    config = ml_collections.ConfigDict({"num_intermediate_factor": 1.5})
    params, _ = drawn(
        lambda act, mask: Transition(config, SETTINGS, "t")(act, mask), normal(3, 5), np.ones(3)
    )
    assert params["t/transition1"]["weights"].shape == (5, 7)


def template(seed: int = 0) -> dict[str, np.ndarray]:
    """A template of scattered atoms; residue 1 lacks its C-beta, residue 4 its nitrogen."""
    mask = np.ones((6, 37), np.float32)
    mask[4, N] = 0.0
    beta_mask = np.ones(6, np.float32)
    beta_mask[1] = 0.0
    return {
        "template_aatype": np.random.default_rng(seed).integers(0, 20, 6),
        "template_all_atom_positions": 6.0 * normal(6, 37, 3, seed=seed),
        "template_all_atom_masks": mask,
        "template_pseudo_beta": 12.0 * normal(6, 3, seed=seed + 1) * beta_mask[:, None],
        "template_pseudo_beta_mask": beta_mask,
    }


@pytest.mark.parametrize("use_unit_vector", [True, False])
def test_template_features(use_unit_vector: bool) -> None:
    config = network({}).template
    config.use_template_unit_vector = use_unit_vector
    config.template_pair_stack.num_block = 0
    features = template()

    def fun(batch: Any, mask: Any) -> jax.Array:
        return SingleTemplateEmbedding(config, SETTINGS, "single")(batch, mask)

    params, out = drawn(fun, features, np.ones((6, 6), np.float32))

    beta, aatype = features["template_pseudo_beta"], features["template_aatype"]
    distance = np.linalg.norm(beta[:, None] - beta[None], axis=-1)
    edges = np.append(np.linspace(3.25, 50.75, 39), 1e4)
    bins = (distance[..., None] > edges[:-1]) & (distance[..., None] < edges[1:])
    # Residue 1 has a frame but no C-beta: its distances, from the origin, count.
    assert bins[1].sum() > 0
    atoms, mask = features["template_all_atom_positions"], features["template_all_atom_masks"]
    frames = rigid_group_labels(aatype, atoms, mask)["rigidgroups_gt_frames"][:, 0]
    rotation, origin = frames[:, :9].reshape(-1, 3, 3), frames[:, 9:]
    # The stored frames' convention, by which the template's is tested: C lies on positive x.
    to_c = np.einsum("iab,ia->ib", rotation, atoms[:, C] - atoms[:, CA])
    assert (to_c[:, 0] > 1.0).all()
    local = np.einsum("iab,ija->ijb", rotation, origin[None] - origin[:, None])
    unit = local / np.sqrt(1e-6 + np.square(local).sum(axis=-1, keepdims=True))
    has_frame = mask[:, [N, CA, C]].prod(axis=-1)
    pair_has_frame = np.outer(has_frame, has_frame)[..., None]
    beta_mask = features["template_pseudo_beta_mask"]
    types = np.eye(22)[aatype]
    parts = [
        bins,
        np.outer(beta_mask, beta_mask)[..., None],
        np.broadcast_to(types[None], (6, 6, 22)),
        np.broadcast_to(types[:, None], (6, 6, 22)),
        unit * use_unit_vector,
        pair_has_frame,
    ]
    act = linear(np.concatenate(parts, axis=-1) * pair_has_frame, params["single/embedding2d"])
    assert_close(out, layer_norm(act, params["single/output_layer_norm"]))


@pytest.mark.parametrize("zero_init", [True, False])
def test_undefined_template_angles_are_one_and_zero_without_zero_init(zero_init: bool) -> None:
    config, settings = network({"msa_channel": 5}), Settings(zero_init=zero_init)
    batch = {name: value[None] for name, value in template().items()}
    batch["template_aatype"] = np.full((1, 6), ALANINE)
    params, (rows, mask) = drawn(lambda x: template_torsion_rows(x, config, settings), batch)
    # Residue 4 has no nitrogen and, as alanine, no chi angle: none of its angles is defined.
    assert mask[0, 4] == 0.0
    features = np.concatenate([np.eye(22)[ALANINE], np.tile([1.0, 0.0], 14), np.zeros(7)])
    hidden = np.maximum(linear(features, params["template_single_embedding"]), 0.0)
    expected = linear(hidden, params["template_projection"])
    if zero_init:
        assert not np.allclose(rows[0, 4], expected, atol=1e-3)
    else:
        assert_close(rows[0, 4], expected)


@pytest.mark.parametrize("zero_init", [True, False])
def test_last_layers_start_at_zero_or_at_fan_in_scale(zero_init: bool) -> None:
    settings = Settings(deterministic=True, zero_init=zero_init)
    config = network({}).evoformer
    args = (
        {"msa": np.zeros((1, 2, 64), np.float32), "pair": np.zeros((2, 2, 32), np.float32)},
        {"msa": np.ones((1, 2), np.float32), "pair": np.ones((2, 2), np.float32)},
    )
    transformed = hk.transform(lambda a, m: EvoformerIteration(config, settings, False, "b")(a, m))
    params = run_once(transformed.init, jax.random.key(0), *args)
    last = {
        "b/msa_row_attention_with_pair_bias/attention": ("output_w", 64),
        "b/msa_transition/transition2": ("weights", 256),
        "b/outer_product_mean": ("output_w", 16 * 16),
        "b/triangle_multiplication_outgoing/output_projection": ("weights", 32),
    }
    for path, (name, fan_in) in last.items():
        values = np.asarray(params[path][name])
        if zero_init:
            assert not values.any(), path
        else:
            np.testing.assert_allclose(values.std() * fan_in**0.5, 1.0, atol=0.1, err_msg=path)
