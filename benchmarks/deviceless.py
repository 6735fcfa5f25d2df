"""Compiles the programs of an executor for GPUs that this machine does not have, and counts their
operations.

`DevicelessPrograms` replaces `executor.programs.Programs`: arrays are shapes, compiled programs are
counted, and their results are shapes. A complete `MeshExecutor` can be built with it, and its own
warm-up compiles its own programs. This needs JAX's CUDA plugin (`pip install jax[cuda13]`), but no
GPU. XLA compiles without autotuning, so kernels may differ from those on a GPU; graphs, loops,
copies and memory are the same. Speed, numerical results, and whether cuDNN supports a call cannot
be determined."""

import enum
import importlib.util
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec, use_abstract_mesh
from jax.typing import DTypeLike

from benchmarks.gpu_devices import GpuDevice
from jdisagg.executor.prefill_program import ChunkForm
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import MESH_AXES, Layout

INSTALL = "pip install 'jax[cuda13]'"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def missing() -> str:
    """Returns the reason why this process cannot compile for a GPU, with the remedy; "" if it
    can."""
    if any(importlib.util.find_spec(name) for name in PLUGINS):
        return ""
    return f"compiling for a GPU needs a CUDA plugin of JAX: {INSTALL}"


def without_a_gpu() -> None:
    """Applies process settings before the first use of JAX: JAX runs on the CPU, and the plugin
    needs no driver."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


@dataclass(frozen=True)
class Shape:
    """Shape and type of a program's argument or result, in place of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def block_until_ready(self) -> "Shape":
        return self

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class Counted:
    """Operations of one compiled program, on one device.

    Attributes:
        graphs: Number of CUDA graphs; 0 if the program has fewer than the five operations from
            which XLA makes a graph.
        whiles: Number of loops outside of graphs, which the host drives.
        kernels: Number of kernel launches and library calls, including those in graphs.
        copies, copied_bytes: Number of copies of device memory, and the largest number of bytes
            that one copy writes, including copies by kernels.
        collectives: Number of collectives between devices, each of which ends a graph in XLA 0.11.
        conditionals: Number of choices outside of graphs, which the host makes."""

    program: str
    graphs: int
    whiles: int
    kernels: int
    copies: int
    copied_bytes: int
    collectives: int
    conditionals: int
    temp_bytes: int
    alias_bytes: int
    argument_bytes: int
    compile_seconds: float


def topology_mesh(device: GpuDevice, layout: Layout, kv_heads: int) -> Mesh:
    """Returns the mesh of an instance on described devices, all in one process."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=device.target_config(), topology=f"1x1x{layout.devices}"
    )
    devices = np.array(topology.devices, dtype=object)
    return Mesh(devices.reshape(layout.mesh_shape(kv_heads)), MESH_AXES)


class DevicelessPrograms(Programs):
    """Compiles for a mesh that is only described, and passes the counts to `report`."""

    def __init__(self, mesh: Mesh, device: GpuDevice, report: Callable[[Counted], None]) -> None:
        super().__init__(mesh)
        # private: kernels' lowering asks the abstract mesh which device it is for
        from jax._src.cudnn import fused_attention_stablehlo
        from jax._src.mesh import AbstractDevice

        # it asks this process's own devices; all that we describe are Hopper or later
        fused_attention_stablehlo.check_compute_capability = lambda capability: True
        self._report, self._key = report, ""
        # the plugin knows how much room CUB's sort takes on Hopper, and asks a device elsewhere
        self._options = {"xla_gpu_enable_cub_radix_sort": device.compute_major == 9}
        self._abstract = mesh.abstract_mesh.update(
            abstract_device=AbstractDevice(
                device_kind=device.kind, num_cores=device.cores, platform="cuda"
            )
        )

    def put(self, host: Any) -> Any:
        return jax.tree.map(lambda array: Shape(array.shape, array.dtype), host)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec) -> Any:
        return Shape(shape, jnp.dtype(dtype))

    def get(self, key: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        self._key = _name(key)
        return super().get(key, build)

    def compile(
        self,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        name, began = self._key, time.monotonic()
        with use_abstract_mesh(self._abstract):
            lowered = self._lower(self._abstract, body, arguments, in_specs, out_specs, donate)
            with tempfile.TemporaryDirectory() as dump:
                options = {**self.compiler_options, **self._options, "xla_dump_to": dump}
                compiled = lowered.compile(compiler_options=options)
                thunks = count_thunks(Path(dump))
        memory = compiled.memory_analysis()
        assert memory is not None
        self._report(
            Counted(
                name,
                **thunks,
                copied_bytes=largest_copy(compiled.as_text() or ""),
                temp_bytes=memory.temp_size_in_bytes,
                alias_bytes=memory.alias_size_in_bytes,
                argument_bytes=memory.argument_size_in_bytes,
                compile_seconds=round(time.monotonic() - began, 2),
            )
        )
        results = jax.tree.map(lambda out: Shape(out.shape, out.dtype), lowered.out_info)
        return lambda *_: results


def count_thunks(dump: Path) -> dict[str, int]:
    """Counts the operations of a program from XLA's dump of its final sequence."""
    for stage in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        if found := sorted(dump.glob(f"*{stage}.txt")):
            break
    else:
        there = sorted(path.name for path in dump.iterdir())[:20]
        raise RuntimeError(f"this XLA writes no sequence of thunks that we know; it wrote {there}")
    graphs = whiles = kernels = copies = collectives = conditionals = 0
    inside: int | None = None  # the indentation of the graph whose operations these lines are
    for line in found[-1].read_text().splitlines():
        match = re.match(r"^(\s*)\d+: k(\w+)", line)
        if not match:
            continue
        indent, kind = len(match[1]), match[2]
        if inside is not None and indent <= inside:
            inside = None
        if kind == "CommandBuffer":
            graphs, inside = graphs + 1, indent
        elif kind == "While":
            whiles += inside is None
        elif kind == "Conditional":
            conditionals += inside is None
        elif "Copy" in kind:
            copies += 1
        elif re.match(r"All|Collective|Ragged|ReduceScatter", kind):
            collectives += not kind.endswith("Done")
        elif kind not in ("Sequential", "AsyncStart", "AsyncDone"):
            kernels += 1
    return {
        "graphs": graphs,
        "whiles": whiles,
        "kernels": kernels,
        "copies": copies,
        "collectives": collectives,
        "conditionals": conditionals,
    }


def largest_copy(hlo: str) -> int:
    """Returns the bytes of the largest array that a copy or transposition of the optimised program
    writes. Omits copies inside fused products, which stay in registers."""
    found = []
    for computation in hlo.split("\n\n"):
        # XLA of JAX 0.12 puts a word before the name
        if not re.match(r"\s*%(fused_computation\.)?gemm_fusion", computation):
            found += re.findall(
                r"= (\w+)\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(", computation
            )
    return max((_bytes(kind, sizes) for kind, sizes in found), default=0)


def _bytes(kind: str, sizes: str) -> int:
    bits = re.search(r"\d+", kind)
    count = math.prod(int(size) for size in sizes.split(",") if size)
    return count * (int(bits[0]) if bits else 8) // 8


def _name(key: Hashable) -> str:
    """Returns a readable name for a program's key."""
    kind, *rest = key if isinstance(key, tuple) else (key,)
    words = [str(kind)]
    for part in rest:
        if isinstance(part, enum.Enum):
            words.append(str(part.value))
        elif isinstance(part, ChunkForm):
            words += ["packed"] if part.packed else [] if part.past else ["one"]
            words += [f"past {part.columns} pages"] if part.past else []
            words += [] if part.samples else ["unsampled"]
        elif isinstance(part, int | str) and not isinstance(part, bool):
            words.append(str(part))
    return " ".join(words)
