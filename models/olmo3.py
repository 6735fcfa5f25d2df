"""Reads the configuration of OLMo 3: OLMo 2 with a window in three of four layers. The rope
extension applies only to layers without a window."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types
from models.hf_rope import rope_of

DEFAULTS = FamilyDefaults(None, context_tokens=2048, norm_epsilon=1e-5, rope_theta=500000.0)


def read_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    given = hf.raw("rope_parameters") or {"full_attention": {}, "sliding_attention": {}}
    if not isinstance(given, dict) or "full_attention" not in given:
        raise hf.error("rope_parameters", "must be by kind of layer", "correct it")
    full, plain = given["full_attention"], given.get("sliding_attention") or {}
    config = read_decoder(
        hf.changed(rope_parameters=full), DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="all"
    )
    count, head_dim = len(config.layers), config.attention.head_dim
    rope = rope_of(hf, "rope_parameters", plain, head_dim, config.context_tokens, DEFAULTS)
    windows = read_layer_types(
        hf, count, hf.count("sliding_window", 4096), [(at + 1) % 4 != 0 for at in range(count)]
    )
    layers = tuple(LayerConfig(window, rope=rope if window else None) for window in windows)
    return replace(config, layers=layers, norms="after")
