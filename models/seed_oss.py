"""Reads the configuration of Seed-OSS: Llama with biases on q, k and v, and a separate option for
the bias of the output projection."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=524288)


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family attends to everything")
    config = read_decoder(
        hf,
        DEFAULTS,
        qkv_bias=hf.flag("attention_bias", True),
        output_bias=hf.flag("attention_out_bias", False),
        head_dim_default=128,
    )
    return replace(config, mlp_bias=hf.flag("mlp_bias", False))
