"""Peak speeds of accelerators and links with sources, and the fractions that programs achieve.

Peak FLOP/s are for dense bfloat16, and link speeds for one direction. Units are decimal. The
`Efficiency` of an accelerator was measured on it, or copied from a related accelerator, which a
comment then states. Plain data."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from jdisagg.costs.kernels import OURS, Kernels
from jdisagg.errors import ConfigError

TERA, GIGA = 1e12, 1e9

Built = TypeVar("Built")


def _check_positive(said: str, value: float, name: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{said}: {name} must be a positive number, got {value!r}; measure it again or correct"
            " the description"
        )


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link between devices. `efficiency`: fraction of the peak speed that large
    messages achieve."""

    name: str
    bytes_per_second: float
    latency_seconds: float
    efficiency: float = 0.8

    def __post_init__(self) -> None:
        said = f"link {self.name}"
        _check_positive(said, self.bytes_per_second, "bytes_per_second")
        _check_positive(said, self.efficiency, "efficiency")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ConfigError(
                f"{said}: latency_seconds must be zero or more, got {self.latency_seconds!r};"
                " correct the description"
            )

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / (self.bytes_per_second * self.efficiency)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of an accelerator's peaks that programs achieve, and fixed times. One operation
    takes max(FLOP / (peak x compute), bytes / (bandwidth x memory)) + op_seconds.

    Attributes:
      op_seconds: Launch latency of one operation on the device. A layer has about twelve
        operations.
      step_seconds, prefill_seconds: Host time of a decode step, and of a prefill, during which the
        device is idle.
      collective_seconds: Latency of a collective over two devices; n devices take log2(n) times as
        long.
      large_bytes, large_bandwidth: Messages of at least `large_bytes` bytes achieve the fraction
        `large_bandwidth` instead of `collective_bandwidth`.
    """

    gemm_compute: float
    gemm_memory: float
    attention_compute: float
    attention_memory: float
    op_seconds: float
    attention_seconds: float
    launch_seconds: float = 10e-6
    prefill_launch_seconds: float = 10e-6
    step_seconds: float = 500e-6
    prefill_seconds: float = 1e-3
    sequence_seconds: float = 5e-6
    collective_seconds: float = 8e-6
    collective_bandwidth: float = 0.7
    large_bytes: float = 1e15
    large_bandwidth: float = 0.7

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not spec.name.endswith("_seconds"):
                _check_positive("efficiency", value, spec.name)
            elif not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"efficiency: {spec.name} must be zero or more seconds, got {value!r}; measure"
                    " it again"
                )


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
      watts: Board power at full load, without host and cooling; None if unknown.
      kernels: Properties of the kernels that the engine runs on it (`costs/engines.py`).
    """

    name: str
    peak_flops: float
    memory_bytes_per_second: float
    memory_bytes: float
    domain_devices: int
    scale_up: Link
    host: Link
    scale_out: Link
    efficiency: Efficiency
    dollars_per_hour: float | None = None
    watts: float | None = None
    kernels: Kernels = OURS

    def __post_init__(self) -> None:
        said = f"accelerator {self.name}"
        for name in ("peak_flops", "memory_bytes_per_second", "memory_bytes", "domain_devices"):
            _check_positive(said, getattr(self, name), name)
        if not isinstance(self.domain_devices, int):
            raise ConfigError(
                f"{said}: domain_devices must be a whole number, got {self.domain_devices!r};"
                " correct the description"
            )
        price = self.dollars_per_hour
        if price is not None and not (math.isfinite(price) and price >= 0):
            raise ConfigError(
                f"{said}: dollars_per_hour must be zero or more, got {price!r}; leave it out where"
                " no price is settled"
            )
        if self.watts is not None:
            _check_positive(said, self.watts, "watts")


# One direction; speeds from the table of measured and published links in the standards' names:
# NVLink 3, 4, 5 are half of 600, 900 and 1800 GB/s (NVIDIA A100, H100, Blackwell architecture
# papers); PCIe 4 and 5 x16 as measured (25 and 50 of 32 and 64); InfiniBand HDR 200 Gb/s, NDR 400
# Gb/s; ICI: half of the bidirectional bandwidth a chip of cloud.google.com/tpu/docs (v5e 400, v5p
# 1200, v6e 800, v7x 1200 GB/s); H800: half of 400 GB/s (DeepSeek-V3, section 3.1); Infinity Fabric:
# seven links of 64 or 76.8 GB/s (AMD data sheets). Latencies: usual orders of magnitude of one
# message (NVLink and ICI a few us, verbs 5, TCP 30 to 50), not measured here.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink3", 300 * GIGA, 3e-6),
        Link("nvlink4", 450 * GIGA, 3e-6),
        Link("nvlink5", 900 * GIGA, 3e-6),
        Link("ici-v5e", 200 * GIGA, 2e-6),
        Link("ici-v5p", 600 * GIGA, 2e-6),
        Link("ici-v6e", 400 * GIGA, 2e-6),
        Link("ici-v7", 600 * GIGA, 2e-6),
        Link("nvlink4-h800", 200 * GIGA, 3e-6),
        Link("infinity-mi300", 448 * GIGA, 3e-6),
        Link("infinity-mi350", 537 * GIGA, 3e-6),
        Link("pcie4", 32 * GIGA, 5e-6),
        Link("pcie5", 64 * GIGA, 5e-6),
        Link("pcie6", 128 * GIGA, 5e-6),
        Link("nvlink-c2c", 450 * GIGA, 3e-6),
        Link("infiniband-hdr", 25 * GIGA, 5e-6, 0.9),
        Link("infiniband-ndr", 50 * GIGA, 5e-6, 0.9),
        Link("infiniband-xdr", 100 * GIGA, 5e-6, 0.9),
        Link("ethernet-400g", 50 * GIGA, 10e-6),
        Link("ethernet-200g", 25 * GIGA, 15e-6),
        Link("ethernet-100g", 12.5 * GIGA, 30e-6),
        Link("ethernet-25g", 3.125 * GIGA, 40e-6),
        Link("ethernet-10g", 1.25 * GIGA, 50e-6),
    )
}

# GEMM and prefill attention: fits to the published op tables of aiconfigurator (GEMM with n, k >=
# 1024; median error 5 to 9 %; attention 11 to 15 %, p90 62 to 65 %); TPU v6e: the op profile of
# LLMServingSim. Decode attention likewise.
_A100 = Efficiency(0.778, 0.729, 0.494, 0.654, 6.5e-6, 18.5e-6)
_H100 = Efficiency(0.809, 0.873, 0.484, 0.827, 3.8e-6, 12.3e-6)
_H200 = Efficiency(0.804, 0.830, 0.469, 0.769, 4.2e-6, 12.4e-6)
# Cards whose links are PCIe: collectives stage through host memory (LLMServingSim's runs of two
# RTX PRO 6000, within 9 %).
_PCIE = {"collective_seconds": 50e-6, "collective_bandwidth": 0.3, "large_bandwidth": 0.3}
_A100_PCIE, _H200_PCIE = (dataclasses.replace(item, **_PCIE) for item in (_A100, _H200))
# Attention was not measured; the values are those of H100 and H200.
_V6E = Efficiency(0.786, 0.949, 0.484, 0.769, 4.5e-6, 12.4e-6)

# Memory: what the driver reports where that is published (MiB of nvidia-smi: A100 81,920, H100
# 81,559, H200 143,771, L40S 46,068, RTX 4090 24,564; B200 178.35 GiB, pytorch/ao 4002), which is 1
# to 7 % more than the name of the card. Peak, bandwidth and other memory: NVIDIA data sheets (A100
# 80GB SXM 312 TFLOP/s, 2.039 TB/s; H100 SXM 989, 3.35; H200 SXM 989, 4.8; HGX B200 4.5 PFLOP/s
# sparse = 2250 dense, 8 TB/s;
# GB200 NVL72 360 PFLOP/s sparse, 576 TB/s, 13.4 TB over 72; HGX B300 2.1 TB over 8, GB300 NVL72 20
# TB over 72, speeds in bfloat16 as of the 200s; L40S 362, 864 GB/s, 48 GB, no NVLink;
# GeForce RTX 4090 165.2 with float32 accumulation, 1008 GB/s, 24 GB; RTX PRO 6000 Blackwell 503.8,
# 1792 GB/s, 96 GB: its peak stands in one source only) and cloud.google.com/tpu/docs (v5e 197
# TFLOP/s, 819 GB/s, 16 GB; v5p 459, 2765, 95 GB; v6e 918, 1638, 32 GB; v7x 2307, 7380, 192 GiB).
# H20 148 TFLOP/s, 4 TB/s, 96 GB and H800: NVIDIA data sheets as resellers publish them; MI300X 1307
# TFLOP/s, 5.3 TB/s, 192 GB, MI355X 2500, 8 TB/s, 288 GB: AMD data sheets. Dollars an
# accelerator-hour: A100 17.6 / 8 and H100 38 / 8 as the Splitwise paper (ISCA'24) charges an 8-GPU
# machine; TPU list prices on demand in us-east / us-central (1.20, 4.20, 2.70). None means that
# no public list price is settled. Watts: the board power of the same data sheets, at most.
HARDWARE: dict[str, Accelerator] = {
    item.name: item
    for item in (
        Accelerator(
            "a100", 312 * TERA, 2.039 * TERA, 85.9 * GIGA, 8,
            LINKS["nvlink3"], LINKS["pcie4"], LINKS["infiniband-hdr"], _A100, 2.2, 400,
        ),
        Accelerator(
            "h100", 989 * TERA, 3.35 * TERA, 85.5 * GIGA, 8,
            LINKS["nvlink4"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H100, 4.75, 700,
        ),
        Accelerator(
            "h200", 989 * TERA, 4.8 * TERA, 150.8 * GIGA, 8,
            LINKS["nvlink4"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H200, None, 700,
        ),
        # Not measured: the fractions of the H100.
        Accelerator(
            "h800", 989 * TERA, 3.35 * TERA, 85.5 * GIGA, 8,
            LINKS["nvlink4-h800"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H100, None, 700,
        ),
        Accelerator(
            "h20", 148 * TERA, 4.0 * TERA, 96 * GIGA, 8,
            LINKS["nvlink4"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H100, None, 400,
        ),
        # Not measured: the fractions of the H200.
        Accelerator(
            "mi300x", 1307 * TERA, 5.3 * TERA, 192 * GIGA, 8,
            LINKS["infinity-mi300"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H200, None, 750,
        ),
        Accelerator(
            "mi355x", 2500 * TERA, 8 * TERA, 288 * GIGA, 8,
            LINKS["infinity-mi350"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H200, None, 1400,
        ),
        Accelerator(
            "b200", 2250 * TERA, 8 * TERA, 191.5 * GIGA, 8,
            LINKS["nvlink5"], LINKS["pcie5"], LINKS["infiniband-ndr"], _H200, None, 1000,
        ),
        Accelerator(
            "gb200-nvl72", 2500 * TERA, 8 * TERA, 186 * GIGA, 72,
            LINKS["nvlink5"], LINKS["nvlink-c2c"], LINKS["infiniband-ndr"], _H200, None, 1200,
        ),
        Accelerator(
            "b300", 2250 * TERA, 8 * TERA, 262 * GIGA, 8,
            LINKS["nvlink5"], LINKS["pcie6"], LINKS["infiniband-xdr"], _H200, None, 1100,
        ),
        Accelerator(
            "gb300-nvl72", 2500 * TERA, 8 * TERA, 279 * GIGA, 72,
            LINKS["nvlink5"], LINKS["nvlink-c2c"], LINKS["infiniband-xdr"], _H200, None, 1400,
        ),
        # Not measured: the fractions of the A100, whose generation of kernels it runs.
        Accelerator(
            "l40s", 362 * TERA, 0.864 * TERA, 48.3 * GIGA, 8,
            LINKS["pcie4"], LINKS["pcie4"], LINKS["ethernet-100g"], _A100_PCIE, None, 350,
        ),
        # Fractions of a related card; `benchmarks/fidelity.py` fits them to runs of both.
        Accelerator(
            "rtx-4090", 165.2 * TERA, 1.008 * TERA, 25.7 * GIGA, 1,
            LINKS["pcie4"], LINKS["pcie4"], LINKS["ethernet-100g"], _A100_PCIE, None, 450,
        ),
        Accelerator(
            "rtx-pro-6000", 503.8 * TERA, 1.792 * TERA, 96 * GIGA, 1,
            LINKS["pcie5"], LINKS["pcie5"], LINKS["ethernet-100g"], _H200_PCIE, None, 600,
        ),
        # v5e and v5p were not measured: the fractions of the v6e. The domain of v5e and v6e is a
        # whole slice.
        Accelerator(
            "tpu-v5e", 197 * TERA, 0.819 * TERA, 16 * GIGA, 256,
            LINKS["ici-v5e"], LINKS["pcie4"], LINKS["ethernet-100g"], _V6E, 1.20,
        ),
        Accelerator(
            "tpu-v5p", 459 * TERA, 2.765 * TERA, 95 * GIGA, 8960,
            LINKS["ici-v5p"], LINKS["pcie5"], LINKS["ethernet-200g"], _V6E, 4.20,
        ),
        Accelerator(
            "tpu-v6e", 918 * TERA, 1.638 * TERA, 32 * GIGA, 256,
            LINKS["ici-v6e"], LINKS["pcie5"], LINKS["ethernet-200g"], _V6E, 2.70,
        ),
        Accelerator(
            "tpu-v7x", 2307 * TERA, 7.38 * TERA, 206 * GIGA, 9216,
            LINKS["ici-v7"], LINKS["pcie5"], LINKS["ethernet-200g"], _V6E,
        ),
    )
}  # fmt: skip


def accelerator(name: str) -> Accelerator:
    if name not in HARDWARE:
        raise ConfigError(
            f"no hardware named {name!r}; the table has {', '.join(sorted(HARDWARE))}, or measure"
            " this machine's"
        )
    return HARDWARE[name]


def link(name: str) -> Link:
    if name not in LINKS:
        raise ConfigError(f"no link named {name!r}; the table has {', '.join(sorted(LINKS))}")
    return LINKS[name]


def accelerator_from_fields(
    fields: Mapping[str, object], where: str = "hardware file"
) -> Accelerator:
    """Builds an `Accelerator` from the fields of `dataclasses.asdict`. Ignores the field
    "measured".

    Raises:
      ConfigError: A field is missing, unknown or invalid; the message names the field.
    """
    values = {name: value for name, value in fields.items() if name != "measured"}
    parts: dict[str, object] = {}
    for name, kind in (
        ("scale_up", Link),
        ("host", Link),
        ("scale_out", Link),
        ("efficiency", Efficiency),
    ):
        if name in values:
            parts[name] = _built(kind, values.pop(name), f"{where}: {name}", {})
    if "kernels" in values:
        parts["kernels"] = _kernels(values.pop("kernels"), f"{where}: kernels")
    return _built(Accelerator, values, where, parts)


def _built(
    kind: Callable[..., Built], value: object, where: str, parts: Mapping[str, object]
) -> Built:
    """`parts`: fields that are already built. All other fields except the name must be numbers."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object, got {value!r}; measure the machine again")
    specs = {spec.name: spec for spec in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(map(str, set(value) - set(specs))):
        raise ConfigError(
            f"{where}: unknown fields {', '.join(unknown)}; it has {', '.join(sorted(specs))}"
        )
    for name, spec in specs.items():
        if name in parts:
            continue
        if name not in value:
            if spec.default is dataclasses.MISSING:
                raise ConfigError(
                    f"{where}: needed field {name!r} is missing; measure the machine again"
                )
            continue
        item = value[name]
        if name == "name":
            if not isinstance(item, str):
                raise ConfigError(f"{where}: name must be a text, got {item!r}; correct it")
        elif not (item is None and spec.default is None) and not _is_number(item):
            raise ConfigError(
                f"{where}: {name} must be a number, got {str(item)[:40]}; measure the machine again"
            )
    try:
        return kind(**value, **parts)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error


def _kernels(value: object, where: str) -> Kernels:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object, got {value!r}; correct it")
    known = dataclasses.asdict(OURS)
    for name, item in value.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown field {name}; it has {', '.join(sorted(known))}")
        default = known[name]
        fits = _is_number(item) if type(default) in (int, float) else type(item) is type(default)
        if not fits or (name == "exchange" and item not in ("gather", "all_to_all")):
            raise ConfigError(f"{where}: {name} must be like {default!r}, got {item!r}; correct it")
    return Kernels(**value)


def _is_number(item: object) -> bool:
    if not isinstance(item, int | float) or isinstance(item, bool):
        return False
    return isinstance(item, float) or abs(item) < 1e300
