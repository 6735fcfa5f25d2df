"""Reads the config.json fields that all families share: sizes, biases, rotary positions, windows.
The file of each family then reads the family's own options and replaces values of the result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from jdisagg.errors import CheckpointError
from jdisagg.ops.activations import Activation
from jdisagg.ops.rope_frequencies import Rope
from models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_rope import extended_context, read_rope

MOST_LAYERS = 10_000
LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}


def read_decoder(
    hf: HfConfig,
    defaults: FamilyDefaults,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["", "head", "all", "own"] = "",
    head_dim_default: int | None = None,
    activation: Activation = "silu",
    ffn_default: int | None = None,
) -> DecoderConfig:
    names = ACTIVATIONS[activation]
    for field in ("hidden_act", "hidden_activation"):
        if hf.raw(field) not in (None, *names) and not hf.sizes_only:
            raise hf.error(field, f"must be {names[0]!r}", "other activations are not supported")
    width, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    kv_heads = hf.count("num_key_value_heads", _kv_heads_default(hf, heads, defaults))
    if heads % kv_heads:
        raise hf.error(
            "num_key_value_heads", f"must divide num_attention_heads={heads}", "correct it"
        )
    head_dim = hf.count("head_dim", head_dim_default or max(1, width // heads))
    if head_dim % 2:
        raise CheckpointError(
            f"{hf.where}: head_dim must be even for rotary positions, got {head_dim}; correct it"
        )
    context = hf.count("max_position_embeddings", defaults.context_tokens)
    layers = hf.count("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise hf.error("num_hidden_layers", f"must be at most {MOST_LAYERS}", "correct it")
    try:
        rope = read_rope(hf, head_dim, context, defaults)
    except CheckpointError:
        if not hf.sizes_only:
            raise
        # Inspection has already reported this error. These fields of it are known, so they are not
        # reported again.
        hf.pass_over("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")
        rope = Rope(head_dim, defaults.rope_theta)
    return DecoderConfig(
        family=str(hf.raw("model_type")),
        vocabulary=hf.count("vocab_size"),
        width=width,
        ffn=hf.count("intermediate_size", ffn_default),
        attention=AttentionConfig(heads, kv_heads, head_dim, rope, qkv_bias, output_bias, qk_norm),
        layers=(LayerConfig(),) * layers,
        norm_epsilon=hf.number("rms_norm_eps", defaults.norm_epsilon),
        tied=hf.flag("tie_word_embeddings", defaults.tied),
        context_tokens=extended_context(context, rope),
        activation=activation,
        left_aside=hf.count("num_nextn_predict_layers", 0, least=0),
    )


def with_windows(config: DecoderConfig, windows: Sequence[int | None]) -> DecoderConfig:
    return replace(
        config,
        layers=tuple(
            replace(layer, window=window)
            for layer, window in zip(config.layers, windows, strict=True)
        ),
    )


def with_ropes(config: DecoderConfig, ropes: Mapping[str, Rope]) -> DecoderConfig:
    """`ropes` has the rotary parameters of each kind in LAYER_TYPES."""
    return replace(
        config,
        layers=tuple(
            replace(layer, rope=ropes[LAYER_TYPES[layer.window is not None]])
            for layer in config.layers
        ),
    )


def read_window(hf: HfConfig, default: int | None = None) -> int | None:
    """Returns `default` if the field is absent, and None if the field is null."""
    if "sliding_window" not in hf.fields:
        return default
    return hf.count("sliding_window") if hf.has("sliding_window") else None


def with_one_window(hf: HfConfig, config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Sets one window for all layers. Raises an error if `layer_types` gives some layers no
    window."""
    windows = (window,) * len(config.layers)
    if read_layer_types(hf, len(windows), window, [True] * len(windows)) != windows:
        raise hf.error("layer_types", "must agree with sliding_window", "one window serves all")
    return with_windows(config, windows)


def read_layer_types(
    hf: HfConfig, layers: int, window: int | None, default: Sequence[bool]
) -> tuple[int | None, ...]:
    """The field `layer_types` selects the layers with a window. If config.json lacks it, `default`
    selects them."""
    types = hf.names("layer_types")
    if types is None:
        return tuple(window if windowed else None for windowed in default)
    if len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise hf.error(
            "layer_types",
            f"must name {layers} layers, each one of {', '.join(LAYER_TYPES)}",
            "correct it",
        )
    if window is None and "sliding_attention" in types:
        raise hf.error(
            "layer_types",
            "contains sliding_attention, but use_sliding_window and sliding_window give no window",
            "set both",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def refuse_windows(hf: HfConfig, reason: str) -> None:
    """Raises CheckpointError if the config enables windows or special kinds of layers. For families
    whose layers are all alike."""
    types = hf.names("layer_types") or ()
    if any(kind != "full_attention" for kind in types) and not hf.sizes_only:
        raise hf.error("layer_types", f"is not supported ({reason})", "use a checkpoint without it")
    hf.pass_over("max_window_layers")
    if hf.raw("sliding_window") and hf.flag("use_sliding_window", True) and not hf.sizes_only:
        raise hf.error(
            "sliding_window", f"is not supported ({reason})", "use a checkpoint without it"
        )


def _kv_heads_default(hf: HfConfig, heads: int, defaults: FamilyDefaults) -> int:
    explicit_null = "num_key_value_heads" in hf.fields
    return heads if explicit_null or defaults.kv_heads is None else defaults.kv_heads
