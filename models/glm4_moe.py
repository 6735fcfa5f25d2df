"""Reads the configuration of GLM-4.5, 4.6 and 4.7. They have experts that are chosen by corrected
sigmoid scores, optionally in groups, a shared expert, dense first layers, and rotary positions on
half of each head. dots.llm1 has the same experts."""

from dataclasses import dataclass, replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import (
    read_decoder,
    read_layer_types,
    read_window,
    refuse_windows,
    with_windows,
)

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=131072, norm_epsilon=1e-5, partial_rotary=0.5)


@dataclass(frozen=True, slots=True)
class RoutingDefaults:
    """Values that transformers assumes for routing fields missing in config.json."""

    experts: int
    experts_per_token: int
    ffn: int
    groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0


ROUTING = RoutingDefaults(128, 8, 1408)
DOTS_DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=2048)


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    config = read_decoder(
        hf,
        DEFAULTS,
        qkv_bias=hf.flag("attention_bias", False),
        qk_norm="head" if hf.flag("use_qk_norm", False) else "",
    )
    experts, dense = read_experts(hf), hf.count("first_k_dense_replace", 1, least=0)
    return replace(
        config,
        layers=tuple(
            replace(layer, experts=experts if at >= dense else None)
            for at, layer in enumerate(config.layers)
        ),
        left_aside=hf.count("num_nextn_predict_layers", 1, least=0),
    )


def read_dots_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DOTS_DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head")
    hf.raw("norm_topk_prob")  # its default is false
    experts = read_experts(hf.changed(norm_topk_prob=hf.flag("norm_topk_prob", False)), ROUTING)
    dense = hf.count("first_k_dense_replace", 0, least=0)
    count, window = len(config.layers), read_window(hf, 4096)
    first = hf.count("max_window_layers", 62, least=0)
    windows = read_layer_types(hf, count, window, [at >= first for at in range(count)])
    layers = (
        replace(layer, experts=experts if at >= dense else None)
        for at, layer in enumerate(with_windows(config, windows).layers)
    )
    return replace(config, layers=tuple(layers))


def read_experts(hf: HfConfig, defaults: RoutingDefaults = ROUTING) -> ExpertConfig:
    """GLM-4.5 uses DeepSeek-V3's routing and field names."""
    for field, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if hf.raw(field) not in (None, only):
            raise hf.error(field, f"must be {only!r}", "other routing is not supported here")
    ffn = hf.count("moe_intermediate_size", defaults.ffn)
    experts = ExpertConfig(
        hf.count("n_routed_experts", defaults.experts),
        hf.count("num_experts_per_tok", defaults.experts_per_token),
        ffn,
        hf.flag("norm_topk_prob", True),
        shared_ffn=ffn * hf.count("n_shared_experts", 1, least=0),
        scores="sigmoid",
        correction=True,
        groups=hf.count("n_group", defaults.groups),
        groups_per_token=hf.count("topk_group", defaults.groups_per_token),
        scaling=hf.number("routed_scaling_factor", defaults.scaling),
    )
    return check_groups(hf, experts)


def check_groups(hf: HfConfig, experts: ExpertConfig) -> ExpertConfig:
    """Raises CheckpointError if the number of experts, their groups and the experts per token are
    not consistent."""
    if experts.experts % experts.groups or experts.groups_per_token > experts.groups:
        raise hf.error(
            "n_group",
            f"must divide n_routed_experts={experts.experts} and be at least"
            f" topk_group={experts.groups_per_token}",
            "correct it",
        )
    within = experts.experts // experts.groups * experts.groups_per_token
    if experts.experts_per_token > within:
        raise hf.error(
            "num_experts_per_tok",
            f"must be at most {within}, the experts of the chosen groups",
            "correct it",
        )
    return experts
