"""Gated DeltaNet (Yang et al., 2024), which replaces attention in most layers of Qwen3-Next and
Qwen3.5: a short convolution, the gated delta rule, and a gated norm on each head.

Each key head is used by a group of value heads. A group's queries, keys and values are adjacent in
one kernel and one convolution. Groups and state are sharded over the mesh axis "kv". Devices along
the mesh axis "rep" repeat the same recurrence, and only the gate and the output projection are
split over these devices. The recurrent state is float32, and the convolution's state has the
activations' type."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.layout.axes import LogicalAxis
from jdisagg.model_api import Inputs, Recur, Runs, Shards, State
from jdisagg.ops.gated_delta import DeltaInputs, delta_runs, delta_step, unit_length
from jdisagg.ops.norm import rms_norm
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.short_convolution import convolve_runs, convolve_step
from models.decoder_config import DecoderConfig, DeltaConfig
from models.linear import Linear, Norm, own_heads, rows_of


class LowRank(nnx.Module):
    """Two linear maps with `rank` values between them, which every device computes."""

    def __init__(
        self, make: Make, shape: tuple[int, int], rank: int, axis: LogicalAxis, form: KernelForm
    ) -> None:
        self.a = Linear(make, (shape[0], rank), ("embed", "latent"), form=form)
        self.b = Linear(make, (rank, shape[1]), ("latent", axis), form=form)

    def __call__(self, x_TD: jax.Array, shards: Shards) -> jax.Array:
        return self.b(self.a(x_TD, shards), shards)


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet module. The caller's `recur` function loads and stores the state of each
    sequence."""

    def __init__(
        self, make: Make, config: DecoderConfig, delta: DeltaConfig, form: KernelForm
    ) -> None:
        width, heads = config.width, delta.value_heads
        channels, values = delta.key_heads * delta.group_channels, heads * delta.value_dim

        def into(size: int, axis: LogicalAxis, form: KernelForm) -> Linear:
            return Linear(make, (width, size), ("embed", axis), form=form)

        def gate(size: int, axis: LogicalAxis, form: KernelForm) -> Linear | LowRank:
            if not delta.rank:
                return into(size, axis, form)
            return LowRank(make, (width, size), delta.rank, axis, form)

        gates = heads * (delta.key_dim if delta.by_channel else 1)
        self.qkv = into(channels, "kv_heads", form)
        self.write = into(heads, "kv_heads", form.plain())
        self.decay = gate(gates, "kv_heads", form.plain())
        self.kernel = parameter(
            make((channels, delta.taps), "matrix", delta.taps), ("kv_heads", "head")
        )
        self.decay_bias = parameter(make((gates,), "float32", width), ("kv_heads",))
        self.decay_log = parameter(make((heads,), "float32", width), ("kv_heads",))
        self.gate = gate(values, "q_heads", form)
        self.norm = Norm(make, delta.value_dim, ("head",), config.norm_epsilon)
        self.o = Linear(make, (values, width), ("q_heads", "embed"), form=form)
        self.delta = delta

    def __call__(
        self, x_TD: jax.Array, recur: Recur, shards: Shards, rows_R: jax.Array | None = None
    ) -> jax.Array:
        """Returns the output [T, D]. With `rows_R`, returns [R, D] for these token indices only.
        The other tokens only update the state."""
        mixed_TC = self.qkv(x_TD, shards)
        write_TN = jax.nn.sigmoid(self.write(x_TD, shards).astype(jnp.float32))
        step_TC = self.decay(x_TD, shards).astype(jnp.float32) + self.decay_bias[...][None, :]
        step_TNG, rate_1N1 = step_TC.reshape(*write_TN.shape, -1), jnp.exp(self.decay_log[...])
        rate_1N1 = rate_1N1[None, :, None]
        if bound := self.delta.bound:
            decay_TNG = bound * jax.nn.sigmoid(rate_1N1 * step_TNG)
        else:
            decay_TNG = -rate_1N1 * jax.nn.softplus(step_TNG)

        def advance(inputs: Inputs, state: State, runs: Runs | None) -> tuple[jax.Array, State]:
            mixed_TC, *gates = inputs
            inputs_RSC, kept = self._inputs(state[0]), self._matrices(state[1])
            if runs is None:
                y_TC, inputs_RSC = convolve_step(mixed_TC, self.kernel[...], inputs_RSC)
                out_TNH, kept = delta_step(self._heads(y_TC, *gates), kept)
            else:
                y_TC, inputs_RSC = convolve_runs(mixed_TC, self.kernel[...], inputs_RSC, runs)
                out_TNH, kept = delta_runs(self._heads(y_TC, *gates), kept, runs, shards.platform)
            return out_TNH, (self._by_group(inputs_RSC), kept.reshape(*kept.shape[:2], -1))

        out_TNH = recur((mixed_TC, decay_TNG, write_TN), advance)
        out_RNH = rows_of(out_TNH.astype(x_TD.dtype), rows_R)
        x_RD = rows_of(x_TD, rows_R)
        if not x_RD.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        gate_RNH = self.gate(x_RD, shards).reshape(x_RD.shape[0], -1, self.delta.value_dim)
        out_RNH = own_heads(out_RNH, gate_RNH.shape[1], shards)
        normal_RNH = rms_norm(out_RNH, self.norm.weight[...], self.norm.epsilon)
        opened = jax.nn.sigmoid if self.delta.by_channel else jax.nn.silu
        gated_RNH = normal_RNH.astype(jnp.float32) * opened(gate_RNH.astype(jnp.float32))
        return self.o.summed(gated_RNH.astype(x_TD.dtype).reshape(x_RD.shape[0], -1), shards)

    def _heads(self, y_TC: jax.Array, decay_TNG: jax.Array, write_TN: jax.Array) -> DeltaInputs:
        delta, tokens = self.delta, y_TC.shape[0]
        group_TGC = jax.nn.silu(y_TC).reshape(tokens, -1, delta.group_channels)
        q_TGH, k_TGH, v_TGC = jnp.split(group_TGC, (delta.key_dim, 2 * delta.key_dim), axis=2)
        q_TNH, k_TNH = (
            jnp.repeat(unit_length(part), delta.values_per_key, axis=1) for part in (q_TGH, k_TGH)
        )
        v_TNH = v_TGC.reshape(tokens, -1, delta.value_dim)
        return DeltaInputs(q_TNH * delta.key_dim**-0.5, k_TNH, v_TNH, decay_TNG, write_TN)

    def _inputs(self, kept_RGX: jax.Array) -> jax.Array:
        rows = kept_RGX.shape[0]
        by_group = kept_RGX.reshape(rows, -1, self.delta.taps - 1, self.delta.group_channels)
        return by_group.swapaxes(1, 2).reshape(rows, self.delta.taps - 1, -1)

    def _by_group(self, inputs_RSC: jax.Array) -> jax.Array:
        rows, kept, _ = inputs_RSC.shape
        by_token = inputs_RSC.reshape(rows, kept, -1, self.delta.group_channels)
        by_group = by_token.swapaxes(1, 2)
        return by_group.reshape(rows, by_group.shape[1], -1)

    def _matrices(self, kept_RNX: jax.Array) -> jax.Array:
        return kept_RNX.reshape(*kept_RNX.shape[:2], self.delta.key_dim, self.delta.value_dim)
