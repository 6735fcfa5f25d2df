"""Manages the meshes of the research API, and the channel that transfers KV between them. There is
one executor for each pair of layout and devices. It is built at first use."""

from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.limits import mesh_limits
from jdisagg.engine.replica import LoadModel
from jdisagg.engine.research.instance import ResearchInstance
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.transfer.in_process import InProcessChannel


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Sizes of an engine's meshes.

    Args:
        chunk_tokens: Maximum number of tokens in a prefill chunk. Short prompts that are computed
            together share a chunk.
        sessions_per_rank: Number of sequences of full context length for which each dp rank has
            pages.

    Raises:
        ConfigError: `sessions_per_rank` is below 1.
    """

    page_size: int = 16
    chunk_tokens: int = 256
    sessions_per_rank: int = 4
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sessions_per_rank < 1:
            raise ConfigError(f"sessions_per_rank must be at least 1, got {self.sessions_per_rank}")


class ResearchMeshes:
    """All meshes of an engine, each with its own weights and pages. Meshes are freed by `close`."""

    def __init__(self, load: LoadModel, devices: tuple[Device, ...], sizes: MeshSizes) -> None:
        self.devices = devices
        self.channel = InProcessChannel(MonotonicClock())
        self._load = load
        self._sizes = sizes
        self._instances: dict[tuple[Layout, tuple[int, ...]], ResearchInstance] = {}

    @property
    def instances(self) -> list[ResearchInstance]:
        return list(self._instances.values())

    def instance(self, layout: Layout, devices: Sequence[Device]) -> ResearchInstance:
        """Returns the executor for a layout on `devices`, and builds it at first use. Raises
        LayoutError if there are too few devices, or if the model cannot be sharded by the
        layout."""
        if len(devices) != layout.devices:
            raise LayoutError(
                f"layout {layout} needs dp * tp = {layout.devices} devices, and there are"
                f" {len(devices)} (the engine has {len(self.devices)}); choose a smaller layout, or"
                " give as many devices"
            )
        key = (layout, tuple(device.id for device in devices))
        if key not in self._instances:
            self._instances[key] = self._build(layout, devices)
        return self._instances[key]

    def close(self) -> None:
        """Frees all meshes. Idempotent."""
        for instance in self._instances.values():
            instance.close()
        self._instances.clear()

    def _build(self, layout: Layout, devices: Sequence[Device]) -> ResearchInstance:
        if layout.pp > 1:
            raise LayoutError(
                f"layout {layout}: the research API has one mesh for each layout, and pipeline"
                " stages have several; use pp=1, or jdisagg serve"
            )
        loaded, sizes = self._load(layout, devices), self._sizes
        model = loaded.model
        layout.check(model.geometry)
        context = min(sizes.context_tokens or model.context_tokens, model.context_tokens)
        config = InstanceConfig(
            layout,
            sizes.page_size,
            pages_per_rank=sizes.sessions_per_rank * -(-context // sizes.page_size),
            slots_per_rank=1,
            chunk_tokens=sizes.chunk_tokens,
            min_chunk_tokens=min(64, sizes.chunk_tokens),
        )
        # One layer per group, so that each block holds one layer.
        groups = len(model.kv_spec.layers)
        limits = mesh_limits(config, Mode.DISAGGREGATED, model.kv_spec, context, groups)
        return ResearchInstance(f"research-{layout}", loaded, layout, limits, self.channel)
