"""Reads and writes KV caches as safetensors files with a header.

The tensors `layers.<index>.<component>` [K, T, H] are not sharded and keep the dtypes of the KV, so
a file can be loaded under any layout. The metadata field `jdisagg_kv` is the header in JSON, and
`jdisagg_kv_sha256` is a digest of the header and all tensors. Files are written atomically. Files
are not encrypted, although KV reveals much of the prompt. Loading executes no code from a file."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
import safetensors
from safetensors.numpy import save_file

from jdisagg.engine.research.kv_blocks import KVPlace
from jdisagg.engine.research.kv_cache import KVCache, NextToken, blocks_of_layers
from jdisagg.errors import InvalidRequestError, KVFileError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec

VERSION = 1
_HEADER, _DIGEST = "jdisagg_kv", "jdisagg_kv_sha256"
_CODES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
}  # safetensors' names of the dtypes of `layout.kv_spec.DTYPE_BYTES`


class KVHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of a KV file. `fingerprint` is the fingerprint of the model
    (engine/fingerprint.py)."""

    version: int
    fingerprint: str
    spec: KVSpec
    first_position: int
    token_ids: tuple[int, ...]
    chosen: NextToken | None = None


class _Version(msgspec.Struct):
    version: int


def write_kv(kv: KVCache, path: str | os.PathLike[str], fingerprint: str) -> None:
    """Gathers a cache to the host and writes it to the file `path`. Replaces an existing file.

    Raises:
        KVFileError: The file cannot be written.
    """
    path = Path(path)
    header = msgspec.json.encode(
        KVHeader(VERSION, fingerprint, kv.spec, kv.first_position, kv.token_ids, kv.chosen)
    )
    tensors = {
        _tensor(index, name): np.ascontiguousarray(array)
        for index in range(kv.layers)
        for name, array in kv.layer(index).components.items()
    }
    views = {name: (_code(array), array.shape, array.tobytes()) for name, array in tensors.items()}
    metadata = {_HEADER: header.decode(), _DIGEST: _digest(header, views)}
    unfinished = path.parent / f".{path.name}.{os.getpid()}"
    try:
        save_file(tensors, unfinished, metadata)
        unfinished.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise KVFileError(
            f"KV file {path} cannot be written ({error}); give a path that can"
        ) from error


def read_kv(
    path: str | os.PathLike[str], fingerprint: str, layout: Layout, place: KVPlace
) -> KVCache:
    """Reads and checks a KV file. Returns the cache at `place`, on a mesh of `layout`.

    Raises:
        KVFileError: The file is missing, truncated or damaged, or its version, model fingerprint or
            KV spec differs from the expected one. The message names the field and both values.
    """
    path, spec = Path(path), place.spec
    raw, views, digest = _opened(path)
    if digest != (found := _digest(raw, views)):
        raise KVFileError(
            f"KV file {path} is corrupt: its field {_DIGEST} is {digest!r}, and its content has"
            f" {found!r}; save it again"
        )
    header = _decoded(path, raw)
    for name, wanted in {"fingerprint": fingerprint, "spec": spec}.items():
        if (value := getattr(header, name)) != wanted:
            raise KVFileError(
                f"KV file {path}: {_difference(name, value, wanted)}; load it with the model and"
                " types that saved it"
            )
    layers: list[dict[str, np.ndarray]] = []
    for index, kind in enumerate(spec.layers):
        layers.append({})
        for part in kind.components:
            dtype = spec.dtype_of(part)
            shape = (max(1, part.heads), len(header.token_ids), part.width)
            code, found_shape, data = views.get(_tensor(index, part.name), ("", (), b""))
            if (code, found_shape) != (_CODES[dtype], shape):
                raise KVFileError(
                    f"KV file {path}: tensor {_tensor(index, part.name)} is {code or 'missing'}"
                    f" {list(found_shape)}; it must be {_CODES[dtype]} {list(shape)}: save it again"
                )
            layers[-1][part.name] = np.frombuffer(data, jnp.dtype(dtype)).reshape(shape)
    blocks = blocks_of_layers(place, header.first_position, layers)
    return KVCache(
        header.token_ids,
        header.chosen,
        layout,
        place.mesh,
        place.rank,
        spec,
        blocks,
        first_position=header.first_position,
    )


_Views = Mapping[str, tuple[str, tuple[int, ...], bytes | bytearray]]


def _opened(path: Path) -> tuple[bytes, _Views, str]:
    try:
        content = path.read_bytes()
        found = safetensors.deserialize(content)
    except OSError as error:
        raise KVFileError(f"KV file {path} cannot be read ({error}); give another") from error
    except safetensors.SafetensorError as error:
        raise KVFileError(
            f"KV file {path} is truncated, corrupt or no safetensors file ({error}); save it again"
        ) from error
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    if not metadata.keys() >= {_HEADER, _DIGEST}:
        raise KVFileError(
            f"KV file {path} has no metadata field {_HEADER!r}: it is of something else (it has"
            f" {', '.join(sorted(metadata)) or 'none'}); give what `Engine.save` wrote"
        )
    views = {name: (view["dtype"], tuple(view["shape"]), view["data"]) for name, view in found}
    return metadata[_HEADER].encode(), views, metadata[_DIGEST]


def _decoded(path: Path, raw: bytes) -> KVHeader:
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if version != VERSION:
            raise KVFileError(
                f"KV file {path}: its version is {version}, and {VERSION} is read here; load it"
                " with the release that saved it"
            )
        header = msgspec.json.decode(raw, type=KVHeader)
    except (msgspec.MsgspecError, InvalidRequestError) as error:
        raise KVFileError(
            f"KV file {path}: its header cannot be read ({error}); save it again"
        ) from error
    if not header.token_ids or header.first_position < 0:
        raise KVFileError(
            f"KV file {path}: it has {len(header.token_ids)} tokens from position"
            f" {header.first_position} on; there must be one or more, from 0 or later: save it"
            " again"
        )
    return header


def _digest(header: bytes, views: _Views) -> str:
    digest = hashlib.sha256(header)
    for name, (code, shape, data) in sorted(views.items()):
        digest.update(f"\n{name} {code} {list(shape)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _difference(name: str, value: object, wanted: object) -> str:
    if isinstance(value, KVSpec) and isinstance(wanted, KVSpec):
        if len(value.layers) != len(wanted.layers):
            return f"its spec has {len(value.layers)} layers, and this model's {len(wanted.layers)}"
        for index, (one, other) in enumerate(zip(value.layers, wanted.layers, strict=True)):
            if one != other:
                return f"its spec.layers[{index}] is {one}, and this model's is {other}"
        return f"its spec.dtype is {value.dtype!r}, and this model's is {wanted.dtype!r}"
    return f"its {name} is {value!r}, and this model's is {wanted!r}"


def _tensor(layer: int, component: str) -> str:
    return f"layers.{layer}.{component}"


def _code(array: np.ndarray) -> str:
    return _CODES[array.dtype.name]
