"""Reads the configuration of Laguna. It has norms on each head of q and k, gates of attention
through a softplus, rotary parameters and a number of query heads by kind of layer, experts chosen
by corrected sigmoid scores with a shared one, and a dense first layer."""

from dataclasses import replace

from models.decoder_config import AttentionConfig, DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import (
    LAYER_TYPES,
    read_decoder,
    read_layer_types,
    read_window,
    with_ropes,
    with_windows,
)
from models.hf_experts import count_experts, sparse_layers, with_experts
from models.hf_rope import ropes_by_kind

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=131072, partial_rotary=1.0)
FULL, WINDOWED = LAYER_TYPES
ROPES: dict[str, dict[str, object]] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    WINDOWED: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "moe_apply_router_weight_on_input": False,
    "moe_router_logit_softcapping": 0.0,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.require(_ONLY)
    hf.pass_over("mlp_only_layers", "gating_types")  # mlp_layer_types and gating by other names
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf.changed(rope_parameters=None),
        DEFAULTS,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        head_dim_default=128,
    )
    count = len(config.layers)
    windows = read_layer_types(hf, count, read_window(hf, 512), [False] * count)
    ropes = ropes_by_kind(hf, ROPES, config.attention.head_dim, config.context_tokens, DEFAULTS)
    config = with_ropes(with_windows(config, windows), ropes)
    experts = ExpertConfig(
        count_experts(hf, 256),
        hf.count("num_experts_per_tok", 8),
        hf.count("moe_intermediate_size", 512),
        normalised=True,
        shared_ffn=hf.count("shared_expert_intermediate_size", 512),
        scores="sigmoid",
        correction=True,
        scaling=hf.number("moe_routed_scaling_factor", 1.0),
    )
    config = with_experts(hf, config, experts, sparse_layers(hf, config, 1))
    return _with_heads(hf, config, _gated(hf, config.attention))


def _gated(hf: HfConfig, attention: AttentionConfig) -> AttentionConfig:
    gating = hf.raw("gating")
    if gating not in (None, True, "per-head", "per-element"):
        raise hf.error("gating", "must be true, 'per-head' or 'per-element'", "correct it")
    by_value = gating == "per-element"
    return replace(attention, gated=by_value, head_gates=not by_value, softplus_gates=True)


def _with_heads(hf: HfConfig, config: DecoderConfig, attention: AttentionConfig) -> DecoderConfig:
    """Layers with a window may have another number of query heads than layers without one."""
    heads = hf.counts("num_attention_heads_per_layer")
    heads = heads or (attention.query_heads,) * len(config.layers)
    windowed = [layer.window is not None for layer in config.layers]
    found = set(zip(windowed, heads, strict=False))
    if len(heads) != len(windowed) or len(found) > len(set(windowed)):
        raise hf.error(
            "num_attention_heads_per_layer",
            f"must give one number to all of {len(windowed)} layers with a window, and one to all"
            " others",
            "other sizes by layer are not supported",
        )
    if any(number % attention.kv_heads for number in heads):
        raise hf.error(
            "num_attention_heads_per_layer",
            f"must be multiples of num_key_value_heads={attention.kv_heads}",
            "correct it",
        )
    of_kind = {kind: replace(attention, query_heads=number) for kind, number in found}
    usual = of_kind[any(windowed)]
    layers = tuple(
        replace(layer, attention=None if of_kind[kind] == usual else of_kind[kind])
        for layer, kind in zip(config.layers, windowed, strict=True)
    )
    return replace(config, attention=usual, layers=layers)
