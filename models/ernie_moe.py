"""Reads the configuration of ERNIE 4.5 with experts: dense ERNIE 4.5, and experts chosen by
corrected softmax scores, with shared ones, in the layers that three fields select."""

from dataclasses import replace

from models import llama
from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(
    kv_heads=4, context_tokens=131072, norm_epsilon=1e-5, rope_theta=500000.0, tied=True
)


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.require({"use_bias": False, "moe_gate": "topk", "moe_use_aux_free": True})
    hf.pass_over("moe_capacity", "use_moe")
    hf = hf.renamed({"moe_k": "num_experts_per_tok"})
    config = replace(llama.read_ernie_config(hf, DEFAULTS, None), left_aside=0, mtp_aside=True)
    if hf.number("moe_norm_min", 1e-12) > 1e-6:
        raise hf.error("moe_norm_min", "must be at most 1e-6", "use another checkpoint")
    ffn = hf.count("moe_intermediate_size", 1536)
    experts = ExpertConfig(
        count_experts(hf, 64),
        hf.count("num_experts_per_tok", 6),
        ffn,
        normalised=True,
        shared_ffn=ffn * hf.count("moe_num_shared_experts", 2, least=0),
        correction=True,
        wide=True,
        wide_router=True,
    )
    count, every = len(config.layers), hf.count("moe_layer_interval", 1)
    first, last = (
        hf.count(f"moe_layer_{end}_index", default, least=-1)
        for end, default in (("start", 1), ("end", -1))
    )
    last = count - 1 if last == -1 else last
    sparse = [(at + 1) % every == 0 and first <= at <= last for at in range(count)]
    return with_experts(hf, config, experts, sparse)
