"""A linear map and a norm, used in the blocks of all families: Flax NNX modules on local shards
(see `models/blocks.py`)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jdisagg.model_api import AdapterRows, MakeStack, Shards
from jdisagg.ops.adapters import Factors, add_adapters, add_one
from jdisagg.ops.linear import project
from jdisagg.ops.norm import layer_norm, rms_norm
from jdisagg.ops.parameters import Axes, LogicalAxis, Make, parameter
from jdisagg.ops.quantized_weights import KernelForm

AxisSize = tuple[LogicalAxis, int]


class AdapterStack(nnx.Module):
    """The LoRA adapters of one matrix, or of one matrix of each expert: the factors `a` [in, G, R]
    and `b` [G, R, out] of G slots with rank R (`ops/adapters.py`)."""

    def __init__(
        self,
        make: MakeStack,
        slots: int,
        rank: int,
        into: AxisSize,
        out: AxisSize,
        experts: AxisSize | None = None,
    ) -> None:
        first = () if experts is None else (experts,)

        def stack(*dims: AxisSize) -> nnx.Param[jax.Array]:
            axes = tuple([axis for axis, _ in dims])
            return nnx.Param(make(tuple([size for _, size in dims]), axes), logical_axes=axes)  # type: ignore[return-value]

        self.a = stack(*first, into, ("head", slots), ("head", rank))
        self.b = stack(*first, ("head", slots), ("head", rank), out)

    @property
    def factors(self) -> Factors:
        return Factors(self.a[...], self.b[...])

    def add(self, y_TD: jax.Array, x_TD: jax.Array, rows: AdapterRows, platform: str) -> jax.Array:
        if rows.alike:
            return add_one(y_TD, x_TD, self.factors, rows.slot_T[0], platform)
        product = partial(project, platform=platform)
        return add_adapters(y_TD, x_TD, self.factors, rows.slot_T, product)


class Linear(nnx.Module):
    """A kernel [in, out], or [out, in] if `transposed`, with optional quantization scales [out] and
    bias [out]. `adapter` is set in layers with adapter slots."""

    adapter: AdapterStack | None = None

    def __init__(
        self,
        make: Make,
        shape: tuple[int, int],
        axes: Axes,
        *,
        bias: bool = False,
        form: KernelForm,
    ) -> None:
        order = slice(None, None, -1) if form.transposed else slice(None)
        kept = (shape[0] // 2, shape[1]) if form.packed() else shape
        self.kernel = parameter(make(kept[order], form.role(), shape[0]), axes[order])
        self.scale = (
            parameter(make(shape[1:], "float32", shape[0]), axes[1:]) if form.weights else None
        )
        self.bias = parameter(make(shape[1:], "bias", shape[0]), axes[1:]) if bias else None
        self.transposed = form.transposed
        self.ends: tuple[AxisSize, AxisSize] = (axes[0], shape[0]), (axes[1], shape[1])

    def __call__(self, x_TD: jax.Array, shards: Shards) -> jax.Array:
        return self._product(x_TD, shards, None if self.bias is None else self.bias[...])

    def summed(self, x_TD: jax.Array, shards: Shards) -> jax.Array:
        y_TD = self._product(x_TD, shards, None)
        if shards.tp:
            y_TD = lax.psum(y_TD, shards.tp)
        return y_TD if self.bias is None else y_TD + self.bias[...][None, :]

    def _product(self, x_TD: jax.Array, shards: Shards, bias: jax.Array | None) -> jax.Array:
        y_TD = project(
            x_TD,
            self.kernel[...],
            bias,
            transposed=self.transposed,
            platform=shards.platform,
            scale=None if self.scale is None else self.scale[...],
        )
        if self.adapter is None or shards.adapters is None:
            return y_TD
        return self.adapter.add(y_TD, x_TD, shards.adapters, shards.platform)


class Norm(nnx.Module):
    """Root mean square norm with a weight. With `above_one` the norm multiplies by one plus the
    weight. With `centred` it first subtracts the mean (LayerNorm without a bias). A `size` of
    several dimensions means that only the last one is normalised."""

    def __init__(
        self,
        make: Make,
        size: int | tuple[int, ...],
        axes: Axes,
        epsilon: float,
        *,
        above_one: bool = False,
        centred: bool = False,
    ) -> None:
        role = "bias" if above_one else "norm"  # initialised to zero or one
        shape = size if isinstance(size, tuple) else (size,)
        self.weight = parameter(make(shape, role, shape[-1]), axes)
        self.epsilon, self.above_one, self.centred = epsilon, above_one, centred

    def __call__(self, x: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        if self.centred:
            assert not over, "no family shards these"
            return layer_norm(x, self.weight[...], None, self.epsilon)
        return rms_norm(x, self.weight[...], self.epsilon, over, above_one=self.above_one)


def own_heads(out_RNH: jax.Array, heads: int, shards: Shards) -> jax.Array:
    if out_RNH.shape[1] == heads:
        return out_RNH
    return lax.dynamic_slice_in_dim(out_RNH, lax.axis_index(shards.tp[-1]) * heads, heads, axis=1)


def rows_of(of_T: jax.Array, rows_R: jax.Array | None) -> jax.Array:
    """Selects rows by their indices `rows_R`, or returns all rows if `rows_R` is None. Padding
    indices (-1) select row 0."""
    return of_T if rows_R is None else jnp.take(of_T, rows_R, axis=0, mode="clip")
