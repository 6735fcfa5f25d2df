"""Llama 2 and 3.x, and other models of the same form: optional biases on all projections, one head
size, no window."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=2048)


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias)
    return replace(config, mlp_bias=hf.flag("mlp_bias", False))
