"""Compiles the programs of an executor for absent accelerators, and counts their operations.

`DevicelessPrograms` replaces `executor.programs.Programs`: what goes to the mesh is a shape, each
compiled program is counted, and its results are shapes. A `MeshExecutor` can therefore be built
around it whole, and its warm-up builds all of its programs. For GPUs this needs a CUDA plugin of
JAX (`pip install jax[cuda13]`), for TPUs `pip install jax[tpu]`, and no device. For a GPU XLA then
compiles without autotuning: kernels may differ from those on the GPU, but graphs, loops, copies and
memory do not. Speed and numbers are not measured."""

import enum
import importlib.util
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec, use_abstract_mesh
from jax.typing import DTypeLike

from benchmarks.gpu_devices import GpuDevice
from benchmarks.tpu_devices import TpuDevice
from benchmarks.tpu_hlo import array_bytes, count_operations
from jdisagg.executor.prefill_program import ChunkForm
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import Layout
from jdisagg.ops.parameters import layout_meshes

PLUGINS = {
    "gpu": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "a CUDA plugin of JAX", "jax[cuda13]"),
    "tpu": (("libtpu",), "libtpu", "jax[tpu]"),
}


def missing(platform: str = "gpu") -> str:
    """Returns what prevents this process from compiling for a platform, and the remedy. Empty if
    nothing does."""
    modules, what, package = PLUGINS[platform]
    if any(importlib.util.find_spec(name) for name in modules):
        return ""
    return f"compiling for a {platform.upper()} needs {what}: pip install '{package}'"


def without_a_device() -> None:
    """Sets up this process, before JAX is used, to run on the CPU: neither the CUDA plugin nor
    libtpu looks for a device."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # libtpu would ask the cloud's metadata server, and allow one process on the host
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


@dataclass(frozen=True)
class Shape:
    """Shape and type of a program's argument or result, in place of an array, and the pipeline
    stage on whose mesh it is."""

    shape: tuple[int, ...]
    dtype: np.dtype
    stage: int = 0

    def block_until_ready(self) -> "Shape":
        return self

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class Counted:
    """One compiled program. Bytes are of one device.

    Attributes:
        whiles: On a GPU, the loops that the host drives, outside of any graph. On a TPU, all loops.
        copies: Copies of device memory. On a TPU, transpositions too, outside of fusions.
        copied_bytes: The most that one copy writes, on a GPU also one that is a kernel.
        collectives: Exchanges between devices. XLA 0.11 ends a CUDA graph at each.
        temp_bytes, alias_bytes, argument_bytes: XLA's memory analysis. `alias_bytes` are results
            that are written in place of an argument.
        trace_seconds: Processor seconds of tracing and lowering, which one thread does at a time.
        compile_seconds: Processor seconds of XLA, with the texts that it writes for the counts.
    """

    program: str
    whiles: int
    copies: int
    copied_bytes: int
    collectives: int
    temp_bytes: int
    alias_bytes: int
    argument_bytes: int
    trace_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class GpuCounted(Counted):
    """A program for a GPU.

    Attributes:
        graphs: CUDA graphs in which it is launched; 0 if it has fewer than the five operations of
            which XLA makes a graph.
        kernels: Launches, those of a graph and library calls included.
        conditionals: Branches that the host takes, outside of any graph.
    """

    graphs: int
    kernels: int
    conditionals: int


@dataclass(frozen=True)
class TpuCounted(Counted):
    """A program for a TPU.

    Attributes:
        copies_bytes: Sum over all copies.
        prefetched_bytes: The largest copy into VMEM.
        memory_bytes: Bytes that are read from or written to HBM, by the program's text. A loop's
            body counts once.
        accessed_bytes: Bytes that the operations access by XLA's cost model, in HBM and in VMEM, so
            that weights that pass through VMEM count three times. A Pallas kernel does not count.
        optimal_seconds: Duration by XLA's cost model, with the same limits.
        roof_seconds: Least duration: the weights of a decode step or a prefill chunk divided by the
            memory's bandwidth, or the arithmetic of the program divided by the device's rate. 0 for
            programs without weights.
    """

    copies_bytes: int
    prefetched_bytes: int
    memory_bytes: int
    accessed_bytes: int
    optimal_seconds: float
    roof_seconds: float


@dataclass(frozen=True)
class Copied:
    """A copy from the mesh of one pipeline stage to that of another. Bytes are of one device."""

    source: int
    target: int
    copied_bytes: int


Report = Callable[[Counted | Copied], None]


def topology_meshes(
    device: GpuDevice | TpuDevice, layout: Layout, kv_heads: int
) -> tuple[Mesh, ...]:
    """Returns the meshes of an instance on as many of these devices as its layout has."""
    if isinstance(device, TpuDevice):
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=device.slice_of(layout.devices)
        )
    else:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=device.target_config(), topology=f"1x1x{layout.devices}"
        )
    return layout_meshes(layout, kv_heads, topology.devices[: layout.devices])


class DevicelessPrograms(Programs):
    """Compiles for a mesh that is only described, and hands the counts to `report`. `stage` is the
    pipeline stage of the mesh."""

    stage = 0

    def __init__(self, mesh: Mesh, report: Report) -> None:
        super().__init__(mesh)
        self.spans_processes = False  # the hosts of a described slice are none of ours
        self._report, self._key = report, ""
        self._abstract = mesh.abstract_mesh

    def put(self, host: Any) -> Any:
        return jax.tree.map(lambda array: Shape(array.shape, array.dtype, self.stage), host)

    def followed_by(self, later: Sequence["DevicelessPrograms"]) -> None:
        """Makes these the programs of the first pipeline stage, and `later` those of the others."""
        self.later = tuple(later)
        for number, stage in enumerate(self.stages):
            assert isinstance(stage, DevicelessPrograms)
            stage.stage = number

    def receive(self, array: Any) -> Any:
        each = array.nbytes // self.mesh.shape["dp"]
        self._report(Copied(array.stage, self.stage, each))
        return Shape(array.shape, array.dtype, self.stage)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec) -> Any:
        return Shape(shape, jnp.dtype(dtype), self.stage)

    def get(self, key: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        self._key = f"stage {self.stage} " * (self.stage > 0 or bool(self.later)) + _name(key)
        return super().get(key, build)

    def compile(
        self,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        name, began = self._key, time.process_time()
        specs = in_specs, out_specs, donate
        with use_abstract_mesh(self._abstract), self.precision():
            lowered = self._trace(self._abstract, body, arguments, *specs).lower()
            read = self._bytes_of(arguments, in_specs, donate)
            lowered_at = time.process_time()
            compiled, counted = self._counted(lowered, name, read, self.options_of(arguments))
        memory = compiled.memory_analysis()
        assert memory is not None
        self._report(
            counted(
                program=name,
                temp_bytes=memory.temp_size_in_bytes,
                alias_bytes=memory.alias_size_in_bytes,
                argument_bytes=memory.argument_size_in_bytes,
                trace_seconds=round(lowered_at - began, 2),
                compile_seconds=round(time.process_time() - lowered_at, 2),
            )
        )
        results = jax.tree.map(
            lambda out: Shape(out.shape, out.dtype, self.stage), lowered.out_info
        )
        return lambda *_: results

    def _counted(
        self, lowered: jax.stages.Lowered, name: str, read: int, options: dict[str, str | bool]
    ) -> tuple[jax.stages.Compiled, Callable[..., Counted]]:
        """Compiles a program. Returns it, and its counts but for memory and time.

        Args:
            read: Bytes of those arguments on a device that are not donated.
            options: XLA's options of the program.
        """
        raise NotImplementedError

    def _bytes_of(
        self, arguments: tuple[Any, ...], in_specs: tuple[Any, ...], donate: tuple[int, ...]
    ) -> int:
        kept = [index for index in range(len(arguments)) if index not in donate]
        shards = jax.tree.map(
            lambda array, sharding: (
                math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
            ),
            tuple(arguments[index] for index in kept),
            self._shardings(tuple(in_specs[index] for index in kept)),
        )
        return sum(jax.tree.leaves(shards))


class GpuPrograms(DevicelessPrograms):
    """Compiles for GPUs."""

    def __init__(self, mesh: Mesh, device: GpuDevice, report: Report) -> None:
        super().__init__(mesh, report)
        # private: kernels' lowering asks the abstract mesh which device it is for
        from jax._src.cudnn import fused_attention_stablehlo
        from jax._src.mesh import AbstractDevice

        # it asks this process's own devices; all that we describe are Hopper or later
        fused_attention_stablehlo.check_compute_capability = lambda capability: True
        # the plugin contains how much room CUB's sort takes on Hopper, and asks a device elsewhere
        self._options = {"xla_gpu_enable_cub_radix_sort": device.compute_major == 9}
        self._abstract = mesh.abstract_mesh.update(
            abstract_device=AbstractDevice(
                device_kind=device.kind, num_cores=device.cores, platform="cuda"
            )
        )

    def _counted(
        self, lowered: jax.stages.Lowered, name: str, read: int, options: dict[str, str | bool]
    ) -> tuple[jax.stages.Compiled, Callable[..., Counted]]:
        with tempfile.TemporaryDirectory() as dump:
            more = {**self._options, "xla_dump_to": dump}
            compiled = lowered.compile(compiler_options=options | more)
            thunks = count_thunks(Path(dump))
        copied = largest_copy(compiled.as_text() or "")
        return compiled, partial(GpuCounted, **thunks, copied_bytes=copied)


class TpuPrograms(DevicelessPrograms):
    """Compiles for TPUs. `embedding_bytes`: bytes on a device of an embedding that is no head, of
    which a step reads only rows."""

    def __init__(
        self, mesh: Mesh, device: TpuDevice, report: Report, embedding_bytes: int = 0
    ) -> None:
        super().__init__(mesh, report)
        self._device, self._embedding = device, embedding_bytes

    def _counted(
        self, lowered: jax.stages.Lowered, name: str, read: int, options: dict[str, str | bool]
    ) -> tuple[jax.stages.Compiled, Callable[..., Counted]]:
        compiled = lowered.compile(compiler_options=options)
        hlo = compiled.as_text() or ""
        if dump := os.environ.get("TPU_PROGRAMS_DUMP"):
            (Path(dump) / f"{name.replace(' ', '_')}.hlo").write_text(hlo)
        cost = compiled.cost_analysis() or {}
        roof = 0.0
        if name.startswith(("step", "group")):
            weights = read - (self._embedding if name.startswith("step") else 0)
            rate, bandwidth = self._device.flops, self._device.memory_bandwidth
            roof = max(weights / bandwidth, cost.get("flops", 0.0) / rate)
        return compiled, partial(
            TpuCounted,
            **count_operations(hlo),
            accessed_bytes=int(cost.get("bytes accessed", 0)),
            # XLA subtracts a second for each operation whose cost it cannot tell
            optimal_seconds=round(cost.get("optimal_seconds", 0.0) % 1, 7),
            roof_seconds=round(roof, 7),
        )


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
    return max((array_bytes(kind, sizes) for kind, sizes in found), default=0)


def _name(key: Hashable) -> str:
    kind, *rest = key if isinstance(key, tuple) else (key,)
    words = [str(kind)]
    for part in rest:
        if isinstance(part, enum.Enum):
            words.append(str(part.value))
        elif isinstance(part, ChunkForm):
            words += ["packed" if part.packed else "one"]
        elif isinstance(part, int | str) and not isinstance(part, bool):
            words.append(str(part))
    return " ".join(words)
