"""Between a mesh's executor and the header of its recording: `record` writes one beside a running
mesh, `rebuild` makes the mesh again."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import jax

from jdisagg.config import ModelConfig
from jdisagg.engine.embedded import Record
from jdisagg.engine.replica import LoadModel, Replica
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.scheduler.executor import Executor, MeshLimits
from jdisagg.service.recording import RecordingExecutor, RecordingHeader
from jdisagg.transfer.channel import Channel


def record(
    folder: Path,
    name: str,
    executor: Executor,
    mesh: MeshExecutor,
    layout: Layout,
    model: ModelConfig,
) -> RecordingExecutor:
    """`executor` (the mesh itself, or the leader's broadcast over it), recorded to
    `folder`/`name`.commands; a file of that name is kept, and this one numbered, since what a
    restarted worker did before is what one wants to see."""
    limits = {
        key: value for key, value in dataclasses.asdict(mesh.limits).items() if key != "kv_spec"
    }
    header = RecordingHeader(
        name=name,
        model=str(Path(model.directory).resolve()),
        dtype=model.dtype,
        weights=model.weights,
        kv_dtype=model.kv_dtype,
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
    """What an embedded cluster is given to record its meshes to `folder`; None where `folder` is
    empty."""

    def between(name: str, instance: Replica) -> Executor:
        return record(
            Path(folder), name, instance.executor, instance.executor, instance.config.layout, model
        )

    return between if folder else None


def rebuild(
    header: RecordingHeader, devices: Sequence[Device], channel: Channel, load: LoadModel
) -> MeshExecutor:
    """The mesh that was recorded, fresh, on `devices` of this process."""
    layout = Layout.parse(header.layout)
    loaded = load(layout, devices)
    fields = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in header.limits.items()
    }
    spec = loaded.model.kv_spec
    limits = MeshLimits(**fields, kv_spec=spec)  # pyright: ignore  # JSON's own types
    role = MeshRole(header.prefill, header.decode, header.emit, header.codec, header.extracts)
    return MeshExecutor(
        header.name, loaded.model, Programs(loaded.mesh), layout, limits, role, channel
    )
