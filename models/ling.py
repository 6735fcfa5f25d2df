"""Reads the configuration of Ling 3.0. It has Kimi Delta Attention with bounded gates in most
layers, latent attention with rotary positions and a gate for each head in the others, and
DeepSeek-V3's experts, with bounds on the gates of the last layers.

Ling 2.5 and 2.6 have the same `model_type` and another architecture, lightning attention."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, DeltaConfig
from models.deepseek import read_latent
from models.glm4_moe import RoutingDefaults, read_experts
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_experts import gate_bounds, sparse_layers, with_experts
from models.kimi_linear import FULL, LINEAR, NAMES, SIZES

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=262144, rope_theta=6e6)
ROUTING = RoutingDefaults(512, 8, 768, groups=8, groups_per_token=4, scaling=2.5)
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "linear_attention": "kda",
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "mtp_use_kda": False,
    "no_kda_lora": True,
    "routing_group_score_top_k": 2,
    "score_function": "sigmoid",
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    if not hf.has("kda_lower_bound") and not hf.names("architectures"):
        raise hf.error(
            "architectures", "must be stated", "Ling 2.6, of the same model_type, is not supported"
        )
    hf.require(_ONLY)
    hf.pass_over("mtp_loss_scaling_factor", "partial_rotary_factor", "rotary_dim", "router_dtype")
    hf = hf.renamed(NAMES)
    size, heads = hf.count("head_dim", 128), hf.count("num_attention_heads")
    # transformers writes the size of the rotated part as `head_dim`
    size = hf.count("linear_head_dim", size)
    plain = hf.changed(layer_types=None, head_dim=None, partial_rotary_factor=None)
    config = read_latent(plain, DEFAULTS, SIZES)
    taps = hf.count("linear_conv_kernel_dim", hf.count("short_conv_kernel_size", 4, least=2))
    bound = hf.number("kda_lower_bound", -5.0) if hf.flag("kda_safe_gate", True) else 0.0
    if bound > 0:
        raise hf.error("kda_lower_bound", "must be at most 0", "correct it")
    heads = hf.count("linear_num_heads", heads)
    delta = DeltaConfig(heads, heads, size, size, taps, by_channel=True, bound=bound)
    experts, count = read_experts(hf, ROUTING), len(config.layers)
    shared = hf.count("moe_shared_expert_intermediate_size", experts.ffn)
    experts = replace(experts, shared_ffn=experts.shared_ffn // experts.ffn * shared)
    config = with_experts(hf, config, experts, sparse_layers(hf, config, 2))
    routed = gate_bounds(hf, "expert_swiglu_limit_list", count)
    beside = gate_bounds(hf, "share_expert_swiglu_limit_list", count)
    layers = tuple(
        replace(
            layer,
            delta=delta if kind == LINEAR else None,
            experts=layer.experts and replace(layer.experts, clamp=routed[at]),
            gate=beside[at] if layer.experts else None,
        )
        for at, (layer, kind) in enumerate(zip(config.layers, _kinds(hf, count), strict=True))
    )
    attention = replace(config.attention, head_gates=True)
    return replace(config, attention=attention, layers=layers)


def _kinds(hf: HfConfig, count: int) -> tuple[str, ...]:
    every = hf.count("layer_group_size", 6)
    usual = tuple(LINEAR if number % every else FULL for number in range(1, count + 1))
    kinds = hf.names("layer_types") or usual
    if len(kinds) != count or FULL not in kinds or not {*kinds} <= {LINEAR, FULL}:
        raise hf.error(
            "layer_types",
            f"must name {count} layers, each {LINEAR} or {FULL}, one of them {FULL}",
            "correct it",
        )
    return kinds
