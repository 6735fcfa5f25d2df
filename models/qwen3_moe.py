"""Reads the configuration of Qwen3-MoE (30B-A3B, 235B-A22B), which has Qwen3's attention, and
experts in the layers selected by `decoder_sparse_step` and `mlp_only_layers`, of Qwen3-Omni's
text model, and of Mellum 2, which also has windows, and rotary parameters by kind of layer."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import (
    read_decoder,
    read_layer_types,
    read_window,
    with_one_window,
    with_ropes,
    with_windows,
)
from models.hf_experts import count_experts, sparse_layers, with_experts
from models.hf_rope import ropes_by_kind

DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=32768)
OMNI_DEFAULTS = replace(DEFAULTS, rope_theta=1e6)
MELLUM_DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=131072)
MELLUM_ROPES: dict[str, dict[str, object]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def read_omni_config(hf: HfConfig) -> DecoderConfig:
    """Reads the text part of Qwen3-Omni. For text, three-dimensional rotary positions equal
    ordinary ones."""
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(given := hf.raw(field), dict):
            plain = {name: value for name, value in given.items() if name != "interleaved"}
            hf = hf.changed(**{field: plain})
    hf = hf.changed(norm_topk_prob=hf.flag("norm_topk_prob", True))
    return read_config(hf, OMNI_DEFAULTS)


def read_config(hf: HfConfig, defaults: FamilyDefaults = DEFAULTS) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, qk_norm="head")
    window = _window(hf)
    total = count_experts(hf, 128, least=0)
    chosen = hf.count("num_experts_per_tok", 8)
    experts = (
        ExpertConfig(
            total, chosen, hf.count("moe_intermediate_size", 768), hf.flag("norm_topk_prob", False)
        )
        if total
        else None
    )
    return with_sparse_layers(hf, with_one_window(hf, config, window), experts)


def read_mellum_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf.changed(rope_parameters=None),
        MELLUM_DEFAULTS,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        head_dim_default=128,
    )
    hf.pass_over("mtp_layer_types", "mtp_mlp_layer_types")
    count, size, context = len(config.layers), config.attention.head_dim, config.context_tokens
    windows = read_layer_types(hf, count, read_window(hf, 1024), [False] * count)
    ropes = ropes_by_kind(hf, MELLUM_ROPES, size, context, MELLUM_DEFAULTS)
    config = with_ropes(with_windows(config, windows), ropes)
    experts = ExpertConfig(
        count_experts(hf, 64),
        hf.count("num_experts_per_tok", 8),
        hf.count("moe_intermediate_size", 896),
        hf.flag("norm_topk_prob", True),
    )
    config = replace(config, left_aside=0, mtp_aside=True)
    return with_experts(hf, config, experts, sparse_layers(hf, config, 0))


def with_sparse_layers(
    hf: HfConfig, config: DecoderConfig, experts: ExpertConfig | None
) -> DecoderConfig:
    step, dense = hf.count("decoder_sparse_step", 1), frozenset(hf.counts("mlp_only_layers"))
    if experts is None:
        return config
    numbers = range(len(config.layers))
    sparse = [at not in dense and (at + 1) % step == 0 for at in numbers]
    return with_experts(hf, config, experts, sparse)


def _window(hf: HfConfig) -> int | None:
    hf.pass_over("max_window_layers", "sliding_window")
    if not hf.flag("use_sliding_window", False) or (
        "sliding_window" in hf.fields and not hf.has("sliding_window")
    ):
        return None
    return hf.count("sliding_window", 4096)
