"""Reads the configuration of gpt-oss (arXiv 2508.10925). It has attention sinks, windows in every
second layer, and experts with biases and a clamped gate function. The weights of a token's experts
are a softmax over the logits of these experts."""

from dataclasses import replace

from jdisagg.ops.activations import ClampedGate
from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, with_windows
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=131072, norm_epsilon=1e-5, rope_theta=150000.0)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    # These fields are redundant with fields that are read.
    hf.pass_over("initial_context_length", "experts_per_token")
    if not (hf.has("rope_scaling") or hf.has("rope_parameters")):
        hf = hf.changed(rope_parameters=YARN)
    bias = hf.flag("attention_bias", True)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias, head_dim_default=64)
    total, chosen = count_experts(hf, 128), hf.count("num_experts_per_tok", 4)
    clamp = ClampedGate(hf.number("swiglu_limit", 7.0), hf.number("swiglu_alpha", 1.702))
    if clamp.limit <= 0:
        raise hf.error("swiglu_limit", "must be above zero", "correct it")
    experts = ExpertConfig(total, chosen, config.ffn, normalised=True, biased=True, clamp=clamp)
    count = len(config.layers)
    windows = read_layer_types(
        hf, count, hf.count("sliding_window", 128), [at % 2 == 0 for at in range(count)]
    )
    config = replace(config, attention=replace(config.attention, sinks=True))
    return with_experts(hf, with_windows(config, windows), experts)
