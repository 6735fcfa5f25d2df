"""Reads the configuration of GLM-4. It has biases on q, k and v, rotary positions on neighbouring
pairs in half of each head, and gate and up in one tensor. The models of April 2025 (0414, Z1) also
have norms after attention and feed-forward."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(
    kv_heads=2, context_tokens=131072, norm_epsilon=1.5625e-7, partial_rotary=0.5
)
VL_DEFAULTS = FamilyDefaults(
    kv_heads=2, context_tokens=32768, norm_epsilon=1e-5, partial_rotary=1.0
)


def read_glm_config(hf: HfConfig, defaults: FamilyDefaults = DEFAULTS) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    bias = hf.flag("attention_bias", True)
    size = 128 if defaults is DEFAULTS else None
    config = read_decoder(hf, defaults, qkv_bias=bias, head_dim_default=size)
    attention = config.attention
    return replace(
        config, attention=replace(attention, rope=replace(attention.rope, interleaved=True))
    )


def read_config(hf: HfConfig) -> DecoderConfig:
    return replace(read_glm_config(hf), norms="both")


def read_vl_config(hf: HfConfig) -> DecoderConfig:
    """Reads the text part of GLM-4.1V: GLM-4-0414 with other defaults. For text,
    three-dimensional rotary positions equal ordinary ones."""
    return replace(read_glm_config(hf, VL_DEFAULTS), norms="both")
