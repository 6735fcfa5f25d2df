"""Grouped expert products on a GPU: each expert's rows times the expert's matrix.

`products` chooses between two implementations:
- Hopper, 16-bit: JAX's `pallas.ops.gpu.ragged_dot_mgpu`, three calls (gate, up, down), by wgmma and
  TMA.
- Elsewhere (Blackwell, float32, quantized experts): our own kernels (Pallas, Triton backend) in two
  calls. The first computes gate, up and the activation and reads tokens by index, so that they need
  not be gathered first. A kernel program handles one block of rows and one tile of columns.
  Programs without a block do nothing. Quantized values are widened as they are read.

Rows whose expert is on another device are not computed, and their output is undefined."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdisagg.ops.activations import ExpertGate, SquaredRelu
from jdisagg.ops.mlp import gated_expert
from jdisagg.ops.optional_kernels import WGMMA_EXPERTS, usable
from jdisagg.ops.paged_attention_pallas import Ref, triton
from jdisagg.ops.quantized_weights import halves

# Rows of a block. The lower bound is the number of rows of a tensor-core product. The upper bound
# is the number of rows whose block fits into registers.
MIN_ROWS, MAX_ROWS = 16, 128
TILE = 64
WARPS, STAGES = 4, 3
# ragged_dot_mgpu: rows and columns of a tile, depth of a step, steps in flight.
MGPU_ROWS, MGPU_COLUMNS, MGPU_DEPTH, MGPU_STEPS = 64, 128, 64, 4


def block_rows(pairs: int, experts: int) -> int:
    rows = MIN_ROWS
    while rows < min(MAX_ROWS, pairs / experts):
        rows *= 2
    return rows


def is_hopper(device_kind: str) -> bool:
    return any(name in device_kind for name in ("H100", "H200", "H20", "H800", "GH200"))


def wgmma_applies(x_TD: jax.Array, ffn: int, device_kind: str) -> bool:
    whole = x_TD.shape[1] % MGPU_DEPTH == 0 and ffn % MGPU_DEPTH == 0
    fits = is_hopper(device_kind) and usable(WGMMA_EXPERTS)
    return fits and whole and x_TD.dtype in (jnp.bfloat16, jnp.float16)


def by_wgmma(
    rows_PD: jax.Array,
    sizes_E: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    biases_PF: tuple[jax.Array, jax.Array] | None = None,
    clamp: ExpertGate | None = None,
) -> jax.Array:
    """Applies each row's expert by JAX's Hopper kernel `ragged_dot_mgpu`: [P, D].

    Args:
        rows_PD: Rows sorted by expert. Rows whose expert is on another device come last.
    """
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    product = partial(
        ragged_dot,
        group_sizes=sizes_E,
        block_m=MGPU_ROWS,
        block_n=MGPU_COLUMNS,
        block_k=MGPU_DEPTH,
        max_concurrent_steps=MGPU_STEPS,
        grid_block_n=1,
    )
    gate_PF = up_PF = product(rows_PD, up_EDF)
    if not isinstance(clamp, SquaredRelu):
        gate_PF = product(rows_PD, gate_EDF)
    if biases_PF is not None:
        gate_PF, up_PF = gate_PF + biases_PF[0], up_PF + biases_PF[1]
    return product(gated_expert(gate_PF, up_PF, clamp), down_EFD)


def by_blocks(
    x_TD: jax.Array,
    token_P: jax.Array,
    expert_B: jax.Array,
    start_B: jax.Array,
    end_B: jax.Array,
    weights: tuple[jax.Array | None, ...],
    rows: int,
    clamp: ExpertGate | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Applies experts by our own kernels: [P, D], without the bias of the output. Pair p applies an
    expert to token `token_P[p]`. The pairs of block b, start_B[b] to end_B[b], use expert
    expert_B[b]. A block has at most `rows` pairs and may be empty. P includes `rows` entries of
    padding."""
    gate_EDF, up_EDF, down_EFD, *scales = weights[:6]
    assert gate_EDF is not None and up_EDF is not None and down_EFD is not None
    pairs, depth, ffn = token_P.shape[0], x_TD.shape[1], gate_EDF.shape[2]
    blocks = expert_B.shape[0]
    params = triton.CompilerParams(num_warps=WARPS, num_stages=STAGES)

    def call(kernel: object, columns: int, arrays: tuple[jax.Array, ...], name: str) -> jax.Array:
        whole = [pl.BlockSpec(array.shape, lambda b, n, d=array.ndim: (0,) * d) for array in arrays]
        return pl.pallas_call(
            partial(kernel, rows=rows),  # type: ignore[arg-type]
            grid=(blocks, pl.cdiv(columns, TILE)),
            in_specs=whole,
            out_specs=pl.BlockSpec((pairs, columns), lambda b, n: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((pairs, columns), x_TD.dtype),
            compiler_params=params,
            interpret=interpret,
            name=name,
        )(*arrays)

    plan = (expert_B, start_B, end_B)
    biases = [bias for bias in weights[6:8] if bias is not None]
    into = [scale for scale in scales[:2] if scale is not None] + biases
    out = [scale for scale in scales[2:] if scale is not None]
    hidden = partial(_hidden, clamp=clamp, biased=bool(biases))
    hidden_PF = call(
        hidden, ffn, (*plan, token_P, x_TD, gate_EDF, up_EDF, *into), "jdisagg_experts_hidden"
    )
    return call(_down, depth, (*plan, hidden_PF, down_EFD, *out), "jdisagg_experts_down")


def _hidden(
    expert_ref: Ref,
    start_ref: Ref,
    end_ref: Ref,
    token_ref: Ref,
    x_ref: Ref,
    gate_ref: Ref,
    up_ref: Ref,
    *more_and_out: Ref,
    rows: int,
    clamp: ExpertGate | None,
    biased: bool,
) -> None:
    *scales, out_ref = more_and_out
    scales, biases = (scales[:-2], scales[-2:]) if biased else (scales, [])
    # Read outside of the branches, because interpreted branches cannot read refs.
    block, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(end_ref[block] > 0)
    def _() -> None:
        place_R, own_R = _block(start_ref[block], end_ref[block], rows)
        token_R = triton.load(token_ref.at[place_R], mask=own_R, other=0)
        expert = expert_ref[block]
        gate_RN, up_RN = _products(token_R, own_R, x_ref, (gate_ref, up_ref), expert, tile, scales)
        if biased:
            gate_RN = gate_RN + _tile_of(biases[0], expert, tile)
            up_RN = up_RN + _tile_of(biases[1], expert, tile)
        # In float32, because Triton has no bfloat16 arithmetic.
        hidden_RN = gated_expert(gate_RN, up_RN, clamp)
        _store(out_ref, tile, place_R, own_R, hidden_RN.astype(out_ref.dtype))


def _down(
    expert_ref: Ref,
    start_ref: Ref,
    end_ref: Ref,
    hidden_ref: Ref,
    down_ref: Ref,
    *scales_and_out: Ref,
    rows: int,
) -> None:
    *scales, out_ref = scales_and_out
    # Read outside of the branches, because interpreted branches cannot read refs.
    block, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(end_ref[block] > 0)
    def _() -> None:
        place_R, own_R = _block(start_ref[block], end_ref[block], rows)
        (out_RN,) = _products(
            place_R, own_R, hidden_ref, (down_ref,), expert_ref[block], tile, scales
        )
        _store(out_ref, tile, place_R, own_R, out_RN.astype(out_ref.dtype))


def _block(start: jax.Array, end: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    place_R = start + jnp.arange(rows, dtype=jnp.int32)
    return place_R, place_R < end


def _products(
    row_R: jax.Array,
    own_R: jax.Array,
    x_ref: Ref,
    matrices: tuple[Ref, ...],
    expert: jax.Array,
    tile: jax.Array,
    scales: Sequence[Ref],
) -> tuple[jax.Array, ...]:
    rows, (_, kept, columns) = row_R.shape[0], matrices[0].shape
    paired = 2 if 2 * kept == x_ref.shape[1] else 1  # inputs in a byte
    column_N = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def rows_of_x(input_K: jax.Array, inside_K: jax.Array) -> jax.Array:
        shape = (rows, TILE)
        return triton.load(
            x_ref.at[_spread(row_R[:, None], shape), _spread(input_K[None, :], shape)],
            mask=_spread(own_R[:, None] & inside_K[None, :], shape),
            other=0.0,
        )

    def body(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        depth_K = step * TILE + jnp.arange(TILE, dtype=jnp.int32)
        inside_K, shape = depth_K < kept, (TILE, TILE)
        x_parts = [rows_of_x(depth_K * paired + half, inside_K) for half in range(paired)]
        at = (
            jnp.full(shape, expert, jnp.int32),
            _spread(depth_K[:, None], shape),
            _spread(column_N[None, :], shape),
        )
        inside = _spread(inside_K[:, None] & (column_N < columns)[None, :], shape)
        added = []
        for total, matrix in zip(sums, matrices, strict=True):
            nothing = 0.0 if jnp.issubdtype(matrix.dtype, jnp.floating) else 0
            loaded = triton.load(matrix.at[at], mask=inside, other=nothing)
            parts = halves(loaded) if paired == 2 else (loaded,)
            for x_RK, part in zip(x_parts, parts, strict=True):
                wide = part.astype(x_ref.dtype)
                total = total + triton.dot(x_RK, wide, precision=precision)
            added.append(total)
        return tuple(added)

    zeros = tuple(jnp.zeros((rows, TILE), jnp.float32) for _ in matrices)
    sums = lax.fori_loop(0, pl.cdiv(kept, TILE), body, zeros)
    if not scales:
        return sums
    return tuple(
        total * _tile_of(scale, expert, tile) for total, scale in zip(sums, scales, strict=True)
    )


def _tile_of(of_EN: Ref, expert: jax.Array, tile: jax.Array) -> jax.Array:
    column_N = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    at = jnp.full((TILE,), expert, jnp.int32), column_N
    loaded_N = triton.load(of_EN.at[at], mask=column_N < of_EN.shape[1], other=0.0)
    return loaded_N.astype(jnp.float32)[None, :]


def _store(
    out_ref: Ref, tile: jax.Array, place_R: jax.Array, own_R: jax.Array, out_RN: jax.Array
) -> None:
    column_N = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    inside = own_R[:, None] & (column_N < out_ref.shape[1])[None, :]
    at = _spread(place_R[:, None], out_RN.shape), _spread(column_N[None, :], out_RN.shape)
    triton.store(out_ref.at[at], out_RN, mask=_spread(inside, out_RN.shape))


def _spread(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(array, shape)
