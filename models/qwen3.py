"""Reads the configuration of dense Qwen3, which has a norm on each head of q and k, an independent
head size, optional attention biases, and Qwen2's windows."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, with_windows
from models.qwen2 import read_windows

DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=32768)


def read_config(hf: HfConfig, defaults: FamilyDefaults = DEFAULTS) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf, defaults, qkv_bias=bias, output_bias=bias, qk_norm="head", head_dim_default=128
    )
    return with_windows(config, read_windows(hf, len(config.layers)))
