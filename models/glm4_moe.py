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
from models.hf_experts import count_experts, sparse_layers, with_experts

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


VL_DEFAULTS = replace(DEFAULTS, context_tokens=65536)
SOLAR_DEFAULTS = replace(DEFAULTS, rope_theta=1e6, partial_rotary=1.0)
SARVAM_DEFAULTS = FamilyDefaults(
    kv_heads=4, context_tokens=131072, rope_theta=8e6, partial_rotary=1.0
)
ROUTING = RoutingDefaults(128, 8, 1408)
SOLAR_ROUTING = RoutingDefaults(128, 8, 1280)
SARVAM_ROUTING = RoutingDefaults(128, 6, 1024, scaling=2.5)
DOTS_DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=2048)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = _read(hf, DEFAULTS, qk_norm=hf.flag("use_qk_norm", False))
    config = replace(config, left_aside=hf.count("num_nextn_predict_layers", 1, least=0))
    return with_experts(hf, config, read_experts(hf), sparse_layers(hf, config, 1))


def read_vl_config(hf: HfConfig) -> DecoderConfig:
    """Reads the text part of GLM-4.5V and 4.6V. For text, three-dimensional rotary positions equal
    ordinary ones."""
    config = _read(hf, VL_DEFAULTS, bias=True)
    return with_experts(hf, config, read_experts(hf), sparse_layers(hf, config, 1))


def read_solar_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Solar Open: no layer is dense, and whole heads are rotated."""
    hf.pass_over("intermediate_size")
    config = _read(hf.changed(intermediate_size=1), SOLAR_DEFAULTS, head_dim=128)
    return with_experts(hf, config, read_experts(hf, SOLAR_ROUTING))


def read_sarvam_config(hf: HfConfig) -> DecoderConfig:
    hf = hf.renamed({"num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"})
    config = _read(hf, SARVAM_DEFAULTS, qk_norm=hf.flag("use_qk_norm", True), head_dim=64)
    config = replace(config, left_aside=hf.count("num_nextn_predict_layers", 0, least=0))
    return with_experts(hf, config, read_experts(hf, SARVAM_ROUTING), sparse_layers(hf, config, 1))


def _read(
    hf: HfConfig,
    defaults: FamilyDefaults,
    *,
    qk_norm: bool = False,
    bias: bool = False,
    head_dim: int | None = None,
) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    return read_decoder(
        hf,
        defaults,
        qkv_bias=hf.flag("attention_bias", bias),
        qk_norm="head" if qk_norm else "",
        head_dim_default=head_dim,
    )


def read_dots_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DOTS_DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head")
    hf.raw("norm_topk_prob")  # its default is false
    experts = read_experts(hf.changed(norm_topk_prob=hf.flag("norm_topk_prob", False)), ROUTING)
    count, window = len(config.layers), read_window(hf, 4096)
    first = hf.count("max_window_layers", 62, least=0)
    windows = read_layer_types(hf, count, window, [at >= first for at in range(count)])
    config = with_windows(config, windows)
    return with_experts(hf, config, experts, sparse_layers(hf, config, 0))


def read_experts(hf: HfConfig, defaults: RoutingDefaults = ROUTING) -> ExpertConfig:
    """GLM-4.5 uses DeepSeek-V3's routing and field names."""
    for field, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if hf.raw(field) not in (None, only):
            raise hf.error(field, f"must be {only!r}", "other routing is not supported here")
    ffn = hf.count("moe_intermediate_size", defaults.ffn)
    experts = ExpertConfig(
        count_experts(hf, defaults.experts),
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
