"""Experts over every placement against a loop over experts in numpy. No pair is dropped, and only
routed pairs are computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdisagg.layout.axes import TP_AXES, Layout
from jdisagg.model_api import Shards
from jdisagg.ops import moe
from jdisagg.ops.activations import ClampedGate, ExpertGate, SquaredRelu
from jdisagg.ops.moe import (
    ExpertWeights,
    Routing,
    block_products,
    block_rows,
    gpu_products,
    plan_blocks,
    route,
    routed_experts,
)
from jdisagg.ops.parameters import layout_mesh
from tests.lanes import first_quick

TOKENS, WIDTH, FFN, EXPERTS, CHOSEN = 24, 12, 16, 8, 3


def _inputs(seed: int = 0, dtype: str = "float32") -> tuple[jax.Array, jax.Array, ExpertWeights]:
    random = np.random.default_rng(seed)
    shapes = (
        (TOKENS, WIDTH),
        (TOKENS, EXPERTS),
        (EXPERTS, WIDTH, FFN),
        (EXPERTS, WIDTH, FFN),
        (EXPERTS, FFN, WIDTH),
    )
    x_TD, logits_TE, *weights = (jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)
    return x_TD, logits_TE.astype(jnp.float32), ExpertWeights(*weights)


def _biased(weights: ExpertWeights) -> ExpertWeights:
    random, dtype = np.random.default_rng(9), weights.gate_EDF.dtype
    biases = (jnp.asarray(random.normal(size=(EXPERTS, n)), dtype) for n in (FFN, FFN, WIDTH))
    return ExpertWeights(*weights[:6], *biases)


def _loop_over_experts(
    x_TD: jax.Array,
    routing: Routing,
    weights: ExpertWeights,
    valid_T: np.ndarray,
    clamp: ClampedGate | None = None,
) -> np.ndarray:
    x, gate, up, down = (np.asarray(part, np.float64) for part in (x_TD, *weights[:3]))
    biases = [np.zeros(())] * 3 if weights.gate_bias_EF is None else weights[6:]
    gate_bias, up_bias, down_bias = (
        np.broadcast_to(np.asarray(bias, np.float64), (EXPERTS, n))
        for bias, n in zip(biases, (FFN, FFN, WIDTH), strict=True)
    )
    out = np.zeros_like(x)
    for token in np.flatnonzero(valid_T):
        for expert, weight in zip(
            np.asarray(routing.experts_TJ)[token],
            np.asarray(routing.weights_TJ)[token],
            strict=True,
        ):
            hidden = x[token] @ gate[expert] + gate_bias[expert]
            other, alpha = x[token] @ up[expert] + up_bias[expert], 1.0
            if clamp:
                hidden, alpha = np.minimum(hidden, clamp.limit), clamp.alpha
                other = 1 + np.maximum(-clamp.limit, np.minimum(other, clamp.limit))
            hidden = hidden / (1 + np.exp(-alpha * hidden)) * other
            out[token] += weight * (hidden @ down[expert] + down_bias[expert])
    return out


def _sharded(layout: Layout, platform: str = "cpu", clamp: ClampedGate | None = None):
    mesh = layout_mesh(layout, 2, jax.devices()[: layout.devices])
    shards = Shards(tp=TP_AXES, dp=("dp",), ep=layout.expert_axes(), platform=platform)
    table = layout.axis_table()
    whole, split = table["expert"] or None, table["expert_ffn"] or None
    inward, outward = PartitionSpec(whole, None, split), PartitionSpec(whole, split, None)
    biases = (PartitionSpec(whole, split),) * 2 + (PartitionSpec(whole),) if clamp else ()
    specs = ExpertWeights(inward, inward, outward, None, None, None, *biases)  # pyright: ignore[reportArgumentType]

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec("dp"),) * 3 + (specs,),
        out_specs=PartitionSpec("dp"),
        check_vma=False,
    )
    def run(
        x_TD: jax.Array, logits_TE: jax.Array, valid_T: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        return routed_experts(
            x_TD,
            route(logits_TE, CHOSEN, normalised=True),
            weights,
            shards,
            experts=EXPERTS,
            valid_T=valid_T,
            clamp=clamp,
        )

    return run


CLAMP = ClampedGate(limit=1.2, alpha=1.702)
PLACEMENTS = [
    ("dp=2,tp=2,ep=2", "cpu", None),
    ("dp=2,tp=2,ep=4", "tpu", CLAMP),
    ("dp=2,tp=4,ep=1", "cpu", CLAMP),
    ("dp=2,tp=4,ep=1", "cpu", None),
    ("dp=4,tp=1,ep=4", "cpu", None),
    ("dp=2,tp=4,ep=8", "cpu", None),
    ("dp=1,tp=4,ep=1", "cpu", None),
    ("dp=1,tp=4,ep=4", "cpu", CLAMP),
    ("dp=1,tp=1,ep=1", "tpu", None),
]


@pytest.mark.parametrize(("layout", "platform", "clamp"), first_quick(PLACEMENTS, quick=2, ci=7))
def test_every_placement_gives_the_sum_of_the_routed_experts(
    layout: str, platform: str, clamp: ClampedGate | None
) -> None:
    """Biases, which go with the clamp, count once."""
    x_TD, logits_TE, weights = _inputs()
    weights = _biased(weights) if clamp else weights
    valid_T = np.arange(TOKENS) % 5 != 3
    run = _sharded(Layout.parse(layout), platform, clamp)
    routing = route(logits_TE, CHOSEN, normalised=True)
    expected = _loop_over_experts(x_TD, routing, weights, valid_T, clamp)
    got = np.asarray(run(x_TD, logits_TE, jnp.asarray(valid_T), weights))
    np.testing.assert_allclose(got[valid_T], expected[valid_T], atol=2e-4)
    np.testing.assert_array_equal(got[~valid_T], 0)


def test_nothing_is_dropped_when_all_tokens_choose_the_same_experts() -> None:
    x_TD, logits_TE, weights = _inputs()
    logits_TE = jnp.broadcast_to(jnp.arange(EXPERTS, dtype=jnp.float32)[None, :], logits_TE.shape)
    run = _sharded(Layout(dp=2, tp=4, ep=8))
    expected = _loop_over_experts(
        x_TD, route(logits_TE, CHOSEN, normalised=True), weights, np.ones(TOKENS, bool)
    )
    np.testing.assert_allclose(
        run(x_TD, logits_TE, jnp.ones(TOKENS, bool), weights), expected, atol=2e-4
    )


@pytest.mark.parametrize(("near",), first_quick([(True,), (False,)]))
def test_a_loop_over_grouped_products_drops_nothing(near: bool) -> None:
    """`near`: all pairs are of this device's experts, so that the loop has many trips."""
    x_TD, _, weights = _inputs()
    random = np.random.default_rng(3)
    local_TJ = np.sort(random.integers(0, EXPERTS, (TOKENS, CHOSEN)).astype(np.int32))
    held = EXPERTS if near else 2
    held_weights = jax.tree.map(lambda part: part[:held], weights)
    bias_ED = random.normal(size=(held, x_TD.shape[1])).astype(np.float32)
    held_weights = held_weights._replace(down_bias_ED=jnp.asarray(bias_ED))
    local_TJ = np.minimum(local_TJ, held)
    weights_TJ = random.uniform(size=local_TJ.shape).astype(np.float32)
    given = jnp.asarray(x_TD), jnp.asarray(local_TJ)
    local_sums = jax.jit(moe._local_sums, static_argnums=(4, 5))
    sums = [
        np.asarray(local_sums(*given, jnp.asarray(weights_TJ), held_weights, 4, at_once))
        for at_once in (16, local_TJ.size)
    ]
    products = jax.jit(moe.block_products, static_argnums=3)
    y_TJD = np.asarray(products(*given, held_weights, 4))
    y_TJD = y_TJD + bias_ED[np.minimum(local_TJ, held - 1)]
    here_TJ = local_TJ < held
    assert here_TJ.sum() > (32 if near else 0)
    want = np.where(here_TJ[..., None], y_TJD * weights_TJ[..., None], 0).sum(1)
    np.testing.assert_allclose(sums[0], want, atol=1e-4)
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("routed", [0, 1, 5, 40, 64])
def test_blocks_cover_exactly_the_pairs_routed_here(routed: int) -> None:
    experts, rows, pairs = 4, 4, 64
    local_P = np.random.default_rng(routed).permutation(
        np.where(np.arange(pairs) < routed, np.arange(pairs) % 3, experts)
    )
    plan = jax.jit(plan_blocks, static_argnums=(1, 2))(local_P, experts, rows)
    counts = [int((local_P == expert).sum()) for expert in range(experts)]
    assert int(plan.blocks) == sum(-(-count // rows) for count in counts)
    covered = []
    for expert, start in list(
        zip(np.asarray(plan.expert_B), np.asarray(plan.start_B), strict=True)
    )[: int(plan.blocks)]:
        mine = [
            pair
            for pair in np.asarray(plan.order_P)[start : start + rows]
            if local_P[pair] == expert
        ]
        assert mine
        covered += mine
    assert sorted(covered) == sorted(np.flatnonzero(local_P < experts))


def test_the_rows_of_a_block_follow_the_share_of_an_expert() -> None:
    assert block_rows(pairs=8, experts=128) == 2
    assert block_rows(pairs=512, experts=128) == 8
    assert block_rows(pairs=1 << 20, experts=8) == 128


def test_the_compiled_loop_multiplies_one_block_at_a_time() -> None:
    """The only products are of [rows, D] and [rows, F], so the work is the number of blocks, which
    is data."""
    x_TD, logits_TE, weights = _inputs()
    local_TJ = route(logits_TE, CHOSEN, normalised=True).experts_TJ
    jaxpr = str(jax.make_jaxpr(block_products, static_argnums=3)(x_TD, local_TJ, weights, 4))
    assert jaxpr.count("dot_general") == 3
    assert "while" in jaxpr and f"f32[4,{FFN}]" in jaxpr and f"f32[{TOKENS},{FFN}]" not in jaxpr


def test_one_tokens_result_does_not_depend_on_its_neighbours() -> None:
    x_TD, logits_TE, weights = _inputs()
    run = _sharded(Layout())
    alone = run(x_TD, logits_TE, jnp.arange(TOKENS) == 7, weights)[7]
    np.testing.assert_array_equal(alone, run(x_TD, logits_TE, jnp.ones(TOKENS, bool), weights)[7])


def test_routing_weights_sum_to_one_only_where_normalised() -> None:
    _, logits_TE, _ = _inputs()
    np.testing.assert_allclose(
        jnp.sum(route(logits_TE, CHOSEN, normalised=True).weights_TJ, axis=1), 1, rtol=1e-6
    )
    probabilities = np.exp(logits_TE) / np.exp(logits_TE).sum(axis=1, keepdims=True)
    plain = np.sort(np.asarray(route(logits_TE, CHOSEN, normalised=False).weights_TJ), axis=1)
    np.testing.assert_allclose(plain, np.sort(probabilities, axis=1)[:, -CHOSEN:], rtol=1e-5)


@pytest.mark.parametrize(("platform",), first_quick([("cpu",), ("tpu",)]))
def test_experts_without_a_gate_square_what_is_positive(platform: str) -> None:
    x_TD, logits_TE, weights = _inputs()
    routing = route(logits_TE, CHOSEN, normalised=True)
    ungated = weights._replace(gate_EDF=weights.up_EDF)
    shards = Shards(platform=platform)
    run = partial(routed_experts, shards=shards, experts=EXPERTS, clamp=SquaredRelu())
    got = jax.jit(run)(x_TD, routing, ungated)
    x, up, down = (np.asarray(part, np.float64) for part in (x_TD, *weights[1:3]))
    inner_TEF = np.maximum(np.einsum("td,edf->tef", x, up), 0) ** 2
    each_TED = np.einsum("tef,efd->ted", inner_TEF, down)
    chosen = np.asarray(routing.experts_TJ)[:, :, None]
    expected = np.sum(
        np.take_along_axis(each_TED, chosen, axis=1) * np.asarray(routing.weights_TJ)[:, :, None],
        axis=1,
    )
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("tokens", "dtype", "clamp"),
    first_quick(
        [
            (5, "bfloat16", CLAMP),
            (TOKENS, "float32", None),
            (5, "float32", SquaredRelu()),
            (1, "bfloat16", None),
        ],
        ci=3,
    ),
)
def test_the_gpu_s_kernels_give_what_the_loop_over_blocks_gives(
    tokens: int, dtype: str, clamp: ExpertGate | None
) -> None:
    """Includes pairs without a local expert and experts without pairs. Biases go with the clamp.
    Without a gate, `up` is in its place."""
    x_TD, _, weights = _inputs(3, dtype)
    weights = _biased(weights) if clamp is CLAMP else weights
    if isinstance(clamp, SquaredRelu):
        weights = weights._replace(gate_EDF=weights.up_EDF)
    choices = np.random.default_rng(tokens).integers(0, EXPERTS + 1, (tokens, CHOSEN))
    choices[choices == 2] = 5
    local_TJ = jnp.asarray(choices, jnp.int32)
    rows = block_rows(local_TJ.size, EXPERTS)
    loop = jax.jit(block_products, static_argnums=(3, 4))
    expected = loop(x_TD[:tokens], local_TJ, weights, rows, clamp)
    kernels = jax.jit(partial(gpu_products, device_kind="a GPU", clamp=clamp, interpret=True))
    got = kernels(x_TD[:tokens], local_TJ, weights)
    here = choices < EXPERTS
    difference = np.abs(np.asarray(got, np.float32) - np.asarray(expected, np.float32))[here]
    scale = np.abs(np.asarray(expected, np.float32)).max()
    assert got.dtype == expected.dtype
    assert difference.max() < (1e-5 if dtype == "float32" else 2e-2) * scale
