"""Gated short convolution of LFM2, which replaces attention in most layers. The product of two
projections passes through a causal convolution over the last tokens, channel by channel. The result
is multiplied by a third projection.

Channels and state are sharded over the mesh axis "kv", in as many parts as there are kv heads. The
last product and the output projection are also split over the mesh axis "rep"."""

import jax
from flax import nnx

from jdisagg.model_api import Inputs, Recur, Runs, Shards, State
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.short_convolution import (
    convolve_runs,
    convolve_step,
    inputs_by_head,
    inputs_by_token,
)
from models.decoder_config import ConvolutionConfig, DecoderConfig
from models.linear import Linear, own_heads, rows_of


class ShortConvolution(nnx.Module):
    """Gated short convolution. The caller's `recur` function loads and stores the last inputs of
    each sequence."""

    def __init__(
        self, make: Make, config: DecoderConfig, convolution: ConvolutionConfig, form: KernelForm
    ) -> None:
        width, bias, taps = config.width, convolution.bias, convolution.taps

        def square(*axes: str) -> Linear:
            return Linear(make, (width, width), axes, bias=bias, form=form)  # type: ignore[arg-type]

        self.write, self.x = square("embed", "kv_heads"), square("embed", "kv_heads")
        self.gate, self.o = square("embed", "q_heads"), square("q_heads", "embed")
        self.kernel = parameter(make((width, taps), "matrix", taps), ("kv_heads", "head"))
        self.kernel_bias = parameter(make((width,), "bias", taps), ("kv_heads",)) if bias else None
        self.head_dim = width // config.attention.query_heads

    def __call__(
        self, x_TD: jax.Array, recur: Recur, shards: Shards, rows_R: jax.Array | None = None
    ) -> jax.Array:
        given_TC = self.write(x_TD, shards) * self.x(x_TD, shards)
        kernel_CK = self.kernel[...]
        bias_C = None if self.kernel_bias is None else self.kernel_bias[...]

        def advance(inputs: Inputs, state: State, runs: Runs | None) -> tuple[jax.Array, State]:
            (inputs_TC,), (kept,) = inputs, state
            last_RSC = inputs_by_token(kept, kernel_CK.shape[1] - 1)
            if runs is None:
                y_TC, last_RSC = convolve_step(inputs_TC, kernel_CK, last_RSC, bias_C)
            else:
                y_TC, last_RSC = convolve_runs(inputs_TC, kernel_CK, last_RSC, runs, bias_C)
            y_TNP = y_TC.reshape(y_TC.shape[0], -1, self.head_dim)
            return y_TNP, (inputs_by_head(last_RSC, kept.shape[1]),)

        out_RNP, x_RD = rows_of(recur((given_TC,), advance), rows_R), rows_of(x_TD, rows_R)
        if not x_RD.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        gate_RC = self.gate(x_RD, shards)
        out_RNP = own_heads(out_RNP, gate_RC.shape[1] // self.head_dim, shards)
        return self.o.summed(gate_RC * out_RNP.reshape(gate_RC.shape), shards)
