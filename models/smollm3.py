"""Reads the configuration of SmolLM3: Llama in which every fourth layer has no rotary positions.
Only layers without rotary positions may have a window."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, with_windows

DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=32768, rope_theta=2e6, tied=True)


def read_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias)
    count, interval = len(config.layers), hf.count("no_rope_layer_interval", 4)
    rotated = [bool(turn) for turn in hf.counts("no_rope_layers")]
    rotated = rotated or [(layer + 1) % interval != 0 for layer in range(count)]
    if len(rotated) < count:
        raise hf.error("no_rope_layers", f"must name {count} layers", "correct it")
    hf.pass_over("sliding_window", "max_window_layers")  # in case they are disabled
    window = None
    if hf.flag("use_sliding_window", False) and hf.has("sliding_window"):
        window = hf.count("sliding_window")
    still = [not turn for turn in rotated[:count]]
    windows = read_layer_types(hf, count, window, still)
    layers = tuple(
        replace(layer, rotated=turn) for layer, turn in zip(config.layers, rotated, strict=False)
    )
    config = replace(config, layers=layers, mlp_bias=hf.flag("mlp_bias", False))
    return with_windows(config, windows)
