"""What a planner may choose: modes, layouts and counts of instances that a number of accelerators
allows, and how they are joined.

`Site` is what the user has; `Candidate` one way to use it. `candidates` lists those that the model
divides by and memory admits, or says why there is none (`NothingFits`). Layouts: a dense model's dp
ranks are instances of their own, so dp = 1; experts lie over all of an instance's devices, or are
cut by tp. tp stays within a scale-up domain; dp ranks that share experts may lie in several, which
then exchange tokens over the slower link. Pure; knows the cost model, no workload beyond its
longest request, and no time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import Accelerator, Link
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout

CHUNKS = (512, 1024, 2048, 4096, 8192)
# Whole prompts, or pieces of them where they are longer than this, in the modes that do not look
# for a chunk size.
WHOLE_CHUNK = 8192
ACTIVATIONS = 0.1  # of memory, beside weights and KV
PAGE_TOKENS = 64


class NothingFits(ConfigError):
    """No way to use these accelerators for this model and workload; the message says what is in the
    way and what would help."""


@dataclass(frozen=True)
class Site:
    """`accelerators` of one kind in all, `devices_per_node` of them in a host, `domain_devices` of
    them joined by the scale-up link (NVLink, ICI); every device has one `scale_out` link to other
    domains. None: as in the hardware's description, where a domain of up to 8 devices is a host's,
    and a larger one is of hosts of 4."""

    accelerator: Accelerator
    accelerators: int
    devices_per_node: int | None = None
    domain_devices: int | None = None
    scale_out: Link | None = None

    def __post_init__(self) -> None:
        for name in ("accelerators", "devices_per_node", "domain_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"site: {name} must be at least 1, got {value}")

    @property
    def node(self) -> int:
        return self.devices_per_node or (
            4 if self.accelerator.domain_devices > 8 else self.accelerator.domain_devices
        )

    @property
    def domain(self) -> int:
        described = self.accelerator.domain_devices
        return self.domain_devices or (described if described > 8 else min(described, self.node))

    @cached_property
    def described(self) -> Accelerator:
        """The accelerator as it is joined here."""
        return replace(
            self.accelerator,
            domain_devices=self.domain,
            scale_out=self.scale_out or self.accelerator.scale_out,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """`decode_instances` of `decode` layout; in the one-pool modes they do both halves and
    `prefill` is None."""

    mode: Mode
    decode: Layout
    decode_instances: int
    chunk_tokens: int = WHOLE_CHUNK
    prefill: Layout | None = None
    prefill_instances: int = 0

    @property
    def devices(self) -> int:
        return self.decode_instances * self.decode.devices + (
            self.prefill_instances * self.prefill.devices if self.prefill else 0
        )

    @property
    def name(self) -> str:
        decode = f"{self.decode_instances} x {short(self.decode)}"
        if self.prefill:
            return f"{self.prefill_instances} x {short(self.prefill)} -> {decode}"
        return f"{decode}, chunk {self.chunk_tokens}" if self.mode is Mode.CHUNKED else decode

    def unit_devices(self) -> int:
        """Devices of the smallest part that has the whole's ratio of prefill to decode
        instances."""
        return (
            self.devices // gcd(self.prefill_instances, self.decode_instances)
            if self.prefill
            else self.decode.devices
        )


def short(layout: Layout) -> str:
    """A layout without its ones: "tp4", "dp8 ep8", "1 device"."""
    parts = [
        f"{name}{value}" for name in ("dp", "tp", "ep") if (value := getattr(layout, name)) > 1
    ]
    return " ".join(parts) or "1 device"


def handoff_path(site: Site, candidate: Candidate) -> tuple[Link, int]:
    """(link, how many side by side) that one prompt's KV takes from a prefill to a decode instance:
    within a scale-up domain where each domain can hold whole units of prefill and decode together,
    else off it. Each device has a link of its own, so the side with fewer devices bounds them (of a
    decode instance: those of the one dp rank that receives; of a prefill one likewise)."""
    assert candidate.prefill is not None
    parallel = min(candidate.prefill.tp, candidate.decode.tp)
    accelerator = site.described
    near = candidate.unit_devices() <= site.domain
    return (accelerator.scale_up if near else accelerator.scale_out), parallel


@dataclass(frozen=True, slots=True)
class Fitting:
    """A layout of one instance whose weights fit, with room for `kv_tokens` of KV on each dp
    rank."""

    layout: Layout
    model: CostModel
    kv_tokens: int


def fitting_layouts(
    geometry: CostGeometry, site: Site, longest_tokens: int, dtype: str = "bfloat16"
) -> list[Fitting]:
    """Layouts of one instance that hold the weights and, on a dp rank, one request of
    `longest_tokens`. Raises NothingFits."""
    most = site.accelerators if geometry.experts else min(site.accelerators, site.domain)
    weights_least, room_most, refused = float("inf"), 0, ""
    found: list[Fitting] = []
    for layout in _layouts(most, site.domain, bool(geometry.experts)):
        try:
            model = CostModel(geometry, site.described, layout, dtype=dtype)
        except LayoutError as error:
            refused = error.message
            continue
        tokens = model.kv_tokens_per_rank(ACTIVATIONS)
        room = tokens // PAGE_TOKENS * PAGE_TOKENS  # of one request: it has whole pages
        weights_least = min(weights_least, model.weight_bytes_per_device)
        room_most = max(room_most, room)
        if room >= longest_tokens and not _priced_alike(layout, found):
            found.append(Fitting(layout, model, tokens))
    if found:
        return found
    device = site.accelerator
    if weights_least == float("inf"):
        raise NothingFits(
            f"nothing fits, because no layout on up to {most} devices divides {geometry.name}:"
            f" {refused}"
        )
    if not room_most:
        needed = CostModel(geometry, device, dtype=dtype).weight_bytes_per_device
        bits = geometry.matrix_bits
        kept = f"{dtype}, matrices in {bits} bits" if bits else dtype
        raise NothingFits(
            f"nothing fits, because the weights of {geometry.name} ({needed / 1e9:.0f} GB in"
            f" {kept}) leave no room for KV on up to {most} {device.name} of"
            f" {device.memory_bytes / 1e9:.0f} GB (at best {weights_least / 1e9:.0f} GB a device);"
            " give more accelerators, larger ones, or a larger scale-up domain, or weights in fewer"
            " bits"
        )
    raise NothingFits(
        f"nothing fits, because the longest request has {longest_tokens:,} tokens and a dp rank of"
        f" {geometry.name} on up to {most} {device.name} has room for {room_most:,} at most; give"
        " more accelerators, or leave such requests out"
    )


def _priced_alike(layout: Layout, found: list[Fitting]) -> bool:
    """Whether another layout of the same costs and memory is there: experts whole over the devices
    of a tensor-parallel group cost what each cut over them costs."""
    return layout.ep == layout.tp and any(item.layout == Layout(tp=layout.tp) for item in found)


def _layouts(most: int, domain: int, experts: bool) -> Iterator[Layout]:
    """By powers of two up to `most` devices, tp up to a `domain`."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    for tp in sizes:
        if tp > domain:
            return
        yield Layout(tp=tp)
        if not experts:
            continue
        if tp > 1:
            yield Layout(tp=tp, ep=tp)
        for dp in sizes[1:]:
            if dp * tp <= most:
                yield Layout(dp=dp, tp=tp, ep=dp * tp)


def one_pool(fitting: list[Fitting], site: Site, modes: tuple[Mode, ...]) -> Iterator[Candidate]:
    """As many instances of one layout as there is room for."""
    for item in fitting:
        count = site.accelerators // item.layout.devices
        if Mode.UNIFIED in modes:
            yield Candidate(Mode.UNIFIED, item.layout, count)
        if Mode.CHUNKED in modes:
            for chunk in CHUNKS:
                yield Candidate(Mode.CHUNKED, item.layout, count, chunk)


def two_pools(fitting: list[Fitting], site: Site) -> Iterator[Candidate]:
    """Every pair of layouts, and every count of prefill instances with as many decode instances as
    the rest holds."""
    for prefill in fitting:
        for decode in fitting:
            for count in range(1, site.accelerators // prefill.layout.devices + 1):
                left = site.accelerators - count * prefill.layout.devices
                if instances := left // decode.layout.devices:
                    yield Candidate(
                        Mode.DISAGGREGATED,
                        decode.layout,
                        instances,
                        WHOLE_CHUNK,
                        prefill.layout,
                        count,
                    )
