"""Configuration: frozen dataclasses, composed; recipes in `configs/` return one, flags override
fields by path.

Each component gets only its own part. No environment variable changes behaviour. Sizes are tokens,
pages and seconds."""

import dataclasses
import enum
import re
import types
import typing
from dataclasses import dataclass, field

from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_DTYPES, WEIGHT_BITS
from jdisagg.prefix_config import PrefixConfig as PrefixConfig  # one of the parts
from jdisagg.timeouts import Timeouts

KV_CHANNELS = ("auto", "engine", "nixl", "cuda")
_ORIGIN = re.compile(r"https?://[^/\s,]+")


class Mode(enum.Enum):
    """DISAGGREGATED: two meshes. CHUNKED: one mesh, prefill chunks mixed between decode steps.
    UNIFIED: one mesh, whole prefills."""

    DISAGGREGATED = "disaggregated"
    CHUNKED = "chunked"
    UNIFIED = "unified"


@dataclass(frozen=True)
class ModelConfig:
    """What is served.

    Args:
        directory: Hugging Face or Orbax form.
        dtype: of weights and KV: float32 or bfloat16.
        weights: what the matrices of layers are quantized to: int8, int4 or fp8; "": kept in
            `dtype`.
        kv_dtype: what KV is kept and sent in: fp8; "": in `dtype`.
        context_tokens: caps the model's own limit; None: that limit, or as much of it as one
            sequence finds memory for (engine/memory_plan.py).

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    directory: str = ""
    dtype: str = "float32"
    context_tokens: int | None = None
    weights: str = ""
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"model.dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.weights and self.weights not in WEIGHT_BITS:
            raise ConfigError(
                f"model.weights must be {', '.join(WEIGHT_BITS)} or empty, got {self.weights!r}"
            )
        if self.kv_dtype and self.kv_dtype not in KEPT_DTYPES:
            raise ConfigError(
                f"model.kv_dtype must be {', '.join(KEPT_DTYPES)} or empty, got {self.kv_dtype!r}"
            )
        if self.context_tokens is not None:
            _positive("model.context_tokens", self.context_tokens)


@dataclass(frozen=True)
class InstanceConfig:
    """One model replica on one mesh. Sizes are tokens unless another unit stands there.

    Args:
        layout: of its mesh, sizes of dp, tp and ep.
        page_size: tokens a page of KV.
        pages_per_rank: of each dp rank; None: enough for `slots_per_rank` sequences of full
            context, or as many as memory has room for (engine/memory_plan.py).
        slots_per_rank: sequences that decode at once on each dp rank.
        chunk_tokens: the largest packed prefill chunk of a dp rank; smaller buckets are made down
            to `min_chunk_tokens`.
        min_chunk_tokens: the smallest one.
        layer_groups: how many programs a chunk is chained of, each of which gives a block that
            leaves while the next computes; the same on both sides. None: by the model's bytes
            (engine/limits.py).
        block_bytes: blocks of a short prompt that would have fewer bytes carry several layer
            groups; the same on both sides. 0: each carries one; None: 4 MiB, and 0 where
            `layer_groups` is given.
        steps_per_dispatch: decode steps of one command; the host looks at tokens in between.
        stream_tokens: so many new tokens of a sequence are sent together (its first at once); above
            1 saves the host work and makes streams less smooth.
        queue_limit: requests that wait at this instance.
        growth_tokens: for which a decoding sequence gets pages ahead of its need.
        ahead_sequences: how many may have pages beyond the slots, so that a freed slot finds its
            next sequence ready; None: a quarter of the slots.
        codec: how KV that this instance receives travels (transfer/codec.py).
        hardware: what its devices are, so that the router can predict seconds: a name of
            costs/hardware.py, or a file that launch.measure_costs wrote; empty: not known.
        memory_fraction: of each device's memory, that this instance may take; None: 0.9 of an
            accelerator's, 0.5 of a host's.

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    layout: Layout = Layout()
    page_size: int = 128
    pages_per_rank: int | None = None
    slots_per_rank: int = 8
    chunk_tokens: int = 512
    min_chunk_tokens: int = 64
    layer_groups: int | None = None
    block_bytes: int | None = None
    steps_per_dispatch: int = 1
    stream_tokens: int = 1
    queue_limit: int = 1024
    growth_tokens: int = 256
    ahead_sequences: int | None = None
    codec: str = "none"
    hardware: str = ""
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        for name in (
            "page_size",
            "slots_per_rank",
            "chunk_tokens",
            "min_chunk_tokens",
            "steps_per_dispatch",
            "stream_tokens",
            "queue_limit",
        ):
            _positive(name, getattr(self, name))
        for name in ("pages_per_rank", "layer_groups"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.block_bytes is not None and self.block_bytes < 0:
            raise ConfigError(f"block_bytes must not be negative, got {self.block_bytes}")
        if self.growth_tokens < 1:
            raise ConfigError(f"growth_tokens must be at least 1, got {self.growth_tokens}")
        if self.ahead_sequences is not None and self.ahead_sequences < 0:
            raise ConfigError(f"ahead_sequences must not be negative, got {self.ahead_sequences}")
        if self.min_chunk_tokens > self.chunk_tokens:
            raise ConfigError(
                f"min_chunk_tokens={self.min_chunk_tokens} exceeds chunk_tokens={self.chunk_tokens}"
            )


@dataclass(frozen=True)
class LimitsConfig:
    """Bounds of requests, and how long each part of one may take.

    Args:
        max_waiting_requests: that wait at the router for their first token.
        max_prompt_bytes: of a prompt's text.
        default_deadline_seconds: of a request whose client gave none.
        handoff_lease_seconds: of each state of a hand-off in which the other side is waited for;
            receivers renew it by heartbeats.
        reservation_lease_seconds: of a reservation until a sequence takes it over.
        max_attempts: of each child of a request.
        pull_seconds: for each try of a transfer.
        step_seconds: for each command on a mesh.
        verify: check hand-offs by keyed checksums after insertion.
        timeouts: all other waits, heartbeats and retries.

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    max_waiting_requests: int = 256
    max_prompt_bytes: int = 4 << 20
    default_deadline_seconds: float = 600.0
    handoff_lease_seconds: float = 7.0
    reservation_lease_seconds: float = 5.0
    max_attempts: int = 8
    pull_seconds: float = 5.0
    step_seconds: float = 120.0
    verify: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            if spec.name not in ("verify", "timeouts"):
                _positive(f"limits.{spec.name}", getattr(self, spec.name))
        handoff = self.timeouts.handoff
        if self.handoff_lease_seconds < handoff.least_lease_seconds:
            raise ConfigError(
                f"limits.handoff_lease_seconds={self.handoff_lease_seconds} must be at least"
                f" {handoff.least_lease_seconds:g}, 1.5 times"
                f" limits.timeouts.handoff.heartbeat_seconds={handoff.heartbeat_seconds:g}: a"
                " heartbeat that is late must not end it"
            )


@dataclass(frozen=True)
class RoutingConfig:
    """How the router places and admits. Predictions need `hardware` of every worker; without, the
    least loaded are chosen and none refused.

    Args:
        ttft_slo_seconds: a request whose first token would come later is refused; None: its
            deadline alone counts.
        tpot_slo_seconds: no sequence is placed where a decode step would take longer; None: no
            bound.
        hold_seconds: requests wait at the router, in fair order, while every prefill worker has
            this much to do.
        local_gain: in [0, 1): by how much prefilling on the decode worker must be cheaper, first
            token and hand-off together, to be chosen.
        far_link: what joins workers without a common rack (a name of costs/hardware.py).
        output_quantile: in (0, 1): of the output lengths seen lately, how long an answer is
            expected to be; None: max_tokens.
        tenant_weights: "name=number,name=number": shares under load; 1 where none is given.
        tenant_quotas: the same form: tokens a second; no bound where none is given.
        quota_burst_seconds: of a quota that may be used at once.
        peer_fetch: prefill workers fetch what others keep; fetch_from_decode: decode workers, too.
        far_prefill_tokens: prompts of fewer unknown tokens are prefilled in the decode worker's
            rack; 0: predicted seconds alone decide.

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    ttft_slo_seconds: float | None = None
    tpot_slo_seconds: float | None = None
    hold_seconds: float = 0.5
    local_gain: float = 0.1
    far_link: str = "ethernet-25g"
    output_quantile: float | None = 0.75
    tenant_weights: str = ""
    tenant_quotas: str = ""
    quota_burst_seconds: float = 10.0
    peer_fetch: bool = False
    fetch_from_decode: bool = True
    far_prefill_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("ttft_slo_seconds", "tpot_slo_seconds", "hold_seconds", "quota_burst_seconds"):
            if getattr(self, name) is not None:
                _positive(f"routing.{name}", getattr(self, name))
        if not 0 <= self.local_gain < 1:
            raise ConfigError(f"routing.local_gain must be in [0, 1), got {self.local_gain}")
        if self.output_quantile is not None and not 0 < self.output_quantile < 1:
            raise ConfigError(
                f"routing.output_quantile must be within 0 and 1, got {self.output_quantile}; none"
                " takes max_tokens"
            )
        if self.far_prefill_tokens < 0:
            raise ConfigError(
                "routing.far_prefill_tokens must not be negative, got"
                f" {self.far_prefill_tokens}; 0 sets no threshold"
            )
        self.weights()
        self.quotas()

    def weights(self) -> dict[str, float]:
        return _by_name("routing.tenant_weights", self.tenant_weights)

    def quotas(self) -> dict[str, float]:
        return _by_name("routing.tenant_quotas", self.tenant_quotas)


@dataclass(frozen=True)
class ServiceConfig:
    """Where a process listens, and whom it lets in.

    Args:
        host: address or name to bind to.
        port: 0: the system chooses one.
        max_message_bytes: of each gRPC message.
        drain_seconds: for running requests to finish when the process is asked to end.
        tls_certificate: PEM file; with it and `tls_key` the port speaks TLS alone.
        tls_key: PEM file.
        tls_client_ca: PEM file; clients, too, must show a certificate that it signed.
        token_file: bearer tokens of clients, one a line; behind it whose it is and how much
            it may use (docs/security.md).
        cluster_token_file: the token that our processes show each other.
        kv_channel: how KV comes from other processes. auto: on one host by shared memory; else
            NIXL where both have it and RDMA, else JAX's engine; engine: not by NIXL; nixl: by it
            always; cuda: as auto, but on one host from GPU to GPU where both lend their memory
            (never run on a GPU yet).
        http_port: of the OpenAI-compatible door, with the same host, TLS and tokens; None: there
            is none.
        http_cors_origins: of the pages whose scripts may use the HTTP door, by commas, such as
            https://chat.example.com; *: of any.
        http_guide: the web page's guide may simulate, in a process beside this one.
        tool_parser: how the model writes calls of tools, of jdisagg.chat.formats; auto: as its chat
            template shows, none: it writes none.
        reasoning_parser: how it writes what it thinks before it answers, likewise.

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    host: str = "127.0.0.1"
    port: int = 8700
    http_port: int | None = None
    http_cors_origins: str = ""
    http_guide: bool = True
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_message_bytes: int = 16 << 20
    drain_seconds: float = 30.0
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token_file: str = ""
    cluster_token_file: str = ""
    kv_channel: str = "auto"

    def __post_init__(self) -> None:
        if self.kv_channel not in KV_CHANNELS:
            raise ConfigError(f"service.kv_channel must be in {KV_CHANNELS}: {self.kv_channel!r}")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError(
                "service.tls_certificate and service.tls_key go together; give both or none"
            )
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError(
                "service.tls_client_ca asks for clients' certificates, which needs TLS; give"
                " tls_certificate and tls_key"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"service.port must be in [0, 65535], got {self.port}; 0 lets the system choose"
            )
        if self.http_port is not None and not 0 <= self.http_port <= 65535:
            raise ConfigError(
                f"service.http_port must be in [0, 65535], got {self.http_port}; 0 lets the system"
                " choose"
            )
        if self.http_port and self.http_port == self.port:
            raise ConfigError(
                f"service.http_port={self.http_port} is service.port, too; give each door its own"
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "service.http_cors_origins must be * or origins such as"
                    f" https://chat.example.com, by commas, got {origin!r}; leave paths out"
                )
        _positive("service.max_message_bytes", self.max_message_bytes)
        if not self.drain_seconds >= 0:
            raise ConfigError(
                f"service.drain_seconds must not be negative, got {self.drain_seconds}"
            )

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Of `http_cors_origins`, each."""
        origins = (origin.strip() for origin in self.http_cors_origins.split(","))
        return tuple(filter(None, origins))


@dataclass(frozen=True)
class EngineConfig:
    """The embedded cluster.

    Args:
        model: what is served.
        mode: one mesh or two.
        prefill: the prefill mesh's instance; not used in the one-mesh modes.
        decode: the decode mesh's instance, or the one mesh's.
        limits: bounds and waits of requests.
        routing: how requests are placed and admitted.
        prefix: KV that stays for later requests.
        service: where the gRPC service listens.
        warm_up: compile every bucket before serving.
        compilation_cache: folder in which compiled programs are kept.

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    mode: Mode = Mode.DISAGGREGATED
    prefill: InstanceConfig = field(default_factory=InstanceConfig)
    decode: InstanceConfig = field(default_factory=InstanceConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    warm_up: bool = True
    compilation_cache: str = "~/.cache/jdisagg/xla"

    def __post_init__(self) -> None:
        if self.prefix.disk_gib and self.mode is not Mode.DISAGGREGATED:
            raise ConfigError(
                f"prefix.disk_gib={self.prefix.disk_gib:g} is for prefill workers, and"
                f" mode={self.mode.value} has none; leave --disk_cache_dir out, or say"
                " --mode=disaggregated"
            )
        if self.prefix.append_tokens and self.mode is not Mode.DISAGGREGATED:
            raise ConfigError(
                f"prefix.append_tokens={self.prefix.append_tokens} is for decode workers beside"
                f" prefill workers, and mode={self.mode.value} has one mesh, which computes all;"
                " leave --append_tokens out, or say --mode=disaggregated"
            )


@dataclass(frozen=True)
class WorkerConfig:
    """What one worker is.

    Args:
        model: what is served.
        mode: of a mixed worker: CHUNKED or UNIFIED; the others do not read it.
        instance: its mesh.
        limits: bounds and waits of requests.
        prefix: KV that stays for later requests.
        service: where it listens.
        warm_up: compile every bucket before serving.
        compilation_cache: folder in which compiled programs are kept.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    mode: Mode = Mode.CHUNKED
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    warm_up: bool = True
    compilation_cache: str = "~/.cache/jdisagg/xla"


@dataclass(frozen=True)
class _Change:
    """`text` for the field that `names` lead to; `path` is how the user wrote it."""

    names: tuple[str, ...]
    text: str
    path: str


def override(config: object, assignments: typing.Sequence[str]) -> typing.Any:
    """Sets fields of a nested config dataclass by path. All fields of a dataclass change together
    before it is validated, so that the order of assignments does not matter.

    Args:
        config: a config dataclass; it is not changed.
        assignments: each "path.to.field=value", its value parsed by the field's type.

    Returns:
        The changed copy.

    Raises:
        ConfigError: naming the path and the fields that there are, or what the value must be.
    """
    changes: list[_Change] = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"override {assignment!r} must have the form path.to.field=value")
        changes.append(_Change(tuple(path.strip().split(".")), text.strip(), path))
    return _replace(config, changes) if changes else config


def _replace(config: typing.Any, changes: typing.Sequence[_Change]) -> typing.Any:
    if not dataclasses.is_dataclass(config) or isinstance(config, type | Layout):
        raise ConfigError(
            f"override {changes[0].path!r}: {type(config).__name__} has no fields to set"
        )
    hints = typing.get_type_hints(type(config))
    values: dict[str, object] = {}
    for change in changes:
        name = change.names[0]
        if name not in hints:
            raise ConfigError(
                f"override {change.path!r}: {type(config).__name__} has no field {name!r}; it has"
                f" {', '.join(hints)}"
            )
        if len(change.names) == 1:
            values[name] = _parse(hints[name], change.text, change.path)
        elif name not in values:
            inner = [
                dataclasses.replace(other, names=other.names[1:])
                for other in changes
                if other.names[0] == name and other.names[1:]
            ]
            values[name] = _replace(getattr(config, name), inner)
    return dataclasses.replace(config, **values)


def _parse(kind: typing.Any, text: str, path: str) -> object:
    if isinstance(kind, types.UnionType):
        if text.lower() == "none":
            return None
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if dataclasses.is_dataclass(kind) and kind is not Layout:
        raise ConfigError(
            f"override {path!r}: it is no single value; set one of its fields,"
            f" {', '.join(typing.get_type_hints(kind))}"
        )
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is Layout:
            return Layout.parse(text)
        return kind(text)
    except JdisaggError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        choices = (
            f": one of {', '.join(member.value for member in kind)}"
            if isinstance(kind, type) and issubclass(kind, enum.Enum)
            else ""
        )
        raise ConfigError(
            f"override {path!r}: {text!r} is not a {getattr(kind, '__name__', kind)}{choices}"
        ) from error


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be positive, got {value}")


def _by_name(field_name: str, text: str) -> dict[str, float]:
    """Reads "name=number,name=number"; numbers are positive."""
    numbers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.rpartition("=")
        try:
            numbers[name.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals or name.strip() not in numbers:
            raise ConfigError(f"{field_name}: {part!r} must have the form name=number")
        _positive(f"{field_name}: {name.strip()}", numbers[name.strip()])
    return numbers
