"""Reads the configuration of LFM2. It has gated short convolutions in most layers, and attention
with norms on each head of q and k in the others. Some models have experts, chosen by corrected
sigmoid scores, behind dense first layers."""

from dataclasses import replace

from models.decoder_config import ConvolutionConfig, DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_experts import count_experts, sparse_layers, with_experts

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=128_000, rope_theta=1e6, tied=True)
FULL, CONVOLUTION = "full_attention", "conv"
# Fields that transformers does not read: duplicates of sizes under other names, and options of
# training.
_PASSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
    "use_pos_enc",
)


def read_config(hf: HfConfig) -> DecoderConfig:
    return replace(_read(hf), ffn=_ffn(hf))


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    config = _read(hf)
    experts = ExpertConfig(
        count_experts(hf, 32),
        hf.count("num_experts_per_tok", 4),
        hf.count("moe_intermediate_size", 1792),
        hf.flag("norm_topk_prob", True),
        scores="sigmoid",
        correction=hf.flag("use_expert_bias", True),
        scaling=hf.number("routed_scaling_factor", 1.0),
        not_zero=1e-6,
    )
    hf = hf.renamed({"num_dense_layers": "first_k_dense_replace"})
    return with_experts(hf, config, experts, sparse_layers(hf, config, 2))


def _read(hf: HfConfig) -> DecoderConfig:
    hf.pass_over(*_PASSED)
    if hf.raw("tie_embedding") is not None:
        hf = hf.changed(tie_word_embeddings=hf.flag("tie_embedding", True))
    config = read_decoder(hf.changed(layer_types=None), DEFAULTS, qk_norm="head")
    heads, kv_heads = config.attention.query_heads, config.attention.kv_heads
    if config.width % heads:
        raise hf.error("hidden_size", f"must be a multiple of the {heads} heads", "correct it")
    short = ConvolutionConfig(
        kv_heads, config.width, hf.count("conv_L_cache", 3, least=2), hf.flag("conv_bias", False)
    )
    layers = tuple(
        replace(layer, convolution=short if kind == CONVOLUTION else None)
        for layer, kind in zip(config.layers, _kinds(hf, len(config.layers)), strict=True)
    )
    return replace(config, layers=layers, norm_epsilon=hf.number("norm_eps", 1e-5))


def _kinds(hf: HfConfig, count: int) -> tuple[str, ...]:
    full = hf.counts("full_attn_idxs") if hf.has("full_attn_idxs") else tuple(range(count))
    kinds = hf.names("layer_types")
    if kinds is None:
        kinds = tuple(FULL if at in full else CONVOLUTION for at in range(count))
    if len(kinds) != count or any(kind not in (FULL, CONVOLUTION) for kind in kinds):
        raise hf.error(
            "layer_types", f"must list {FULL} or {CONVOLUTION} for {count}", "correct it"
        )
    if FULL not in kinds:
        raise hf.error(
            "layer_types",
            "must list a layer with attention",
            "models without one are not supported",
        )
    return kinds


def _ffn(hf: HfConfig) -> int:
    size = hf.count("block_ff_dim", hf.count("intermediate_size", 12288))
    factor, unit = hf.number("block_ffn_dim_multiplier", 1.0), hf.count("block_multiple_of", 256)
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if hf.raw("block_ffn_dim_multiplier") is None and "block_ffn_dim_multiplier" in hf.fields:
        return size
    return -(-int(factor * size) // unit) * unit
