"""Vision encoders: Flax NNX modules that map the patches of one image to activations of the text
model, one for each image token.

Patches are ordered in blocks of `merge` x `merge`, so that the patches of a token are adjacent. All
parameters are replicated."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Shards
from jdisagg.ops.image_attention import image_attention
from jdisagg.ops.norm import layer_norm
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.rope import rotate
from models.linear import Linear, Norm
from models.vision_config import VisionConfig

_EPSILON = {"qwen": 1e-6, "pixtral": 1e-5}


class _LayerNorm(nnx.Module):
    def __init__(self, make: Make, size: int, epsilon: float) -> None:
        self.weight = parameter(make((size,), "norm", size), ("embed",))
        self.bias = parameter(make((size,), "bias", size), ("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.weight[...], self.bias[...], self.epsilon)


def _norm(make: Make, config: VisionConfig, epsilon: float) -> _LayerNorm | Norm:
    if config.kind == "qwen":
        return _LayerNorm(make, config.width, epsilon)
    return Norm(make, config.width, ("embed",), epsilon)


def _linear(make: Make, into: int, out: int, form: KernelForm, bias: bool) -> Linear:
    return Linear(make, (into, out), ("embed", "embed"), bias=bias, form=form)


def _activated(x: jax.Array, kind: str) -> jax.Array:
    if kind == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=kind == "gelu_tanh")


def normalised(pixels_PC: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """Normalises uint8 pixels for an encoder: float32 [P, C]."""
    wide = pixels_PC.astype(jnp.float32).reshape(pixels_PC.shape[0], -1, 3) / 255
    means, deviations = (jnp.asarray(part, jnp.float32)[None, None] for part in (mean, std))
    return ((wide - means) / deviations).reshape(pixels_PC.shape)


class PatchEmbedding(nnx.Module):
    """Normalises pixels and projects each patch. Adds learned positions, interpolated from a square
    table, or applies a norm."""

    def __init__(self, make: Make, config: VisionConfig, form: KernelForm) -> None:
        qwen, width = config.kind == "qwen", config.width
        self.project = _linear(make, 3 * config.patch**2, width, form, qwen)
        self.positions = (
            parameter(make((config.side**2, width), "embedding", width), ("embed", "embed"))
            if config.side
            else None
        )
        self.norm = None if qwen else _norm(make, config, _EPSILON[config.kind])
        self.config = config

    def __call__(
        self, pixels_PC: jax.Array, place_P2: jax.Array, size_2: jax.Array, shards: Shards
    ) -> jax.Array:
        """Returns activations [P, D]."""
        config, dtype = self.config, self.project.kernel[...].dtype
        x_PC = normalised(pixels_PC, config.mean, config.std)
        x_PD = self.project(x_PC.astype(dtype), shards)
        if self.positions is not None:
            x_PD = x_PD + self._interpolated(place_P2, size_2).astype(dtype)
        return x_PD if self.norm is None else self.norm(x_PD)

    def _interpolated(self, place_P2: jax.Array, size_2: jax.Array) -> jax.Array:
        assert self.positions is not None
        side = self.config.side
        at_P2 = place_P2.astype(jnp.float32) * (side - 1)
        at_P2 = at_P2 / jnp.maximum(size_2 - 1, 1).astype(jnp.float32)[None]
        low_P2 = jnp.floor(at_P2)
        part_P2 = at_P2 - low_P2
        low_P2 = low_P2.astype(jnp.int32)
        total = jnp.zeros((place_P2.shape[0], self.config.width), jnp.float32)
        for down in (0, 1):
            for right in (0, 1):
                tap_12 = jnp.asarray((down, right), jnp.int32)[None]
                tap_P2 = jnp.clip(low_P2 + tap_12, 0, side - 1)
                each_P2 = jnp.where(tap_12 > 0, part_P2, 1 - part_P2)
                rows_PD = jnp.take(self.positions[...], tap_P2[:, 0] * side + tap_P2[:, 1], axis=0)
                total += rows_PD.astype(jnp.float32) * each_P2.prod(axis=1)[:, None]
        return total


class VisionBlock(nnx.Module):
    """Attention of all patches of an image to each other, with rotary positions by row and column,
    and a feed-forward block."""

    def __init__(self, make: Make, config: VisionConfig, form: KernelForm) -> None:
        qwen, width, epsilon = config.kind == "qwen", config.width, _EPSILON[config.kind]
        self.attention_norm = _norm(make, config, epsilon)
        self.q = _linear(make, width, width, form, qwen)
        self.k = _linear(make, width, width, form, qwen)
        self.v = _linear(make, width, width, form, qwen)
        self.o = _linear(make, width, width, form, qwen)
        self.mlp_norm = _norm(make, config, epsilon)
        self.gate = None if qwen else _linear(make, width, config.ffn, form, False)
        self.up = _linear(make, width, config.ffn, form, qwen)
        self.down = _linear(make, config.ffn, width, form, qwen)
        self.config = config

    def __call__(
        self, x_PD: jax.Array, place_P2: jax.Array, count: jax.Array, shards: Shards
    ) -> jax.Array:
        """Returns activations [P, D]. Patches from index `count` on are padding."""
        config = self.config
        into_PD = self.attention_norm(x_PD)
        heads = (x_PD.shape[0], config.heads, config.head_dim)
        q_PNH, k_PNH, v_PNH = (
            part(into_PD, shards).reshape(heads) for part in (self.q, self.k, self.v)
        )
        angles = self._angles(place_P2)
        q_PNH, k_PNH = (
            rotate(x.astype(jnp.float32), angles).astype(x.dtype) for x in (q_PNH, k_PNH)
        )
        o_PNH = image_attention(q_PNH, k_PNH, v_PNH, count, config.head_dim**-0.5)
        x_PD = x_PD + self.o(o_PNH.reshape(x_PD.shape), shards)
        into_PD = self.mlp_norm(x_PD)
        up_PF, activation = self.up(into_PD, shards), config.activation
        if self.gate is None:
            inner_PF = _activated(up_PF, activation)
        else:
            inner_PF = _activated(self.gate(into_PD, shards), activation) * up_PF
        return x_PD + self.down(inner_PF, shards)

    def _angles(self, place_P2: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, quarter = self.config, self.config.head_dim // 4
        exponent = jnp.arange(quarter, dtype=jnp.float32) * 4 / config.head_dim
        if config.kind == "qwen":
            rows = columns = exponent
        else:  # rows have every second frequency, columns the others
            rows, columns = exponent, exponent + 2 / config.head_dim
        place = place_P2.astype(jnp.float32)
        angles = jnp.concatenate(
            [
                place[:, at, None] / (jnp.float32(config.theta) ** part)[None]
                for at, part in ((0, rows), (1, columns))
            ],
            axis=1,
        )
        return jnp.cos(angles), jnp.sin(angles)


class PatchMerger(nnx.Module):
    """Merges the patches of each token and projects them to the width of the text model. The norm
    is applied to each patch, or with `merged_norm` to the merged patches."""

    def __init__(
        self, make: Make, config: VisionConfig, form: KernelForm, *, merged_norm: bool = False
    ) -> None:
        merged = config.width * config.merge**2
        self.norm = (
            _LayerNorm(make, merged, config.out_epsilon)
            if merged_norm
            else _norm(make, config, config.out_epsilon)
        )
        self.merged_norm = merged_norm
        pixtral = config.kind == "pixtral"
        self.merge = _linear(make, merged, config.width, form, False) if pixtral else None
        into, between = (config.width, config.out_width) if pixtral else (merged, merged)
        self.up = _linear(make, into, between, form, config.biased)
        self.out = _linear(make, between, config.out_width, form, config.biased)
        self.merged = merged

    def __call__(self, x_PD: jax.Array, shards: Shards) -> jax.Array:
        """Returns the activations of each token, [P / merge^2, D] with the text model's D."""
        if self.merged_norm:
            x_TM = self.norm(x_PD.reshape(-1, self.merged))
        else:
            x_TM = self.norm(x_PD).reshape(-1, self.merged)
        if self.merge is not None:
            x_TM = self.merge(x_TM, shards)
        return self.out(_activated(self.up(x_TM, shards), "gelu"), shards)


class VisionEncoder(nnx.Module):
    """A whole vision encoder: patch embedding, blocks and mergers. Implements
    `model_api.Vision`."""

    def __init__(self, make: Make, config: VisionConfig, form: KernelForm) -> None:
        self.patches = PatchEmbedding(make, config, form)
        self.blocks = nnx.List([VisionBlock(make, config, form) for _ in range(config.layers)])
        self.merger = PatchMerger(make, config, form)
        self.deep_mergers = nnx.List(
            [PatchMerger(make, config, form, merged_norm=True) for _ in config.deepstack]
        )
        self.deep_after = config.deepstack
        self.format = config.format
        self.kept_rows = config.kept_rows
