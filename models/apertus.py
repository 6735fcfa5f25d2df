"""Reads the configuration of Apertus. It has a feed-forward block without a gate and with the
activation xIELU (arXiv 2411.13010), whose parameters differ by layer, and norms on each head of q
and k."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(
    kv_heads=None, context_tokens=65536, norm_epsilon=1e-5, rope_theta=12_000_000.0
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    if hf.flag("post_norm", False):
        raise hf.error("post_norm", "must be false", "norms after blocks are not supported here")
    if not (hf.has("rope_scaling") or hf.has("rope_parameters")):
        hf = hf.changed(rope_parameters=LLAMA3)
    bias = hf.flag("attention_bias", False)
    return read_decoder(
        hf, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head", activation="xielu"
    )
