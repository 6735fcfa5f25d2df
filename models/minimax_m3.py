"""Reads the configuration of MiniMax M3 (text part). In most layers, tokens attend to blocks of
positions that an indexer selects. The model has experts with a clamped gate, chosen by corrected
sigmoid scores, a shared expert, and dense first layers."""

from dataclasses import replace

from jdisagg.ops.activations import ClampedGate
from models.decoder_config import BlockIndexConfig, DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=524288, rope_theta=5e6, partial_rotary=1.0)
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "n_shared_experts": 1,
}
# Fields of the object `sparse_attention_config`, with their names at the top level.
_OF_SPARSE = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_SPARSE_ONLY: dict[str, object] = {
    "use_sparse_attention": True,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
}
_OF_LAYERS = ("sparse_attention_freq", "sparse_disable_index_value")


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.require(_ONLY)
    if hf.raw("hidden_act") == "swigluoai":
        hf = hf.changed(hidden_act=None)  # the clamped gate, which has fields of its own
    sparse = _sparse_fields(hf)
    config = read_decoder(hf, DEFAULTS, qk_norm="head", head_dim_default=128)
    attention, count = config.attention, len(config.layers)
    rotated = hf.count("rotary_dim", attention.rope.head_dim)
    if rotated < attention.rope.head_dim and not hf.sizes_only:
        raise hf.error(
            "rotary_dim", "must equal head_dim x partial_rotary_factor", "correct either"
        )
    gate = ClampedGate(hf.number("swiglu_limit", 7.0), hf.number("swiglu_alpha", 1.702))
    experts, index = _experts(hf, gate), _index(sparse, attention.kv_heads, attention.rope.head_dim)
    blocks = [kind == SPARSE for kind in _kinds(hf, sparse, count)]
    moe = hf.counts("moe_layer_freq") if isinstance(hf.raw("moe_layer_freq"), list) else ()
    named = hf.names("mlp_layer_types")
    fed = named or tuple("sparse" if each else "dense" for each in moe or (1,) * count)
    if len(fed) != count or any(kind not in ("sparse", "dense") for kind in fed):
        raise hf.error("mlp_layer_types", f"must list dense or sparse for {count}", "correct it")
    config = with_experts(hf, config, experts, [kind == "sparse" for kind in fed])
    layers = tuple(
        replace(layer, index=index if selects else None)
        for layer, selects in zip(config.layers, blocks, strict=True)
    )
    return replace(
        config,
        ffn=hf.count("dense_intermediate_size", 12288),
        layers=layers,
        gate=gate,
        norms_above_one=True,
        mtp_aside=True,
    )


def _experts(hf: HfConfig, gate: ClampedGate) -> ExpertConfig:
    return ExpertConfig(
        count_experts(hf, 128),
        hf.count("num_experts_per_tok", 4),
        hf.count("intermediate_size", 3072),
        normalised=True,
        shared_ffn=hf.count("shared_intermediate_size", 3072),
        scores="sigmoid",
        correction=True,
        scaling=hf.number("routed_scaling_factor", 2.0),
        clamp=gate,
    )


def _sparse_fields(hf: HfConfig) -> HfConfig:
    given = hf.raw("sparse_attention_config") or {}
    known = {*_OF_SPARSE, *_SPARSE_ONLY, *_OF_LAYERS}
    if not isinstance(given, dict) or not given.keys() <= known:
        raise hf.error(
            "sparse_attention_config", f"must have no fields but {', '.join(known)}", "correct it"
        )
    for field, only in _SPARSE_ONLY.items():
        if given.get(field) not in (None, only) and not hf.sizes_only:
            raise hf.error(
                "sparse_attention_config", f"must have {field}={only!r}", "use another checkpoint"
            )
    hf.pass_over(*_OF_SPARSE.values())
    fields = {ours: given.get(own, hf.fields.get(ours)) for own, ours in _OF_SPARSE.items()}
    layers = {name: given.get(name) for name in _OF_LAYERS}
    return HfConfig(fields | layers, f"{hf.where}: sparse_attention_config")


def _index(sparse: HfConfig, kv_heads: int, rotated: int) -> BlockIndexConfig:
    if sparse.count("index_n_heads", 4) != kv_heads:
        raise sparse.error(
            "index_n_heads", f"must equal num_key_value_heads={kv_heads}", "use another checkpoint"
        )
    index = BlockIndexConfig(
        sparse.count("index_head_dim", 128),
        sparse.count("index_block_size", 128),
        sparse.count("index_topk_blocks", 16),
        sparse.count("index_local_blocks", 1, least=0),
    )
    if index.dim < rotated or index.dim % kv_heads or not 0 < index.local <= index.top:
        raise sparse.error(
            "index_head_dim",
            f"must be a multiple of num_key_value_heads={kv_heads} and at least {rotated}, the"
            f" rotated values, with 1 to {index.top} local blocks",
            "use another checkpoint",
        )
    return index


def _kinds(hf: HfConfig, sparse: HfConfig, count: int) -> tuple[str, ...]:
    kinds, stated = hf.names("layer_types"), sparse.counts("sparse_attention_freq")
    if kinds is None:
        kinds = tuple(SPARSE if each else FULL for each in stated) or (FULL,) * count
    if len(kinds) != count or any(kind not in (FULL, SPARSE) for kind in kinds):
        raise hf.error("layer_types", f"must list {FULL} or {SPARSE} for {count}", "correct it")
    disabled = sparse.counts("sparse_disable_index_value")
    if any(kind == SPARSE and not each for kind, each in zip(kinds, disabled, strict=False)):
        raise hf.error(
            "sparse_attention_config",
            "must have sparse_disable_index_value in layers with an indexer",
            "values of an indexer are not supported",
        )
    return kinds
