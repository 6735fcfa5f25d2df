"""Reads the configuration of DeepSeek-V2, V3, V3.2, R1 and models with the same architecture (Kimi
K2, GLM-4.7-Flash, GLM-5, Mistral 4). They have latent attention, in some models with an indexer,
routed experts in groups with a shared expert, and dense first layers."""

import math
from dataclasses import replace
from typing import Literal

from models.decoder_config import DecoderConfig, ExpertConfig, IndexConfig, LatentConfig
from models.glm4_moe import RoutingDefaults, check_groups, read_experts
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows
from models.hf_experts import count_experts, sparse_layers, with_experts
from models.ministral import with_query_growth, without_query_growth

V2_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=2048)
V3_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=4096)
FLASH_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=202752, norm_epsilon=1e-5)
V32_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=163840)
DSA_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=202752, norm_epsilon=1e-5)
V3_ROUTING = RoutingDefaults(256, 8, 2048, groups=8, groups_per_token=4, scaling=2.5)
MISTRAL_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=1048576)
# Defaults of transformers for fields missing in config.json.
SIZES = LatentConfig(query_rank=1536, rank=512, rope_dim=64, nope_dim=128, value_dim=128)
FLASH_SIZES = LatentConfig(query_rank=768, rank=512, rope_dim=64, nope_dim=192, value_dim=256)
DSA_SIZES = LatentConfig(query_rank=2048, rank=512, rope_dim=64, nope_dim=192, value_dim=256)
MISTRAL_SIZES = LatentConfig(query_rank=1024, rank=256, rope_dim=64, nope_dim=64, value_dim=128)
MISTRAL_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SARVAM_DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=4096)
SARVAM_SIZES = LatentConfig(query_rank=0, rank=512, rope_dim=64, nope_dim=128, value_dim=128)
SARVAM_ROUTING = RoutingDefaults(128, 8, 2048, scaling=2.5)
YOUTU_DEFAULTS = FamilyDefaults(kv_heads=16, context_tokens=131072, tied=True)
FLASH_ROUTING = RoutingDefaults(64, 4, 1536, scaling=1.8)
DSA_ROUTING = RoutingDefaults(256, 8, 2048, scaling=2.5)


def read_v3_config(hf: HfConfig) -> DecoderConfig:
    config = read_latent(hf, V3_DEFAULTS, SIZES)
    sparse = _behind_dense(hf, config, 3)
    return with_experts(hf, config, read_experts(hf, V3_ROUTING), sparse)


def read_flash_config(hf: HfConfig) -> DecoderConfig:
    config = read_latent(hf, FLASH_DEFAULTS, FLASH_SIZES)
    return with_experts(hf, config, read_experts(hf, FLASH_ROUTING), sparse_layers(hf, config, 1))


def read_sarvam_config(hf: HfConfig) -> DecoderConfig:
    hf.pass_over("q_head_dim")
    hf = hf.renamed({"num_shared_experts": "n_shared_experts"})
    config = read_latent(hf, SARVAM_DEFAULTS, SARVAM_SIZES)
    config = replace(config, left_aside=hf.count("num_nextn_predict_layers", 0, least=0))
    return with_experts(hf, config, read_experts(hf, SARVAM_ROUTING), sparse_layers(hf, config, 1))


def read_youtu_config(hf: HfConfig) -> DecoderConfig:
    hf.pass_over("embedding_initializer_range")
    return replace(read_latent(hf, YOUTU_DEFAULTS, SIZES), left_aside=0)


def read_v32_config(hf: HfConfig) -> DecoderConfig:
    config = _with_indexer(hf, read_latent(hf, V32_DEFAULTS, SIZES), 64, interleaved=False)
    return with_experts(hf, config, read_experts(hf, V3_ROUTING), sparse_layers(hf, config, 3))


def read_dsa_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of GLM-5 to 5.3. In 5.2 and 5.3 several layers share one selection."""
    config = _with_indexer(hf, read_latent(hf, DSA_DEFAULTS, DSA_SIZES), 32, interleaved=True)
    hf.pass_over("index_share_for_mtp_iteration")  # of drafts, changes no token
    kinds = _indexer_kinds(hf, len(config.layers))
    layers = zip(config.layers, kinds, strict=True)
    config = replace(config, layers=tuple([replace(one, selects=kind) for one, kind in layers]))
    return with_experts(hf, config, read_experts(hf, DSA_ROUTING), sparse_layers(hf, config, 3))


def _indexer_kinds(hf: HfConfig, layers: int) -> list[Literal["own", "shared"]]:
    pattern = hf.raw("index_topk_pattern")
    every, first = hf.count("index_topk_freq", 1), hf.count("index_skip_topk_offset", 2, least=0)
    kinds = hf.names("indexer_types")
    if kinds is None and isinstance(pattern, str | list | tuple) and pattern:
        kinds = tuple(
            [{"F": "full", "S": "shared"}.get(str(one).upper(), str(one)) for one in pattern]
        )
    elif kinds is None:
        kinds = tuple(
            ["shared" if max(at - first + 1, 0) % every else "full" for at in range(layers)]
        )
    if len(kinds) != layers or kinds[0] != "full" or not {*kinds} <= {"full", "shared"}:
        raise hf.error(
            "indexer_types",
            f"must be 'full' or 'shared' for each of {layers} layers, the first 'full'",
            "correct it",
        )
    return ["own" if kind == "full" else "shared" for kind in kinds]


def _with_indexer(
    hf: HfConfig, config: DecoderConfig, heads: int, *, interleaved: bool
) -> DecoderConfig:
    latent = config.attention.latent
    assert latent is not None
    types = hf.names("layer_types")
    if types and any(kind != "indexed_attention" for kind in types):
        raise hf.error("layer_types", "must be 'indexed_attention' in every layer", "correct it")
    index = IndexConfig(
        hf.count("index_n_heads", heads),
        hf.count("index_head_dim", 128),
        hf.count("index_topk", 2048),
        # GLM-5's published config.json has this field, which transformers does not read.
        hf.flag("indexer_rope_interleave", interleaved),
    )
    if not latent.query_rank or index.dim < latent.rope_dim:
        raise hf.error(
            "index_head_dim",
            f"must be at least qk_rope_head_dim={latent.rope_dim}, with a q_lora_rank",
            "correct it",
        )
    attention = replace(config.attention, latent=replace(latent, index=index))
    return replace(config, attention=attention)


def read_v2_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of DeepSeek-V2, which routes by softmax and scales expert weights
    without normalising them."""
    config = read_latent(hf, V2_DEFAULTS, SIZES)
    method = hf.raw("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise hf.error(
            "topk_method", "must be 'greedy' or 'group_limited_greedy'", "use another checkpoint"
        )
    for field, only in (("scoring_func", "softmax"), ("norm_topk_prob", False)):
        if hf.raw(field) not in (None, only) and not hf.sizes_only:
            raise hf.error(field, f"must be {only!r}", "other routing is not supported here")
    grouped = method == "group_limited_greedy"
    groups, kept = hf.count("n_group", 1), hf.count("topk_group", 1)
    ffn = hf.count("moe_intermediate_size", 1407)
    experts = ExpertConfig(
        count_experts(hf, 64),
        hf.count("num_experts_per_tok"),
        ffn,
        normalised=False,
        shared_ffn=ffn * hf.count("n_shared_experts", 2, least=0),
        groups=groups if grouped else 1,
        groups_per_token=kept if grouped else 1,
        scaling=hf.number("routed_scaling_factor", 1.0),
        wide=True,
    )
    sparse = _behind_dense(hf, config, 0)
    return with_experts(hf, config, check_groups(hf, experts), sparse)


def read_mistral4_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Mistral Small 4, which routes by softmax and scales queries by their
    position."""
    if hf.count("n_group", 1) != 1 and not hf.sizes_only:
        raise hf.error("n_group", "must be 1", "groups of experts are not supported here")
    hf.pass_over("topk_group")
    _check_turned_part(hf)
    plain, beta = without_query_growth(
        hf.changed(partial_rotary_factor=None), MISTRAL_ROPE, "partial_rotary_factor"
    )
    config = read_latent(plain, MISTRAL_DEFAULTS, MISTRAL_SIZES)
    config = with_query_growth(config, beta, plain)
    ffn = hf.count("moe_intermediate_size", 2048)
    experts = ExpertConfig(
        count_experts(hf, 128),
        hf.count("num_experts_per_tok", 4),
        ffn,
        hf.flag("norm_topk_prob", True),
        shared_ffn=ffn * hf.count("n_shared_experts", 1, least=0),
        scaling=hf.number("routed_scaling_factor", 1.0),
        wide=True,
    )
    sparse = _behind_dense(hf, config, 0)
    return with_experts(hf, config, check_groups(hf, experts), sparse)


def _behind_dense(hf: HfConfig, config: DecoderConfig, usual: int) -> list[bool]:
    dense = hf.count("first_k_dense_replace", usual, least=0)
    return [at >= dense for at in range(len(config.layers))]


def _check_turned_part(hf: HfConfig) -> None:
    given = hf.raw("rope_scaling") or hf.raw("rope_parameters")
    inner = given.get("partial_rotary_factor") if isinstance(given, dict) else None
    turned = hf.count("qk_rope_head_dim", MISTRAL_SIZES.rope_dim)
    whole = turned + hf.count("qk_nope_head_dim", MISTRAL_SIZES.nope_dim)
    part = hf.number("partial_rotary_factor", turned / whole) if inner is None else inner
    if not isinstance(part, int | float) or int(whole * part) != turned:
        raise hf.error(
            "qk_rope_head_dim",
            f"must be partial_rotary_factor={part} times {whole} values",
            "correct it",
        )


def read_latent(hf: HfConfig, defaults: FamilyDefaults, sizes: LatentConfig) -> DecoderConfig:
    if hf.raw("index_topk") is None or hf.fields.get("layer_types") is None:
        refuse_windows(hf, "this family uses full attention")
    hf.pass_over("qk_head_dim")
    rope_dim = hf.count("qk_rope_head_dim", sizes.rope_dim)
    one_step = "q_lora_rank" in hf.fields and hf.raw("q_lora_rank") is None
    latent = LatentConfig(
        0 if one_step else hf.count("q_lora_rank", sizes.query_rank, least=0),
        hf.count("kv_lora_rank", sizes.rank),
        rope_dim,
        hf.count("qk_nope_head_dim", sizes.nope_dim),
        hf.count("v_head_dim", sizes.value_dim),
    )
    _check_head_dim(hf, latent)
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf.changed(head_dim=rope_dim), defaults, qkv_bias=bias, output_bias=bias)
    attention = replace(
        config.attention,
        kv_heads=1,
        head_dim=latent.nope_dim + rope_dim,
        rope=replace(config.attention.rope, interleaved=hf.flag("rope_interleave", True)),
        latent=latent,
    )
    scale = attention.head_dim**-0.5 * _yarn_scale(hf) ** 2
    return replace(
        config,
        attention=replace(attention, scale=scale),
        mlp_bias=hf.flag("mlp_bias", False),
        left_aside=hf.count("num_nextn_predict_layers", 1, least=0),
    )


def _check_head_dim(hf: HfConfig, latent: LatentConfig) -> None:
    whole = latent.nope_dim + latent.rope_dim
    sizes = {latent.rope_dim, latent.nope_dim, latent.value_dim, whole}
    sizes.add(latent.rank + latent.rope_dim)  # of what is cached, in Sarvam's models
    if hf.count("head_dim", whole) not in sizes:
        raise hf.error("head_dim", f"must be one of {sorted(sizes)}", "correct or remove it")


def _yarn_scale(hf: HfConfig) -> float:
    given = hf.raw("rope_scaling") or hf.raw("rope_parameters")
    if not isinstance(given, dict) or (given.get("rope_type") or given.get("type")) in (
        None,
        "default",
    ):
        return 1.0
    factor, all_dim = given.get("factor"), given.get("mscale_all_dim")
    if not isinstance(factor, int | float) or not isinstance(all_dim, int | float) or factor <= 1:
        return 1.0
    return 0.1 * all_dim * math.log(factor) + 1.0
