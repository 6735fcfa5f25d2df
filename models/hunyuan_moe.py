"""Reads the configuration of Hunyuan-A13B: dense Hunyuan, and in every layer experts chosen by
softmax, with a shared one. In its published config.json, sizes of experts may be lists by layer."""

from models import llama
from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import HfConfig
from models.hf_experts import count_experts, with_experts

# Sizes that may be lists by layer.
_BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "use_mixed_mlp_moe": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_shared_expert": 1,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    hf = hf.changed(**{field: _of_all(hf, field) for field in _BY_LAYER})
    hf.require(_ONLY)
    hf.pass_over("moe_drop_tokens", "moe_random_routing_dropped_token")  # of training
    hf = hf.renamed({"moe_topk": "num_experts_per_tok"})
    config = llama.read_hunyuan_config(hf)
    ffn = hf.count("moe_intermediate_size", config.ffn)
    if ffn != config.ffn and not hf.sizes_only:
        raise hf.error("moe_intermediate_size", f"must be {config.ffn}", "use another checkpoint")
    total, chosen = count_experts(hf, 1), hf.count("num_experts_per_tok", 1)
    experts = ExpertConfig(total, chosen, ffn, True, shared_ffn=ffn, wide=True, wide_router=True)
    return with_experts(hf, config, experts)


def _of_all(hf: HfConfig, field: str) -> object:
    value = hf.raw(field)
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise hf.error(field, "must be the same in all layers", "use another checkpoint")
    return value[0]
