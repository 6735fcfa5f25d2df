"""Enumerates the planner's candidates: modes, layouts and numbers of instances.

`fitting_layouts` lists the layouts that divide the model evenly and fit into memory, or raises
`NothingFits` with the reason. For dense models dp is 1, because dp ranks would be equivalent to
separate instances. Experts are distributed over all devices of an instance, or each expert is
sharded by tp. tp stays within the devices that share a scale-up link (a domain). dp ranks that
share experts may span domains, and then exchange tokens over the scale-out link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Literal

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import DEFAULT_SOFTWARE, Software
from jdisagg.costs.hardware import Accelerator, Link
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout

CHUNKS = (512, 1024, 2048, 4096, 8192)
# Chunk size of the modes for which no chunk size is searched. Longer prompts take several chunks.
WHOLE_CHUNK = 8192
ACTIVATIONS = 0.1  # fraction of memory left for activations
PAGE_TOKENS = 64
SLOW_LINK = 128e9  # bytes per second: PCIe 6


Best = Literal["rate", "dollars", "joules"]  # what a plan makes most of: requests per each of it


class NothingFits(ConfigError):
    """Raised if no candidate fits the accelerators, model and workload. The message has the reason
    and a remedy."""


@dataclass(frozen=True)
class Site:
    """The accelerators that a plan may use. Fields that are None take their value from the
    description of the hardware.

    Attributes:
      hardware: Name or file of the accelerator's description, for recipes.
      devices_per_node: Number of accelerators of a host. By default a domain of up to 8 is one
        host, and a larger domain consists of hosts of 4.
      scale_out: Link of each device to devices with which it shares no scale-up link.
      between: Link of each device between prefill and decode instances; None selects the scale-up
        link where instances share one, and else `scale_out`.
      decoding: Accelerators of another kind, on which all decode instances run. The accelerators of
        this site then only prefill.
    """

    accelerator: Accelerator
    accelerators: int
    devices_per_node: int | None = None
    domain_devices: int | None = None
    scale_out: Link | None = None
    software: Software = DEFAULT_SOFTWARE
    between: Link | None = None
    hardware: str = ""
    decoding: "Site | None" = None

    def __post_init__(self) -> None:
        for name in ("accelerators", "devices_per_node", "domain_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"site: {name} must be at least 1, got {value}")

    @property
    def decodes(self) -> "Site":
        return self.decoding or self

    @property
    def devices(self) -> int:
        return self.accelerators + (self.decoding.accelerators if self.decoding else 0)

    @property
    def text(self) -> str:
        own = f"{self.accelerators} {self.accelerator.name}"
        return f"{own} and {self.decoding.text}" if self.decoding else own

    @property
    def node(self) -> int:
        return self.devices_per_node or (
            4 if self.accelerator.domain_devices > 8 else self.accelerator.domain_devices
        )

    @property
    def domain(self) -> int:
        described = self.accelerator.domain_devices
        return self.domain_devices or (described if described > 8 else min(described, self.node))

    @property
    def slow_links(self) -> bool:
        """Whether to consider pipeline stages: the devices of a host are connected by PCIe only,
        and the engine is jdisagg's. Other engines do not support stages on both sides of a
        hand-off."""
        own = self.software.engine is DEFAULT_SOFTWARE.engine
        return own and self.accelerator.scale_up.bytes_per_second <= SLOW_LINK

    @cached_property
    def described(self) -> Accelerator:
        return replace(
            self.accelerator,
            domain_devices=self.domain,
            scale_out=self.scale_out or self.accelerator.scale_out,
        )

    def spent(self, candidate: "Candidate", what: "Best") -> float | None:
        """Returns the dollars per hour, or the watts (joules per second), of the accelerators that
        a candidate uses; 1 for "rate", and None if a price or power is unknown."""
        used = (
            (self, candidate.prefill_devices),
            (self.decodes, candidate.devices - candidate.prefill_devices),
        )
        cards = [(site.accelerator, count) for site, count in used if count]
        if what == "rate":
            return 1.0
        total = 0.0
        for card, count in cards:
            price = card.dollars_per_hour if what == "dollars" else card.watts
            if price is None:
                return None
            total += count * price
        return total

    def cost_model(self, geometry: CostGeometry, layout: Layout, dtype: str) -> CostModel:
        """`geometry` must already have the weight and KV precision of the software."""
        card = self.software.card(self.described, geometry, layout)
        return CostModel(geometry, card, layout, dtype=dtype)


def check_priced(site: Site, best: Best) -> None:
    """Raises ConfigError if `best` needs a price or a power that is unknown or 0."""
    for one in dict.fromkeys((site, site.decodes)) if best != "rate" else ():
        card, said = one.accelerator, f"{one.accelerators} {one.accelerator.name}"
        if best == "dollars" and not card.dollars_per_hour:
            raise ConfigError(
                f"planner: best=dollars needs the price of {said}, above 0; give"
                " --pool=NAME:COUNT@DOLLARS_PER_HOUR, or --dollars_per_hour with --hardware"
            )
        if best == "joules" and not card.watts:
            raise ConfigError(
                f"planner: best=joules needs the power of {said}, and its description has none;"
                " give a hardware file with `watts`"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to use the accelerators: a mode, and for each role a layout and a number of
    instances. In the unified and chunked modes `prefill` is None, and the decode instances also
    prefill. `gather_steps`: as in `InstanceConfig`."""

    mode: Mode
    decode: Layout
    decode_instances: int
    chunk_tokens: int = WHOLE_CHUNK
    prefill: Layout | None = None
    prefill_instances: int = 0
    gather_steps: int = 0

    @property
    def devices(self) -> int:
        return self.decode_instances * self.decode.devices + self.prefill_devices

    @property
    def prefill_devices(self) -> int:
        return self.prefill_instances * self.prefill.devices if self.prefill else 0

    @property
    def staged(self) -> bool:
        return max(self.decode.pp, self.prefill.pp if self.prefill else 1) > 1

    @property
    def name(self) -> str:
        decode = f"{self.decode_instances} x {short(self.decode)}"
        if self.prefill:
            return f"{self.prefill_instances} x {short(self.prefill)} -> {decode}"
        if self.gather_steps:
            decode += f", prompts gathered for {self.gather_steps} steps"
        return f"{decode}, chunk {self.chunk_tokens}" if self.mode is Mode.CHUNKED else decode

    def unit_devices(self) -> int:
        """Returns the number of devices of the smallest group of instances that has the candidate's
        ratio of prefill to decode instances."""
        return (
            self.devices // gcd(self.prefill_instances, self.decode_instances)
            if self.prefill
            else self.decode.devices
        )


def short(layout: Layout) -> str:
    parts = [
        f"{name}{value}"
        for name in ("pp", "dp", "tp", "ep")
        if (value := getattr(layout, name)) > 1
    ]
    return " ".join(parts) or "1 device"


def handoff_path(site: Site, candidate: Candidate) -> tuple[Link, int]:
    """Returns the link over which one prompt's KV is sent from prefill to decode, and the number of
    these links that are used in parallel.

    Without `site.between`, it is the scale-up link if this connects `unit_devices` accelerators.
    Each device has its own link. The dp rank with fewer devices, on the prefill or the decode side,
    therefore limits the number of parallel links."""
    assert candidate.prefill is not None
    parallel = min(candidate.prefill.tp, candidate.decode.tp)
    near = site.decoding is None and candidate.unit_devices() <= site.domain
    out = (site.described.scale_out, site.decodes.described.scale_out)
    far = min(out, key=lambda link: link.bytes_per_second)
    return site.between or (site.described.scale_up if near else far), parallel


@dataclass(frozen=True, slots=True)
class Fitting:
    """`kv_tokens`: number of tokens whose KV fits on each dp rank in addition to the weights."""

    layout: Layout
    model: CostModel
    kv_tokens: int


def fitting_layouts(
    geometry: CostGeometry, site: Site, longest_tokens: int, dtype: str = "bfloat16"
) -> list[Fitting]:
    """Returns the layouts with enough memory for the weights and, on each dp rank, the KV of one
    request of `longest_tokens` tokens. Raises NothingFits if no layout has enough."""
    most = site.accelerators if geometry.experts else min(site.accelerators, site.domain)
    weights_least, room_most, refused = float("inf"), 0, ""
    found: list[Fitting] = []
    layouts = [*_layouts(most, site.domain, bool(geometry.experts))]
    if site.slow_links and not (geometry.experts or geometry.linear or geometry.windowed_part):
        layouts += _staged_layouts(most)
    for layout in layouts:
        try:
            model = site.cost_model(geometry, layout, dtype)
        except LayoutError as error:
            refused = error.message
            continue
        tokens = model.kv_tokens_per_rank(ACTIVATIONS)
        room = tokens // PAGE_TOKENS * PAGE_TOKENS  # one request occupies whole pages
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
            f" {device.memory_bytes / 1e9:.0f} GB (at best {weights_least / 1e9:.0f} GB per"
            " device);"
            " give more accelerators, larger ones, or a larger scale-up domain, or weights in fewer"
            " bits"
        )
    raise NothingFits(
        f"nothing fits, because the longest request has {longest_tokens:,} tokens and a dp rank of"
        f" {geometry.name} on up to {most} {device.name} has room for {room_most:,} at most; give"
        " more accelerators, or leave such requests out"
    )


def _priced_alike(layout: Layout, found: list[Fitting]) -> bool:
    whole = replace(layout, ep=1)
    return layout.ep == layout.tp and any(item.layout == whole for item in found)


def _layouts(most: int, domain: int, experts: bool) -> Iterator[Layout]:
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


def _staged_layouts(most: int) -> Iterator[Layout]:
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    for tp in sizes:
        for pp in sizes[1:]:
            if pp * tp <= most:
                yield Layout(tp=tp, pp=pp)


def one_pool(fitting: list[Fitting], site: Site, modes: tuple[Mode, ...]) -> Iterator[Candidate]:
    """Yields a candidate with one pool for each mode and layout, with as many instances as fit.
    Layouts with pipeline stages are omitted, because prefills and decode steps that alternate in
    the same stages are not simulated."""
    gathered = site.software.engine.gather_steps
    for item in fitting:
        if item.layout.pp > 1:
            continue
        count = site.accelerators // item.layout.devices
        if Mode.UNIFIED in modes:
            yield Candidate(Mode.UNIFIED, item.layout, count)
        if Mode.CHUNKED in modes:
            for chunk in CHUNKS:
                yield Candidate(Mode.CHUNKED, item.layout, count, chunk)
            if gathered and item.layout.dp > 1:
                yield Candidate(Mode.CHUNKED, item.layout, count, gather_steps=gathered)


def two_pools(fitting: Sequence[Fitting], site: Site) -> Iterator[Candidate]:
    for prefill in fitting:
        for decode in fitting:
            for count in range(1, site.accelerators // prefill.layout.devices + 1):
                left = site.accelerators - count * prefill.layout.devices
                if instances := left // decode.layout.devices:
                    yield _pair(prefill.layout, count, decode.layout, instances)


def two_kinds(
    fitting: Sequence[Fitting], decoding: Sequence[Fitting], site: Site, best: Best
) -> Iterator[Candidate]:
    """Yields candidates that prefill on the accelerators of `site` and decode on those of
    `site.decoding`. For the rate, they use as many instances of both as fit. For other objectives,
    they have all ratios of prefill to decode instances, each with as many instances as fit."""
    for prefill in fitting:
        for decode in decoding:
            first = site.accelerators // prefill.layout.devices
            second = site.decodes.accelerators // decode.layout.devices
            if best == "rate":
                yield _pair(prefill.layout, first, decode.layout, second)
                continue
            for count, instances in product(range(1, first + 1), range(1, second + 1)):
                if gcd(count, instances) == 1:
                    times = min(first // count, second // instances)
                    yield _pair(prefill.layout, times * count, decode.layout, times * instances)


def _pair(prefill: Layout, count: int, decode: Layout, instances: int) -> Candidate:
    return Candidate(Mode.DISAGGREGATED, decode, instances, WHOLE_CHUNK, prefill, count)
