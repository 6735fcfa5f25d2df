"""Loads a checkpoint directory into any parallel layout. Each device's slices are read directly
from the files.

A directory holds config.json and either safetensors files in Hugging Face format or the Orbax
format that `jdisagg convert` writes. One error lists all missing, unknown and wrongly shaped
tensors. If config.json sets `tie_word_embeddings` but the checkpoint has an output head that
differs from the embedding, the head is used, as in transformers."""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jdisagg.errors import CheckpointError, ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.reshard_plan import Box, box_of
from jdisagg.model_api import Device
from jdisagg.ops.device_layout import aligned_empty
from jdisagg.ops.parameters import StageOf, layout_meshes, weight_formats
from jdisagg.ops.quantized_weights import Weights
from jdisagg.scheduler.blocks import StageCut, stage_layers
from models import orbax_checkpoint
from models.catalog import read_config
from models.decoder import Decoder, abstract_model
from models.decoder_config import DecoderConfig
from models.draft_folder import with_drafter
from models.hf_config import HfConfig
from models.hf_sources import Source, Whole
from models.hf_vision import OfVision, vision_source
from models.hf_weights import MTP_NAMES, NEXT_TOKEN, RENAMED, STEM, find_source
from models.kv_scales import KVScales, find_kv_scales
from models.parameter_tree import ParameterShape, parameter_shapes, path_name, with_arrays
from models.quantization_config import stored_quantization
from models.quantized_files import QuantizedFiles
from models.quantized_sources import planned_reads, quantized_sources
from models.safetensors_files import CheckpointTensors, SafetensorsFiles, renamed, text_names

# Tensors that no parameter uses: buffers that some checkpoints store, scales of the inputs of
# attention, and decays in the model's type. Scales of KV are read separately (`kv_scales.py`).
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias|[qkv]_scale|prob_scale|slope_rate"
    r"|(query|key|diagonal)_decay)$"
)
_LISTED = 8
_EMBEDDING, _HEAD = STEM["embedding"], STEM["head.kernel"]
_OF_BODY = ("embed_tokens.", "layers.", "norm.")
_COMPARED_ROWS = 4096
_log = logging.getLogger(__name__)


@runtime_checkable
class ReadsAhead(Protocol):
    """Interface of tensors that come from another process."""

    def expect(self, reads: Sequence[tuple[str, Box]]) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. Its parameters are global arrays on `mesh`, which has the axes ("dp", "kv",
    "rep"), and on the `later` meshes of further pipeline stages."""

    model: Decoder
    mesh: Mesh
    layout: Layout
    later: tuple[Mesh, ...] = ()

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return self.mesh, *self.later


def go_on() -> None: ...


def load_config(directory: str | Path) -> DecoderConfig:
    return read_config(HfConfig.from_directory(Path(directory)))


def load_kv_scales(directory: str | Path) -> tuple[KVScales, str]:
    """Returns the KV scales: the numbers by which keys and values are divided before they are
    stored in fp8. Also returns the source of the scales, which is "" if all scales are one by
    default."""
    directory = Path(directory)
    hf = HfConfig.from_directory(directory)
    files = None if orbax_checkpoint.is_orbax(directory) else open_files(directory, hf)
    return find_kv_scales(directory, read_config(hf), files)


def load_model(
    directory: str | Path,
    layout: Layout,
    devices: Sequence[Device],
    *,
    dtype: str = "float32",
    platform: str | None = None,
    weights: Weights = "",
    kv_dtype: str = "",
    next_token: bool = False,
    draft: str = "",
    cut: StageCut | None = None,
    tensors: CheckpointTensors | None = None,
    images: bool = False,
    check: Callable[[], None] = go_on,
) -> LoadedModel:
    """Loads a model. Blocks until all weights are read.

    Args:
        devices: Devices to place the weights on. Their number must equal the layout's.
        platform: JAX platform, which determines whether weight matrices are stored transposed. None
            means the devices' platform.
        weights: Type to which the layers' matrices are quantized while they are read. Empty means
            no quantization.
        kv_dtype: Type in which KV is stored (`KEPT_DTYPES`). Empty means `dtype`.
        draft: Folder of an EAGLE-3 head or a Gemma 4 assistant, which then drafts tokens.
        cut: Function from the model's KV spec to the layers of each pipeline stage. None divides
            the layers equally.
        tensors: Tensors to read instead of the folder's. The configuration and the vision encoder
            are still read from the folder.
        check: Function that is called before each parameter. It raises an error to abort the
            loading.

    Raises:
        CheckpointError: The files do not fit the config, or are unreadable.
        LayoutError: A size of the model is not divisible by the layout's number of shards.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")
    directory = Path(directory)
    hf = HfConfig.from_directory(directory)
    config = read_config(hf)
    files, orbax = tensors, orbax_checkpoint.is_orbax(directory)
    served = bool(getattr(files, "parameters", False))
    if files is not None and not served:
        files = _Renamed(files, _stored_names(files.shapes(), hf))
    elif files is None and orbax:
        _check_orbax(directory, layout, weights)
    elif files is None:
        files = open_files(directory, hf)
    seen = vision_files(directory, config) if images and not orbax and not served else None
    if not seen and not (served and images and _offers_vision(files)):
        config = replace(config, vision=None)
    if files is not None:
        config, files = _with_drafts(config, files, served, draft, next_token)
        config = replace(config, tied=_is_tied(config, files, served, directory))
    config.check(layout)
    meshes = layout_meshes(layout, config.kv_heads, devices)
    mesh, staged = meshes[0], layout.pp > 1
    platform = platform or devices[0].platform
    abstract = partial(abstract_model, dtype=dtype, platform=platform, tp=layout.tp, staged=staged)
    scales = _kv_scales(directory, config, files) if kv_dtype and not served else None
    model = abstract(config)
    placed = partial(weight_formats, mesh=mesh, layout=layout, later=_stage_of(model, meshes, cut))
    if files is None:
        model = orbax_checkpoint.restore(directory, model, mesh, layout)
    elif served:
        config = replace(config, kv_dtype=kv_dtype) if kv_dtype else config
        model = abstract(config, weights=weights)
        sources = _served_sources(model, files)
        model = _fill(model, sources, files, directory, placed(model), check)
    else:
        sources = find_sources(model, files, directory, seen)
        if weights:
            read = zip(parameter_shapes(model), sources, strict=True)
            by_path = {parameter.path: (parameter, source) for parameter, source in read}
            model = abstract(config, weights=weights)
            sources = quantized_sources(model, by_path, files)
        model = _fill(model, sources, files, directory, placed(model), check)
    if scales is not None:
        kept = abstract(replace(config, kv_dtype=kv_dtype), weights=weights)
        model = _with_kv_scales(model, kept, scales, placed(kept))
    return LoadedModel(model, mesh, layout, meshes[1:])


def _check_orbax(directory: Path, layout: Layout, weights: Weights) -> None:
    if layout.pp > 1:
        raise ConfigError(
            f"layout {layout}: {directory} is in Orbax format, which is not loaded for several"
            " pipeline stages; give the Hugging Face directory, or use pp=1"
        )
    if weights:
        raise ConfigError(
            f"weights={weights}: {directory} is in Orbax format, and weights are quantized only"
            " while safetensors files are read; give the Hugging Face directory"
        )


def _with_drafts(
    config: DecoderConfig, files: CheckpointTensors, served: bool, draft: str, next_token: bool
) -> tuple[DecoderConfig, CheckpointTensors]:
    if draft and served:
        raise ConfigError(
            f"draft={draft}: weights that another process offers have no drafter; set"
            " speculate to ngram or off"
        )
    if draft:
        return with_drafter(draft, config, files)
    if next_token:
        prefix, found = f"model.layers.{len(config.layers)}.", files.shapes()
        stored = all(prefix + name in found for name in NEXT_TOKEN.values())
        stored |= served and any(name.startswith("next_token/") for name in found)
        config = replace(config, next_token=stored and config.can_draft)
    return config, files


def _stage_of(model: Decoder, meshes: tuple[Mesh, ...], cut: StageCut | None) -> StageOf | None:
    if len(meshes) == 1:
        return None
    stage = stage_of_path(cut(model.kv_spec) if cut else equal_stages(model, len(meshes)))
    return lambda path: meshes[stage(path)]


def equal_stages(model: Decoder, stages: int) -> tuple[range, ...]:
    """A stage begins at a layer with KV."""
    spec, every = model.kv_spec, len(model.kv_spec.layers)
    return stage_layers(spec.cuts, every, every, stages)


def stage_of_path(layers: Sequence[range]) -> Callable[[tuple[Any, ...]], int]:
    """The embedding is on the first stage; norm and head are on the last."""
    of_layer = [stage for stage, run in enumerate(layers) for _ in run]

    def stage_of(path: tuple[Any, ...]) -> int:
        if path[0] == "layers":
            return of_layer[int(path[1])]
        return 0 if path[0] in ("stem", "vision") else len(layers) - 1

    return stage_of


def _kv_scales(directory: Path, config: DecoderConfig, files: CheckpointTensors | None) -> KVScales:
    scales, origin = find_kv_scales(directory, config, files)
    _log.info("%s: KV scales: %s", directory, origin or "none (jdisagg calibrate_kv creates them)")
    return scales


def _with_kv_scales(
    read: Decoder, kept: Decoder, scales: KVScales, shardings: Sequence[Any]
) -> Decoder:
    leaves = jax.tree.leaves(nnx.state(read))
    of_path = {part.path: leaf for part, leaf in zip(parameter_shapes(read), leaves, strict=True)}
    arrays = []
    for part, sharding in zip(parameter_shapes(kept), shardings, strict=True):
        if part.path not in of_path:
            first, layer, *_, component = part.path
            # The KV of the drafting layer has no calibrated scales, because drafts do not change
            # output tokens. An assistant reads the KV of the model's layers.
            of_layer, assistant = {}, kept.config.assistant
            if first == "layers":
                source = kept.kv_spec.layers[int(layer)].source
                of_layer = scales[int(layer) if source is None else source]
            elif assistant is not None:
                of_layer = scales[assistant.reads[int(part.path[2])]]
            values = of_layer.get(str(component), np.ones(part.shape)).astype(part.dtype)
            of_path[part.path] = jax.make_array_from_callback(
                part.shape, sharding, values.__getitem__
            )
        arrays.append(of_path[part.path])
    return with_arrays(kept, arrays)


def open_files(directory: Path, hf: HfConfig) -> CheckpointTensors:
    """The text part of a multimodal model appears under the tensor names of a text model. Quantized
    matrices appear as float matrices under their unquantized names."""
    files = SafetensorsFiles.from_directory(directory)
    files = files.named(_stored_names(files.shapes(), hf))
    stated = stored_quantization(hf)
    return files if stated is None else QuantizedFiles(files, stated, str(directory))


def _stored_names(stored: Iterable[str], hf: HfConfig) -> dict[str, str]:
    """Returns the usual names of the tensors that a checkpoint has under the names `stored`, each
    with its stored name."""
    family = str(hf.fields.get("model_type"))
    beginnings = [*RENAMED.get(family, ())]
    if family.startswith(("qwen3_next", "qwen3_5")):
        layer = f"model.layers.{hf.count('num_hidden_layers')}."
        beginnings += [(f"mtp.{name}", layer + usual) for name, usual in MTP_NAMES.items()]
    names = {renamed(name, beginnings): old for name, old in text_names(stored).items()}
    if _EMBEDDING in names:
        return names
    body = [(part, f"model.{part}") for part in _OF_BODY]  # saved without the head
    return {renamed(name, body): old for name, old in names.items()}


class _Renamed:
    """Offered tensors under other names. `stored` has their offered names by these."""

    def __init__(self, files: CheckpointTensors, stored: Mapping[str, str]) -> None:
        self._files, self._stored = files, stored
        self.total_bytes = files.total_bytes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._files.shapes()
        return {name: shapes[old] for name, old in self._stored.items()}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return self._files.kinds(but=but)

    def unreadable(self) -> list[str]:
        return self._files.unreadable()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._files.read(self._stored[name], index)

    def expect(self, reads: Sequence[tuple[str, Box]]) -> None:
        if isinstance(self._files, ReadsAhead):
            self._files.expect([(self._stored[name], box) for name, box in reads])


def _is_tied(
    config: DecoderConfig, files: CheckpointTensors, served: bool, directory: Path
) -> bool:
    if served:
        return path_name(("head", "kernel")) not in files.shapes()
    if _HEAD not in files.shapes() and (directory / "modules.json").is_file():
        return True  # an embedding model's head is not used
    if not config.tied or not _has_own_head(files):
        return config.tied
    _log.warning(
        "%s: tie_word_embeddings is set, but lm_head.weight differs from the embedding and is used"
        " as the output head",
        directory,
    )
    return False


def _has_own_head(files: CheckpointTensors) -> bool:
    shapes = files.shapes()
    if _HEAD not in shapes or _EMBEDDING not in shapes:
        return False
    if shapes[_HEAD] != shapes[_EMBEDDING]:
        return True  # `_check` reports the wrong shape
    for first in range(0, shapes[_HEAD][0], _COMPARED_ROWS):
        rows = (slice(first, first + _COMPARED_ROWS), slice(None))
        if not np.array_equal(files.read(_HEAD, rows), files.read(_EMBEDDING, rows)):
            return True
    return False


def vision_files(directory: Path, config: DecoderConfig) -> CheckpointTensors | None:
    """Returns None if `config` has no vision encoder, or if the folder lacks one of its tensors,
    such as a folder that was saved as a text-only model."""
    vision = config.vision
    if vision is None:
        return None
    try:
        files = SafetensorsFiles.from_directory(directory).vision_part()
    except CheckpointError as error:  # a folder of the configuration alone
        _log.warning("images are not read: %s", error.message)
        return None
    found, unreadable = files.shapes(), files.unreadable()
    whole = abstract_model(config)
    needed = {
        name: shape
        for part in parameter_shapes(whole)
        if part.path[0] == "vision"
        for name, shape in vision_source(part, vision).needs().items()
    }
    lacking = [name for name, shape in needed.items() if found.get(name) != shape]
    if not lacking and not unreadable:
        return files
    _log.warning(
        "%s: images are not read: %s of the vision encoder's tensors are missing, of another shape"
        " or quantized (%s)",
        directory,
        len(lacking or unreadable),
        ", ".join((lacking or unreadable)[:_LISTED]),
    )
    return None


def _offers_vision(files: CheckpointTensors | None) -> bool:
    return files is not None and any(name.startswith("vision/") for name in files.shapes())


def find_sources(
    model: Decoder,
    files: CheckpointTensors,
    directory: Path,
    vision: CheckpointTensors | None = None,
) -> list[Source]:
    """Returns where each parameter is stored in the files, in the order of `jax.tree.leaves`.
    Raises CheckpointError, which lists the tensors that are missing, unknown or wrongly shaped."""
    found, seen = files.shapes(), model.config.vision
    sources: list[Source] = []
    for part in parameter_shapes(model):
        if part.path[0] == "vision":
            assert seen is not None and vision is not None
            sources.append(OfVision(vision_source(part, seen), vision.read))
        else:
            sources.append(find_source(part, model.config, found))
    _check(sources, files, model.config, directory)
    return sources


def _served_sources(model: Decoder, files: CheckpointTensors) -> list[Source]:
    found, sources, wrong = files.shapes(), [], []
    for part in parameter_shapes(model):
        name = path_name(part.path)
        shape = found.pop(name, ())
        apart = [pair for pair in zip(shape, part.shape, strict=False) if pair[0] != pair[1]]
        padded = len(apart) == 1 and min(apart[0]) >= model.vocabulary
        if len(shape) != len(part.shape) or (apart and not padded):
            wrong.append(f"{name} is {shape or 'missing'}, not {part.shape}")
        sources.append(Whole(name, shape))
    wrong += [f"{name} is not known" for name in found]
    if wrong:
        raise CheckpointError(
            f"the worker that offers its weights serves them in another form: {_listed('', wrong)};"
            " update from a checkpoint's folder"
        )
    return sources


def _fill(
    model: Decoder,
    sources: Sequence[Source],
    files: CheckpointTensors,
    directory: Path,
    shardings: Sequence[Any],
    check: Callable[[], None],
) -> Decoder:
    parameters = parameter_shapes(model)
    total = sum(part.dtype.itemsize * int(np.prod(part.shape)) for part in parameters)
    arrays = []
    if isinstance(files, ReadsAhead):
        shapes = [part.shape for part in parameters]
        files.expect(planned_reads(sources, shapes, shardings, files.shapes()))
    with tqdm(
        total=total,
        desc=f"loading {directory.name}",
        unit="B",
        unit_scale=True,
        delay=2,
        file=sys.stderr,
    ) as progress:
        for parameter, source, sharding in zip(parameters, sources, shardings, strict=True):
            check()
            arrays.append(_read_array(source, files, parameter, sharding))
            progress.update(arrays[-1].nbytes)
    return with_arrays(model, jax.block_until_ready(arrays))  # no tensor is read afterwards


def _read_array(
    source: Source, files: CheckpointTensors, parameter: ParameterShape, sharding: Any
) -> jax.Array:
    shape = parameter.shape
    read: dict[Box, np.ndarray] = {}  # shared by replicas

    def one_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        parts = index or (slice(None),) * len(shape)
        bounds = box_of(parts, shape)
        if bounds not in read:
            view = source.read(files.read, tuple(slice(*bound) for bound in bounds))
            read[bounds] = _to_put(view, parameter.dtype)
        return read[bounds]

    return jax.make_array_from_callback(shape, sharding, one_shard)


def _to_put(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Read-only contiguous views, of files and other arrays, are copied, because JAX could alias
    them. Other views are returned without a copy, because JAX copies transposed views itself,
    several times as fast as numpy."""
    if view.dtype == dtype and (view.flags.writeable or not view.flags.c_contiguous):
        return view
    own = aligned_empty(view.shape, dtype)
    np.copyto(own, view, casting="unsafe")
    return own


def _check(
    sources: Sequence[Source], files: CheckpointTensors, config: DecoderConfig, directory: Path
) -> None:
    found = files.shapes()
    needed = {name: shape for source in sources for name, shape in source.needs().items()}
    missing = [f"{name} {shape}" for name, shape in needed.items() if name not in found]
    misshapen = [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in needed.items()
        if name in found and found[name] != shape
    ]
    ignored = {_HEAD} if config.tied else set()  # equal to the embedding
    extra = [
        f"{name} {shape}"
        for name, shape in found.items()
        if name not in needed
        and name not in ignored
        and not _HARMLESS.search(name)
        and not _behind_the_last(name, config)
        and not _of_a_shared_layer(name, config)
        and not _adds_nothing(name, files)
    ]
    wrong = [
        _listed(*part)
        for part in (("missing", missing), ("of another shape", misshapen), ("not known", extra))
        if part[1]
    ]
    if wrong:
        raise CheckpointError(
            f"{directory}: the tensors do not fit its config.json ({config.family}):"
            f" {'; '.join(wrong)}; use the config.json that the weights were saved with"
        )


def _adds_nothing(name: str, files: CheckpointTensors) -> bool:
    return name.endswith("_proj.bias") and not np.any(files.read(name, (slice(None),)))


def _behind_the_last(name: str, config: DecoderConfig) -> bool:
    if config.mtp_aside and re.search(r"(^|\.)mtp[._]", name):
        return True
    number = re.match(r"model\.layers\.(\d+)\.", name)
    last = len(config.layers)
    return number is not None and last <= int(number[1]) < last + config.left_aside


def _of_a_shared_layer(name: str, config: DecoderConfig) -> bool:
    """Whether the tensor is of an indexer, or of keys and values, of a layer that uses those of an
    earlier layer."""
    number = re.match(r"model\.layers\.(\d+)\.self_attn\.(indexer|[kv]_(proj|norm))\.", name)
    if number is None or int(number[1]) >= len(config.layers):
        return False
    layer = config.layers[int(number[1])]
    return layer.selects == "shared" if number[2] == "indexer" else layer.source is not None


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED])}{more}"
