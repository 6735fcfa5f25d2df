"""Mamba-2 (Dao and Gu, 2024), which replaces attention in most layers of Granite 4's and Nemotron's
hybrids: a short convolution, the recurrence (`jdisagg/ops/state_space.py`), a gate, and a norm over
groups of heads after the gate.

Heads and state are sharded over the mesh axis "kv". The vectors b and c of a group are sharded with
its heads if the groups divide over every possible number of kv shards. Otherwise each shard
computes and stores b and c of all groups (Granite has one group). The recurrent state is float32,
and the convolution's state has the activations' type."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jdisagg.model_api import Inputs, Recur, Runs, Shards, State
from jdisagg.ops.parameters import Axes, Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.short_convolution import (
    convolve_runs,
    convolve_step,
    inputs_by_head,
    inputs_by_token,
)
from jdisagg.ops.state_space import StateSpaceInputs, state_space_runs, state_space_step
from models.decoder_config import DecoderConfig, MambaConfig
from models.linear import Linear, own_heads, rows_of


class Convolution(nnx.Module):
    """A convolution over the last tokens, channel by channel, and SiLU."""

    def __init__(self, make: Make, channels: int, axes: Axes, mamba: MambaConfig) -> None:
        taps = mamba.taps
        self.kernel = parameter(make((channels, taps), "matrix", taps), (*axes, "head"))
        self.bias = (
            parameter(make((channels,), "bias", taps), axes) if mamba.convolution_bias else None
        )

    def __call__(
        self, x_TC: jax.Array, inputs_RSC: jax.Array, runs: Runs | None
    ) -> tuple[jax.Array, jax.Array]:
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        if runs is None:
            y_TC, inputs_RSC = convolve_step(x_TC, kernel, inputs_RSC, bias)
        else:
            y_TC, inputs_RSC = convolve_runs(x_TC, kernel, inputs_RSC, runs, bias)
        return jax.nn.silu(y_TC), inputs_RSC


class GroupNorm(nnx.Module):
    """Root mean square norm over each group of heads, which may span several devices."""

    def __init__(self, make: Make, config: DecoderConfig, mamba: MambaConfig) -> None:
        size = mamba.heads * mamba.head_dim
        self.weight = parameter(make((size,), "norm", size), ("q_heads",))
        self.epsilon = config.norm_epsilon
        self.groups, self.group_heads = mamba.groups, mamba.heads // mamba.groups

    def __call__(self, x_RNP: jax.Array, dtype: jnp.dtype, shards: Shards) -> jax.Array:
        """Normalises float32 values [R, N, P] of N heads over each group. Returns [R, N x P] in
        `dtype`."""
        rows, heads, width = x_RNP.shape
        squares_RN = jnp.sum(jnp.square(x_RNP), axis=-1)
        first = lax.axis_index(shards.tp) * heads if shards.tp else 0
        group_N = (first + jnp.arange(heads, dtype=jnp.int32)) // self.group_heads
        own_NG = group_N[:, None] == jnp.arange(self.groups, dtype=jnp.int32)[None, :]
        sums_RG = jnp.sum(jnp.where(own_NG[None], squares_RN[:, :, None], 0.0), axis=1)
        if shards.tp and heads % self.group_heads:
            sums_RG = lax.psum(sums_RG, shards.tp)
        mean_RN = jnp.take(sums_RG, group_N, axis=1) / (self.group_heads * width)
        normal_RNP = x_RNP * lax.rsqrt(mean_RN + self.epsilon)[:, :, None]
        return normal_RNP.astype(dtype).reshape(rows, -1) * self.weight[...][None, :]


class Mamba2(nnx.Module):
    """Mamba-2 module. The caller's `recur` function loads and stores the state of each sequence."""

    def __init__(
        self, make: Make, config: DecoderConfig, mamba: MambaConfig, form: KernelForm
    ) -> None:
        width, heads, values = config.width, mamba.heads, mamba.heads * mamba.head_dim
        shared: Axes = ("latent",) if mamba.copies else ("kv_heads",)

        def into(size: int, axes: Axes, form: KernelForm) -> Linear:
            return Linear(make, (width, size), ("embed", *axes), bias=mamba.bias, form=form)

        self.x = into(values, ("kv_heads",), form)
        self.bc = into(mamba.groups * mamba.group_channels, shared, form)
        self.step = into(heads, ("kv_heads",), form.plain())
        self.x_convolution = Convolution(make, values, ("kv_heads",), mamba)
        self.bc_convolution = Convolution(make, mamba.groups * mamba.group_channels, shared, mamba)
        self.step_bias = parameter(make((heads,), "float32", width), ("kv_heads",))
        self.decay_log = parameter(make((heads,), "float32", width), ("kv_heads",))
        self.skip = parameter(make((heads,), "float32", width), ("kv_heads",))
        self.gate = into(values, ("q_heads",), form)
        self.norm = GroupNorm(make, config, mamba)
        self.o = Linear(make, (values, width), ("q_heads", "embed"), bias=mamba.bias, form=form)
        self.mamba = mamba

    def __call__(
        self, x_TD: jax.Array, recur: Recur, shards: Shards, rows_R: jax.Array | None = None
    ) -> jax.Array:
        mamba = self.mamba
        x_TC, bc_TC = self.x(x_TD, shards), self.bc(x_TD, shards)
        least, most = mamba.step_limits
        step_TN = self.step(x_TD, shards).astype(jnp.float32) + self.step_bias[...][None, :]
        step_TN = jnp.clip(jax.nn.softplus(step_TN), least, most)
        g_TN = -jnp.exp(self.decay_log[...])[None, :] * step_TN

        def advance(inputs: Inputs, state: State, runs: Runs | None) -> tuple[jax.Array, State]:
            x_TC, bc_TC, step_TN, g_TN = inputs
            kept_x, kept_bc, kept = state
            y_TC, new_x = self.x_convolution(x_TC, inputs_by_token(kept_x, mamba.taps - 1), runs)
            shared = kept_bc[:, :1] if mamba.copies else kept_bc
            z_TC, shared_inputs = self.bc_convolution(
                bc_TC, inputs_by_token(shared, mamba.taps - 1), runs
            )
            y_TNP = y_TC.reshape(y_TC.shape[0], -1, mamba.head_dim).astype(jnp.float32)
            b_TGS, c_TGS = self._of_own_groups(z_TC, y_TNP.shape[1], shards)
            given = StateSpaceInputs(y_TNP, b_TGS, c_TGS, step_TN, g_TN)
            kept_RNSP = kept.reshape(*kept.shape[:2], mamba.state_dim, mamba.head_dim)
            if runs is None:
                out_TNP, kept_RNSP = state_space_step(given, kept_RNSP)
            else:
                out_TNP, kept_RNSP = state_space_runs(given, kept_RNSP, runs, shards.platform)
            out_TNP = out_TNP + self.skip[...][None, :, None] * y_TNP
            new_bc = inputs_by_head(shared_inputs, shared.shape[1])
            return out_TNP, (
                inputs_by_head(new_x, kept_x.shape[1]),
                jnp.broadcast_to(new_bc, (new_bc.shape[0], *kept_bc.shape[1:])),
                kept_RNSP.reshape(-1, *kept.shape[1:]),
            )

        out_TNP = recur((x_TC, bc_TC, step_TN, g_TN), advance)
        out_RNP, x_RD = rows_of(out_TNP, rows_R), rows_of(x_TD, rows_R)
        if not x_RD.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        gate_RNP = self.gate(x_RD, shards).reshape(x_RD.shape[0], -1, mamba.head_dim)
        out_RNP = own_heads(out_RNP, gate_RNP.shape[1], shards)
        gated_RNP = out_RNP * jax.nn.silu(gate_RNP.astype(jnp.float32))
        return self.o.summed(self.norm(gated_RNP, x_TD.dtype, shards), shards)

    def _of_own_groups(
        self, z_TC: jax.Array, heads: int, shards: Shards
    ) -> tuple[jax.Array, jax.Array]:
        mamba = self.mamba
        z_TGC = z_TC.reshape(z_TC.shape[0], -1, mamba.group_channels)
        if mamba.copies and shards.tp:
            units, size = mamba.own_units(heads)
            first = lax.axis_index(shards.tp[0]) * heads
            group_U = (first + size * jnp.arange(units, dtype=jnp.int32)) // mamba.group_heads
            z_TGC = jnp.take(z_TGC, group_U, axis=1)
        b_TGS, c_TGS = jnp.split(z_TGC, 2, axis=2)
        return b_TGS, c_TGS
