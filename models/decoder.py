"""A decoder-only transformer that implements `jdisagg.model_api`. It consists of a stem (embedding,
final norm and output head) and layers.

`abstract_model` builds it with shapes only, `init_model` with random weights, and `checkpoint.py`
from files. The vocabulary is padded to a multiple of the tensor-parallel size.
`jdisagg/ops/linear.py` decides per platform whether weight matrices are stored transposed."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.layout.axes import padded_vocabulary
from jdisagg.model_api import AdapterContent, AdapterSize, Attend, GivenTokens, MakeStack, Shards
from jdisagg.ops.dense_attention import Following
from jdisagg.ops.dense_recurrence import recur_from_the_beginning
from jdisagg.ops.embedding import embed_tokens, gather_logits
from jdisagg.ops.linear import kernel_is_transposed, project
from jdisagg.ops.parameters import TYPE_ROLES, Make, Role, parameter
from jdisagg.ops.quantized_weights import KernelForm, Weights
from models.blocks import DecoderLayer
from models.decoder_config import DecoderConfig
from models.eagle_head import EagleHead
from models.gemma4_assistant import Gemma4Assistant
from models.linear import Linear, Norm
from models.next_token import NextTokenLayer
from models.vision import VisionEncoder


class DecoderStem(nnx.Module):
    """Embedding [V, D], final norm, and an output head unless the head is tied to the embedding.

    Args:
        embeds: Whether the stem has the parameters of `embed`.
        projects: Whether the stem has the parameters of `normed` and `project`.
    """

    def __init__(
        self,
        make: Make,
        config: DecoderConfig,
        padded: int,
        form: KernelForm,
        *,
        embeds: bool = True,
        projects: bool = True,
    ) -> None:
        self.embedding = (
            parameter(make((padded, config.width), "embedding", config.width), ("vocab", "embed"))
            if embeds or config.tied
            else None
        )
        self.norm = (
            Norm(
                make,
                config.width,
                ("embed",),
                config.norm_epsilon,
                above_one=config.norms_above_one,
                centred=config.norms_centred,
            )
            if projects
            else None
        )
        self.head = (
            Linear(make, (config.width, padded), ("embed", "vocab"), form=form)
            if projects and not config.tied
            else None
        )
        self.vocabulary = config.vocabulary
        self.scale, self.divisor = config.embedding_scale, config.logits_divisor
        self.cap = config.logits_cap

    def embed(self, tokens_T: jax.Array, shards: Shards) -> jax.Array:
        assert self.embedding is not None
        x_TD = embed_tokens(self.embedding[...], tokens_T, shards.tp)
        if self.scale == 1:
            return x_TD
        # The scale is rounded too, as in the training of Gemma: the square root of its width is not
        # exact in bfloat16.
        return x_TD * jnp.asarray(self.scale, x_TD.dtype)

    def logits(self, x_RD: jax.Array, shards: Shards) -> jax.Array:
        return self.project(self.normed(x_RD), shards)

    def normed(self, x_RD: jax.Array) -> jax.Array:
        assert self.norm is not None
        return self.norm(x_RD)

    def project(self, y_RD: jax.Array, shards: Shards, *, apart: bool = False) -> jax.Array:
        kernel, transposed = (
            (self.embedding, True)
            if self.head is None
            else (self.head.kernel, self.head.transposed)
        )
        out = project(
            y_RD,
            kernel[...],  # type: ignore[index]  # one of the two is there
            transposed=transposed,
            platform=shards.platform,
            out_dtype=jnp.dtype("float32"),
        )
        if self.divisor != 1:
            out = out / self.divisor
        if self.cap:
            out = self.cap * jnp.tanh(out / self.cap)
        return gather_logits(out, self.vocabulary, shards.tp, apart=apart)


class Decoder(nnx.Module):
    """The whole model: `stem`, `layers`, and the properties that `jdisagg.model_api` requires. With
    `staged`, embedding and head are in two stems, because they are on different meshes."""

    def __init__(
        self,
        make: Make,
        config: DecoderConfig,
        *,
        dtype: str,
        platform: str,
        tp: int,
        weights: Weights = "",
        staged: bool = False,
    ) -> None:
        form = KernelForm(kernel_is_transposed(platform, dtype), weights, platform)
        padded = padded_vocabulary(config.vocabulary, tp)
        plain = form.plain()
        self.stem = DecoderStem(make, config, padded, plain, projects=not staged)
        self.last_stem = DecoderStem(make, config, padded, plain, embeds=False) if staged else None
        self.layers = nnx.List(
            [DecoderLayer(make, config, layer, form, padded) for layer in config.layers]
        )
        self.next_token = _draft_layer(make, config, form, tp)
        self.vision = VisionEncoder(make, config.vision, plain) if config.vision else None
        self.config = config
        self.weights: Weights = weights
        self.kv_spec = config.kv_spec(dtype)
        self.reads_tokens = config.token_inputs > 0
        self.geometry = config.geometry
        self.vocabulary = config.vocabulary
        self.context_tokens = config.context_tokens

    @property
    def head(self) -> DecoderStem:
        return self.stem if self.last_stem is None else self.last_stem

    def adapted_layers(self, adapters: AdapterSize, make: MakeStack) -> list[DecoderLayer]:
        return [layer.adapted(adapters, make) for layer in self.layers]

    def read_adapter(self, directory: Path, adapters: AdapterSize) -> AdapterContent:
        from models.adapters import read_adapter  # it needs this class

        return read_adapter(directory, adapters, self)

    def __call__(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards | None = None,
    ) -> jax.Array:
        """Returns the logits of every position, float32 [T, V_padded]. Used by tests and training
        only."""
        shards, following = shards or Shards(), Following(attend)
        x_TD = self.stem.embed(tokens_T, shards)
        given = GivenTokens(tokens_T, x_TD)
        for index, (layer, kept) in enumerate(zip(self.layers, self.kv_spec.layers, strict=False)):
            recur = recur_from_the_beginning(kept.state, self.kv_spec.dtype, x_TD.shape[0], shards)
            attend = following.over(index, kept.source)
            x_TD = layer(x_TD, positions_T, attend, shards, recur=recur, given=given)
        return self.head.logits(x_TD, shards)


def _draft_layer(
    make: Make, config: DecoderConfig, form: KernelForm, tp: int
) -> NextTokenLayer | EagleHead | Gemma4Assistant | None:
    if config.assistant is not None:
        return Gemma4Assistant(make, config, form, padded_vocabulary(config.vocabulary, tp))
    if config.eagle is not None:
        return EagleHead(make, config, form, padded_vocabulary(config.eagle.vocabulary, tp))
    return NextTokenLayer(make, config, config.draft_layer, form) if config.next_token else None


def abstract_model(
    config: DecoderConfig,
    *,
    dtype: str = "float32",
    platform: str = "cpu",
    tp: int = 1,
    weights: Weights = "",
    staged: bool = False,
) -> Decoder:
    """Builds the model with shapes instead of arrays, without allocating memory.

    Args:
        tp: Tensor-parallel size. The vocabulary is padded to a multiple of it.
        staged: Whether embedding and head are separate, for several pipeline stages.
    """

    def make(shape: tuple[int, ...], role: Role, fan_in: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(role if role in TYPE_ROLES else dtype))

    how = {"dtype": dtype, "platform": platform, "tp": tp}
    return Decoder(make, config, **how, weights=weights, staged=staged)  # type: ignore[arg-type]


def init_model(
    config: DecoderConfig,
    key: jax.Array,
    *,
    dtype: str = "float32",
    platform: str = "cpu",
    tp: int = 1,
) -> Decoder:
    """Matrices have variance 1 / fan-in, and the embedding has standard deviation 0.02. Norm
    weights are one and biases zero."""
    count = 0

    def make(shape: tuple[int, ...], role: Role, fan_in: int) -> jax.Array:
        nonlocal count
        count += 1
        if role == "float32":
            return jnp.zeros(shape, jnp.float32)
        if role in ("norm", "bias"):
            return jnp.full(shape, 1.0 if role == "norm" else 0.0, jnp.dtype(dtype))
        deviation = 0.02 if role == "embedding" else 1 / math.sqrt(fan_in)
        return (
            jax.random.normal(jax.random.fold_in(key, count), shape, jnp.float32) * deviation
        ).astype(dtype)

    return Decoder(make, config, dtype=dtype, platform=platform, tp=tp)
