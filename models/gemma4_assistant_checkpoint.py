"""Reads the folder of a Gemma 4 assistant in its published form: config.json of `gemma4_assistant`
or `gemma4_unified_assistant`, and safetensors files with a text model without keys and values, two
projections, and the centroids of E2B and E4B."""

from dataclasses import replace

import numpy as np

from jdisagg.costs.model_geometry import AssistantSizes
from jdisagg.errors import CheckpointError
from models import gemma4
from models.decoder_config import DecoderConfig, LayerConfig
from models.drafter_config import AssistantConfig
from models.hf_config import HfConfig
from models.hf_fields import VISION
from models.safetensors_files import SafetensorsFiles

ASSISTANTS = {
    "gemma4_assistant": ("gemma4_text", gemma4.read_config),
    "gemma4_unified_assistant": ("gemma4_unified_text", gemma4.read_unified_config),
}
ORDERING = "masked_embedding.token_ordering"  # the tokens of each centroid in turn
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OF_KV = tuple(f"self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm"))


def read_assistant(
    hf: HfConfig, config: DecoderConfig, files: SafetensorsFiles
) -> tuple[DecoderConfig, SafetensorsFiles, dict[str, np.ndarray]]:
    """Returns a model's configuration with that of its assistant, the assistant's tensors, and
    those of them whose values are computed. Raises CheckpointError if the folder has no assistant
    in this form, or that of another model."""
    own, widths = _text_config(hf), hf.count("backbone_hidden_size")
    _check(
        hf,
        {
            f"the model must be a Gemma 4 ({', '.join(_FAMILIES)}), got {config.family}": (
                config.family in _FAMILIES
            ),
            f"backbone_hidden_size must be the model's {config.width}, got {widths}": (
                widths == config.width
            ),
            f"vocab_size must be the model's {config.vocabulary}, got {own.vocabulary}": (
                own.vocabulary == config.vocabulary
            ),
            f"heads must be sharded like the model's {config.kv_heads} kv heads, got"
            f" {own.kv_heads}": own.kv_heads == config.kv_heads,
        },
    )
    layers = tuple(_reading(layer, at, own, config, hf) for at, layer in enumerate(own.layers))
    centroids, chosen, clusters = _centroids(hf, own.vocabulary, files)
    if _HEAD in files.shapes():
        files = files.without((_EMBEDDING,))  # the model's own embedding is used
    assistant = AssistantConfig(replace(own, layers=layers), centroids, chosen)
    tensors = files.renamed(((_EMBEDDING, _HEAD),)).without(_OF_KV)
    return replace(config, assistant=assistant), tensors, clusters


def assistant_sizes(hf: HfConfig) -> AssistantSizes:
    """Reads the sizes of an assistant from its config.json alone."""
    if hf.raw("model_type") not in ASSISTANTS:
        raise hf.error(
            "model_type",
            f"must be one of {', '.join(ASSISTANTS)}",
            "other drafters are not counted",
        )
    own, model_width = _text_config(hf), hf.count("backbone_hidden_size")
    layers = sum(
        own.width * (2 * attention.query_heads * attention.head_dim + 3 * own.ffn)
        for attention in map(own.attention_of, own.layers)
    )
    return AssistantSizes(len(own.layers), layers + own.width * (3 * model_width + own.vocabulary))


_FAMILIES = tuple(family for family, _ in ASSISTANTS.values())


def _text_config(hf: HfConfig) -> DecoderConfig:
    """The layers have no source yet."""
    family, read = ASSISTANTS[str(hf.raw("model_type"))]
    inner = hf.raw("text_config")
    if not isinstance(inner, dict) or inner.get("model_type", family) != family:
        raise hf.error("text_config", f"must be of model_type {family!r}", "correct it")
    hf.pass_over("tie_word_embeddings", *VISION)  # a head is read if the files have one
    text = HfConfig({"model_type": family, **inner}, f"{hf.where}: text_config")
    count = text.count("num_hidden_layers")
    if text.count("num_kv_shared_layers", count, least=0) not in (0, count):
        raise text.error(
            "num_kv_shared_layers", f"must be num_hidden_layers={count}", "no layer has keys"
        )
    for field in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if text.raw(field):
            raise text.error(field, "must be 0 or false", "such assistants are not supported")
    text.pass_over("final_logit_softcapping")  # its logits are not capped
    plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    own = read(text.changed(**plain, final_logit_softcapping=None))
    text.refuse_unread()
    return own


def _reading(
    layer: LayerConfig, at: int, own: DecoderConfig, config: DecoderConfig, hf: HfConfig
) -> LayerConfig:
    """Returns the layer with its source: the model's last layer of the same kind with keys and
    values of its own."""
    sources = [
        index
        for index, other in enumerate(config.layers)
        if other.source is None and (other.window is None) == (layer.window is None)
    ]
    kind = "without a window" if layer.window is None else "with a window"
    _check(hf, {f"layer {at} is {kind}, and the model has no such layer": bool(sources)})
    source = config.layers[sources[-1]]
    ours, theirs = own.attention_of(layer), config.attention_of(source)
    parts = {
        "window": (layer.window, source.window),
        "kv heads": (ours.kv_heads, theirs.kv_heads),
        "head size": (ours.head_dim, theirs.head_dim),
        "rotary positions": (ours.rope, theirs.rope),
    }
    _check(
        hf,
        {
            f"layer {at} must have the {name} of the model's layer {sources[-1]}, {wanted}, got"
            f" {got}": got == wanted
            for name, (got, wanted) in parts.items()
        },
    )
    return replace(layer, source=sources[-1])


def _centroids(
    hf: HfConfig, vocabulary: int, files: SafetensorsFiles
) -> tuple[int, int, dict[str, np.ndarray]]:
    """Returns the number of centroids, that of those chosen, and the centroid of each token."""
    total, chosen = hf.count("num_centroids", 2048), hf.count("centroid_intermediate_top_k", 32)
    if not hf.flag("use_ordered_embeddings", False):
        return 0, 0, {}
    if vocabulary % total or chosen > total:
        raise hf.error(
            "num_centroids",
            f"must divide vocab_size={vocabulary}, and be at least"
            f" centroid_intermediate_top_k={chosen}",
            "correct it",
        )
    if ORDERING not in files.shapes():
        return total, chosen, {}  # reported with all missing tensors
    ordering = files.raw(ORDERING).reshape(-1)
    clusters = np.full(vocabulary, -1.0, np.float32)
    inside = (ordering >= 0) & (ordering < vocabulary)
    if len(ordering) == vocabulary and inside.all():
        clusters[ordering] = np.arange(vocabulary) // (vocabulary // total)
    _check(hf, {f"{ORDERING} must name each of {vocabulary} tokens once": clusters.min() >= 0})
    return total, chosen, {ORDERING: clusters}


def _check(hf: HfConfig, rules: dict[str, bool]) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise CheckpointError(
                f"Gemma 4 assistant {hf.where}: {rule}; give the assistant that was trained for"
                " this model"
            )
