"""Reads the configuration of MiniMax-Text-01 and M1. Most layers have lightning attention
(`models/lightning.py`). The others have softmax attention with rotary positions on a part of each
head. The experts are those of Mixtral. The residual connection adds each block's normalised input,
not its raw input."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig, LightningConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(
    kv_heads=8, context_tokens=4096 * 32, norm_epsilon=1e-5, rope_theta=1e6, partial_rotary=1.0
)
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = {0: LINEAR, 1: FULL}  # of `attn_type_list`
# Names of the residual factors in released checkpoints, and in transformers.
_FACTORS = {
    f"layernorm_{own}_{part}": f"{ours}_{part}_factor"
    for own, ours in (
        ("full_attention", "full_attn"),
        ("linear_attention", "linear_attn"),
        ("mlp", "mlp"),
    )
    for part in ("alpha", "beta")
}


def read_published_config(hf: HfConfig) -> DecoderConfig:
    if not hf.flag("postnorm", False) and not hf.sizes_only:
        raise hf.error("postnorm", "must be true", "residuals before the norm are not supported")
    shared = hf.raw("shared_intermediate_size")
    if any(shared if isinstance(shared, list) else (shared,)) and not hf.sizes_only:
        raise hf.error("shared_intermediate_size", "must be 0", "no release has a shared expert")
    hf.pass_over("shared_moe_mode", *_FACTORS)
    kinds = [KINDS.get(kind, "") for kind in hf.counts("attn_type_list")]
    named = {ours: hf.raw(own) for own, ours in _FACTORS.items() if hf.has(own)}
    return read_config(hf.changed(layer_types=kinds, **named))


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.pass_over("block_size")  # of the computation
    if hf.raw("sliding_window") and not hf.sizes_only:
        raise hf.error("sliding_window", "must be null", "windows are not supported here")
    if hf.has("rotary_dim") and not hf.has("partial_rotary_factor"):
        size = hf.count("hidden_size") // hf.count("num_attention_heads")
        part = hf.count("rotary_dim") / hf.count("head_dim", size)
        hf = hf.changed(partial_rotary_factor=part)
    config = read_decoder(hf.changed(layer_types=None), DEFAULTS)
    total, chosen = count_experts(hf, 8), hf.count("num_experts_per_tok", 2)
    experts = ExpertConfig(total, chosen, config.ffn, normalised=True)
    lightning = LightningConfig(config.attention.query_heads, config.attention.head_dim)
    fed = _factors(hf, "mlp")
    of_kind = {
        LINEAR: LayerConfig(lightning=lightning, factors=(_factors(hf, "linear_attn"), fed)),
        FULL: LayerConfig(factors=(_factors(hf, "full_attn"), fed)),
    }
    kinds = _kinds(hf, len(config.layers))
    config = replace(config, layers=tuple(of_kind[kind] for kind in kinds))
    return with_experts(hf, config, experts)


def _factors(hf: HfConfig, of: str) -> tuple[float, float]:
    return hf.number(f"{of}_alpha_factor", 1.0), hf.number(f"{of}_beta_factor", 1.0)


def _kinds(hf: HfConfig, count: int) -> tuple[str, ...]:
    kinds = hf.names("layer_types")
    if kinds is None:
        kinds = tuple(LINEAR if at % 2 else FULL for at in range(count))
    if len(kinds) != count or any(kind not in (LINEAR, FULL) for kind in kinds):
        raise hf.error(
            "layer_types", f"must give each of {count} layers {LINEAR} or {FULL}", "correct it"
        )
    if FULL not in kinds:
        raise hf.error(
            "layer_types", "must list a layer with attention", "models without one are not served"
        )
    return kinds
