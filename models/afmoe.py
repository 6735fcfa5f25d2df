"""Reads the configuration of Trinity (AFMoE). It has norms before and after blocks, norms on each
head of q and k, a sigmoid gate for each value of attention, windows in most layers and rotary
positions only in these, experts chosen by corrected sigmoid scores with shared ones, and dense
first layers."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, read_window, with_windows
from models.hf_experts import count_experts, sparse_layers, with_experts

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=16384, norm_epsilon=1e-5)
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.require(_ONLY)
    hf.pass_over("load_balance_coeff", "use_grouped_mm")  # of training, and of an implementation
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head", head_dim_default=128
    )
    count, every = len(config.layers), hf.count("global_attn_every_n_layers", 4)
    default = [(at + 1) % every != 0 for at in range(count)]
    config = with_windows(config, read_layer_types(hf, count, read_window(hf, 1024), default))
    ffn = hf.count("moe_intermediate_size", 1408)
    experts = ExpertConfig(
        count_experts(hf, 64),
        hf.count("num_experts_per_tok", 6),
        ffn,
        normalised=True,
        shared_ffn=ffn * hf.count("num_shared_experts", 2, least=0),
        scores="sigmoid",
        correction=True,
        scaling=hf.number("route_scale", 1.0),
    )
    config = replace(
        config,
        attention=replace(config.attention, gated=True),
        layers=tuple(replace(each, rotated=each.window is not None) for each in config.layers),
        norms="both",
        embedding_scale=config.width**0.5 if hf.flag("mup_enabled", False) else 1.0,
    )
    hf = hf.renamed({"num_dense_layers": "first_k_dense_replace"})
    return with_experts(hf, config, experts, sparse_layers(hf, config, 1))
