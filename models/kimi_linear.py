"""Reads the configuration of Kimi Linear. It has Kimi Delta Attention (`models/gated_delta.py`) in
most layers, latent attention without rotary positions in the others, and DeepSeek-V3's experts."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, DeltaConfig, LatentConfig
from models.deepseek import read_latent
from models.glm4_moe import RoutingDefaults, read_experts
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_experts import sparse_layers, with_experts

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=1048576, norm_epsilon=1e-5)
SIZES = LatentConfig(query_rank=0, rank=512, rope_dim=64, nope_dim=128, value_dim=128)
ROUTING = RoutingDefaults(256, 8, 1024, scaling=2.446)
LINEAR, FULL = "linear_attention", "full_attention"
# Names of DeepSeek-V3's fields in Kimi Linear's config.json.
NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Fields of the object `linear_attn_config`, with their names at the top level.
OF_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
OF_LAYERS = {"kda_layers": LINEAR, "full_attn_layers": FULL}


def read_config(hf: HfConfig) -> DecoderConfig:
    if not hf.flag("mla_use_nope", True) and not hf.sizes_only:
        raise hf.error("mla_use_nope", "must be true", "rotary positions are not supported here")
    scores = hf.raw("moe_router_activation_func")
    if scores not in (None, "sigmoid"):
        raise hf.error("moe_router_activation_func", "must be 'sigmoid'", "use another checkpoint")
    hf = hf.renamed(NAMES)
    if not hf.flag("use_grouped_topk", True) and hf.count("n_group", 1) > 1 and not hf.sizes_only:
        raise hf.error("use_grouped_topk", "must be true", "use a checkpoint with one group")
    for field in ("rope_scaling", "rope_parameters"):
        if hf.raw(field) and not hf.sizes_only:
            raise hf.error(field, "must be null", "rotary positions are not supported here")
    plain = hf.changed(layer_types=None)
    if hf.fields.get("head_dim") == hf.count("hidden_size") // hf.count("num_attention_heads"):
        plain = plain.changed(head_dim=None)  # published so; the parts of a head give its size
    config = read_latent(plain, DEFAULTS, SIZES)
    delta = _delta(hf)
    layers = tuple(
        replace(layer, rotated=False, delta=delta if kind == LINEAR else None)
        for layer, kind in zip(config.layers, _kinds(hf, len(config.layers)), strict=True)
    )
    config = replace(
        config, layers=layers, left_aside=hf.count("num_nextn_predict_layers", 0, least=0)
    )
    return with_experts(hf, config, read_experts(hf, ROUTING), sparse_layers(hf, config, 1))


def _linear_fields(hf: HfConfig) -> dict[str, object]:
    given = hf.raw("linear_attn_config")
    known = (*OF_LINEAR, *OF_LAYERS)
    if given is None:
        return {}
    if not isinstance(given, dict) or any(name not in known for name in given):
        raise hf.error(
            "linear_attn_config", f"must have no fields but {', '.join(known)}", "correct it"
        )
    return given


def _delta(hf: HfConfig) -> DeltaConfig:
    inner = _linear_fields(hf)
    hf.pass_over(*OF_LINEAR.values())
    sizes = HfConfig(
        {name: hf.fields.get(outer) for name, outer in OF_LINEAR.items()} | inner,
        f"{hf.where}: linear_attn_config",
    )
    heads, size = sizes.count("num_heads", 32), sizes.count("head_dim", 128)
    taps = sizes.count("short_conv_kernel_size", 4, least=2)
    return DeltaConfig(heads, heads, size, size, taps, by_channel=True, rank=size)


def _kinds(hf: HfConfig, count: int) -> tuple[str, ...]:
    kinds = hf.names("layer_types")
    field = "linear_attn_config" if kinds is None else "layer_types"
    if kinds is None:
        inner = _linear_fields(hf)
        of_layer: dict[object, str] = {}
        for name, kind in OF_LAYERS.items():
            listed = inner.get(name)
            of_layer |= dict.fromkeys(listed if isinstance(listed, list) else (), kind)
        kinds = tuple(of_layer.get(number, "") for number in range(1, count + 1))
        stated = sum(len(found) for name in OF_LAYERS if isinstance(found := inner.get(name), list))
        if not len(of_layer) == stated == count:
            kinds = ()
    if len(kinds) != count or any(kind not in (LINEAR, FULL) for kind in kinds):
        raise hf.error(field, f"must give each of {count} layers one of two kinds", "correct it")
    if FULL not in kinds:
        raise hf.error(field, "must list a layer with full attention", "correct it")
    return kinds
