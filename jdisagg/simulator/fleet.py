"""Describes a simulated fleet: a model, pools of identical instances, their places, the links
between instances, and the workers' configuration.

`InstanceConfig` and `LimitsConfig` configure the workers, as in the live system. Constructors raise
ConfigError for impossible combinations. Pure data."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jdisagg.config import InstanceConfig, LimitsConfig, Mode, PrefixConfig, RoutingConfig
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import DEFAULT_SOFTWARE, Software
from jdisagg.costs.hardware import Accelerator, Link
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention, LatentAttention
from jdisagg.engine.limits import mesh_limits
from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec, latent_layer
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS
from jdisagg.simulator.host_memory import HostLink
from jdisagg.simulator.step_costs import ModelCosts, StepCosts

# Sizes of a GPU instance, because the live defaults are for a CPU. The executor limits the length
# of spans, so that steps_per_dispatch may be large.
INSTANCE = InstanceConfig(
    slots_per_rank=256,
    chunk_tokens=8192,
    min_chunk_tokens=16,
    steps_per_dispatch=4096,
    stream_tokens=256,
    queue_limit=1_000_000,
)
HOSTS_PER_RACK = 4
# By default no request is refused because of waiting requests. Timeouts are long, because pulls
# over slow links take long. Checksums are off, because simulated KV has no bytes.
LIMITS = LimitsConfig(
    max_waiting_requests=1_000_000, default_deadline_seconds=3600.0, pull_seconds=60.0, verify=False
)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of identical instances.

    Attributes:
      costs: Estimates the durations of steps. If None, the cost model of the pool does.
    """

    count: int
    hardware: Accelerator
    instance: InstanceConfig = INSTANCE
    costs: StepCosts | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"a pool must have at least 1 instance, got {self.count}")

    @property
    def devices(self) -> int:
        return self.instance.layout.devices

    @property
    def stages(self) -> int:
        return self.instance.layout.pp


@dataclass(frozen=True, slots=True)
class Fleet:
    """A model, its pools, and the network between them.

    Studies of other engines override methods: `benchmarks/simulator_engines` adds sites and mixed
    pools in this way.

    Attributes:
      decode: Pool of decode instances. In the unified and chunked modes, where each instance both
        prefills and decodes, it is the only pool.
      prefill: Pool of prefill instances; None in the unified and chunked modes.
      host_devices: Number of devices that share the scale-up link; 0 takes the number from the
        description of the hardware.
      link: Link between any two instances; None selects the scale-up link within a host and the
        scale-out link between hosts.
      overlap: Number of layer groups in which the KV of a prompt chunk is sent.
      software: Engine of all instances, whose step times are simulated. `geometry` must have the
        weight and KV precision of this engine.
    """

    geometry: CostGeometry
    decode: Pool
    prefill: Pool | None = None
    mode: Mode = Mode.DISAGGREGATED
    limits: LimitsConfig = LIMITS
    routing: RoutingConfig = RoutingConfig()
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    host_devices: int = 0
    link: Link | None = None
    overlap: int = 2
    fused: bool = False
    context_tokens: int | None = None
    block_tokens: int = 512
    prefix: PrefixConfig = PrefixConfig()
    memory_reserve: float = 0.1
    heartbeat_seconds: float = DEFAULT_TIMEOUTS.membership.heartbeat_seconds
    software: Software = DEFAULT_SOFTWARE

    def __post_init__(self) -> None:
        if (self.prefill is None) is (self.mode is Mode.DISAGGREGATED):
            raise ConfigError(
                f"mode {self.mode.value} with{'out' if self.prefill is None else ''} a prefill"
                " pool: only two pools have one"
            )
        for name in ("overlap", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_devices < 0:
            raise ConfigError(f"host_devices must not be negative, got {self.host_devices}")
        if self.prefix.disk_gib:
            raise ConfigError(
                f"prefix.disk_gib={self.prefix.disk_gib:g}: the simulator has no disk; leave it out"
            )
        if self.prefix.appends and self.prefill is None:
            raise ConfigError(
                f"prefix.append_tokens={self.prefix.appends} needs prefill and decode"
                f" workers, and mode {self.mode.value} has none; leave it out"
            )
        for pool in self.pools:
            self.limits_of(pool)

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def weights_text(self) -> str:
        bits = self.geometry.matrix_bits
        return f"{self.dtype} with matrices in {bits} bits" if bits else self.dtype

    @property
    def kept_dtype(self) -> str:
        return self.kv_dtype or self.geometry.kv_dtype or self.dtype

    def check_roles_change(self) -> None:
        """Raises ConfigError if there is only one pool, or if the instances of the two pools differ
        in hardware or number of devices."""
        if self.prefill is None:
            raise ConfigError(
                f"roles do not change in mode {self.mode.value}: the fleet has no such pool; use"
                " the disaggregated mode"
            )
        for what, mine, theirs in (
            ("devices an instance", self.prefill.devices, self.decode.devices),
            ("accelerator", self.prefill.hardware.name, self.decode.hardware.name),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"roles do not change between pools of different {what}, {mine} and {theirs}:"
                    " give both pools the same"
                )

    @property
    def context(self) -> int:
        return self.context_tokens or self.geometry.context_tokens

    @property
    def accelerators(self) -> int:
        return sum(pool.count * pool.devices for pool in self.pools)

    def hardware_of(self, pool: Pool) -> Accelerator:
        card = pool.hardware
        if self.host_devices:
            card = replace(card, domain_devices=self.host_devices)
        return self.software.card(card, self.geometry, pool.instance.layout)

    def cost_model(self, pool: Pool) -> CostModel:
        layout = pool.instance.layout
        return CostModel(
            self.geometry,
            self.hardware_of(pool),
            layout,
            dtype=self.dtype,
            kv_dtype=self.kept_dtype,
        )

    def costs_of(self, pool: Pool) -> StepCosts:
        return pool.costs or ModelCosts(self.cost_model(pool), pool.instance.codec)

    def limits_of(self, pool: Pool) -> MeshLimits:
        """Raises ConfigError if the weights leave no memory for KV."""
        instance = pool.instance
        if instance.pages_per_rank is None:
            model = self.cost_model(pool)
            pages = model.kv_tokens_per_rank(self.memory_reserve) // instance.page_size
            if not pages:
                raise ConfigError(
                    f"{self.geometry.name} in {self.weights_text} takes"
                    f" {model.weight_bytes_per_device / 1e9:.0f} GB on each {pool.hardware.name}"
                    f" with layout {instance.layout}, which leaves no room for KV in its"
                    f" {pool.hardware.memory_bytes / 1e9:.0f} GB; use more devices an"
                    " instance, or another accelerator"
                )
            # More pages than all slots can use would serve only a prefix cache.
            most = instance.slots_per_rank * math.ceil(self.context / instance.page_size)
            kept = pages if self.prefix.reuse else min(pages, most)
            instance = replace(instance, pages_per_rank=kept)
        # All KV of a prompt is sent as one block, also with several pipeline stages.
        one = replace(instance, layout=replace(instance.layout, pp=1))
        limits = mesh_limits(
            one,
            self.mode,
            kv_spec(self.geometry, self.kept_dtype),
            self.context,
            layer_groups=1,
            append_tokens=self.prefix.appends if pool is self.decode else 0,
        )
        # Every chunk has the size that is simulated, because planners compare chunk sizes.
        mixed = limits.chunk_buckets[-1:] if self.fused and self.mode is Mode.CHUNKED else ()
        return replace(limits, whole_blocks=True, stages=pool.stages, mixed_buckets=mixed)

    @property
    def tiers(self) -> TierRoom:
        return TierRoom(self.prefix.host_bytes, always=self.prefix.restores == "always")

    def host_link(self, pool: Pool) -> HostLink:
        kept = self.geometry.kv_bytes_per_token(self.kept_dtype)
        return HostLink(pool.hardware.host, pool.devices // pool.instance.layout.dp, kept)

    def places(self) -> tuple[tuple[str, ...], ...]:
        """Returns for each pool the places of its instances, written "rack/host/domain/process".

        Pools with equal hardware share hosts. The order of instances alternates between the pools
        in proportion to their sizes, so that a prefill and a decode instance share a host if both
        fit."""
        turns = sorted(
            ((index + 0.5) / pool.count, number, index)
            for number, pool in enumerate(self.pools)
            for index in range(pool.count)
        )
        found: dict[tuple[int, int], str] = {}
        free: dict[str, tuple[int, int]] = {}
        hosts = 0
        for _, number, index in turns:
            pool = self.pools[number]
            size = self.hardware_of(pool).domain_devices
            kind = pool.hardware.name
            host, left = free.get(kind, (0, 0))
            if left < min(pool.devices, size):
                host, left = hosts, math.ceil(pool.devices / size) * size
                hosts += left // size
            free[kind] = (host, left - pool.devices)
            rack = host // HOSTS_PER_RACK
            found[number, index] = f"rack{rack}/host{host}/domain{host}/{number}.{index}"
        return tuple(
            tuple(found[number, index] for index in range(pool.count))
            for number, pool in enumerate(self.pools)
        )

    def link_between(self) -> Callable[[str, str], Link]:
        out = self._slowest(lambda hardware: hardware.scale_out)
        up = self._slowest(lambda hardware: hardware.scale_up)

        def between(one: str, other: str) -> Link:
            return up if one.split("/")[:2] == other.split("/")[:2] else out

        return between

    @property
    def far(self) -> Link:
        return self._slowest(lambda hardware: hardware.scale_out)

    def _slowest(self, kind: Callable[[Accelerator], Link]) -> Link:
        links = (kind(pool.hardware) for pool in self.pools)
        return self.link or min(links, key=lambda link: link.bytes_per_second)


def _grouped(attention: GroupedAttention, layers: int, dtype: str) -> KVSpec:
    sizes = (("k", attention.head_dim), ("v", attention.value_size))
    parts = tuple([KVComponent(name, attention.kv_heads, size) for name, size in sizes])
    return KVSpec((KVLayer(parts),) * layers, dtype)


def kv_spec(geometry: CostGeometry, dtype: str) -> KVSpec:
    attention = geometry.attention
    if isinstance(attention, LatentAttention):
        index, width = attention.index_dim, attention.kv_rank + attention.rope_dim
        shared, own = attention.shared_layers, latent_layer(width, index=index)
        layers = (own,) * (geometry.layers - shared) + (latent_layer(width),) * shared
        return KVSpec(layers, dtype)
    spec = _grouped(attention, geometry.layers, dtype)
    if attention.indexed_layers:
        first = geometry.layers - attention.indexed_layers
        key = KVComponent("index", 0, attention.index_dim)
        indexed = [KVLayer((*layer.components, key)) for layer in spec.layers[first:]]
        return KVSpec((*spec.layers[:first], *indexed), dtype)
    if attention.full is None and not attention.shared_layers:
        return spec
    layers: tuple[KVLayer, ...] = ()
    for kind, own in geometry.kv_kinds:
        assert isinstance(kind, GroupedAttention)
        layers += _grouped(kind, own, dtype).layers
    return KVSpec(layers, dtype)
