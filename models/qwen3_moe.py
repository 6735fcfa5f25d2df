"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention; experts in the layers that
`decoder_sparse_step` and `mlp_only_layers` leave."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types

DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=32768)


def read_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm=True)
    window = _window(hf)
    total = hf.count("num_experts", hf.count("num_local_experts", 128), least=0)
    chosen = hf.count("num_experts_per_tok", 8)
    if total and chosen > total:
        raise hf.error("num_experts_per_tok", f"must be at most num_experts={total}", "correct it")
    experts = (
        ExpertConfig(
            total, chosen, hf.count("moe_intermediate_size", 768), hf.flag("norm_topk_prob", False)
        )
        if total
        else None
    )
    layers = len(config.layers)
    if read_layer_types(hf, layers, window, [True] * layers) != (window,) * layers:
        raise hf.error("layer_types", "must agree with sliding_window", "one window serves all")
    step, dense = hf.count("decoder_sparse_step", 1), frozenset(hf.counts("mlp_only_layers"))
    sparse = (layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return replace(
        config,
        layers=tuple(LayerConfig(window, experts if is_sparse else None) for is_sparse in sparse),
    )


def _window(hf: HfConfig) -> int | None:
    """All layers see the window where `use_sliding_window` is set (this family has no
    `max_window_layers`)."""
    hf.pass_over("max_window_layers", "sliding_window")
    if not hf.flag("use_sliding_window", False) or (
        "sliding_window" in hf.fields and not hf.has("sliding_window")
    ):
        return None
    return hf.count("sliding_window", 4096)
