"""Mamba-2's recurrence: state space duality (Dao and Gu, 2024, arXiv 2405.21060), linear attention
whose state decays by one number per head and token.

For each head, with state S [ds, P], input x [P], step d > 0, and b and c [ds] of its group:

S_t = exp(g_t) S_(t-1) + b_t (x) d_t x_t,   y_t = S_t^T c_t

where g = -d a, and a > 0 is a parameter of the head. A chunk is processed in runs of `grain`
tokens. With cumulative gates G, the tokens of a run contribute to each other by a masked product,
y_i = sum_j exp(G_i - G_j) (c_i.b_j) d_j x_j for j <= i, and only the state passes between runs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.model_api import Runs
from jdisagg.ops.recurrent_runs import at_once, cut_into_runs, in_turn


class StateSpaceInputs(NamedTuple):
    """Inputs per token: `x_TNP` of each head, `b_TGS` and `c_TGS` of each group, `step_TN`, and
    `g_TN`, the logarithm of the gate, never positive. All inputs are set to zero for padding, which
    therefore leaves the state unchanged."""

    x_TNP: jax.Array
    b_TGS: jax.Array
    c_TGS: jax.Array
    step_TN: jax.Array
    g_TN: jax.Array


class _Run(NamedTuple):
    within_GUCP: jax.Array
    c_GCS: jax.Array
    from_start_GUC: jax.Array
    decay_GU: jax.Array
    add_GUSP: jax.Array

    def on(self, state_GUSP: jax.Array) -> tuple[jax.Array, jax.Array]:
        read_GUCP = _sum("gcs,gusp->gucp", self.c_GCS, state_GUSP)
        out_GUCP = self.within_GUCP + self.from_start_GUC[..., None] * read_GUCP
        return out_GUCP, self.decay_GU[..., None, None] * state_GUSP + self.add_GUSP


def state_space_runs(
    inputs: StateSpaceInputs, state_RNSP: jax.Array, runs: Runs, platform: str = "cpu"
) -> tuple[jax.Array, jax.Array]:
    """Applies the recurrence to a prefill chunk with tokens of several sequences (rows).

    Args:
        state_RNSP: float32 state before each row's first token of this chunk.
        platform: JAX platform. On a GPU all runs are computed without a loop.

    Returns:
        y [T, N, P] in float32 (unspecified for padding), and the states of the rows at `runs.ends`.
        Rows without tokens keep their state.
    """
    (tokens, heads, width), groups = inputs.x_TNP.shape, inputs.b_TGS.shape[1]
    kept_RGUSP = state_RNSP.reshape(-1, groups, heads // groups, *state_RNSP.shape[2:])
    cut = StateSpaceInputs(*(cut_into_runs(part, runs) for part in inputs))
    parts = jax.vmap(_prepare)(cut)
    if runs.short:
        out, new = jax.vmap(_Run.on)(parts, kept_RGUSP)
    elif traits_of(platform).without_loops:
        before_n, new = at_once(
            parts.decay_GU[..., None, None], parts.add_GUSP, kept_RGUSP, runs, jnp.multiply
        )
        out, _ = jax.vmap(_Run.on)(parts, before_n)
    else:
        out, new = in_turn(parts, kept_RGUSP, runs)
    by_head = out.reshape(out.shape[0], heads, runs.grain, width)
    return jnp.swapaxes(by_head, 1, 2).reshape(-1, heads, width)[:tokens], new.reshape(
        -1, *state_RNSP.shape[1:]
    )


def state_space_step(
    inputs: StateSpaceInputs, state_BNSP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies the recurrence to one new token of each sequence. Returns y [B, N, P] and the next
    states."""
    x, b, c, step, g = (part.astype(jnp.float32) for part in inputs)
    (rows, heads, width), groups = x.shape, b.shape[1]
    kept_BGUSP = state_BNSP.reshape(rows, groups, heads // groups, -1, width)
    keep_BGU = jnp.exp(g).reshape(rows, groups, -1)
    written_BGUP = (step[..., None] * x).reshape(rows, groups, -1, width)
    new_BGUSP = (
        keep_BGU[..., None, None] * kept_BGUSP
        + b[:, :, None, :, None] * written_BGUP[:, :, :, None, :]
    )
    out_BGUP = _sum("bgs,bgusp->bgup", c, new_BGUSP)
    return out_BGUP.reshape(x.shape), new_BGUSP.reshape(state_BNSP.shape)


def _prepare(run: StateSpaceInputs) -> _Run:
    x_NCP, b_GCS, c_GCS, step_NC, g_NC = run
    groups, size = b_GCS.shape[0], g_NC.shape[1]
    g_GUC = g_NC.reshape(groups, -1, size)
    written_GUCP = (step_NC[..., None] * x_NCP).reshape(groups, -1, size, x_NCP.shape[2])
    upto_CC = jnp.tril(jnp.ones((size, size), jnp.bool_))
    # Gates are summed from j on. A difference of two sums from the start would lose significant
    # digits after a token at which the state decays almost to zero.
    behind_CC = jnp.tril(jnp.ones((size, size), jnp.bool_), -1)
    gap_GUCC = jnp.cumsum(jnp.where(behind_CC, g_GUC[..., :, None], 0.0), axis=-2)
    total_GUC = jnp.cumsum(g_GUC, axis=-1)
    shared_GCC = _sum("gcs,gds->gcd", c_GCS, b_GCS)
    mix_GUCC = jnp.where(upto_CC, shared_GCC[:, None] * jnp.exp(gap_GUCC), 0.0)
    to_end_GUC = jnp.exp(gap_GUCC[..., -1, :])
    return _Run(
        within_GUCP=_sum("gucd,gudp->gucp", mix_GUCC, written_GUCP),
        c_GCS=c_GCS,
        from_start_GUC=jnp.exp(total_GUC),
        decay_GU=jnp.exp(total_GUC[..., -1]),
        add_GUSP=_sum("gcs,gucp->gusp", b_GCS, to_end_GUC[..., None] * written_GUCP),
    )


def _sum(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """By default a GPU would round the inputs to 11 bits."""
    return jnp.einsum(letters, left, right, precision=lax.Precision.HIGHEST)
