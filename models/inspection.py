"""Determines, from a checkpoint folder or a config.json, whether jdisagg can serve the model. Reads
no weights.

The config is first read in full, as by a worker."""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from jdisagg.chat.formats import AnswerFormat
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import MESH_AXES, Layout
from jdisagg.layout.kv_spec import KVLayer, KVSpec
from jdisagg.ops.parameters import param_specs
from jdisagg.ops.quantized_weights import Weights
from models import orbax_checkpoint
from models.catalog import FAMILIES, read_config
from models.checkpoint import equal_stages, find_sources, open_files, stage_of_path, vision_files
from models.decoder import abstract_model
from models.decoder_config import DecoderConfig, LayerConfig
from models.draft_folder import with_drafter
from models.gemma4_assistant_checkpoint import ASSISTANTS
from models.hf_config import HfConfig
from models.parameter_tree import parameter_shapes
from models.quantized_files import QuantizedFiles
from models.safetensors_files import CheckpointTensors, SafetensorsFiles
from models.tokenizer import Tokenizer

_LISTED = 5


@dataclass
class Inspection:
    """`missing` lists the reasons why the model cannot be served; an empty list means that the
    model can be served. `config` and `geometry` are None for unsupported families, and if the sizes
    cannot be read."""

    where: str
    family: str
    quantization: str
    missing: list[str] = field(default_factory=list)
    config: DecoderConfig | None = None
    geometry: CostGeometry | None = None
    drafter: str = ""
    stored: str = "no weights were read"
    tokenizer: str = ""


def inspect(path: Path, draft: str = "") -> Inspection:
    """`draft`: folder of a separate drafter. Raises CheckpointError if `path` is neither a folder
    nor a file."""
    bare = path.is_file()
    hf = HfConfig.from_file(path) if bare else HfConfig.from_directory(path)
    found = Inspection(
        hf.where, str(hf.raw("model_type")), _quantization(hf.fields.get("quantization_config"))
    )
    if found.family in FAMILIES:
        _read_strictly(found, hf)
    else:
        text = hf.fields.get("text_config")  # the part of a multimodal model that would be served
        if isinstance(text, dict):
            hf = HfConfig({**hf.fields, **text, "model_type": found.family}, hf.where)
        drafts = found.family in ASSISTANTS
        of_drafter = " (a drafter: give --model its model, and --draft this folder)" * drafts
        found.missing = [f"the family {found.family!r}{of_drafter}", *hf.unread(known_only=True)]
    if not bare:
        _look_at_files(found, path, hf, draft)
    if draft and found.config is not None and not found.drafter:  # without safetensors files
        try:
            found.config = with_drafter(draft, found.config, SafetensorsFiles({}))[0]
            found.drafter = _drafter(found.config)
        except CheckpointError as error:
            found.missing += [error.message] if error.message not in found.missing else []
    return found


def layers_by_kind(config: DecoderConfig) -> list[tuple[str, int]]:
    return list(Counter(_kind(layer, config) for layer in config.layers).items())


def kv_by_kind(config: DecoderConfig, dtype: str) -> dict[str, int]:
    kept = zip(config.layers, config.kv_spec(dtype).layers, strict=False)
    return {
        _kind(layer, config): KVSpec((KVLayer(of_layer.components),), dtype).bytes_per_token
        for layer, of_layer in kept
    }


def bytes_per_device(
    config: DecoderConfig, layout: Layout, dtype: str, weights: Weights = ""
) -> tuple[int, int, int]:
    """Returns the bytes on one device of the weights, of one token's KV, and of one sequence's
    recurrent state. With several pipeline stages, returns the bytes of the largest stage. Raises
    LayoutError if the layout cannot shard the model."""
    config.check(layout)
    shape = layout.mesh_shape(config.kv_heads)
    sizes: dict[str, int] = dict(zip(MESH_AXES, shape, strict=True))
    model = abstract_model(config, dtype=dtype, tp=layout.tp, weights=weights, staged=layout.pp > 1)
    spec, shards = model.kv_spec, sizes["kv"]
    runs = equal_stages(model, layout.pp)
    stage_of, held = stage_of_path(runs), [0] * layout.pp
    for parameter, axes_of in zip(parameter_shapes(model), param_specs(model, layout), strict=True):
        parts = prod(sizes[axis] for axes in axes_of for axis in _tuple(axes))
        size = parameter.dtype.itemsize * (prod(parameter.shape) // parts)
        held[stage_of(parameter.path)] += size
    kv = max(
        KVSpec(spec.layers[run.start : run.stop], spec.dtype).bytes_per_device(shards)
        for run in runs
    )
    return max(held), kv, spec.state.bytes_per_device(shards)


def _read_strictly(found: Inspection, hf: HfConfig) -> None:
    try:
        found.config = read_config(hf)
    except CheckpointError as error:
        found.missing.append(error.message)
        loose = HfConfig(hf.fields, hf.where, sizes_only=True)
        try:
            found.config = read_config(loose)
        except CheckpointError:
            return
        found.missing += [text for text in loose.unread() if text not in error.message]
    found.geometry = found.config.cost_geometry(hf.where)


def _look_at_files(found: Inspection, directory: Path, hf: HfConfig, draft: str) -> None:
    if found.config is not None:
        try:
            seen = None
            if not orbax_checkpoint.is_orbax(directory):
                seen = vision_files(directory, found.config)
            if seen is None:
                found.config = replace(found.config, vision=None)
            found.stored = _stored(found, directory, hf, seen, draft)
        except CheckpointError as error:
            found.missing += [error.message] if error.message not in found.missing else []
    try:
        tokenizer = Tokenizer.from_directory(directory)
        chat = _chat(tokenizer)
        found.tokenizer = f"{tokenizer.vocabulary:,} tokens, ends {list(tokenizer.eos_ids)}, {chat}"
    except CheckpointError as error:
        found.tokenizer = f"none: {error.message}"


def _chat(tokenizer: Tokenizer) -> str:
    if not tokenizer.has_chat_template:
        return "no chat template"
    form = AnswerFormat.of(tokenizer.chat_template)
    if not form.shows_tools:
        return "a chat template without tools"
    calls = f"the parser {form.tools}" if form.tools else "no parser, so that they stay text"
    return f"a chat template, for tool calls {calls}"


def _stored(
    found: Inspection, directory: Path, hf: HfConfig, vision: CheckpointTensors | None, draft: str
) -> str:
    assert found.config is not None
    if orbax_checkpoint.is_orbax(directory):
        return "Orbax format (checked when it is loaded)"
    files = open_files(directory, hf)
    if draft:
        found.config, files = with_drafter(draft, found.config, files)
        found.drafter = _drafter(found.config)
    model = abstract_model(found.config)
    if unreadable := files.unreadable():
        raise CheckpointError(
            f"{len(unreadable)} tensors of an unsupported type: {', '.join(unreadable[:_LISTED])}"
        )
    find_sources(model, files, directory, vision)
    text = f"{files.total_bytes:,} bytes of {', '.join(sorted(files.kinds()))}"
    restored = ", quantized matrices restored while reading"
    return text + (restored if isinstance(files, QuantizedFiles) else "")


def _drafter(config: DecoderConfig) -> str:
    parts = parameter_shapes(abstract_model(config))
    count = sum(prod(part.shape) for part in parts if part.path[0] == "next_token")
    if (assistant := config.assistant) is None:
        return f"eagle, {count:,} parameters, with KV of its own"
    read = ", ".join(map(str, sorted(set(assistant.reads))))
    return (
        f"assistant, {len(assistant.reads)} layers of {assistant.config.width}, {count:,}"
        f" parameters, without KV: reads that of layers {read}"
    )


def _kind(layer: LayerConfig, config: DecoderConfig) -> str:
    experts = layer.experts
    fed = f"{experts.experts_per_token} of {experts.experts} experts" if experts else "dense"
    if layer.parts == "ffn":
        return f"{fed}, nothing else" if experts else "dense feed-forward, nothing else"
    seen = f"window of {layer.window:,}" if layer.window else "full attention"
    if layer.recurrent:
        seen = "gated delta net" if layer.delta else "Mamba-2"
        seen = "short convolution" if layer.convolution else seen
        seen = "lightning attention" if layer.lightning else seen
        seen = "Kimi Delta Attention" if layer.delta and layer.delta.by_channel else seen
    elif latent := config.attention.latent:
        if latent.index:
            shared = " of an earlier layer" if layer.selects == "shared" else ""
            seen = f"attention to {latent.index.top:,} selected positions{shared},"
        seen += f" to latents of {latent.rank} + {latent.rope_dim}"
    if layer.index:
        seen = f"attention to {layer.index.top} blocks of {layer.index.block} positions"
    if any(each.attention for each in config.layers):
        attention = config.attention_of(layer)
        seen += f" with {attention.kv_heads} kv heads of {attention.head_dim}"
        fed += " beside a dense block" if experts and experts.beside else ""
    return f"{seen}, nothing else" if layer.parts == "mixer" else f"{seen}, {fed}"


def _quantization(stated: object) -> str:
    if not isinstance(stated, dict):
        return "none"
    if isinstance(own := stated.get("quantization"), dict):
        stated = own | stated  # ModelOpt's hf_quant_config.json
    keys = ("quant_method", "quant_algo", "format", "bits", "weight_block_size")
    return " ".join(str(stated[key]) for key in keys if key in stated) or "of unknown kind"


def _tuple(axes: object) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,) if isinstance(axes, str) else ()
