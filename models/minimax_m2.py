"""Reads the configuration of MiniMax M2. It has experts in every layer, chosen by corrected sigmoid
scores, one norm over all heads of q and another over all heads of k, and rotary positions on a part
of each head."""

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=196608, rope_theta=5e6, partial_rotary=1.0)
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    hf.require(_ONLY)
    if any(kind != 1 for kind in hf.counts("attn_type_list")) and not hf.sizes_only:
        raise hf.error(
            "attn_type_list", "must be 1 throughout", "linear attention is not supported"
        )
    hf.pass_over("mlp_intermediate_size", "shared_moe_mode")
    if hf.has("rotary_dim") and not hf.has("partial_rotary_factor"):
        part = hf.count("rotary_dim") / hf.count("head_dim", 128)
        hf = hf.changed(partial_rotary_factor=part)
    config = read_decoder(hf, DEFAULTS, qk_norm="all", head_dim_default=128)
    total, chosen = count_experts(hf, 256), hf.count("num_experts_per_tok", 8)
    experts = ExpertConfig(
        total, chosen, config.ffn, normalised=True, scores="sigmoid", correction=True
    )
    return with_experts(hf, config, experts)
