"""GLM-4: biases on q, k and v, rotary positions on neighbouring pairs of half of each head, gate
and up in one tensor. The models of April 2025 (0414, Z1) also have norms after attention and
feed-forward."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(
    kv_heads=2, context_tokens=131072, norm_epsilon=1.5625e-7, partial_rotary=0.5
)


def read_glm_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of glm-4-9b as transformers writes it."""
    refuse_windows(hf, "this family uses full attention")
    bias = hf.flag("attention_bias", hf.raw("model_type") == "glm4")
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, head_dim_default=128)
    attention = config.attention
    return replace(
        config, attention=replace(attention, rope=replace(attention.rope, interleaved=True))
    )


def read_config(hf: HfConfig) -> DecoderConfig:
    return replace(read_glm_config(hf), norms="both")
