"""The configuration: a tree of frozen dataclasses of settings (`settings/declared.py`).

Functions in `configs/` return a configuration. `--set` and flags then change its settings by path.
Each component receives only its own part of the tree. No environment variable changes behaviour.
The flags and the tables in docs/reference come from the types and the `Attributes:` sections."""

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from msgspec import Meta

from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import CODEC_BITS, KEPT_DTYPES, WEIGHT_BITS
from jdisagg.settings.address import check_host
from jdisagg.settings.declared import (
    Amount,
    AtMost,
    Count,
    File,
    Flag,
    Needs,
    NotNegative,
    OneOf,
    Port,
    Positive,
    Settings,
)
from jdisagg.settings.prefix import NO_PREFIX as NO_PREFIX  # re-exported
from jdisagg.settings.prefix import PrefixConfig as PrefixConfig
from jdisagg.settings.timeouts import Timeouts

FROM_FOLDER = ("eagle", "assistant")  # drafters in a folder of their own
SPECULATE = ("auto", "mtp", *FROM_FOLDER, "ngram", "off")
KV_CHANNELS = ("auto", "engine", "nixl")
LOG_FORMATS = ("text", "json")
KEPT_RESPONSES_MIB = 64
FLAG, SERVICE, HTTP = Flag(), Flag(shown="service"), Flag(shown="http")
OBSERVE = Flag(shown="observe")
_ORIGIN = re.compile(r"https?://[^/\s,]+")


class Mode(enum.Enum):
    """How prefill and decode share devices.

    DISAGGREGATED: one mesh for prefill, another for decode. CHUNKED: one mesh, which mixes prefill
    chunks into decode steps. UNIFIED: one mesh, which runs whole prefills between decode steps."""

    DISAGGREGATED = "disaggregated"
    CHUNKED = "chunked"
    UNIFIED = "unified"


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The model to serve and the data types of its weights and KV.

    Attributes:
        directory: Checkpoint folder in Hugging Face or Orbax format. --model also takes a Hugging
            Face name (org/name), which is downloaded into the Hugging Face cache.
        dtype: Data type of weights and KV. --dtype=auto is the checkpoint's own, also the default
            with --model.
        context_tokens: Longest prompt plus answer, in tokens. Default: the model's limit, or what
            fits.
        weights: Data type to which the weight matrices of the layers are quantized while loading.
            Empty keeps the type of the checkpoint.
        kv_dtype: Data type in which KV is stored and transferred. Empty keeps that of the weights.
        draft: Folder of an EAGLE-3 head, the same on all workers, or of a Gemma 4 assistant, which
            prefill workers do not need. It drafts tokens.
    """

    section: ClassVar[str] = "model"
    directory: Annotated[str, Flag("model")] = ""
    dtype: Annotated[str, OneOf(("float32", "bfloat16")), FLAG] = "float32"
    context_tokens: Annotated[Count | None, FLAG] = None
    weights: Annotated[str, OneOf(("", *WEIGHT_BITS)), FLAG] = ""
    kv_dtype: Annotated[str, OneOf(("", *KEPT_DTYPES)), FLAG] = ""
    draft: Annotated[str, FLAG] = ""


@dataclass(frozen=True)
class InstanceConfig(Settings):
    """One model replica on one mesh.

    Attributes:
        layout: Sizes of the mesh axes dp, tp and ep, such as dp=1,tp=2, and the number of pipeline
            stages pp.
        page_size: Number of tokens per KV page.
        pages_per_rank: KV pages per dp rank. Default: enough for all slots, or as many as fit into
            memory.
        slots_per_rank: Number of sequences that each dp rank decodes at the same time.
        chunk_tokens: Largest packed prefill chunk of a dp rank, in tokens, a multiple of 16. Others
            are its half and its quarter, unless they are below `min_chunk_tokens`. In mode unified,
            chunks of one prompt have up to four times this size, at most the context.
        min_chunk_tokens: Size of the smallest prefill chunk, in tokens.
        gather_steps: Decode steps for which prompts wait on one mesh, until each dp rank has one. A
            chunk with prompts of all ranks costs little more than one with a single prompt.
        layer_groups: Groups of layers into which a chunk's prefill is divided. The KV of one is
            sent while the next computes. Prefill and decode need the same number. None derives it
            from the model's bytes (engine/limits.py).
        block_bytes: Smallest KV block to send, in bytes. Smaller ones of several layer groups are
            merged. Prefill and decode need the same value. 0 never merges. None: 4 MiB, or 0 with
            `layer_groups`.
        steps_per_dispatch: Decode steps that the host submits as one command, after which it reads
            their tokens.
        stream_tokens: Tokens of a sequence that are sent together, after the first, which is sent
            at once. More saves host work and makes streams less smooth.
        speculate: Source of draft tokens, which change no stream (docs/speculation.md). It is the
            checkpoint's next-token layer (mtp), the EAGLE-3 head or Gemma 4 assistant in
            `model.draft` (eagle, assistant), the sequence's own tokens (ngram), the first available
            of these, with that in `model.draft` first (auto), or none (off). Tokens are drafted
            only while this saves time.
        queue_limit: Number of requests that may wait at this instance.
        growth_tokens: Future tokens for which a decoding sequence gets pages in advance.
        ahead_sequences: Sequences without a slot that may hold pages, to be ready when a slot is
            free. None: a quarter of the slots.
        codec: Compression of KV in transfers. It is a setting of the receiver.
        hardware: Speed of the devices, from which the router predicts times: a name, such as h100,
            or a file of `jdisagg measure_costs`. Default: measured after warm-up.
        memory_fraction: Fraction of each device's memory that a mesh may use. Default: 0.9 on
            accelerators, 0.5 of the host's memory on CPUs.
        adapters: Number of slots for LoRA adapters (docs/adapters.md). 0 serves the model alone.
        adapter_rank: Largest rank of a LoRA adapter. Each slot has memory for this rank.
        adapter_experts: Whether LoRA adapters may change routed experts, too. This takes far more
            memory.
        stage_weights: Whether memory is reserved for a second copy of the weights, so that new ones
            can be loaded while requests run (docs/weights.md).
        routed_experts: Whether the experts that the model chooses are stored beside the KV, so that
            requests can have them returned (docs/routed_experts.md). Prefill and decode need the
            same value.
    """

    section: ClassVar[str] = "instance"
    layout: Annotated[Layout, Flag("{section}")] = Layout()
    page_size: Annotated[Count, FLAG] = 128
    pages_per_rank: Annotated[Count | None, FLAG] = None
    slots_per_rank: Annotated[Count, FLAG] = 8
    chunk_tokens: Annotated[Count, FLAG] = 512
    min_chunk_tokens: Annotated[Count, AtMost("chunk_tokens")] = 64
    gather_steps: Amount = 0
    layer_groups: Count | None = None
    block_bytes: Amount | None = None
    steps_per_dispatch: Count = 1
    stream_tokens: Count = 1
    speculate: Annotated[str, OneOf(SPECULATE), FLAG] = "auto"
    queue_limit: Count = 1024
    growth_tokens: Count = 256
    ahead_sequences: Amount | None = None
    codec: Annotated[str, OneOf(tuple(CODEC_BITS)), FLAG] = "none"
    hardware: Annotated[str, FLAG] = ""
    memory_fraction: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, FLAG] = None
    adapters: Annotated[Amount, FLAG] = 0
    adapter_rank: Annotated[Count, FLAG] = 64
    adapter_experts: Annotated[bool, FLAG] = False
    stage_weights: bool = False
    routed_experts: Annotated[bool, FLAG] = False


@dataclass(frozen=True)
class LimitsConfig(Settings):
    """Limits of requests and of the time that each part of a request may take.

    Attributes:
        max_waiting_requests: Number of requests that may wait at the router for their first token.
        max_prompt_bytes: Largest prompt text accepted, in UTF-8 bytes.
        max_images: Number of images that a request may have.
        max_image_bytes: Largest image file accepted, in bytes.
        max_image_pixels: Largest image accepted, in pixels, as its header says.
        default_deadline_seconds: Deadline of requests that set none, in seconds.
        handoff_lease_seconds: Time for which a worker keeps the state of a KV hand-off without a
            message or heartbeat of the other worker.
        reservation_lease_seconds: Time for which a decode worker keeps reserved pages that are not
            yet used.
        max_attempts: Number of attempts for each sequence of a request.
        pull_seconds: Time limit of each try of a KV transfer, in seconds.
        step_seconds: Time limit of each command on a mesh. For images it grows by this for each
            2,048 patches.
        verify: Whether keyed checksums verify transferred KV in the receiver's pages.
        tuned_apart: Whether float32 sequences may move between workers with different autotune
            results (docs/guarantees.md).
        timeouts: All other waits, heartbeats and retries.
    """

    section: ClassVar[str] = "limits"
    max_waiting_requests: Count = 256
    max_prompt_bytes: Count = 4 << 20
    max_images: Count = 32
    max_image_bytes: Count = 20 << 20
    max_image_pixels: Count = 40_000_000
    default_deadline_seconds: Positive = 600.0
    handoff_lease_seconds: Positive = 7.0
    reservation_lease_seconds: Positive = 5.0
    max_attempts: Count = 8
    pull_seconds: Positive = 5.0
    step_seconds: Positive = 120.0
    verify: bool = True
    tuned_apart: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)

    def _check(self) -> None:
        handoff = self.timeouts.handoff
        if self.handoff_lease_seconds < handoff.least_lease_seconds:
            raise ConfigError(
                f"limits.handoff_lease_seconds={self.handoff_lease_seconds} must be at least"
                f" {handoff.least_lease_seconds:g}, 1.5 times"
                f" limits.timeouts.handoff.heartbeat_seconds={handoff.heartbeat_seconds:g}: a"
                " late heartbeat must not end the lease"
            )


@dataclass(frozen=True)
class RoutingConfig(Settings):
    """Placement and admission at the router.

    The router can predict times only if every worker has `hardware` or measured times. If a worker
    has neither, the router chooses the least loaded workers and refuses no request because of its
    latency.

    Attributes:
        ttft_slo_seconds: Highest predicted time to first token at which a request is admitted. None
            applies the request's deadline only.
        tpot_slo_seconds: Highest predicted decode step time at which a worker gets a sequence.
            None sets no bound.
        hold_seconds: Queued work of all prefill workers above which requests wait at the router,
            which orders them fairly among tenants. Workers with several dp ranks get at least three
            full chunks.
        local_gain: Part of the predicted time of prefill and hand-off that a decode worker must
            save to compute a prompt itself, if it has streams or little of the prompt cached.
        tenant_weights: Shares under load, as "name=number,name=number". The default share is 1.
        tenant_quotas: Tokens per second, as "name=number,name=number". Other tenants have no quota.
        quota_burst_seconds: Burst that a tenant may use at once, in seconds of its quota.
        peer_fetch: Whether workers that compute prompts fetch cached KV from other workers. None
            means yes for a router of worker processes.
        fetch_from_decode: Whether `peer_fetch` also fetches from decode workers.
        far_prefill_tokens: Uncached prompt tokens below which the prefill worker must be in the
            decode worker's rack. 0 decides by predicted times only.
    """

    section: ClassVar[str] = "routing"
    ttft_slo_seconds: Positive | None = None
    tpot_slo_seconds: Positive | None = None
    hold_seconds: Positive = 0.5
    local_gain: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    tenant_weights: str = ""
    tenant_quotas: str = ""
    quota_burst_seconds: Positive = 10.0
    peer_fetch: Annotated[bool | None, FLAG] = None
    fetch_from_decode: bool = True
    far_prefill_tokens: Annotated[int, Meta(ge=0, description="0 sets no threshold")] = 0

    def _check(self) -> None:
        self.weights()
        self.quotas()

    def weights(self) -> dict[str, float]:
        return _by_name("routing.tenant_weights", self.tenant_weights)

    def quotas(self) -> dict[str, float]:
        return _by_name("routing.tenant_quotas", self.tenant_quotas)


@dataclass(frozen=True)
class ServiceConfig(Settings):
    """Listening addresses of a process, its credentials and its KV channel.

    Attributes:
        host: Address or host name to listen on, at which other processes call this one.
        port: Port of the gRPC service. 0 lets the system choose one.
        http_port: Port of the OpenAI-compatible HTTP API, with the same host, TLS and tokens. None:
            no such API.
        served_model_name: Model name in the APIs. Default: the checkpoint's, which is its folder's
            name, or org/name of the Hugging Face cache.
        http_cors_origins: Origins of web pages whose scripts may use the HTTP API, separated by
            commas, such as https://chat.example.com. * allows every origin.
        tool_parser: Format of the model's tool calls, a name from jdisagg.chat.formats. "auto"
            detects it from the chat template. "none" disables tool parsing.
        reasoning_parser: Format of the reasoning that the model writes before its answer. "auto"
            and "none" are as for tool calls.
        reranker: Form of the prompts of /v1/score and /v1/rerank: "qwen3", or "none" without these.
            "auto": "qwen3" for a model with "rerank" in its name.
        kept_responses_mib: Memory for responses of /v1/responses that later requests may continue,
            in MiB. 0 keeps none. None: 64, or 0 for a router that may be one of several.
        batch_folder: Folder for /v1/files and /v1/batches, of this server alone. Default: no such
            API.
        lora_modules: LoRA adapters to offer from the start, as name=folder,name=folder.
        max_message_bytes: Largest body of an HTTP request, and largest gRPC message of a client,
            in bytes.
        drain_seconds: Time that running requests have to finish at shutdown, in seconds.
        tls_certificate: PEM file with the server certificate. It switches all gRPC and HTTP ports
            to TLS.
        tls_key: PEM file with the private key of the certificate.
        tls_client_ca: PEM file with the authority that must have signed certificates of clients and
            workers.
        token_file: File with the clients' bearer tokens, one per line. Each may be followed by the
            token's tenant and limits (docs/security.md). A client sends the first token.
        cluster_token_file: File with the token that the processes of a cluster authenticate with.
        advertise_host: Host at which others call this worker, if not `host`, as behind a translated
            address.
        kv_host: Address of the interface for KV from and to other hosts. Default: the advertised
            host if it is an address of this machine, else `host`.
        kv_channel: Channel for KV from other processes. "auto" takes the first available of: shared
            memory on one host, NIXL if both sides have it with RDMA, and JAX's transfer engine.
            "engine" never uses NIXL. "nixl" always uses NIXL.
    """

    section: ClassVar[str] = "service"
    host: Annotated[str, SERVICE] = "127.0.0.1"
    port: Annotated[Port, SERVICE] = 8700
    http_port: Annotated[Port | None, HTTP] = None
    served_model_name: Annotated[str, HTTP] = ""
    http_cors_origins: Annotated[str, HTTP] = ""
    tool_parser: Annotated[str, HTTP] = "auto"
    reasoning_parser: Annotated[str, HTTP] = "auto"
    reranker: Annotated[str, OneOf(("auto", "none", "qwen3"))] = "auto"
    kept_responses_mib: Amount | None = None
    batch_folder: File = ""
    lora_modules: Annotated[str, HTTP] = ""
    max_message_bytes: Count = 32 << 20
    drain_seconds: Annotated[NotNegative, SERVICE] = 30.0
    tls_certificate: Annotated[File, SERVICE, Needs(("tls_key",))] = ""
    tls_key: Annotated[File, SERVICE, Needs(("tls_certificate",))] = ""
    tls_client_ca: Annotated[File, SERVICE, Needs(("tls_certificate",))] = ""
    token_file: Annotated[File, SERVICE] = ""
    cluster_token_file: Annotated[File, SERVICE] = ""
    advertise_host: Annotated[str, Flag(shown="peer")] = ""
    kv_host: Annotated[str, Flag(shown="peer")] = ""
    kv_channel: Annotated[str, OneOf(KV_CHANNELS), Flag(shown="channel")] = "auto"

    def _check(self) -> None:
        for name in ("host", "advertise_host", "kv_host"):
            check_host(f"service.{name}", getattr(self, name), wildcard=name == "host")
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
class ObserveConfig(Settings):
    """Metrics, logs and traces of a process.

    Attributes:
        metrics_port: Port of Prometheus metrics (GET /metrics). 0 disables it.
        metrics_host: Address on which metrics are served. 0.0.0.0 means all interfaces.
        log_format: Log lines as text or as JSON objects.
        log_requests: Whether a line is logged for every request that ended or was refused.
        otlp_endpoint: OpenTelemetry collector for spans, such as http://host:4317. Empty disables
            it.
        metrics: Whether metrics and the latest traced requests are recorded even without a metrics
            port, for the HTTP API and its web page.
    """

    section: ClassVar[str] = "observe"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="0 is off"), OBSERVE] = 0
    metrics_host: Annotated[str, OBSERVE] = "127.0.0.1"
    log_format: Annotated[str, OneOf(LOG_FORMATS), OBSERVE] = "text"
    log_requests: Annotated[bool, OBSERVE] = False
    otlp_endpoint: Annotated[str, OBSERVE] = ""
    metrics: bool = False

    def _check(self) -> None:
        if not self.metrics_host:
            raise ConfigError(
                "observe.metrics_host is empty; name an interface, or 0.0.0.0 for all"
            )

    @property
    def on(self) -> bool:
        return bool(self.metrics or self.metrics_port or self.otlp_endpoint)


@dataclass(frozen=True)
class ServerConfig(Settings):
    """What an embedded cluster and a worker process have in common.

    Attributes:
        model: Model to serve.
        limits: Bounds and time limits of requests.
        prefix: Prefix cache.
        service: Addresses and credentials of the service.
        warm_up: Whether the programs for all batch and chunk sizes are compiled before serving.
        compilation_cache: Folder of the persistent cache of compiled programs. '' disables it.
        kernels: Hand-written kernels on accelerators: auto (those that pass a check at the start),
            xla (none), or names separated by commas.
        autotune_results: File of XLA's autotune results for GPU workers. '' is the file that the
            first start of a kind of worker wrote beside its compiled programs.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    warm_up: bool = True
    compilation_cache: Annotated[str, FLAG] = "~/.cache/jdisagg/xla"
    kernels: Annotated[str, FLAG] = "auto"
    autotune_results: Annotated[str, FLAG] = ""


@dataclass(frozen=True)
class EngineConfig(ServerConfig):
    """The embedded cluster: prefill mesh, decode mesh and router in one process.

    Attributes:
        mode: How prefill and decode share devices. disaggregated: on separate meshes. chunked,
            unified: both on the mesh of `decode`.
        prefill: Instance on the prefill mesh. The one-mesh modes do not use it.
        decode: Instance on the decode mesh, or on the only mesh.
        routing: Placement and admission of requests.
    """

    mode: Annotated[Mode, FLAG] = Mode.DISAGGREGATED
    prefill: InstanceConfig = field(default_factory=InstanceConfig)
    decode: InstanceConfig = field(default_factory=InstanceConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def _check(self) -> None:
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
class WorkerConfig(ServerConfig):
    """One worker process. Only mixed workers use `mode`, which is CHUNKED or UNIFIED."""

    mode: Mode = Mode.CHUNKED
    instance: InstanceConfig = field(default_factory=InstanceConfig)


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
        if not numbers[name.strip()] > 0:
            raise ConfigError(f"{field_name}: {name.strip()} must be positive, got {number}")
    return numbers
