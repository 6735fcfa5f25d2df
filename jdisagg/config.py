"""Configuration as a tree of frozen dataclasses.

Functions in `configs/` return a configuration. Command-line flags then override its fields by path.
Each component receives only its own part of the tree. No environment variable changes behaviour.
The reference table in docs/ is generated from the `Attributes:` sections, which have one entry per
field. The name or the description of a field states its unit."""

import dataclasses
import enum
import re
import types
import typing
from dataclasses import dataclass, field, replace

from jdisagg.address import check_host
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_DTYPES, WEIGHT_BITS
from jdisagg.limits_config import LimitsConfig as LimitsConfig  # re-exported
from jdisagg.prefix_config import NO_PREFIX as NO_PREFIX  # re-exported
from jdisagg.prefix_config import PrefixConfig as PrefixConfig

SPECULATE = ("auto", "mtp", "eagle", "ngram", "off")
KV_CHANNELS = ("auto", "engine", "nixl")
KEPT_RESPONSES_MIB = 64
_ORIGIN = re.compile(r"https?://[^/\s,]+")


class Mode(enum.Enum):
    """How prefill and decode share devices.

    DISAGGREGATED: one mesh for prefill, another for decode. CHUNKED: one mesh, which mixes prefill
    chunks into decode steps. UNIFIED: one mesh, which runs whole prefills between decode steps."""

    DISAGGREGATED = "disaggregated"
    CHUNKED = "chunked"
    UNIFIED = "unified"


@dataclass(frozen=True)
class ModelConfig:
    """The model to serve and the data types of its weights and KV.

    Attributes:
        directory: Folder that contains the checkpoint, in Hugging Face or Orbax format.
        dtype: Data type of weights and KV, float32 or bfloat16.
        context_tokens: Cap on the model's context length, in tokens. None uses the model's own
            limit, or the longest sequence that fits into memory (engine/memory_plan.py).
        weights: Data type to which the weight matrices of the layers are quantized: int8, int4 or
            fp8. Empty keeps `dtype`.
        kv_dtype: Data type in which KV is stored and transferred: fp8. Empty keeps `dtype`.
        draft: Folder of an EAGLE-3 head that drafts tokens, the same on all workers. Empty means
            none.

    Raises:
        ConfigError: A field is invalid. The message names the field and its value.
    """

    directory: str = ""
    dtype: str = "float32"
    context_tokens: int | None = None
    weights: str = ""
    kv_dtype: str = ""
    draft: str = ""

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
    """One model replica on one mesh.

    Attributes:
        layout: Sizes of the mesh axes dp, tp and ep, and the number of pipeline stages pp.
        page_size: Number of tokens per KV page.
        pages_per_rank: Number of KV pages of each dp rank. None takes enough pages for
            `slots_per_rank` sequences of full context, or as many as fit into memory
            (engine/memory_plan.py).
        slots_per_rank: Number of sequences that each dp rank decodes at the same time.
        chunk_tokens: Size of the largest packed prefill chunk of a dp rank, in tokens. Further
            chunk sizes are its half and its quarter, unless they are below `min_chunk_tokens`. In
            mode unified, chunks of one prompt have up to four times this size, at most the context.
        min_chunk_tokens: Size of the smallest prefill chunk, in tokens.
        gather_steps: Approximate number of decode steps for which prompts wait, in modes chunked
            and unified, until each dp rank has one. All ranks take part in each chunk, so that a
            chunk with prompts of all ranks costs little more than one with a single prompt. With 0,
            prompts do not wait.
        layer_groups: Number of groups of layers into which the prefill of a chunk is divided. Each
            group is one program. The KV of one group is sent while the next group computes. Prefill
            and decode instances need the same value. None derives the number from the model's
            bytes, or takes two for each pipeline stage (engine/limits.py).
        block_bytes: Smallest KV block to send, in bytes. If the blocks of a short prompt are
            smaller, the blocks of several layer groups are merged. Prefill and decode instances
            need the same value. 0 never merges. None means 4 MiB, or 0 if `layer_groups` is set.
        steps_per_dispatch: Number of decode steps that the host submits as one command. The host
            reads the tokens of all these steps at the end of the command.
        stream_tokens: Number of new tokens of a sequence that are sent together. The first token is
            sent at once. Values above 1 save host work and make streams less smooth.
        speculate: Source of draft tokens, which change no stream (docs/speculation.md): the
            checkpoint's next-token layer (mtp), the EAGLE-3 head of `model.draft` (eagle), the
            sequence's own tokens (ngram), the first available of eagle, mtp and ngram (auto), or
            none (off). Tokens are drafted only while this saves time.
        queue_limit: Number of requests that may wait at this instance.
        growth_tokens: Number of future tokens for which pages are allocated to a decoding sequence
            in advance.
        ahead_sequences: Number of sequences without a slot that may hold pages, so that a sequence
            is ready when a slot becomes free. None takes a quarter of the slots.
        codec: Compression of the KV that this instance receives (transfer/codec.py).
        hardware: Speed of the devices, from which the router predicts times: a name in
            costs/hardware.py, or a file of `jdisagg measure_costs`. Empty measures after warm-up.
        memory_fraction: Fraction of each device's memory that this instance may use. None means 0.9
            on accelerators and 0.5 on hosts.
        adapters: Number of slots for LoRA adapters (docs/adapters.md). 0 serves the model alone.
        adapter_rank: Largest rank of an adapter. Each slot has memory for this rank.
        adapter_experts: Whether adapters may change routed experts, whose slots take most memory.
        stage_weights: Whether memory is reserved for a second copy of the weights, so that new
            weights can be loaded while requests run (docs/weights.md).

    Raises:
        ConfigError: A field is invalid. The message names the field and its value.
    """

    layout: Layout = Layout()
    page_size: int = 128
    pages_per_rank: int | None = None
    slots_per_rank: int = 8
    chunk_tokens: int = 512
    min_chunk_tokens: int = 64
    gather_steps: int = 0
    layer_groups: int | None = None
    block_bytes: int | None = None
    steps_per_dispatch: int = 1
    stream_tokens: int = 1
    speculate: str = "auto"
    queue_limit: int = 1024
    growth_tokens: int = 256
    ahead_sequences: int | None = None
    codec: str = "none"
    hardware: str = ""
    memory_fraction: float | None = None
    adapters: int = 0
    adapter_rank: int = 64
    adapter_experts: bool = False
    stage_weights: bool = False

    def __post_init__(self) -> None:
        if self.speculate not in SPECULATE:
            raise ConfigError(
                f"speculate must be one of {', '.join(SPECULATE)}, got {self.speculate!r}"
            )
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
            "growth_tokens",
            "adapter_rank",
        ):
            _positive(name, getattr(self, name))
        for name in ("pages_per_rank", "layer_groups"):
            _positive(name, 1 if (value := getattr(self, name)) is None else value)
        for name in ("block_bytes", "ahead_sequences", "adapters", "gather_steps"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        if self.min_chunk_tokens > self.chunk_tokens:
            raise ConfigError(
                f"min_chunk_tokens={self.min_chunk_tokens} exceeds chunk_tokens={self.chunk_tokens}"
            )


@dataclass(frozen=True)
class RoutingConfig:
    """Placement and admission at the router.

    The router can predict times only if every worker has `hardware` or measured times. If a worker
    has neither, the router chooses the least loaded workers and refuses no request because of its
    latency.

    Attributes:
        ttft_slo_seconds: Highest predicted time to first token at which a request is admitted, in
            seconds. None applies the request's deadline only.
        tpot_slo_seconds: Highest predicted decode step time at which a sequence is placed on a
            worker, in seconds. None sets no bound.
        hold_seconds: Threshold on the queued work of a prefill worker, in seconds. If all prefill
            workers exceed it, requests wait at the router, which orders them fairly among tenants.
            A worker with several dp ranks gets at least three full chunks of work in any case.
        local_gain: Fraction in [0, 1). A decode worker that has running streams, or that does not
            have most of the prompt cached, computes the prompt itself only if this saves time. The
            saving must exceed this fraction of the predicted time of prefill and hand-off together.
        tenant_weights: Shares under load, as "name=number,name=number". The default share is 1.
        tenant_quotas: Tokens per second, as "name=number,name=number". Other tenants have no quota.
        quota_burst_seconds: Size of the burst that a tenant may use at once, in seconds of its
            quota. A value of 10 allows ten seconds' worth of tokens.
        peer_fetch: Whether prefill workers fetch cached KV from other workers. None means yes for a
            router of worker processes.
        fetch_from_decode: Whether `peer_fetch` also fetches from decode workers.
        far_prefill_tokens: Number of uncached prompt tokens below which the prefill worker must be
            in the decode worker's rack. 0 decides by predicted times only.

    Raises:
        ConfigError: A field is invalid. The message names the field and its value.
    """

    ttft_slo_seconds: float | None = None
    tpot_slo_seconds: float | None = None
    hold_seconds: float = 0.5
    local_gain: float = 0.1
    tenant_weights: str = ""
    tenant_quotas: str = ""
    quota_burst_seconds: float = 10.0
    peer_fetch: bool | None = None
    fetch_from_decode: bool = True
    far_prefill_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("ttft_slo_seconds", "tpot_slo_seconds", "hold_seconds", "quota_burst_seconds"):
            if getattr(self, name) is not None:
                _positive(f"routing.{name}", getattr(self, name))
        if not 0 <= self.local_gain < 1:
            raise ConfigError(f"routing.local_gain must be in [0, 1), got {self.local_gain}")
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
    """Listening addresses of a process, its credentials and its KV channel.

    Attributes:
        host: Address or host name to bind to.
        port: Port of the gRPC service. 0 lets the system choose one.
        http_port: Port of the OpenAI-compatible HTTP API, with the same host, TLS and tokens. None
            disables it.
        served_model_name: Model name in both APIs. Empty means the checkpoint's: its folder's name,
            or org/name of the Hugging Face cache.
        http_cors_origins: Origins of web pages whose scripts may use the HTTP API, separated by
            commas, such as https://chat.example.com. "*" allows every origin.
        tool_parser: Format of the model's tool calls, a name from jdisagg.chat.formats. "auto"
            detects it from the chat template. "none" disables tool parsing.
        reasoning_parser: Format of the reasoning that the model writes before its answer. The
            values are those of `tool_parser`.
        kept_responses_mib: Memory for responses of /v1/responses that later requests may continue
            (store, previous_response_id), in MiB. 0 keeps none. None means 64, or 0 for a router
            that may be one of several, because each keeps its own.
        lora_modules: LoRA adapters to offer from the start, as "name=path,name=path".
        max_message_bytes: Largest body of an HTTP request, and largest gRPC message of a client,
            in bytes.
        drain_seconds: Time that running requests have to finish at shutdown, in seconds.
        tls_certificate: PEM file with the server certificate. Together with `tls_key` it makes the
            port accept TLS only.
        tls_key: PEM file with the private key of `tls_certificate`.
        tls_client_ca: PEM file with the authority that must have signed clients' certificates.
            Empty requires no client certificate.
        token_file: File with the clients' bearer tokens, one per line, each optionally followed by
            the token's tenant and limits (docs/security.md).
        cluster_token_file: File with the token that the processes of a cluster authenticate with.
        advertise_host: Host at which routers and other workers call this worker, if not `host`, as
            on a host of several interfaces or with a translated address. The port is the same.
        kv_host: Address of the interface for KV from and to other hosts, to which other workers
            connect. Empty means `advertise_host` if it is an address of this machine, else `host`.
        kv_channel: Channel for KV from other processes. "auto" takes the first available of: shared
            memory on one host, NIXL if both sides have it with RDMA, and JAX's transfer engine.
            "engine" never uses NIXL. "nixl" always uses NIXL.

    Raises:
        ConfigError: A field is invalid. The message names the field and its value.
    """

    host: str = "127.0.0.1"
    port: int = 8700
    http_port: int | None = None
    served_model_name: str = ""
    http_cors_origins: str = ""
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    kept_responses_mib: int | None = None
    lora_modules: str = ""
    max_message_bytes: int = 32 << 20
    drain_seconds: float = 30.0
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token_file: str = ""
    cluster_token_file: str = ""
    advertise_host: str = ""
    kv_host: str = ""
    kv_channel: str = "auto"

    def __post_init__(self) -> None:
        for name in ("host", "advertise_host", "kv_host"):
            check_host(f"service.{name}", getattr(self, name), wildcard=name == "host")
        if self.kv_channel not in KV_CHANNELS:
            raise ConfigError(
                f"service.kv_channel must be one of {', '.join(KV_CHANNELS)}, got"
                f" {self.kv_channel!r}"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError(
                "service.tls_certificate and service.tls_key go together; set both or neither"
            )
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError(
                "service.tls_client_ca requires TLS; set service.tls_certificate and"
                " service.tls_key"
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
                f"service.http_port={self.http_port} equals service.port; choose another"
                " with --http_port"
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "service.http_cors_origins must be * or origins such as"
                    f" https://chat.example.com, separated by commas, got {origin!r}; omit paths"
                )
        _positive("service.max_message_bytes", self.max_message_bytes)
        if self.kept_responses_mib is not None and self.kept_responses_mib < 0:
            raise ConfigError(
                f"service.kept_responses_mib must not be negative, got {self.kept_responses_mib}"
            )
        if not self.drain_seconds >= 0:
            raise ConfigError(
                f"service.drain_seconds must not be negative, got {self.drain_seconds}"
            )

    @property
    def called_host(self) -> str:
        """Host at which other processes call this one."""
        return self.advertise_host or self.host

    def at(self, host: str) -> "ServiceConfig":
        """Returns a copy that uses `host` as the address that the server binds, as the address to
        which clients connect, and for KV transfers."""
        return replace(self, host=host, advertise_host="", kv_host="")

    @property
    def alone(self) -> "ServiceConfig":
        """The configuration of a server that is the only one of its cluster. Such a server stores
        responses of /v1/responses by default."""
        if self.kept_responses_mib is not None:
            return self
        return replace(self, kept_responses_mib=KEPT_RESPONSES_MIB)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        origins = (origin.strip() for origin in self.http_cors_origins.split(","))
        return tuple(filter(None, origins))


@dataclass(frozen=True)
class EngineConfig:
    """The embedded cluster: prefill mesh, decode mesh and router in one process.

    Attributes:
        model: Model to serve.
        mode: How prefill and decode share devices.
        prefill: Instance on the prefill mesh. The one-mesh modes do not use it.
        decode: Instance on the decode mesh, or on the only mesh.
        limits: Bounds and time limits of requests.
        routing: Placement and admission of requests.
        prefix: Prefix cache.
        service: Addresses and credentials of the service.
        warm_up: Whether the programs for all batch and chunk sizes are compiled before serving.
        compilation_cache: Folder of the persistent cache of compiled programs.
        kernels: Hand-written kernels on accelerators. "auto" checks each at the start and replaces
            those that fail by plain XLA, "xla" uses none, names separated by commas use only these.

    Raises:
        ConfigError: `prefix` contradicts `mode`.
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
    kernels: str = "auto"

    def __post_init__(self) -> None:
        if self.prefix.disk_gib and self.mode is not Mode.DISAGGREGATED:
            raise ConfigError(
                f"prefix.disk_gib={self.prefix.disk_gib:g} needs prefill workers, and"
                f" mode={self.mode.value} has none; omit --disk_cache_dir, or use"
                " --mode=disaggregated"
            )
        if self.prefix.appends and self.mode is not Mode.DISAGGREGATED:
            raise ConfigError(
                f"prefix.append_tokens={self.prefix.appends} needs separate decode and"
                f" prefill workers, and mode={self.mode.value} has one mesh;"
                " omit --append_tokens, or use --mode=disaggregated"
            )


@dataclass(frozen=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        mode: CHUNKED or UNIFIED, for mixed workers. Prefill and decode workers ignore it.
        warm_up: Whether the programs for all batch and chunk sizes are compiled before serving.
        kernels: Hand-written kernels on accelerators. "auto" checks each at the start and replaces
            those that fail by plain XLA, "xla" uses none, names separated by commas use only these.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    mode: Mode = Mode.CHUNKED
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    warm_up: bool = True
    compilation_cache: str = "~/.cache/jdisagg/xla"
    kernels: str = "auto"


@dataclass(frozen=True)
class _Change:
    names: tuple[str, ...]
    text: str
    path: str


def override(config: object, assignments: typing.Sequence[str]) -> typing.Any:
    """Sets fields of a nested config dataclass by path.

    Each dataclass is validated once, after all its fields have changed, so that the order of
    assignments does not matter.

    Args:
        assignments: Strings of the form "path.to.field=value". Each value is parsed by the type of
            its field.

    Returns:
        The changed copy.

    Raises:
        ConfigError: A path names no field, or a value does not fit its field.
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
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not Layout:
        raise ConfigError(
            f"override {path!r}: {kind.__name__} is not a single value; set one of its fields:"
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
