"""Computes the fingerprint of a model directory. Two fingerprints are equal if the same files are
served in the same dtypes.

The fingerprint covers each file's path, size and content. Files above 64 MiB are sampled: their
first bytes (the header of a safetensors file) and evenly spaced pieces. KV scales are covered only
if the KV dtype uses them, and a drafter in a folder of its own only if its KV is handed over and
cached. The Hugging Face and the Orbax form of one model have different fingerprints, so all workers
of a cluster must load the same form."""

import hashlib
import re
from pathlib import Path

from jdisagg.engine.drafter_files import keeps_kv
from jdisagg.errors import CheckpointError
from jdisagg.layout.kv_spec import KV_SCALES_FILE

_WHOLE_BYTES = 64 << 20
_FIRST_BYTES = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_IGNORED = {".md", ".txt", ".gitattributes", ".py", ".png"}
SUMS_FILE = "SHA256SUMS"
_SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def model_fingerprint(
    directory: str | Path, dtype: str, weights: str = "", kv_dtype: str = "", draft: str = ""
) -> str:
    """Returns the fingerprint as 32 hexadecimal digits. `draft` is the folder of a separate
    drafter, or empty."""
    kinds = (
        dtype + (f" weights={weights}" if weights else "") + (f" kv={kv_dtype}" * bool(kv_dtype))
    )
    digest = hashlib.sha256(kinds.encode())
    _add_files(digest, Path(directory), scales=bool(kv_dtype))
    if draft and keeps_kv(draft):
        digest.update(b"\ndraft")
        _add_files(digest, Path(draft), scales=False)
    return digest.hexdigest()[:32]


def _add_files(digest: "hashlib._Hash", root: Path, *, scales: bool) -> None:
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if _ignored(path.relative_to(root)):
            continue
        if path == root / KV_SCALES_FILE and not scales:
            continue
        size = path.stat().st_size
        digest.update(f"\n{path.relative_to(root).as_posix()} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(_FIRST_BYTES))
            for sample in range(_SAMPLES):
                file.seek(_FIRST_BYTES + (size - _FIRST_BYTES) * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))


def _ignored(path: Path) -> bool:
    return path.suffix in _IGNORED or any(part.startswith((".", "__")) for part in path.parts)


def file_states(directory: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Returns path, size and modification time of each file. Callers compare two results: they are
    equal if no file was written between the two calls."""
    files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    states = [(path, path.stat()) for path in files]
    return tuple((str(path), state.st_size, state.st_mtime_ns) for path, state in states)


def check_sums(directory: str | Path) -> None:
    """Verifies the files of a directory against its file SHA256SUMS, which has the format of
    `sha256sum`. Does nothing if the directory has no SHA256SUMS.

    Raises:
        CheckpointError: A listed file is missing or does not match its checksum, or a line has no
            valid checksum.
    """
    root = Path(directory)
    if not (root / SUMS_FILE).is_file():
        return
    for line in (root / SUMS_FILE).read_text().splitlines():
        found = _SUM_LINE.fullmatch(line.strip())
        name = found[2] if found else ""
        path = root / name
        if found is None or not path.resolve().is_relative_to(root.resolve()):
            raise CheckpointError(
                f"{root / SUMS_FILE}: line {line[:80]!r} must be a SHA-256 sum and a file of the"
                " folder; write it with sha256sum"
            )
        if not path.is_file():
            raise CheckpointError(f"{path} is named in {SUMS_FILE} and missing; copy it again")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != found[1].lower():
            raise CheckpointError(
                f"{path}: its content has the SHA-256 sum {digest[:16]}, and {SUMS_FILE} states"
                f" {found[1][:16]}; copy it again"
            )
