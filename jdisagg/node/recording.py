"""Records the commands and results of a mesh's executor to a file, for debugging. `jdisagg replay`
rebuilds the mesh from the file and runs the commands again.

A file is a magic word followed by records. A record is a byte for its kind, the command's number,
the payload's length (both little-endian) and the payload. There are four kinds: header (JSON that
describes the mesh), command and result (both encoded by `packed`), and error (text). Each record is
flushed at once, so that after a crash the recording ends with the last command before the crash. A
truncated last record is ignored. Recordings contain prompts and must be kept private."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import jax

from jdisagg.config import ModelConfig
from jdisagg.engine.embedded import Record
from jdisagg.engine.replica import LoadModel, Replica, load_stages
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import Layout
from jdisagg.messages.packed import Unpacker, pack
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.model_api import Device
from jdisagg.scheduler.executor import Executor, MeshLimits
from jdisagg.transfer.channel import Channel

unpack_command = Unpacker[StepCommand](StepCommand)
unpack_result = Unpacker[StepResult](StepResult)

MAGIC = b"jdisagg commands 3\n"
_RECORD = struct.Struct("<cQQ")
_HEADER, _COMMAND, _RESULT, _ERROR = b"H", b"C", b"R", b"E"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordingHeader:
    """Description of the recorded mesh. `limits` has the fields of `MeshLimits` without the KV spec
    and the image format, which are derived from the model."""

    name: str
    model: str
    dtype: str
    layout: str
    prefill: bool
    decode: bool
    emit: bool
    extracts: bool
    codec: str
    processes: int
    limits: dict[str, int | str | list[int] | None]
    versions: str = ""
    weights: str = ""
    kv_dtype: str = ""
    draft: str = ""


@dataclasses.dataclass(slots=True)
class RecordedCommand:
    """One command with its result or error. If the recording ends before the command has completed,
    neither is set."""

    number: int
    command: StepCommand
    result: StepResult | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    path: Path
    header: RecordingHeader
    entries: list[RecordedCommand]


class RecordingExecutor:
    """An `Executor` that passes commands to another one and records them with their results. If
    writing to the file fails, recording stops and commands continue. Raises ConfigError if the file
    cannot be created."""

    def __init__(self, inner: Executor, path: Path, header: RecordingHeader) -> None:
        self.limits, self.card = inner.limits, inner.card
        self._inner = inner
        self._number = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            )
        except OSError as error:
            raise ConfigError(
                f"recording: cannot write {path}: {error.strerror}; choose another place"
            ) from error
        self._file.write(MAGIC)
        self._write(_HEADER, 0, json.dumps(dataclasses.asdict(header)).encode())
        if self._file.closed:
            raise ConfigError(
                f"recording: cannot write {path}: its header does not fit; choose another place"
            )

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        self._number += 1
        number = self._number
        self._write(_COMMAND, number, pack(command))
        future = asyncio.ensure_future(self._inner.run(command))
        future.add_done_callback(lambda done: self._ended(number, done))
        return future

    def close(self) -> None:
        self._inner.close()
        self._file.close()

    def _ended(self, number: int, done: "asyncio.Future[StepResult]") -> None:
        if done.cancelled():
            return
        if error := done.exception():
            self._write(_ERROR, number, str(error).encode())
        else:
            self._write(_RESULT, number, pack(done.result()))

    def _write(self, kind: bytes, number: int, data: bytes) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(_RECORD.pack(kind, number, len(data)) + data)
            self._file.flush()
        except OSError as error:
            _log.error("recording %s stopped: %s; the mesh continues", self._file.name, error)
            with contextlib.suppress(OSError):  # close() tries to write the rest once more
                self._file.close()


def read_recording(path: Path) -> Recording:
    """Reads a recording. Raises ConfigError if the file is unreadable, damaged or not a recording
    of this version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"recording: cannot read {path}: {error.strerror}; give a file that --record wrote"
        ) from error
    if not data.startswith(MAGIC):
        raise ConfigError(
            f"recording: {path} does not begin with {MAGIC!r}; give a file that this version's"
            " --record wrote"
        )
    header: RecordingHeader | None = None
    entries: dict[int, RecordedCommand] = {}
    try:
        for kind, number, body in _records(data[len(MAGIC) :]):
            if kind == _HEADER:
                header = RecordingHeader(**json.loads(body))
            elif kind == _COMMAND:
                entries[number] = RecordedCommand(number, unpack_command(body))
            elif kind == _RESULT:
                entries[number].result = unpack_result(body)
            else:
                entries[number].error = body.decode("utf-8", "replace")
    except (JdisaggError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"recording: {path} is damaged, or of another version: {error}; record again"
        ) from error
    if header is None:
        raise ConfigError(f"recording: {path} has no header; record again")
    return Recording(path, header, list(entries.values()))


def _records(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    at = 0
    while at + _RECORD.size <= len(data):
        kind, number, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + length > len(data):
            return
        yield kind, number, data[at : at + length]
        at += length


def record(
    folder: Path,
    name: str,
    executor: Executor,
    mesh: MeshExecutor,
    layout: Layout,
    model: ModelConfig,
) -> RecordingExecutor:
    """Wraps `executor` to record its commands in the file `name`.commands in `folder`. If the file
    exists, creates a numbered file instead, so that the recording before a restart is kept.

    Args:
        executor: Executor of the mesh. In an instance of several processes, the executor that sends
            commands to all processes.
        mesh: Executor of this process's mesh, which the recording's header describes.
    """
    limits = {
        key: value
        for key, value in dataclasses.asdict(mesh.limits).items()
        if key not in ("kv_spec", "images")
    }
    header = RecordingHeader(
        name=name,
        model=str(Path(model.directory).resolve()),
        dtype=model.dtype,
        weights=model.weights,
        kv_dtype=model.kv_dtype,
        draft=model.draft and str(Path(model.draft).resolve()),
        layout=str(layout),
        prefill=mesh.role.prefill,
        decode=mesh.role.decode,
        emit=mesh.role.emit,
        extracts=mesh.role.extracts,
        codec=mesh.role.codec,
        processes=len({device.process_index for device in mesh.mesh.devices.flat}),
        limits=limits,
        versions=f"JAX {jax.__version__} on {mesh.platform}",
    )
    return RecordingExecutor(executor, _free(folder, name), header)


def _free(folder: Path, name: str) -> Path:
    paths = (
        folder / f"{name}{suffix}.commands"
        for suffix in itertools.chain(("",), (f"-{count}" for count in itertools.count(2)))
    )
    return next(path for path in paths if not path.exists())


def embedded_recorder(folder: str, model: ModelConfig) -> Record | None:
    """Returns a function that wraps an executor of an embedded cluster to record it in `folder`.
    Returns None if `folder` is empty."""

    def between(name: str, instance: Replica) -> Executor:
        return record(
            Path(folder), name, instance.executor, instance.executor, instance.config.layout, model
        )

    return between if folder else None


def rebuild(
    header: RecordingHeader, devices: Sequence[Device], channel: Channel, load: LoadModel
) -> MeshExecutor:
    """Builds the mesh that a recording's header describes, on devices of this process.

    Args:
        channel: Channel for the mesh's KV transfers.
        load: Function that loads the weights.
    """
    layout = Layout.parse(header.layout)
    fields = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in header.limits.items()
    }
    groups = fields["layer_groups"]
    assert isinstance(groups, int)
    loaded = load_stages(load, layout, devices, groups)
    spec = loaded.model.kv_spec
    vision = loaded.model.vision if fields.get("image_rows") else None
    images = None if vision is None else vision.format
    limits = MeshLimits(**fields, kv_spec=spec, images=images)  # pyright: ignore  # JSON's own types
    role = MeshRole(header.prefill, header.decode, header.emit, header.codec, header.extracts)
    return MeshExecutor(
        header.name, loaded.model, Programs(*loaded.meshes), layout, limits, role, channel
    )
