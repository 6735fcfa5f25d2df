"""Reads the configuration of Step 3.5 and 3.7 Flash (text part). They have more query heads in
layers with a window, a gate for each head's output, rotary parameters by kind of layer, experts
that are chosen by corrected sigmoid scores, a shared expert, and bounds on the gates of the last
layers."""

from dataclasses import replace

from jdisagg.ops.rope_frequencies import Rope
from models.decoder_config import AttentionConfig, DecoderConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import LAYER_TYPES, read_decoder
from models.hf_experts import count_experts, gate_bounds
from models.hf_rope import rope_of

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=128000, norm_epsilon=1e-5, partial_rotary=1.0)
FULL, WINDOWED = LAYER_TYPES
# Field names in released checkpoints, and in transformers.
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "att_impl_type": "GQA",
    "gating": True,
    "mlp_bias": False,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "zero_centered": True,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.require(_ONLY)
    hf.pass_over("use_moe", "need_fp32_gate", "max_seq_len", "yarn_only_types")
    hf.pass_over("moe_every_n_layer", "moe_layer_offset", "mtp_layer_types", "mtp_mlp_layer_types")
    hf = hf.renamed(_NAMES)
    bias = hf.flag("attention_bias", False)
    plain = hf.changed(rope_parameters=None, rope_scaling=None, rope_theta=None)
    config = read_decoder(
        plain, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head", head_dim_default=128
    )
    count = len(config.layers)
    kinds = _of_layers(hf.names("layer_types"), hf, "layer_types", count) or (FULL,) * count
    if unknown := set(kinds) - set(LAYER_TYPES):
        raise hf.error("layer_types", f"must not have {', '.join(unknown)}", "correct it")
    scale = hf.number("query_pre_attn_scalar", config.attention.head_dim) ** -0.5
    full = replace(config.attention, head_gates=True, scale=scale)
    windowed = replace(full, query_heads=_windowed_heads(hf, full, kinds))
    usual = windowed if WINDOWED in kinds else full
    ropes = _ropes(hf, kinds, full.head_dim, config.context_tokens)
    hf.pass_over("sliding_window")
    window = hf.count("sliding_window") if WINDOWED in kinds else None
    fed = _fed(hf, count)
    routed, beside = (
        gate_bounds(hf, name, count) for name in ("swiglu_limits", "swiglu_limits_shared")
    )
    experts = _experts(hf)
    layers = tuple(
        LayerConfig(
            window if kind == WINDOWED else None,
            replace(experts, clamp=routed[at]) if fed[at] else None,
            rope=ropes[kind],
            attention=full if kind == FULL and usual != full else None,
            gate=beside[at],
        )
        for at, kind in enumerate(kinds)
    )
    return replace(config, attention=usual, layers=layers, norms_above_one=True)


def _experts(hf: HfConfig) -> ExpertConfig:
    return ExpertConfig(
        count_experts(hf, 288),
        hf.count("num_experts_per_tok", 8),
        hf.count("moe_intermediate_size", 1280),
        normalised=True,
        shared_ffn=hf.count("share_expert_dim", 1280),
        scores="sigmoid",
        correction=True,
        scaling=hf.number("moe_router_scaling_factor", 1.0),
    )


def _of_layers(
    values: tuple[str, ...] | None, hf: HfConfig, field: str, count: int
) -> tuple[str, ...] | None:
    aside = hf.count("num_nextn_predict_layers", 0, least=0)
    if values is not None and len(values) not in (count, count + aside):
        raise hf.error(field, f"must have a value for each of {count} layers", "correct it")
    return None if values is None else values[:count]


def _fed(hf: HfConfig, count: int) -> tuple[bool, ...]:
    kinds = _of_layers(hf.names("mlp_layer_types"), hf, "mlp_layer_types", count)
    stated = hf.raw("moe_layers_enum")
    if kinds is not None:
        return tuple(kind == "sparse" for kind in kinds)
    if stated is None:
        return tuple(at >= 3 for at in range(count))
    numbers = stated.split(",") if isinstance(stated, str) else stated
    if not isinstance(numbers, list) or not all(str(one).strip().isdecimal() for one in numbers):
        raise hf.error("moe_layers_enum", "must be numbers of layers", "correct it")
    chosen = {int(str(one)) for one in numbers}
    return tuple(at in chosen for at in range(count))


def _windowed_heads(hf: HfConfig, full: AttentionConfig, kinds: tuple[str, ...]) -> int:
    other = hf.raw("attention_other_setting") or {}
    sizes = {
        "num_attention_groups": full.kv_heads,
        "head_dim": full.head_dim,
        "true_head_dim": full.head_dim,
        "attention_type": WINDOWED,
    }
    if not isinstance(other, dict) or any(
        other.get(name, size) != size for name, size in sizes.items()
    ):
        raise hf.error(
            "attention_other_setting", f"must have {sizes}", "other sizes are not supported"
        )
    own = HfConfig(other, f"{hf.where}: attention_other_setting")
    heads = own.count("num_attention_heads", full.query_heads)
    heads = hf.count("num_sliding_attention_heads", heads)
    by_layer = hf.raw("per_layer_config")
    wanted = {at: {"num_attention_heads": heads} for at, kind in enumerate(kinds) if kind != FULL}
    if by_layer and (
        not isinstance(by_layer, dict)
        or not all(str(at).isdecimal() for at in by_layer)
        or {int(at): sizes for at, sizes in by_layer.items()} != wanted
    ):
        raise hf.error(
            "per_layer_config",
            f"must give num_attention_heads={heads} to each layer with a window",
            "other sizes by layer are not supported",
        )
    if heads % full.kv_heads:
        raise hf.error(
            "num_sliding_attention_heads", f"must be a multiple of {full.kv_heads}", "correct it"
        )
    return heads


def _ropes(hf: HfConfig, kinds: tuple[str, ...], head_dim: int, context: int) -> dict[str, Rope]:
    given, scaling = hf.raw("rope_parameters") or {}, hf.raw("rope_scaling") or {}
    theta, parts = hf.raw("rope_theta"), hf.raw("partial_rotary_factors")
    if not isinstance(given, dict) or not isinstance(scaling, dict):
        raise hf.error("rope_parameters", "and rope_scaling must be objects", "correct them")
    if given and not given.keys() >= set(kinds):
        raise hf.error("rope_parameters", f"must have {', '.join(set(kinds))}", "correct it")
    plain = hf.changed(rope_theta=None)  # which may be a list by layer
    ropes: dict[str, Rope] = {}
    for kind in dict.fromkeys(kinds):
        at, own = kinds.index(kind), given.get(kind)
        scaled = scaling if kind == FULL and own is None else {}
        if own is None:
            own = {"rope_theta": _at(theta, at, DEFAULTS.rope_theta)}
            own |= {"partial_rotary_factor": _at(parts, at, 1.0)} | scaled
        if not isinstance(own, dict):
            raise hf.error("rope_parameters", f"must have an object for {kind}", "correct it")
        field = "rope_scaling" if scaled else "rope_parameters"
        ropes[kind] = rope_of(plain, field, own, head_dim, context, DEFAULTS)
    return ropes


def _at(values: object, at: int, default: float) -> object:
    if isinstance(values, list):
        return values[at] if at < len(values) else default
    return default if values is None else values
