"""Stores a block of KV as a file: a header, followed by the bytes of the block's arrays.

The header holds the format's version, the namespace and name of the block, the position of each
array in the block (piece, box, dtype), the checksums of its pieces and a digest of the arrays. The
header has a digest of its own. A file is written under a temporary name and then renamed, so that a
partial file is never read as a block. Files are not synced to the disk: a file that a power failure
damaged fails its digest and counts as a cache miss. `cause_of` converts an error to the name of the
file's defect. Uses NumPy, no JAX and no threads."""

import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import ml_dtypes  # noqa: F401  # registers bfloat16 and the like with np.dtype
import msgspec
import numpy as np

from jdisagg.layout.reshard_plan import Box
from jdisagg.plain import Message

MAGIC, VERSION = b"jdisagg KV block", 1
SUFFIX, UNFINISHED = ".kv", ".unfinished"
DIGEST_BYTES = 32
MOST_HEADER_BYTES = 1 << 20
_FRONT = struct.Struct("<16sHI")  # magic, version, bytes of the header

# causes
FULL, READ_ONLY, GONE, FAILED = "full", "read_only", "gone", "failed"
FORMAT, VERSION_DIFFERS, FOREIGN, TRUNCATED = "format", "version", "foreign", "truncated"
SPOILED, KILLED, LOCKED = "spoiled", "unfinished", "locked"
_CAUSES = {
    FULL: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    READ_ONLY: (errno.EROFS, errno.EACCES, errno.EPERM),
    GONE: (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ESTALE, errno.ENODEV),
}


class SpoiledFileError(Exception):
    """Raised if a file does not contain a valid copy of the requested block."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def cause_of(error: Exception) -> str:
    if isinstance(error, SpoiledFileError):
        return error.cause
    if isinstance(error, OSError):
        found = [cause for cause, numbers in _CAUSES.items() if error.errno in numbers]
        return found[0] if found else FAILED
    return FAILED


@dataclass(frozen=True, slots=True)
class SavedArray:
    """One array of a saved block: the slice `box` of the block's piece number `piece`."""

    piece: int
    box: Box
    array: np.ndarray


class _Place(Message, frozen=True):
    piece: int
    box: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in self.box])

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class BlockHeader(Message, frozen=True):
    """The header of a block file. `digest` is a hash of the bytes of all arrays. `written_at` is a
    Unix time in seconds, or 0 if unknown."""

    namespace: bytes
    name: bytes
    checksums: tuple[int, ...]
    places: tuple[_Place, ...]
    digest: bytes
    written_at: float = 0.0

    @property
    def payload_bytes(self) -> int:
        return sum([place.bytes for place in self.places])


def write_block(
    path: Path,
    namespace: bytes,
    name: bytes,
    arrays: Sequence[SavedArray],
    checksums: tuple[int, ...],
    written_at: float = 0.0,
) -> int:
    """Writes a block atomically and returns the file's size in bytes. Raises OSError."""
    views = [np.ascontiguousarray(one.array).reshape(-1).view(np.uint8) for one in arrays]
    digest = blake2b(digest_size=DIGEST_BYTES)
    for view in views:
        digest.update(view.data)
    places = tuple([_Place(one.piece, one.box, one.array.dtype.name) for one in arrays])
    header = msgspec.msgpack.encode(
        BlockHeader(namespace, name, checksums, places, digest.digest(), written_at)
    )
    front = _FRONT.pack(MAGIC, VERSION, len(header)) + header
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(front + _digest(front))
            for view in views:
                file.write(view.data)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return len(front) + DIGEST_BYTES + sum([view.nbytes for view in views])


def read_header(file: BinaryIO, namespace: bytes) -> BlockHeader:
    """Reads a file's header and checks it against the file's length. Raises SpoiledFileError if the
    header is invalid or is that of another namespace. Raises OSError if reading fails."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size:
        raise SpoiledFileError(TRUNCATED)
    magic, version, length = _FRONT.unpack(front)
    if magic != MAGIC or length > MOST_HEADER_BYTES:
        raise SpoiledFileError(FORMAT)
    if version != VERSION:
        raise SpoiledFileError(VERSION_DIFFERS)
    content, digest = file.read(length), file.read(DIGEST_BYTES)
    if len(content) < length or len(digest) < DIGEST_BYTES:
        raise SpoiledFileError(TRUNCATED)
    if _digest(front + content) != digest:
        raise SpoiledFileError(SPOILED)
    try:
        header = msgspec.msgpack.decode(content, type=BlockHeader)
        payload = header.payload_bytes
    except (msgspec.DecodeError, TypeError) as error:
        raise SpoiledFileError(FORMAT) from error
    if header.namespace != namespace:
        raise SpoiledFileError(FOREIGN)
    if os.fstat(file.fileno()).st_size != file.tell() + payload:
        raise SpoiledFileError(TRUNCATED)
    return header


def read_block(
    path: Path, namespace: bytes, name: bytes
) -> tuple[tuple[SavedArray, ...], tuple[int, ...], int]:
    """Returns the arrays of a block, the checksums of its pieces, and the file's size in bytes.
    Raises SpoiledFileError if the file is damaged or holds another block. Raises OSError if reading
    fails."""
    with path.open("rb", buffering=0) as file:
        header = read_header(file, namespace)
        if header.name != name:
            raise SpoiledFileError(FOREIGN)
        payload = np.empty(header.payload_bytes, np.uint8)
        view, read = payload.data, 0
        while read < len(view):
            count = file.readinto(view[read:])
            if not count:
                raise SpoiledFileError(TRUNCATED)
            read += count
        bytes_ = file.tell()
    if _digest(payload.data) != header.digest:
        raise SpoiledFileError(SPOILED)
    arrays, at = [], 0
    for place in header.places:
        part = payload[at : at + place.bytes].view(np.dtype(place.dtype)).reshape(place.shape)
        arrays.append(SavedArray(place.piece, place.box, part))
        at += place.bytes
    return tuple(arrays), header.checksums, bytes_


def _digest(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
