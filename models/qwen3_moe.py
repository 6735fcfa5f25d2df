"""Reads the configuration of Qwen3-MoE (30B-A3B, 235B-A22B), which has Qwen3's attention, and
experts in the layers selected by `decoder_sparse_step` and `mlp_only_layers`."""

from collections.abc import Sequence
from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, with_one_window

DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=32768)


def read_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head")
    window = _window(hf)
    total = hf.count("num_experts", hf.count("num_local_experts", 128), least=0)
    chosen = hf.count("num_experts_per_tok", 8)
    experts = (
        ExpertConfig(
            total, chosen, hf.count("moe_intermediate_size", 768), hf.flag("norm_topk_prob", False)
        )
        if total
        else None
    )
    config = with_one_window(hf, config, window)
    return replace(config, layers=sparse_layers(hf, config.layers, experts))


def sparse_layers(
    hf: HfConfig, layers: Sequence[LayerConfig], experts: ExpertConfig | None
) -> tuple[LayerConfig, ...]:
    if experts and experts.experts_per_token > experts.experts:
        raise hf.error(
            "num_experts_per_tok", f"must be at most num_experts={experts.experts}", "correct it"
        )
    step, dense = hf.count("decoder_sparse_step", 1), frozenset(hf.counts("mlp_only_layers"))
    return tuple(
        replace(layer, experts=experts if at not in dense and (at + 1) % step == 0 else None)
        for at, layer in enumerate(layers)
    )


def _window(hf: HfConfig) -> int | None:
    hf.pass_over("max_window_layers", "sliding_window")
    if not hf.flag("use_sliding_window", False) or (
        "sliding_window" in hf.fields and not hf.has("sliding_window")
    ):
        return None
    return hf.count("sliding_window", 4096)
