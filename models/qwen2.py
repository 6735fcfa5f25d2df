"""Reads the configuration of Qwen2 and Qwen2.5, which have biases on q, k and v, and optional
windows in some layers."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, with_windows

DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=32768)
VL_DEFAULTS = FamilyDefaults(
    kv_heads=8, context_tokens=32768, norm_epsilon=1e-5, rope_theta=1000000.0
)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS, qkv_bias=True)
    return with_windows(config, read_windows(hf, len(config.layers)))


def read_vl_config(hf: HfConfig) -> DecoderConfig:
    """Reads the text part of the config.json of Qwen2-VL and Qwen2.5-VL. For text,
    three-dimensional rotary positions equal ordinary ones."""
    field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
    given = hf.raw(field)
    if isinstance(given, dict) and "mrope" in (given.get("type"), given.get("rope_type")):
        plain = {name: value for name, value in given.items() if name not in ("type", "rope_type")}
        hf = hf.changed(**{field: plain})
    config = read_decoder(hf, VL_DEFAULTS, qkv_bias=True)
    return with_windows(config, read_windows(hf, len(config.layers)))


def read_windows(hf: HfConfig, layers: int) -> tuple[int | None, ...]:
    """Uses `layer_types` if present. Without this field, layers from index `max_window_layers` on
    have the window if `use_sliding_window` is set."""
    hf.pass_over("sliding_window")  # in case it is disabled
    window = None
    if hf.flag("use_sliding_window", False):
        silent = "sliding_window" not in hf.fields
        window = 4096 if silent else (hf.count("sliding_window", 0, least=0) or None)
    first = hf.count("max_window_layers", 28, least=0)
    return read_layer_types(hf, layers, window, [layer >= first for layer in range(layers)])
