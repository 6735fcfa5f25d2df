"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464): linear attention whose state decays
by a gate. The gate is one number for each head, or one for each channel of its keys (Kimi Delta
Attention, arXiv 2510.26692).

For each head, with state S [dk, dv], key k, value v, query q, gate exp(g) and strength b:

u_t = b_t (v_t - (exp(g_t) S_(t-1))^T k_t),  S_t = exp(g_t) S_(t-1) + k_t (x) u_t,  o_t = S_t^T q_t

A prefill chunk is processed in runs of `grain` tokens. Within a run, with cumulative gates G, the
vectors u solve a triangular system, (I + A) U = B (V - exp(G) K S), A_ij = b_i sum_c exp(G_ic -
G_jc) k_ic k_jc for j < i. All arithmetic is float32. The vectors q and k must have norm one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.model_api import Runs
from jdisagg.ops.recurrent_runs import at_once, cut_into_runs, in_turn

# Size of the blocks of tokens within a run that are multiplied channel by channel if each channel
# has a gate.
_BLOCK = 16


class DeltaInputs(NamedTuple):
    """Inputs per token and head. `g_TNG` is the logarithm of the gate and never positive. G is 1
    for one gate per head, or dk for one per channel. `b_TN` is the strength of writing. `g_TNG` and
    `b_TN` are zero for padding, which therefore leaves the state unchanged.
    """

    q_TNH: jax.Array
    k_TNH: jax.Array
    v_TNH: jax.Array
    g_TNG: jax.Array
    b_TN: jax.Array


class _Run(NamedTuple):
    values_NCV: jax.Array
    keys_NCK: jax.Array
    queries_NCK: jax.Array
    mix_NCC: jax.Array
    writes_NCK: jax.Array
    decay_NG: jax.Array

    def on(self, state_NKV: jax.Array) -> tuple[jax.Array, jax.Array]:
        u_NCV = self.values_NCV - _product(self.keys_NCK, state_NKV)
        out_NCV = _product(self.queries_NCK, state_NKV) + _product(self.mix_NCC, u_NCV)
        kept_NKV = self.decay_NG[..., None] * state_NKV
        return out_NCV, kept_NKV + _product(jnp.swapaxes(self.writes_NCK, 1, 2), u_NCV)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiplies matrices in full float32. By default a GPU would round the inputs to 11 bits."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def unit_length(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + epsilon)


def delta_runs(
    inputs: DeltaInputs, state_RNKV: jax.Array, runs: Runs, platform: str = "cpu"
) -> tuple[jax.Array, jax.Array]:
    """Applies the gated delta rule to a prefill chunk with tokens of several sequences (rows).

    Args:
        state_RNKV: float32 state before each row's first token of this chunk.
        platform: JAX platform. On a GPU all runs are computed without a loop.

    Returns:
        o [T, N, dv] in float32 (unspecified for padding), and the states of the rows at
        `runs.ends`. Rows without tokens keep their state.
    """
    tokens, heads, width = inputs.v_TNH.shape
    parts = jax.vmap(_prepare)(DeltaInputs(*(cut_into_runs(part, runs) for part in inputs)))
    if runs.short:
        out, new_RNKV = jax.vmap(_Run.on)(parts, state_RNKV)
    elif traits_of(platform).without_loops:
        out, new_RNKV = _at_once(parts, state_RNKV, runs)
    else:
        out, new_RNKV = in_turn(parts, state_RNKV, runs)
    return jnp.swapaxes(out, 1, 2).reshape(-1, heads, width)[:tokens], new_RNKV


def _at_once(parts: _Run, state_RNKV: jax.Array, runs: Runs) -> tuple[jax.Array, jax.Array]:
    written_nNKC = jnp.swapaxes(parts.writes_NCK, 2, 3)
    keep_nNKK = parts.decay_NG[..., None] * jnp.eye(state_RNKV.shape[2])[None, None] - _product(
        written_nNKC, parts.keys_NCK
    )
    add_nNKV = _product(written_nNKC, parts.values_NCV)
    before_nNKV, new_RNKV = at_once(keep_nNKK, add_nNKV, state_RNKV, runs, _product)
    out, _ = jax.vmap(_Run.on)(parts, before_nNKV)
    return out, new_RNKV


def delta_step(inputs: DeltaInputs, state_BNKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies the gated delta rule to one new token of each sequence. Returns the outputs [B, N,
    dv] and the next states."""
    q, k, v, g, b = (part.astype(jnp.float32) for part in inputs)
    kept = jnp.exp(g)[..., None] * state_BNKV
    u_BNV = b[..., None] * (v - _read(kept, k))
    new = kept + k[..., None] * u_BNV[..., None, :]
    return _read(new, q), new


def _read(state_BNKV: jax.Array, key_BNK: jax.Array) -> jax.Array:
    return jnp.einsum("bnkv,bnk->bnv", state_BNKV, key_BNK, precision=lax.Precision.HIGHEST)


def _prepare(run: DeltaInputs) -> _Run:
    q, k, v, g, b = run
    size = g.shape[1]
    total_NCG = jnp.cumsum(g, axis=1)
    before_CC = jnp.tril(jnp.ones((size, size), jnp.bool_), -1)
    upto_CC = jnp.tril(jnp.ones((size, size), jnp.bool_))
    pairs = _pairs_of_heads if g.shape[2] == 1 else _pairs_of_channels
    keys_NCC, queries_NCC = pairs(q, k, total_NCG, upto_CC)
    solve_NCC = _inverse(jnp.where(before_CC, keys_NCC * b[:, :, None], 0.0))
    from_start, to_end = jnp.exp(total_NCG), jnp.exp(total_NCG[:, -1:] - total_NCG)
    return _Run(
        values_NCV=_product(solve_NCC, b[..., None] * v),
        keys_NCK=_product(solve_NCC, b[..., None] * from_start * k),
        queries_NCK=from_start * q,
        mix_NCC=jnp.where(upto_CC, queries_NCC, 0.0),
        writes_NCK=to_end * k,
        decay_NG=from_start[:, -1],
    )


def _pairs_of_heads(
    q_NCK: jax.Array, k_NCK: jax.Array, total_NC1: jax.Array, upto_CC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    total_NC = total_NC1[..., 0]
    # Masked before the exponential: above the diagonal the exponent would be positive.
    gap_NCC = jnp.where(upto_CC, total_NC[:, :, None] - total_NC[:, None, :], 0.0)
    decay_NCC, k_NKC = jnp.exp(gap_NCC), jnp.swapaxes(k_NCK, 1, 2)
    return _product(k_NCK, k_NKC) * decay_NCC, _product(q_NCK, k_NKC) * decay_NCC


def _pairs_of_channels(
    q_NCK: jax.Array, k_NCK: jax.Array, total_NCK: jax.Array, upto_CC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """No factor exceeds one: tokens of different blocks meet at the gate G before the later block,
    as exp(G_i - G) exp(G - G_j), and tokens of one block are multiplied channel by channel, with
    exp(G_i - G_j) of each pair."""
    heads, size, width = k_NCK.shape
    each = min(_BLOCK, size)
    count = size // each
    total_NBLK = total_NCK.reshape(heads, count, each, width)
    first_N1K = jnp.zeros_like(total_NBLK[:, :1, -1])
    border_NB1K = jnp.concatenate((first_N1K, total_NBLK[:, :-1, -1]), axis=1)[:, :, None]
    later_NBLK = jnp.exp(total_NBLK - border_NB1K)
    number = jnp.arange(size, dtype=jnp.int32) // each
    earlier_BC = number[None, :] < jnp.arange(count, dtype=jnp.int32)[:, None]
    gap_NBCK = border_NB1K - total_NCK[:, None]
    far_NBCK = jnp.exp(jnp.where(earlier_BC[None, :, :, None], gap_NBCK, -jnp.inf))
    far_NBKC = jnp.swapaxes(far_NBCK * k_NCK[:, None], 2, 3)
    upto_LL = upto_CC[:each, :each]
    near_NBLLK = total_NBLK[:, :, :, None] - total_NBLK[:, :, None]
    near_NBLLK = jnp.exp(jnp.where(upto_LL[None, None, :, :, None], near_NBLLK, -jnp.inf))
    near_NBLLK = near_NBLLK * k_NCK.reshape(heads, count, 1, each, width)
    own_BC = number[None, :] == jnp.arange(count, dtype=jnp.int32)[:, None]

    def with_keys(x_NCK: jax.Array) -> jax.Array:
        x_NBLK = x_NCK.reshape(heads, count, each, width)
        far_NBLC = _product(x_NBLK * later_NBLK, far_NBKC)
        near_NBLL = jnp.sum(x_NBLK[:, :, :, None] * near_NBLLK, axis=-1)
        near_NBLC = jnp.tile(near_NBLL, (1, 1, 1, count))
        return jnp.where(own_BC[None, :, None], near_NBLC, far_NBLC).reshape(heads, size, size)

    return with_keys(k_NCK), with_keys(q_NCK)


def _inverse(below_NCC: jax.Array) -> jax.Array:
    size = below_NCC.shape[-1]
    index = jnp.arange(size)
    found = jnp.broadcast_to(jnp.eye(size, dtype=below_NCC.dtype), below_NCC.shape)
    block = 1
    while block < size:
        number = index // block
        corner_CC = (number[:, None] == number[None, :] + 1) & (number[None, :] % 2 == 0)
        found = found - _product(_product(found, jnp.where(corner_CC, below_NCC, 0.0)), found)
        block *= 2
    return found
