"""Qwen2 and Qwen2.5: biases on q, k and v; some layers may see only a window."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig, read_decoder, with_windows

DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=32768)
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS, qkv_bias=True)
    return with_windows(config, read_windows(hf, len(config.layers)))


def read_windows(hf: HfConfig, layers: int) -> tuple[int | None, ...]:
    """`layer_types` where given; else the layers from `max_window_layers` on, if
    `use_sliding_window`."""
    window = (
        (hf.count("sliding_window", 0) or None) if hf.flag("use_sliding_window", False) else None
    )
    if (
        window is None
        and "sliding_window" not in hf.fields
        and hf.flag("use_sliding_window", False)
    ):
        window = 4096
    types = hf.names("layer_types")
    if types is None:
        first = hf.count("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise hf.error(
            "layer_types",
            f"must name {layers} layers, each one of {', '.join(LAYER_TYPES)}",
            "correct it",
        )
    if window is None and "sliding_attention" in types:
        raise hf.error(
            "layer_types",
            "names sliding_attention, but use_sliding_window and sliding_window give no window",
            "set both",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
