"""Maps each parameter to its tensors in a Hugging Face checkpoint. `models/hf_sources.py` reads
slices of these tensors.

Each expert may have its own tensors, or one fused tensor may hold all experts. In a fused tensor
gate and up are adjacent, or interleaved if the experts have biases (gpt-oss)."""

from collections.abc import Mapping
from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.drafter_config import EagleConfig
from models.hf_recurrent import convolution_source, delta_source, lightning_source, mamba_source
from models.hf_sources import (
    Columns,
    EverySecond,
    Fused,
    HeadRows,
    OneDimension,
    PerExpert,
    Rows,
    SomeRows,
    Source,
    Whole,
)
from models.parameter_tree import ParameterShape

Shapes = Mapping[str, tuple[int, ...]]

STEM = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
# Prefixes of tensor names that a family spells differently, and the usual prefixes. One that begins
# with a dot is a part of a name.
RENAMED = {
    "nemotron_h": (
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
    ),
    "sarvam_moe": (
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".dense.", ".o_proj."),
    ),
    "bailing_hybrid": (
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".dense.", ".o_proj."),
        (".final_layernorm.", ".shared_head.norm."),
    ),
    "lfm2": (("model.embedding_norm.", "model.norm."),),
    "lfm2_moe": (("model.embedding_norm.", "model.norm."),),
    "lfm3": (("model.embedding_norm.", "model.norm."),),
}
# For each parameter of a layer, its tensor names in the supported families. If a layer has several
# of them, the last one applies.
LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm.weight": (
        "input_layernorm.weight",
        "norm.weight",
        "attention_layernorm.weight",
        "operator_norm.weight",
    ),
    "attention_post_norm.weight": (
        "post_attention_layernorm.weight",
        "post_self_attn_layernorm.weight",
        "post_operator_norm.weight",
    ),
    "mlp_norm.weight": (
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "norm.weight",
        "feedforward_layernorm.weight",
        "ffn_norm.weight",
        "pre_mlp_layernorm.weight",
    ),
    "mlp_post_norm.weight": (
        "post_mlp_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "post_ffn_norm.weight",
    ),
    "attention.q.kernel": ("self_attn.q_proj.weight", "mixer.q_proj.weight"),
    "attention.q.bias": ("self_attn.q_proj.bias",),
    "attention.k.kernel": ("self_attn.k_proj.weight", "mixer.k_proj.weight"),
    "attention.k.bias": ("self_attn.k_proj.bias",),
    "attention.v.kernel": ("self_attn.v_proj.weight", "mixer.v_proj.weight"),
    "attention.v.bias": ("self_attn.v_proj.bias",),
    "attention.o.kernel": (
        "self_attn.o_proj.weight",
        "mixer.o_proj.weight",
        "self_attn.out_proj.weight",
    ),
    "attention.o.bias": ("self_attn.o_proj.bias",),
    "attention.q_norm.weight": (
        "self_attn.q_norm.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.query_layernorm.weight",
        "self_attn.q_layernorm.weight",
    ),
    "attention.k_norm.weight": (
        "self_attn.k_norm.weight",
        "self_attn.key_layernorm.weight",
        "self_attn.k_layernorm.weight",
    ),
    "attention.gate.kernel": ("self_attn.g_proj.weight", "self_attn.gate_proj.weight"),
    "attention.sinks": ("self_attn.sinks", "self_attn.attention_sink_bias"),
    "attention.q_a.kernel": ("self_attn.q_a_proj.weight",),
    "attention.q_a.bias": ("self_attn.q_a_proj.bias",),
    "attention.q_b.kernel": ("self_attn.q_b_proj.weight",),
    "attention.kv_a.kernel": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.kv_a.bias": ("self_attn.kv_a_proj_with_mqa.bias",),
    "attention.kv_norm.weight": ("self_attn.kv_a_layernorm.weight",),
    "attention.index.q.kernel": (
        "self_attn.indexer.wq_b.weight",
        "self_attn.indexer.q_proj.weight",
        "self_attn.index_q_proj.weight",
    ),
    "attention.index.k.kernel": (
        "self_attn.indexer.wk.weight",
        "self_attn.indexer.k_proj.weight",
        "self_attn.index_k_proj.weight",
    ),
    "attention.index.q_norm.weight": (
        "self_attn.indexer.q_norm.weight",
        "self_attn.index_q_norm.weight",
    ),
    "attention.index.k_norm.weight": (
        "self_attn.indexer.k_norm.weight",
        "self_attn.index_k_norm.weight",
    ),
    "attention.index.k_norm.bias": ("self_attn.indexer.k_norm.bias",),
    "attention.index.weights": ("self_attn.indexer.weights_proj.weight",),
    # transformers saves the dense blocks of Kimi Linear under the name of its experts.
    "mlp.gate.kernel": (
        "mlp.gate_proj.weight",
        "block_sparse_moe.gate_proj.weight",
        "feed_forward.w1.weight",
        "feed_forward.gate_proj.weight",
    ),
    "mlp.gate.bias": ("mlp.gate_proj.bias",),
    "mlp.up.kernel": (
        "mlp.up_proj.weight",
        "mixer.up_proj.weight",
        "block_sparse_moe.up_proj.weight",
        "feed_forward.w3.weight",
        "feed_forward.up_proj.weight",
    ),
    "mlp.up.bias": ("mlp.up_proj.bias", "mixer.up_proj.bias"),
    "mlp.down.kernel": (
        "mlp.down_proj.weight",
        "shared_mlp.output_linear.weight",
        "mixer.down_proj.weight",
        "block_sparse_moe.down_proj.weight",
        "feed_forward.w2.weight",
        "feed_forward.down_proj.weight",
    ),
    "mlp.act.alpha_p": ("mlp.act_fn.alpha_p",),
    "mlp.act.alpha_n": ("mlp.act_fn.alpha_n",),
    "mlp.act.beta": ("mlp.act_fn.beta",),
    "mlp.act.eps": ("mlp.act_fn.eps",),
    "mlp.down.bias": ("mlp.down_proj.bias", "mixer.down_proj.bias"),
    "mlp.router": (
        "mlp.gate.weight",
        "block_sparse_moe.gate.weight",
        "mlp.router.gate.weight",
        "mlp.router.weight",
        "block_sparse_moe.router.weight",
        "block_sparse_moe.router.layer.weight",
        "mixer.gate.weight",
        "router.proj.weight",
        "feed_forward.router.weight",
        "feed_forward.gate.weight",
        "moe.gate.weight",
        "mlp.gate.wg.weight",
    ),
    "mlp.router_scale": ("router.scale",),
    "mlp.expert_scale": ("router.per_expert_scale",),
    "mlp.dense_norm.weight": ("post_feedforward_layernorm_1.weight",),
    "mlp.routed_norm.weight": ("pre_feedforward_layernorm_2.weight",),
    "mlp.routed_post_norm.weight": ("post_feedforward_layernorm_2.weight",),
    "layer_scale": ("layer_scalar",),
    "inputs.gate.kernel": ("per_layer_input_gate.weight",),
    "inputs.out.kernel": ("per_layer_projection.weight",),
    "inputs.norm.weight": ("post_per_layer_input_norm.weight",),
    "mlp.router_bias": ("mlp.router.bias",),
    "mlp.correction": (
        "mlp.gate.e_score_correction_bias",
        "block_sparse_moe.e_score_correction_bias",
        "mlp.e_score_correction_bias",
        "mlp.expert_bias",
        "mlp.experts.e_score_correction_bias",
        "mlp.gate.expert_bias",
        "mlp.moe_statics.e_score_correction_bias",
        "feed_forward.expert_bias",
        "mixer.gate.e_score_correction_bias",
        "block_sparse_moe.gate.e_score_correction_bias",
        "moe.router_bias",
    ),
    "mlp.shared.gate.kernel": (
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_mlp.gate_proj.weight",
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "feed_forward.shared_expert.gate_proj.weight",
        "share_expert.gate_proj.weight",
    ),
    "mlp.shared.up.kernel": (
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_mlp.up_proj.weight",
        "block_sparse_moe.shared_experts.up_proj.weight",
        "feed_forward.shared_expert.up_proj.weight",
        "mixer.shared_experts.up_proj.weight",
        "share_expert.up_proj.weight",
    ),
    "mlp.shared.down.kernel": (
        "mlp.shared_expert.down_proj.weight",
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_mlp.down_proj.weight",
        "block_sparse_moe.shared_experts.down_proj.weight",
        "feed_forward.shared_expert.down_proj.weight",
        "shared_mlp.output_linear.weight",
        "mixer.shared_experts.down_proj.weight",
        "share_expert.down_proj.weight",
    ),
    "mlp.shared.up.bias": ("mixer.shared_experts.up_proj.bias",),
    "mlp.shared.down.bias": ("mixer.shared_experts.down_proj.bias",),
    "mlp.shared_gate": ("mlp.shared_expert_gate.weight",),
    "mlp.narrow.kernel": ("mixer.fc1_latent_proj.weight",),
    "mlp.narrow.bias": ("mixer.fc1_latent_proj.bias",),
    "mlp.widen.kernel": ("mixer.fc2_latent_proj.weight",),
    "mlp.widen.bias": ("mixer.fc2_latent_proj.bias",),
}
# Parameters of a next-token layer, which is stored after the model's last layer (DeepSeek-V3).
NEXT_TOKEN = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "join.kernel": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
# Prefixes of its tensor names in families that spell it differently (Qwen3-Next), without "mtp.".
MTP_NAMES = {
    "layers.0.": "",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
}
PREFIX = "draft."  # of the tensors of a separate drafter, among those of the model
EAGLE = {
    "fuse.kernel": "fc.weight",
    "embedding_norm.weight": "midlayer.input_layernorm.weight",
    "hidden_norm.weight": "midlayer.hidden_norm.weight",
    "mlp_norm.weight": "midlayer.post_attention_layernorm.weight",
    "norm.weight": "norm.weight",
    "targets": "d2t",
}
ASSISTANT = {
    "into.kernel": "pre_projection.weight",
    "out.kernel": "post_projection.weight",
    "norm.weight": "model.norm.weight",
    "centroids.kernel": "masked_embedding.centroids.weight",
    "clusters": "masked_embedding.token_ordering",
}
EXPERTS: dict[str, tuple[str, ...]] = {
    "mlp.gate": (
        "mlp.experts.{expert}.gate_proj.weight",
        "block_sparse_moe.experts.{expert}.w1.weight",
        "feed_forward.experts.{expert}.w1.weight",
    ),
    "mlp.up": (
        "mlp.experts.{expert}.up_proj.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
        "feed_forward.experts.{expert}.w3.weight",
        "mixer.experts.{expert}.up_proj.weight",
    ),
    "mlp.down": (
        "mlp.experts.{expert}.down_proj.weight",
        "block_sparse_moe.experts.{expert}.w2.weight",
        "feed_forward.experts.{expert}.w2.weight",
        "mixer.experts.{expert}.down_proj.weight",
    ),
}
# Tensors that are stored in float32, whatever the model's type.
IN_FLOAT32 = (
    *LAYER["mlp.correction"],
    *LAYER["attention.index.weights"],
    *LAYER["attention.index.k_norm.weight"],
    *LAYER["attention.index.k_norm.bias"],
)
# Tensors of the inputs of all layers, and the norm that all layers share.
TOKEN_TABLES = "model.embed_tokens_per_layer.weight"
TOKEN_CONTEXTS = "model.per_layer_model_projection.weight"
TOKEN_NORM = "model.per_layer_projection_norm.weight"
# Tensors of several parameters: queries, keys and values; gate and up.
LATENT_HEADS = "self_attn.kv_b_proj.weight"
FUSED_QKV = ("self_attn.qkv_proj.weight", "self_attn.query_key_value.weight")
FUSED_GATE_UP = (
    "mlp.gate_up_proj.weight",
    "shared_mlp.input_linear.weight",
    "mlp.shared_experts.gate_up_proj.weight",
)
# Tensors that hold one matrix (gate, up or down) of all experts.
STACKED_EXPERTS = {
    "mlp.gate": "moe.gate_proj.weight",
    "mlp.up": "moe.up_proj.weight",
    "mlp.down": "moe.down_proj.weight",
}
FUSED_EXPERTS_GATE_UP = (
    "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.input_linear.weight",
    "experts.gate_up_proj",
    "feed_forward.experts.gate_up_proj",
)
FUSED_EXPERTS_DOWN = (
    "mlp.experts.down_proj",
    "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.output_linear.weight",
    "experts.down_proj",
    "feed_forward.experts.down_proj",
)


def find_source(parameter: ParameterShape, config: DecoderConfig, found: Shapes) -> Source:
    """`found` holds the shapes of the checkpoint's tensors, which show the format in use."""
    path, shape = parameter.path, parameter.shape
    if path[0] in ("stem", "last_stem"):
        return _stem_source(parameter, config.vocabulary)
    if path[0] == "next_token":
        return _next_token_source(parameter, config, found)
    prefix, key = f"model.layers.{path[1]}.", ".".join(str(part) for part in path[2:])
    # A dense block in parallel with experts has the tensor names of a dense block, and the experts
    # have those of experts alone.
    key = key.replace("mlp.dense.", "mlp.").replace("mlp.routed.", "mlp.")
    if config.layers[int(path[1])].delta and key.startswith("attention."):
        return delta_source(prefix, key, config, found, parameter)
    if config.layers[int(path[1])].mamba and key.startswith("attention."):
        return mamba_source(prefix, key, config, found, parameter)
    if config.layers[int(path[1])].convolution and key.startswith("attention."):
        return convolution_source(prefix, key, config.width, parameter)
    if (lightning := config.layers[int(path[1])].lightning) and key.startswith("attention."):
        return lightning_source(int(path[1]), key, lightning, len(config.layers), parameter)
    apart = any(prefix + name in found for name in LAYER["attention.gate.kernel"])
    gated = config.attention.gated and not apart
    if gated and key in ("attention.q.kernel", "attention.gate.kernel"):
        return _gated_queries(prefix + LAYER["attention.q.kernel"][0], key, config, parameter)
    if key in LAYER:
        fused = _fused_matrix(prefix, key, config, found, parameter)
        if fused is not None:
            return fused
        names = [prefix + name for name in LAYER[key]]
        name = next((name for name in reversed(names) if name in found), names[0])
        if key == "mlp.correction" and name in found and len(found[name]) == 2:  # ERNIE: [1, E]
            return OneDimension(name, (1, *shape), 1)
        return _matrix(name, shape, parameter.transposed or key.endswith("norm.weight"))
    if key.startswith("inputs."):
        return _token_source(key, int(path[1]), config, parameter)
    if key in ("attention.keys", "attention.values"):
        return _latent_heads(prefix + LATENT_HEADS, key, config)
    layer = config.layers[int(path[1])]
    if layer.experts and layer.experts.biased:
        return _biased_experts(prefix, key, shape)
    experts, into, out = shape
    if (name := prefix + STACKED_EXPERTS[key]) in found:
        return Fused(name, (experts, out, into))
    if key == "mlp.down" and (name := _first(prefix, FUSED_EXPERTS_DOWN, found)):
        return _fused_experts(name, (experts, out, into), 0, found, config.family)
    if key in ("mlp.gate", "mlp.up") and (name := _first(prefix, FUSED_EXPERTS_GATE_UP, found)):
        first = out if key == "mlp.up" else 0
        return _fused_experts(name, (experts, 2 * out, into), first, found, config.family)
    patterns = [prefix + pattern for pattern in EXPERTS[key]]
    pattern = next((each for each in patterns if each.format(expert=0) in found), patterns[0])
    return PerExpert(pattern, experts, (out, into))


def _token_source(key: str, layer: int, config: DecoderConfig, parameter: ParameterShape) -> Source:
    size, whole = config.token_inputs, len(config.layers) * config.token_inputs
    if key == "inputs.table":
        return Columns(TOKEN_TABLES, (config.vocabulary, whole), layer * size)
    if key == "inputs.context.kernel":
        shape, flipped = (whole, config.width), not parameter.transposed
        return Rows(TOKEN_CONTEXTS, shape, layer * size, flipped)
    return Whole(TOKEN_NORM, (size,))


def _next_token_source(parameter: ParameterShape, config: DecoderConfig, found: Shapes) -> Source:
    number, (_, first, *rest) = len(config.layers), parameter.path
    if config.eagle is not None:
        return _eagle_source(parameter, config.eagle)
    if config.assistant is not None:
        return _assistant_source(parameter, config.vocabulary, found)
    if first == "layer":
        stored = replace(config, layers=config.stored_layers)
        return find_source(replace(parameter, path=("layers", number, *rest)), stored, found)
    name = NEXT_TOKEN[".".join(map(str, (first, *rest)))]
    return _matrix(f"model.layers.{number}.{name}", parameter.shape, parameter.transposed)


def _eagle_source(parameter: ParameterShape, eagle: EagleConfig) -> Source:
    key, shape = ".".join(map(str, parameter.path[1:])), parameter.shape
    if key == "head.kernel":
        width = shape[1] if parameter.transposed else shape[0]
        whole = eagle.vocabulary, width
        return Whole(f"{PREFIX}lm_head.weight", whole, flipped=not parameter.transposed)
    name = EAGLE[key] if key in EAGLE else f"midlayer.{LAYER[key][0]}"
    return _matrix(PREFIX + name, shape, parameter.transposed)


def _assistant_source(parameter: ParameterShape, vocabulary: int, found: Shapes) -> Source:
    _, first, *rest = parameter.path
    key, shape = ".".join(map(str, (first, *rest))), parameter.shape
    if key == "head":
        return Whole(f"{PREFIX}lm_head.weight", (vocabulary, shape[1]))
    if first != "layers":
        return _matrix(PREFIX + ASSISTANT[key], shape, parameter.transposed)
    number, *rest = rest
    key = ".".join(map(str, rest))
    names = [f"{PREFIX}model.layers.{number}.{name}" for name in LAYER[key]]
    name = next((name for name in reversed(names) if name in found), names[0])
    return _matrix(name, shape, parameter.transposed)


def _fused_matrix(
    prefix: str, key: str, config: DecoderConfig, found: Shapes, parameter: ParameterShape
) -> Rows | SomeRows | None:
    attention = config.attention_of(config.layers[int(parameter.path[1])])
    flipped = not parameter.transposed
    q = attention.query_heads * attention.head_dim
    kv = attention.kv_heads * attention.head_dim
    part, _, kind = key.rpartition(".")
    first = {"attention.q": 0, "attention.k": q, "attention.v": q + kv}.get(part)
    if first is not None and (name := _first(prefix, FUSED_QKV, found)):
        if kind == "kernel":
            return Rows(name, (q + 2 * kv, config.width), first, flipped)
        rows = tuple(range(first, first + parameter.shape[0]))
        return SomeRows(name.removesuffix("weight") + "bias", (q + 2 * kv,), rows)
    name = _first(prefix, FUSED_GATE_UP, found)
    if name and key.endswith((".gate.kernel", ".up.kernel")):
        ffn = parameter.shape[0 if parameter.transposed else 1]
        row = ffn if key.endswith(".up.kernel") else 0
        return Rows(name, (2 * ffn, config.width), row, flipped)
    return None


def _first(prefix: str, names: tuple[str, ...], found: Shapes) -> str:
    return next((prefix + name for name in names if prefix + name in found), "")


def _gated_queries(
    name: str, key: str, config: DecoderConfig, parameter: ParameterShape
) -> SomeRows:
    heads, size = config.attention.query_heads, config.attention.head_dim
    first = size if key == "attention.gate.kernel" else 0
    rows = tuple(2 * size * head + first + row for head in range(heads) for row in range(size))
    return SomeRows(name, (2 * heads * size, config.width), rows, not parameter.transposed)


def _latent_heads(name: str, key: str, config: DecoderConfig) -> HeadRows:
    attention, latent = config.attention, config.attention.latent
    assert latent is not None
    rows = latent.nope_dim + latent.value_dim
    first = latent.nope_dim if key == "attention.values" else 0
    return HeadRows(name, (attention.query_heads * rows, latent.rank), rows, first)


def _fused_experts(
    name: str, shape: tuple[int, int, int], first: int, found: Shapes, family: str
) -> Fused:
    inward = (shape[0], shape[2], shape[1])
    if found[name] == inward and (inward != shape or family == "llama4_text"):
        return Fused(name, inward, first, inward=True)
    return Fused(name, shape, first)


def _biased_experts(prefix: str, key: str, shape: tuple[int, ...]) -> Source:
    half, _, bias = key.removeprefix("mlp.").partition("_")
    end = "_bias" if bias else ""
    if half == "down":
        return Whole(prefix + FUSED_EXPERTS_DOWN[0] + end, shape)
    both = (*shape[:-1], 2 * shape[-1])
    return EverySecond(prefix + FUSED_EXPERTS_GATE_UP[0] + end, both, 1 if half == "up" else 0)


def _stem_source(parameter: ParameterShape, vocabulary: int) -> Source:
    key, shape = ".".join(str(part) for part in parameter.path[1:]), parameter.shape
    if key == "embedding":
        return Whole(STEM[key], (vocabulary, shape[1]))
    if key == "head.kernel":
        width = shape[1] if parameter.transposed else shape[0]
        return Whole(STEM[key], (vocabulary, width), flipped=not parameter.transposed)
    return Whole(STEM[key], shape)


def _matrix(name: str, shape: tuple[int, ...], transposed: bool) -> Source:
    if len(shape) < 2 or transposed:
        return Whole(name, shape)
    return Whole(name, shape[::-1], flipped=True)
