"""Tensors of a directory of safetensors files, read slice by slice from a memory map as numpy
arrays.

This module parses the headers itself, because the numpy API of the safetensors package has no
bfloat16 and detects a truncated file only when a tensor is read."""

import json
import logging
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jdisagg.errors import CheckpointError

_log = logging.getLogger(__name__)

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Data types of quantized checkpoints, which only `raw` can read.
_OTHERS = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_KNOWN = _DTYPES | _OTHERS
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_LISTED = 8
# Prefixes of tensor names in transformers 5, and in earlier versions.
_TEXT = (("model.language_model.", "model."), ("language_model.", ""), ("thinker.", ""))
_EYES = re.compile(
    r"^(talker|code2wav)\.|^(thinker\.)?(model\.)?(visual|vision_tower|multi_modal_projector|mm_projector|embed_vision"
    r"|vision_embedder|audio_tower|embed_audio|vision_model|patch_merge_mlp|vit_large_projector)\."
)
_LARGEST_HEADER_BYTES = 100_000_000
# Exceptions that a malformed JSON header or index can raise.
_UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a stored tensor: bytes [start, end) of the file `path`."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class CheckpointTensors(Protocol):
    """Interface to the tensors of a checkpoint by name. `read` returns values of a float type."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        """Returns the set of stored data types, as named by safetensors (F32, BF16, ...). Ignores
        tensors with a name that ends with one of `but`."""
        ...

    def unreadable(self) -> list[str]:
        """Lists tensors of a type that `read` does not support, with the type."""
        ...

    @property
    def total_bytes(self) -> int: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a slice of a tensor. The array may be a view into a memory map that is valid only
        while this object exists."""
        ...


class SafetensorsFiles:
    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = dict(tensors)
        self._maps: dict[Path, np.memmap] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> "SafetensorsFiles":
        """Reads all headers. An index, if present, gives the file of each tensor. Other copies of a
        tensor, and tensors that are not in the index, are ignored. A tensor that its file lacks is
        missing only if the model needs it. Without an index, the directory must have
        model.safetensors or a complete set of shards."""
        weight_map = _weight_map(directory)
        if weight_map is None:
            parts = [_read_header(directory / file) for file in _files_without_index(directory)]
            return cls({name: tensor for part in parts for name, tensor in part.items()})
        headers = {file: _read_header(directory / file) for file in set(weight_map.values())}
        held = {n: headers[file][n] for n, file in weight_map.items() if n in headers[file]}
        if absent := sorted(weight_map.keys() - held.keys()):
            _log.warning(
                "%s does not hold tensor %r, which %s places there (%d tensors in all)",
                directory / weight_map[absent[0]],
                absent[0],
                _INDEX,
                len(absent),
            )
        ignored = sum(map(len, headers.values())) - len(held)
        if ignored:
            _log.warning("%s: ignored %d tensors that its index does not name", directory, ignored)
        return cls(held)

    @classmethod
    def of_file(cls, path: Path) -> "SafetensorsFiles":
        return cls(_read_header(path))

    def vision_part(self) -> "SafetensorsFiles":
        return SafetensorsFiles(
            {
                name.removeprefix("model."): tensor
                for name, tensor in self._tensors.items()
                if _EYES.match(name)
            }
        )

    def named(self, stored: Mapping[str, str]) -> "SafetensorsFiles":
        """Returns a view of some tensors under other names. `stored` has their names by these."""
        return SafetensorsFiles({name: self._tensors[old] for name, old in stored.items()})

    def renamed(self, beginnings: Sequence[tuple[str, str]]) -> "SafetensorsFiles":
        """Returns a view of the tensors under the names that `renamed` gives them."""
        return self.named({renamed(name, beginnings): name for name in self._tensors})

    def without(self, endings: tuple[str, ...]) -> "SafetensorsFiles":
        """Returns a view without the tensors whose names end with one of `endings`."""
        named = self._tensors.items()
        return SafetensorsFiles({name: each for name, each in named if not name.endswith(endings)})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return {x.kind for name, x in self._tensors.items() if not (but and name.endswith(but))}

    def unreadable(self) -> list[str]:
        return [
            f"{name} ({tensor.kind})"
            for name, tensor in self._tensors.items()
            if tensor.kind not in _DTYPES
        ]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.end - tensor.start for tensor in self._tensors.values())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a view of the slice in the stored dtype, valid while this object lives."""
        return self._view(name, _DTYPES)[index]

    def raw(self, name: str) -> np.ndarray:
        """Returns a view of a whole tensor, also of quantized types. Raises CheckpointError for
        unknown types."""
        return self._view(name, _KNOWN)

    def kind(self, name: str) -> str:
        return self._tensors[name].kind

    def _view(self, name: str, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
        tensor = self._tensors[name]
        if tensor.kind not in dtypes:
            raise CheckpointError(
                f"tensor {name!r} of {tensor.path.name} has dtype {tensor.kind}, not one of"
                f" {', '.join(dtypes)}, and config.json's quantization_config states no supported"
                " form; use the original checkpoint"
            )
        if tensor.path not in self._maps:
            self._maps[tensor.path] = np.memmap(tensor.path, dtype=np.uint8, mode="r")
        data = self._maps[tensor.path][tensor.start : tensor.end]
        return data.view(dtypes[tensor.kind]).reshape(tensor.shape)


def renamed(name: str, beginnings: Sequence[tuple[str, str]]) -> str:
    """Applies replacements of prefixes, and of parts that begin with a dot, one after the other."""
    for old, new in beginnings:
        if old.startswith("."):
            name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns the names of the tensors of a multimodal model's text part in a text-only model, each
    with its stored name. A text part that was saved as a text-only model may have kept its names,
    so the names decide, not the config. Names of a text-only model stay as they are."""
    return {_text_name(name): name for name in stored if not _EYES.match(name)}


def _text_name(name: str) -> str:
    for theirs, ours in _TEXT:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _weight_map(directory: Path) -> dict[str, str] | None:
    index_path = directory / _INDEX
    if not index_path.is_file():
        return None
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        weight_map = dict(index["weight_map"])
        files = set(weight_map.values())
        missing = [x for x in sorted(files) if not (directory / x).is_file()]
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{index_path} has no readable 'weight_map' ({error}); fetch it again"
        ) from error
    if len(missing) == len(files) and (directory / _SINGLE).is_file():
        _log.warning("%s is ignored: none of its files are there; reading %s", index_path, _SINGLE)
        return None
    if missing:
        raise CheckpointError(
            f"{index_path} names files that are missing: {', '.join(missing)}; fetch them"
        )
    return weight_map


def _files_without_index(directory: Path) -> list[str]:
    if (directory / _SINGLE).is_file():
        return [_SINGLE]
    found = {path.name for path in directory.glob("model-*") if _SHARD.fullmatch(path.name)}
    counts = sorted({name.removesuffix(".safetensors").rpartition("-")[2] for name in found})
    if not counts:
        raise CheckpointError(
            f"{directory} holds neither {_SINGLE} nor {_INDEX}; other weight formats are not"
            " supported"
        )
    if len(counts) > 1:
        raise CheckpointError(
            f"{directory} holds no {_INDEX} and shards of several sets (of {', '.join(counts)});"
            " remove all but one set"
        )
    count, digits = int(counts[0]), len(counts[0])
    names = [f"model-{i:0{digits}}-of-{counts[0]}.safetensors" for i in range(1, count + 1)]
    if missing := [name for name in names if name not in found]:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise CheckpointError(
            f"{directory} holds no {_INDEX}, and of {count} shards these are missing:"
            f" {', '.join(missing[:_LISTED])}{more}; fetch them"
        )
    return names


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= min(size - 8, _LARGEST_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({size} bytes); fetch it again"
            )
        header_bytes = file.read(length)
    try:
        header = json.loads(header_bytes)
        tensors = {
            name: _stored(path, 8 + length, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} has no valid safetensors header ({error}); fetch it again"
        ) from error
    needed = max((tensor.end for tensor in tensors.values()), default=0)
    if needed > size:
        raise CheckpointError(
            f"{path} is truncated: its header needs {needed} bytes, the file has {size}; fetch it"
            " again"
        )
    return tensors


def _stored(path: Path, base: int, entry: Mapping[str, object]) -> StoredTensor:
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("a tensor's entry needs dtype, shape and data_offsets")
    dimensions = tuple(int(size) for size in shape)
    start, end = (base + int(offset) for offset in offsets)
    if kind in _KNOWN and end - start != _KNOWN[kind].itemsize * int(np.prod(dimensions)):
        raise ValueError(f"{end - start} bytes do not hold {kind} of shape {dimensions}")
    return StoredTensor(path, kind, dimensions, start, end)
