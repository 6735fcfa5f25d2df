"""The shapes of meshes that tests share, and the programs that are compiled for them.

Most of the time of a test with real programs is their compilation, and a program belongs to all
numbers of its mesh: layout, sizes of pages, chunks and batches, model. Tests therefore take the
shapes of this file as they are. `tests/test_shapes.py` lists the files whose tests are about other
numbers.

- `config()` is a prefill mesh with tp=2 and a decode mesh with dp=2, whose pages are half as long.
  `config(Mode.UNIFIED)` and `config(Mode.CHUNKED)` are one mesh of one device.
- `config(**FEW_PAGES)` has pages for a part of the sequences that come at once.
- `config(directory=..., **FAMILY)` suits the golden checkpoints, whose contexts are short.
- `instance(layout)` is one mesh, for tests without a cluster.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jdisagg.config import EngineConfig, InstanceConfig, LimitsConfig, Mode, ModelConfig
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import Layout
from jdisagg.layout.platforms import traits_of
from tests.checkpoints import GOLDEN as GOLDEN  # re-exported
from tests.checkpoints import LLAMA as LLAMA
from tests.checkpoints import MOE as MOE
from tests.checkpoints import TINY as TINY
from tests.memory import also_dropped

PREFILL, DECODE, ONE = "tp=2", "dp=2", "tp=1"
PREFILL_PAGE, DECODE_PAGE, CHUNK, SLOTS, CONTEXT, LAYER_GROUPS = 16, 8, 64, 4, 512, 2
FEW_PAGES: dict[str, Any] = {"pages": 56, "growth": 1, "slots": 8}
FAMILY: dict[str, Any] = {"context": 256, "slots": 2, "chunk": 32}

# Without warm-up the first use of a program compiles it, which on a busy machine takes longer than
# the default limits of a transfer and of a step.
PATIENT = LimitsConfig(
    pull_seconds=60.0,
    handoff_lease_seconds=60.0,
    reservation_lease_seconds=60.0,
    step_seconds=600.0,
)


def instance(layout: str, *, chunk: int = CHUNK, **own: object) -> InstanceConfig:
    """One mesh. `own`: Fields that a test is about."""
    shared = InstanceConfig(
        layout=Layout.parse(layout),
        page_size=PREFILL_PAGE,
        chunk_tokens=chunk,
        min_chunk_tokens=min(chunk, CHUNK),
        slots_per_rank=SLOTS,
        layer_groups=LAYER_GROUPS,
        growth_tokens=64,
        speculate="off",
    )
    return replace(shared, **own)  # type: ignore[arg-type]


def config(
    mode: Mode = Mode.DISAGGREGATED,
    prefill: str = PREFILL,
    decode: str = "",
    *,
    directory: Path = LLAMA,
    prefill_page: int = PREFILL_PAGE,
    decode_page: int = DECODE_PAGE,
    chunk: int = CHUNK,
    slots: int = SLOTS,
    pages: int | None = None,
    dtype: str = "float32",
    context: int = CONTEXT,
    warm_up: bool = False,
    limits: LimitsConfig | None = None,
    growth: int = 64,
    steps: int = 1,
    block_bytes: int | None = None,
    layer_groups: int | None = LAYER_GROUPS,
    speculate: str = "off",
) -> EngineConfig:
    """A cluster in this process. `decode` is by default the shared layout of the mode."""
    two = mode is Mode.DISAGGREGATED
    common = instance(
        prefill,
        chunk=chunk,
        page_size=prefill_page,
        slots_per_rank=slots,
        layer_groups=layer_groups,
        block_bytes=block_bytes,
        growth_tokens=growth,
        steps_per_dispatch=steps,
        speculate=speculate,
    )
    layout = Layout.parse(decode or (DECODE if two else ONE))
    return EngineConfig(
        model=ModelConfig(str(directory), dtype, context),
        mode=mode,
        prefill=common,
        decode=replace(common, layout=layout, page_size=decode_page, pages_per_rank=pages),
        limits=limits or (LimitsConfig() if warm_up else PATIENT),
        warm_up=warm_up,
    )


_compiled: dict[object, Programs] = {}
also_dropped.append(_compiled.clear)


def share_programs(executor: MeshExecutor) -> None:
    """Gives an executor without warm-up the programs that executors of equal model, mesh, limits
    and role have compiled in this process. Not for tests that replace what programs are made of,
    unless it is in the traits of the platform."""
    role = replace(executor.role, disk=str(bool(executor.role.disk)))
    parts = (part.structure for stage in executor._stages for part in stage.weights.parts)
    meshes = (stage.mesh for stage in executor.programs.stages)
    form = (executor.limits, executor.limits.longest_run, role, traits_of(executor.platform))
    key = (*form, *parts, *meshes)
    if key in _compiled:
        executor.programs.adopt(_compiled[key])
    _compiled[key] = executor.programs
