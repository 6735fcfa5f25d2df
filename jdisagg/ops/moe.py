"""Routes tokens to experts that are distributed over devices. Each device computes only the tokens
routed to its own experts, and no token is dropped.

Pairs (token, chosen expert) are sorted by local expert and cut into blocks of rows of one expert.
On a GPU the host would drive a loop, so kernels process the blocks (`grouped_products_gpu`).
`lax.ragged_dot` would be simpler, but on CPU and GPU it multiplies every row by every expert (75 ms
against 5 ms for 32 experts). On a TPU `ragged_dot` is a grouped product and is used.

Experts have one of three placements (see `layout/axes.py`). Padding tokens are routed to no
expert."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.model_api import AdapterRows, Shards
from jdisagg.ops import grouped_products_gpu
from jdisagg.ops.activations import ExpertGate, SquaredRelu
from jdisagg.ops.adapters import ExpertFactors, Factors, add_adapters
from jdisagg.ops.mlp import gated_expert
from jdisagg.ops.optional_kernels import BLOCK_EXPERTS, usable
from jdisagg.ops.quantized_weights import scaled_product, widened

# A single bfloat16 row is slow on CPU (`ops/linear.py`). Above 128 rows only padding grows.
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 2, 128
# Number of a token's experts whose output rows are gathered together. Without this limit, XLA would
# gather the rows of all experts at once, which needs more memory.
GATHERED_CHOICES = 4


class Routing(NamedTuple):
    """The J experts that each of T tokens uses, numbered over all devices (int32 [T, J]), and the
    weights of their outputs (float32 [T, J])."""

    experts_TJ: jax.Array
    weights_TJ: jax.Array


class ExpertWeights(NamedTuple):
    """Expert matrices of this device, with scales if quantized and biases if present. For experts
    without a gate (`SquaredRelu`), gate and up are the same matrix."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_scale_EF: jax.Array | None = None
    up_scale_EF: jax.Array | None = None
    down_scale_ED: jax.Array | None = None
    gate_bias_EF: jax.Array | None = None
    up_bias_EF: jax.Array | None = None
    down_bias_ED: jax.Array | None = None


class Adapted(NamedTuple):
    factors: ExpertFactors
    slot_T: jax.Array


class BlockPlan(NamedTuple):
    """Order in which this device computes (token, expert) pairs. Pairs are sorted by local expert,
    pairs of other devices come last, and blocks of rows cover the local pairs.

    Block b holds rows start_B[b] to end_B[b] of expert expert_B[b]."""

    order_P: jax.Array
    expert_B: jax.Array
    start_B: jax.Array
    end_B: jax.Array
    blocks: jax.Array


def route(logits_TE: jax.Array, experts_per_token: int, *, normalised: bool) -> Routing:
    """Chooses the `experts_per_token` most probable experts of each token by a float32 softmax over
    all experts. Ties go to the smaller expert number."""
    probabilities_TE = jax.nn.softmax(logits_TE.astype(jnp.float32), axis=-1)
    weights_TJ, experts_TJ = lax.top_k(probabilities_TE, experts_per_token)
    if normalised:
        weights_TJ = weights_TJ / jnp.sum(weights_TJ, axis=-1, keepdims=True)
    return Routing(experts_TJ, weights_TJ)


def block_rows(pairs: int, experts: int) -> int:
    """Returns the number of rows per block: about twice the mean number of rows per expert, so that
    most experts' weights are read once."""
    rows = MIN_BLOCK_ROWS
    while rows < min(MAX_BLOCK_ROWS, 2 * pairs / experts):
        rows *= 2
    return rows


def plan_blocks(local_P: jax.Array, experts: int, rows: int) -> BlockPlan:
    """Sorts the pairs and divides them into blocks. `local_P` is the local expert of each pair, or
    `experts` for padding and for pairs of other devices."""
    pairs = local_P.shape[0]
    order_P = jnp.argsort(local_P, stable=True)
    pairs_E = _sizes(local_P, experts)
    first_pair_E = jnp.cumsum(pairs_E) - pairs_E
    blocks_E = -(-pairs_E // rows)
    end_block_E = jnp.cumsum(blocks_E)
    block_B = jnp.arange(-(-pairs // rows) + min(experts, pairs), dtype=jnp.int32)
    expert_B = jnp.minimum(
        # This method is chosen because the default one is a loop.
        jnp.searchsorted(end_block_E, block_B, side="right", method="compare_all"),
        experts - 1,
    ).astype(jnp.int32)
    start_B = first_pair_E[expert_B] + (block_B - (end_block_E - blocks_E)[expert_B]) * rows
    end_B = jnp.minimum(start_B + rows, (first_pair_E + pairs_E)[expert_B])
    exists_B = block_B < end_block_E[-1]
    start_B, end_B = jnp.where(exists_B, start_B, 0), jnp.where(exists_B, end_B, 0)
    return BlockPlan(order_P, expert_B, start_B, end_B, end_block_E[-1])


def routed_experts(
    x_TD: jax.Array,
    routing: Routing,
    weights: ExpertWeights,
    shards: Shards,
    *,
    experts: int,
    valid_T: jax.Array | None = None,
    clamp: ExpertGate | None = None,
    factors: ExpertFactors | None = None,
) -> jax.Array:
    """Returns the weighted sum of the outputs of each token's experts: [T, D] in x's dtype,
    replicated over tp. `experts` is the total number of experts on all devices. `clamp` is the gate
    function, or None for silu. `factors` are the experts' adapters, if they have any."""
    adapted = None
    if factors is not None and shards.adapters is not None:
        adapted = Adapted(factors, _slots(shards.adapters, x_TD.shape[0]))
    experts_TJ = routing.experts_TJ
    if valid_T is not None:
        experts_TJ = jnp.where(valid_T[:, None], experts_TJ, experts)
    weights_TJ = routing.weights_TJ
    held = weights.gate_EDF.shape[0]
    gathered = tuple(axis for axis in shards.dp if axis in shards.ep)
    if gathered:
        x_TD, experts_TJ, weights_TJ = (
            lax.all_gather(part, gathered, axis=0, tiled=True)
            for part in (x_TD, experts_TJ, weights_TJ)
        )
        if adapted is not None:
            slot_T = lax.all_gather(adapted.slot_T, gathered, axis=0, tiled=True)
            adapted = adapted._replace(slot_T=slot_T)
    first = lax.axis_index(shards.ep) * held if shards.ep else 0
    local_TJ = experts_TJ - first
    local_TJ = jnp.where((local_TJ >= 0) & (local_TJ < held), local_TJ, held)
    rows = block_rows(local_TJ.size, experts)
    traits = traits_of(shards.platform)
    bias_ED = _output_bias(weights.down_bias_ED, shards)
    at_once = None
    if traits.kernels == "tpu" and held < experts:
        at_once = pairs_at_once(local_TJ.size, held, experts)
        # `_local_sums` adds results in the order of experts. Steps of few pairs must use the same
        # order, so that a token's result does not depend on the batch.
        local_TJ, weights_TJ = lax.sort((local_TJ, weights_TJ), dimension=1, num_keys=1)
    if at_once is not None:
        weights = weights._replace(down_bias_ED=bias_ED)
        y_TD = _local_sums(x_TD, local_TJ, weights_TJ, weights, rows, at_once, clamp, adapted)
    else:
        if traits.kernels == "gpu" and usable(BLOCK_EXPERTS) and adapted is None:
            y_TJD = gpu_products(x_TD, local_TJ, weights, shards.device_kind, clamp)
        elif traits.experts == "ragged":
            y_TJD = _ragged_products(x_TD, local_TJ, weights, rows, clamp, adapted)
        else:
            y_TJD = block_products(x_TD, local_TJ, weights, rows, clamp, adapted)
        if bias_ED is not None:
            y_TJD = y_TJD + bias_ED[jnp.minimum(local_TJ, held - 1)]
        y_TD = _combine(y_TJD, local_TJ < held, weights_TJ, x_TD.dtype)
    if gathered:
        y_TD = lax.psum_scatter(y_TD, gathered, scatter_dimension=0, tiled=True)
    return lax.psum(y_TD, shards.tp) if shards.tp else y_TD


def _slots(rows: AdapterRows, tokens: int) -> jax.Array:
    return jnp.broadcast_to(rows.slot_T[:1], (tokens,)) if rows.alike else rows.slot_T


def _output_bias(bias_ED: jax.Array | None, shards: Shards) -> jax.Array | None:
    """If each expert is split over devices, their results are summed, so the bias is zero on all
    devices but one."""
    if bias_ED is None or not shards.tp or shards.ep:
        return bias_ED
    return jnp.where(lax.axis_index(shards.tp) == 0, bias_ED, jnp.zeros((), bias_ED.dtype))


def _combine(
    y_TJD: jax.Array, here_TJ: jax.Array, weights_TJ: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """The order of summation is the token's order of experts, so it does not depend on the
    batch."""
    weighted_TJD = jnp.where(
        here_TJ[:, :, None], y_TJD.astype(jnp.float32) * weights_TJ[:, :, None], 0.0
    )
    return jnp.sum(weighted_TJD, axis=1).astype(dtype)


def _expert(
    rows_RD: jax.Array,
    expert: ExpertWeights,
    clamp: ExpertGate | None,
    adapted: Adapted | None = None,
) -> jax.Array:
    def product(
        x: jax.Array,
        kernel: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        factors: Factors | None,
    ) -> jax.Array:
        y = x @ kernel if scale is None else scaled_product(x, kernel, scale)
        if factors is not None and adapted is not None:
            y = add_adapters(y, x, factors, adapted.slot_T, jnp.matmul)
        return y if bias is None else y + bias[None, :]

    gate, up, down, gate_scale, up_scale, down_scale, gate_bias, up_bias, _ = expert
    of_gate, of_up, of_down = adapted.factors if adapted else (None, None, None)
    gate_RF = up_RF = product(rows_RD, up, up_scale, up_bias, of_up)
    if not isinstance(clamp, SquaredRelu):
        gate_RF = product(rows_RD, gate, gate_scale, gate_bias, of_gate)
    hidden_RF = gated_expert(gate_RF, up_RF, clamp)
    return product(hidden_RF, down, down_scale, None, of_down)


def _token_rows(
    x_TD: jax.Array, plan: BlockPlan, choices: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """The tokens are padded by one block, so that the last block can be sliced whole."""
    token_P = jnp.pad(plan.order_P // choices, (0, rows))
    place_P = (
        jnp.zeros_like(plan.order_P)
        .at[plan.order_P]
        .set(jnp.arange(plan.order_P.shape[0], dtype=plan.order_P.dtype))
    )
    return token_P, place_P


def block_products(
    x_TD: jax.Array,
    local_TJ: jax.Array,
    weights: ExpertWeights,
    rows: int,
    clamp: ExpertGate | None = None,
    adapted: Adapted | None = None,
) -> jax.Array:
    """Applies each pair's expert to its token, without the output's bias: [T, J, D]. Entries whose
    expert is on another device are undefined."""
    choices = local_TJ.shape[1]
    plan = plan_blocks(local_TJ.reshape(-1), weights.gate_EDF.shape[0], rows)
    token_P, place_P = _token_rows(x_TD, plan, choices, rows)

    def one_block(block: jax.Array, out_PD: jax.Array) -> jax.Array:
        expert, start = plan.expert_B[block], plan.start_B[block]
        token_R = lax.dynamic_slice(token_P, (start,), (rows,))
        rows_RD = x_TD[token_R]
        own, factors = jax.tree.map(
            lambda part: lax.dynamic_index_in_dim(part, expert, keepdims=False),
            (weights, adapted and adapted.factors),
        )
        of_rows = Adapted(factors, adapted.slot_T[token_R]) if adapted else None
        y_RD = _expert(rows_RD, own, clamp, of_rows)
        return lax.dynamic_update_slice(out_PD, y_RD, (start, 0))

    out_PD = lax.fori_loop(
        0, plan.blocks, one_block, jnp.zeros((token_P.shape[0], x_TD.shape[1]), x_TD.dtype)
    )
    return out_PD[place_P].reshape(*local_TJ.shape, -1)


def gpu_products(
    x_TD: jax.Array,
    local_TJ: jax.Array,
    weights: ExpertWeights,
    device_kind: str,
    clamp: ExpertGate | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    held, choices = weights.gate_EDF.shape[0], local_TJ.shape[1]
    rows = grouped_products_gpu.block_rows(local_TJ.size, held)
    plan = plan_blocks(local_TJ.reshape(-1), held, rows)
    token_P, place_P = _token_rows(x_TD, plan, choices, rows)
    plain = weights.gate_scale_EF is None
    if plain and grouped_products_gpu.wgmma_applies(x_TD, weights.gate_EDF.shape[2], device_kind):
        sizes_E = _sizes(local_TJ, held)
        pairs_PD = x_TD[token_P[: local_TJ.size]]
        gate_PF, up_PF = (_of_pairs(bias, local_TJ, plan) for bias in weights[6:8])
        into = None if gate_PF is None or up_PF is None else (gate_PF, up_PF)
        out_PD = grouped_products_gpu.by_wgmma(pairs_PD, sizes_E, *weights[:3], into, clamp)
    else:
        where_B = (plan.expert_B, plan.start_B, plan.end_B)
        out_PD = grouped_products_gpu.by_blocks(
            x_TD, token_P, *where_B, weights, rows, clamp, interpret=interpret
        )
    return out_PD[place_P].reshape(*local_TJ.shape, -1)


def _sizes(local_TJ: jax.Array, held: int) -> jax.Array:
    expert_E = jnp.arange(held, dtype=local_TJ.dtype)
    return jnp.sum(local_TJ.reshape(-1)[:, None] == expert_E[None, :], axis=0, dtype=jnp.int32)


def _of_pairs(of_EF: jax.Array | None, local_TJ: jax.Array, plan: BlockPlan) -> jax.Array | None:
    if of_EF is None:
        return None
    return of_EF[jnp.minimum(local_TJ.reshape(-1)[plan.order_P], of_EF.shape[0] - 1)]


def _ragged_products(
    x_TD: jax.Array,
    local_TJ: jax.Array,
    weights: ExpertWeights,
    rows: int,
    clamp: ExpertGate | None = None,
    adapted: Adapted | None = None,
) -> jax.Array:
    held, choices = weights.gate_EDF.shape[0], local_TJ.shape[1]
    plan = plan_blocks(local_TJ.reshape(-1), held, rows)
    token_P, place_P = _token_rows(x_TD, plan, choices, 0)
    expert_P = jnp.minimum(local_TJ.reshape(-1)[plan.order_P], held - 1)
    own = adapted and adapted._replace(slot_T=adapted.slot_T[token_P])
    sizes_E = _sizes(local_TJ, held)
    out_PD = _ragged_expert(x_TD[token_P], sizes_E, expert_P, weights, clamp, own)
    return out_PD[place_P].reshape(*local_TJ.shape, -1)


def _local_sums(
    x_TD: jax.Array,
    local_TJ: jax.Array,
    weights_TJ: jax.Array,
    weights: ExpertWeights,
    rows: int,
    at_once: int,
    clamp: ExpertGate | None = None,
    adapted: Adapted | None = None,
) -> jax.Array:
    held, choices = weights.gate_EDF.shape[0], local_TJ.shape[1]
    plan = plan_blocks(local_TJ.reshape(-1), held, rows)
    padding = -local_TJ.size % at_once
    token_P, place_P = _token_rows(x_TD, plan, choices, padding)
    place_TJ = place_P.reshape(local_TJ.shape)
    expert_P = jnp.pad(jnp.minimum(local_TJ.reshape(-1)[plan.order_P], held - 1), (0, padding))
    end_E = jnp.cumsum(_sizes(local_TJ, held))

    def body(index: jax.Array, y_TD: jax.Array) -> jax.Array:
        start = index * at_once
        token_R, expert_R = (
            lax.dynamic_slice_in_dim(array, start, at_once) for array in (token_P, expert_P)
        )
        sizes_E = jnp.diff(jnp.clip(end_E - start, 0, at_once), prepend=0)
        own = adapted and adapted._replace(slot_T=adapted.slot_T[token_R])
        out_RD = _ragged_expert(x_TD[token_R], sizes_E, expert_R, weights, clamp, own)
        if weights.down_bias_ED is not None:
            out_RD = out_RD + weights.down_bias_ED[expert_R]
        row_TJ = place_TJ - start
        here_TJ = (local_TJ < held) & (row_TJ >= 0) & (row_TJ < at_once)
        for choice in range(choices):
            if choice and choice % GATHERED_CHOICES == 0:
                y_TD, out_RD = lax.optimization_barrier((y_TD, out_RD))
            of_TD = out_RD[jnp.clip(row_TJ[:, choice], 0, at_once - 1)].astype(jnp.float32)
            of_TD = of_TD * weights_TJ[:, choice, None]
            y_TD = y_TD + jnp.where(here_TJ[:, choice, None], of_TD, 0.0)
        return y_TD

    nothing_TD = jnp.zeros(x_TD.shape, jnp.float32)
    y_TD = lax.fori_loop(0, -(-end_E[-1] // at_once), body, nothing_TD)
    return y_TD.astype(x_TD.dtype)


def _ragged_expert(
    rows_PD: jax.Array,
    sizes_E: jax.Array,
    expert_P: jax.Array,
    weights: ExpertWeights,
    clamp: ExpertGate | None,
    adapted: Adapted | None,
) -> jax.Array:
    # A TPU's kernel rejects 16-bit factors at any precision but its default ("Bad lhs type").
    precision = None if rows_PD.dtype == jnp.float32 else lax.Precision.DEFAULT

    def product(
        x: jax.Array,
        kernel: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        factors: Factors | None,
    ) -> jax.Array:
        if scale is None:
            y = lax.ragged_dot(x, kernel, sizes_E, precision=precision)
        else:
            sums = lax.ragged_dot(
                x,
                widened(kernel, x.dtype),
                sizes_E,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            y = (sums * scale[expert_P]).astype(x.dtype)
        if factors is not None and adapted is not None:
            grouped = partial(lax.ragged_dot, group_sizes=sizes_E, precision=precision)
            y = add_adapters(y, x, factors, adapted.slot_T, grouped)
        return y if bias is None else y + bias[expert_P]

    gate, up, down, gate_scale, up_scale, down_scale, gate_bias, up_bias, _ = weights
    of_gate, of_up, of_down = adapted.factors if adapted else (None, None, None)
    gate_PF = up_PF = product(rows_PD, up, up_scale, up_bias, of_up)
    if not isinstance(clamp, SquaredRelu):
        gate_PF = product(rows_PD, gate, gate_scale, gate_bias, of_gate)
    hidden_PF = gated_expert(gate_PF, up_PF, clamp)
    return product(hidden_PF, down, down_scale, None, of_down)


def pairs_at_once(pairs: int, held: int, experts: int) -> int | None:
    """Returns the number of pairs of one grouped product on a device that holds `held` of `experts`
    experts: a power of two, at least twice the device's mean share of all pairs. Returns None if
    this is more than half of the pairs. One product then covers all pairs."""
    step = MAX_BLOCK_ROWS
    while step * experts < 2 * pairs * held:
        step *= 2
    return step if 2 * step <= pairs else None
