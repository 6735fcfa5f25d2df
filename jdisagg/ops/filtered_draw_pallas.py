"""Draws tokens under top-k and top-p as a GPU kernel (Pallas, Triton backend).

A kernel program for each row runs the search of `ops/sampling.py` in loops of its own, so that the
host drives none: it finds the k-th largest logit, then repeats the race over fewer tokens until the
winner lies in the nucleus. It compares scores, counts and sums of integers, so that its tokens are
those of `sampling` whatever the order of sums. Weights are computed anew in each pass, because an
array of them would take as much memory as the logits.

`interpret=True` runs the same kernel on a CPU, for tests."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jdisagg.ops.optional_kernels import FILTERED_DRAW, usable
from jdisagg.ops.paged_attention_pallas import Ref, triton
from jdisagg.ops.selection import from_order_key, mean_key, order_key

LANES = 8192  # tokens that a kernel program reads at once
WARPS = 16
# Weights are summed as integers of which 2^29 to 2^30 are the whole row: a sum does not depend on
# its order, and rounding adds at most 2^17 for a vocabulary of 2^18.
_SHARES = 29

State = TypeVar("State")


class _Sweep(Protocol):
    def __call__(self, step: Callable[[jax.Array, State], State], start: State, /) -> State: ...


def applies() -> bool:
    return triton is not None and usable(FILTERED_DRAW)


def unit_of(total: jax.Array) -> jax.Array:
    """Returns the power of two by which weights of this sum are multiplied to give shares."""
    exponent = lax.bitcast_convert_type(total, jnp.int32) >> 23
    return lax.bitcast_convert_type((127 + 127 + _SHARES - exponent) << 23, jnp.float32)


def shares(weight: jax.Array, unit: jax.Array) -> jax.Array:
    return (weight * unit + 0.5).astype(jnp.int32)


def needed_shares(top_p: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns how many shares of `whole` the tokens with larger logits must have so that a token
    lies outside the nucleus. At least one, so that the most likely token is always inside."""
    return jnp.maximum(jnp.ceil(top_p * whole.astype(jnp.float32)), 1).astype(jnp.int32)


def filtered_draw(
    logits_BV: jax.Array,
    score_BV: jax.Array,
    largest_B: jax.Array,
    scale_B: jax.Array,
    top_k_B: jax.Array,
    top_p_B: jax.Array,
    *,
    lanes: int = LANES,
    interpret: bool = False,
) -> jax.Array:
    """Returns the token with the largest score of each row's top-k and top-p, int32 [B], ties to
    the smallest id.

    Args:
        largest_B: Each row's largest logit.
        scale_B: 1 / temperature.
        top_k_B: 0 for no top-k.
    """
    assert triton is not None, "ask `applies` first"
    batch, width = logits_BV.shape
    row = pl.BlockSpec((None, width), lambda b: (b, 0))
    number = pl.BlockSpec((None,), lambda b: (b,))
    return pl.pallas_call(
        partial(_kernel, lanes=min(lanes, pl.next_power_of_2(width))),
        grid=(batch,),
        in_specs=[row, row, number, number, number, number],
        out_specs=number,
        out_shape=jax.ShapeDtypeStruct((batch,), jnp.int32),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="jdisagg_filtered_draw",
    )(logits_BV, score_BV, largest_B, scale_B, top_k_B, top_p_B)


def _kernel(
    logits_ref: Ref,
    score_ref: Ref,
    largest_ref: Ref,
    scale_ref: Ref,
    top_k_ref: Ref,
    top_p_ref: Ref,
    token_ref: Ref,
    *,
    lanes: int,
) -> None:
    (width,) = logits_ref.shape
    largest, scale, top_k, top_p = (
        ref[...] for ref in (largest_ref, scale_ref, top_k_ref, top_p_ref)
    )
    first_N = jnp.arange(lanes, dtype=jnp.int32)

    def sweep(step: Callable[[jax.Array, State], State], start: State) -> State:
        def body(block: jax.Array, state: State) -> State:
            return step(block * lanes + first_N, state)

        return lax.fori_loop(0, pl.cdiv(width, lanes), body, start)

    def read(ref: Ref, id_N: jax.Array) -> jax.Array:
        return triton.load(ref.at[id_N], mask=id_N < width, other=-np.inf)

    some = (top_k > 0) & (top_k < width)
    least = lax.cond(
        some,
        lambda _: _kth_largest(lambda id_N: read(logits_ref, id_N), sweep, top_k, lanes),
        lambda none: none,
        # Triton's lowering takes no constant from a branch, and no constant without a type.
        jnp.where(some, jnp.float32(np.inf), jnp.float32(-np.inf)),
    )

    def winner(bound: jax.Array) -> jax.Array:
        """Returns the id of the largest score among logits above `bound`."""

        def step(id_N: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logit_N, score_N = read(logits_ref, id_N), read(score_ref, id_N)
            better_N = (logit_N >= least) & (logit_N > bound) & (score_N > best[0])
            return jnp.where(better_N, score_N, best[0]), jnp.where(better_N, id_N, best[1])

        nothing = jnp.full((lanes,), -np.inf, jnp.float32), jnp.full((lanes,), width - 1, jnp.int32)
        score_N, id_N = sweep(step, nothing)
        return jnp.min(jnp.where(score_N == jnp.max(score_N), id_N, width - 1))

    def in_nucleus(token: jax.Array) -> jax.Array:
        def kept(id_N: jax.Array) -> tuple[jax.Array, jax.Array]:
            logit_N = read(logits_ref, id_N)
            weight_N = jnp.exp((logit_N - largest) * scale)
            return logit_N, jnp.where(logit_N >= least, weight_N, 0.0)

        total = jnp.sum(sweep(lambda id_N, sum_N: sum_N + kept(id_N)[1], jnp.zeros((lanes,))))
        unit = unit_of(total)

        def above(bound: jax.Array) -> jax.Array:
            """Returns the shares of logits above `bound`."""

            def step(id_N: jax.Array, sum_N: jax.Array) -> jax.Array:
                logit_N, weight_N = kept(id_N)
                return sum_N + jnp.where(logit_N > bound, shares(weight_N, unit), 0)

            return jnp.sum(sweep(step, jnp.zeros((lanes,), jnp.int32)))

        needed = needed_shares(top_p, above(jnp.float32(-np.inf)))

        def outside(token: jax.Array) -> jax.Array:
            return above(triton.load(logits_ref.at[token])) >= needed

        def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            token = winner(triton.load(logits_ref.at[state[0]]))
            return token, outside(token)

        return lax.while_loop(lambda state: state[1], again, (token, outside(token)))[0]

    token = winner(jnp.float32(-np.inf))
    token_ref[...] = lax.cond(top_p < 1, in_nucleus, lambda token: token, token)


def _kth_largest(
    read: Callable[[jax.Array], jax.Array], sweep: _Sweep, count: jax.Array, lanes: int
) -> jax.Array:
    """Returns a threshold, float32: the entries that reach it are the `count` largest and all ties
    with the smallest of these.

    As `selection.separating_value`, with three values a pass. Each lane has an entry that reaches
    the least of the lanes' maxima, where the search begins if that many are enough."""
    largest_N = sweep(
        lambda id_N, best_N: jnp.maximum(best_N, read(id_N)),
        jnp.full((lanes,), -np.inf, jnp.float32),
    )
    low = order_key(jnp.where(count <= lanes, jnp.min(largest_N), jnp.float32(-np.inf)))
    high = order_key(jnp.max(largest_N))

    def narrow(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = mean_key(low, high)
        asked = mean_key(low, middle), middle, mean_key(middle, high)

        def step(id_N: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            value_N = read(id_N)
            return tuple(
                sum_N + (value_N >= from_order_key(key)).astype(jnp.int32)
                for sum_N, key in zip(sums, asked, strict=True)
            )

        sums = sweep(step, (jnp.zeros((lanes,), jnp.int32),) * 3)
        counts = [jnp.sum(sum_N) for sum_N in sums]
        reached = counts[0]
        for key, number in zip(asked, counts, strict=True):
            enough = number >= count
            low, reached = jnp.where(enough, key, low), jnp.where(enough, number, reached)
            high = jnp.where(enough, high, jnp.minimum(high, key - 1))
        return low, jnp.where(reached == count, low, high)

    low, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], narrow, (low, high))
    return from_order_key(low)
