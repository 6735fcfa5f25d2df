"""Lightning attention of MiniMax-Text-01 (arXiv 2501.08313), in place of attention in most layers:
linear attention without a softmax, whose state decays by a constant of each head and layer, then a
norm over all heads and a gate.

Its recurrence is Mamba-2's (`jdisagg/ops/state_space.py`), with keys, queries and values for b, c
and x, one group for each head, and steps of one. Heads and state are sharded over the mesh axis
"kv". The state is float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Inputs, Recur, Runs, Shards, State
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.state_space import StateSpaceInputs, state_space_runs, state_space_step
from models.decoder_config import DecoderConfig, LightningConfig
from models.linear import Linear, Norm, own_heads, rows_of

# Epsilon of the norm over all heads. It does not depend on `rms_norm_eps`.
NORM_EPSILON = 1e-6


class LightningAttention(nnx.Module):
    """Lightning attention. The caller's `recur` function loads and stores the state of each
    sequence."""

    def __init__(
        self, make: Make, config: DecoderConfig, lightning: LightningConfig, form: KernelForm
    ) -> None:
        width, heads = config.width, lightning.heads
        values = heads * lightning.dim
        self.qkv = Linear(make, (width, 3 * values), ("embed", "kv_heads"), form=form)
        self.decay = parameter(make((heads,), "float32", width), ("kv_heads",))
        self.norm = Norm(make, values, ("q_heads",), NORM_EPSILON)
        self.gate = Linear(make, (width, values), ("embed", "q_heads"), form=form)
        self.o = Linear(make, (values, width), ("q_heads", "embed"), form=form)
        self.dim = lightning.dim

    def __call__(
        self, x_TD: jax.Array, recur: Recur, shards: Shards, rows_R: jax.Array | None = None
    ) -> jax.Array:
        qkv_TNH = jax.nn.silu(self.qkv(x_TD, shards)).reshape(x_TD.shape[0], -1, 3 * self.dim)
        q_TNH, k_TNH, v_TNH = jnp.split(qkv_TNH.astype(jnp.float32), 3, axis=2)
        step_TN = jnp.ones(q_TNH.shape[:2], jnp.float32)
        given = StateSpaceInputs(v_TNH, k_TNH, q_TNH, step_TN, -self.decay[...][None, :] * step_TN)

        def advance(inputs: Inputs, state: State, runs: Runs | None) -> tuple[jax.Array, State]:
            given, (kept_RNX,) = StateSpaceInputs(*inputs), state
            kept_RNHH = kept_RNX.reshape(*kept_RNX.shape[:2], self.dim, self.dim)
            if runs is None:
                out_TNH, kept_RNHH = state_space_step(given, kept_RNHH)
            else:
                out_TNH, kept_RNHH = state_space_runs(given, kept_RNHH, runs, shards.platform)
            return out_TNH, (kept_RNHH.reshape(-1, *kept_RNX.shape[1:]),)

        out_RNH, x_RD = rows_of(recur(given, advance), rows_R), rows_of(x_TD, rows_R)
        if not x_RD.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        gate_RC = jax.nn.sigmoid(self.gate(x_RD, shards))
        out_RNH = own_heads(out_RNH, gate_RC.shape[1] // self.dim, shards)
        normal_RC = self.norm(out_RNH.reshape(gate_RC.shape), shards.tp)
        return self.o.summed(gate_RC * normal_RC.astype(x_TD.dtype), shards)
