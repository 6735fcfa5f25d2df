"""Reduces the KV pages of a planned configuration to those that workers have memory for, beside
activations and KV in transfer, which the planner does not count one by one."""

from collections.abc import Mapping
from dataclasses import replace

from jdisagg.config import EngineConfig, InstanceConfig, Mode
from jdisagg.costs.hardware import Accelerator
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.engine.limits import worker_config
from jdisagg.engine.memory_plan import DeviceMemory, fit_worker
from jdisagg.engine.prefix_defaults import worker_defaults
from jdisagg.errors import ConfigError
from jdisagg.layout.platforms import DEVICE_FRACTION
from jdisagg.messages.worker_status import WorkerRole


def with_fitting_pages(
    config: EngineConfig, geometry: CostGeometry, cards: Mapping[WorkerRole, Accelerator]
) -> EngineConfig:
    """`cards`: the accelerators of each role. A configuration without room for one sequence is left
    as it is, and is refused with the reason where it is started."""
    if config.mode is not Mode.DISAGGREGATED:
        return replace(config, decode=_fitted(config, WorkerRole.MIXED, geometry, cards))
    prefill = _fitted(config, WorkerRole.PREFILL, geometry, cards)
    return replace(
        config, prefill=prefill, decode=_fitted(config, WorkerRole.DECODE, geometry, cards)
    )


def _fitted(
    config: EngineConfig,
    role: WorkerRole,
    geometry: CostGeometry,
    cards: Mapping[WorkerRole, Accelerator],
) -> InstanceConfig:
    card, own = cards[role], config.prefill if role is WorkerRole.PREFILL else config.decode
    platform = "tpu" if card.name.startswith("tpu") else "gpu"
    memory = DeviceMemory(int(DEVICE_FRACTION * card.memory_bytes), f"of {card.name}", platform)
    worker = worker_defaults(worker_config(config, role), role, sharers=1, processes=1)
    roomy = replace(worker, instance=replace(worker.instance, pages_per_rank=None))
    try:
        room = fit_worker(roomy, role, geometry, memory)[1].room
    except ConfigError:
        return own
    return replace(own, pages_per_rank=min(own.pages_per_rank or room, room))
