"""Every flag of every page, once: the same name means the same thing everywhere.

    flags = define("config", "port", *CLIENT, required=("prompt",), port=8700)

A page names the flags that it takes, and may change a default. What it gets has each flag's value
as an attribute, once `launch.console.run` has parsed the command line. A flag that changes a field
of the configuration is named as the field is, and has no default of its own: the recipe's holds.

It is a table, one entry a flag, and longer than a page for that."""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags as absl

from jdisagg.chat.formats import AUTO, NONE, REASONING, TOOL_FORMS
from jdisagg.config import KV_CHANNELS, EngineConfig, Mode
from jdisagg.costs.cost_model import CODEC_BITS
from jdisagg.costs.hardware import HARDWARE, LINKS
from jdisagg.layout.kv_spec import KEPT_DTYPES, WEIGHT_BITS
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.observe.logs import FORMATS
from launch.shipped import DEFAULT_RECIPE, SHIPPED_MODEL

MODES = [mode.value for mode in Mode]
DTYPES = ["float32", "bfloat16"]
CODECS = list(CODEC_BITS)

OBSERVE = (
    "metrics_port", "metrics_host", "timelines", "log_format", "log_requests", "otlp_endpoint",
)  # fmt: skip
CLIENT = ("target", "authority", "certificate", "key", "server_name")
SERVICE = (
    "host", "port", "drain_seconds", "tls_certificate", "tls_key", "tls_client_ca", "token_file",
    "cluster_token_file",
)  # fmt: skip
HTTP = ("http_port", "http_cors_origins", "tool_parser", "reasoning_parser")
ENGINE = (
    "config", "model", "mode", "dtype", "weights", "kv_dtype", "prefill", "decode",
    "slots_per_rank", "chunk_tokens", "page_size", "pages_per_rank", "context_tokens",
    "memory_fraction", "codec", "hardware", "prefix_cache", "host_cache_gib", "disk_cache_dir",
    "disk_cache_gib", "disk_cache_ttl_hours", "peer_fetch", "append_tokens", "compilation_cache",
    "set",
)  # fmt: skip
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "chat")

Define = Callable[..., object]
Spec = tuple[Define, object, str, dict[str, object]]


def _text(default: str | None, text: str) -> Spec:
    return absl.DEFINE_string, default, text, {}


def _count(default: int | None, text: str, least: int | None = None) -> Spec:
    return absl.DEFINE_integer, default, text, {} if least is None else {"lower_bound": least}


def _real(default: float | None, text: str, least: float | None = None) -> Spec:
    return absl.DEFINE_float, default, text, {} if least is None else {"lower_bound": least}


def _yes(default: bool | None, text: str) -> Spec:
    return absl.DEFINE_bool, default, text, {}


def _list(default: Sequence[str] | None, text: str) -> Spec:
    return absl.DEFINE_list, default, text, {}


def _many(text: str) -> Spec:
    return absl.DEFINE_multi_string, [], text, {}


def _one_of(values: Sequence[str], default: str | None, text: str) -> Spec:
    return absl.DEFINE_enum, default, text, {"enum_values": list(values)}


FLAGS: dict[str, Spec] = {
    # what is served
    "config": _text(DEFAULT_RECIPE, "A recipe: a Python file with get_config()."),
    "model": _text(
        None, "Checkpoint directory, Hugging Face or Orbax form; default: the recipe's."
    ),
    "mode": _one_of(MODES, None, "Two meshes, or one. Default: the recipe's."),
    "dtype": _one_of(
        [*DTYPES, "auto"],
        None,
        "Type of weights and KV; auto: the checkpoint's own. Default: --model's own, or the"
        " recipe's.",
    ),
    "weights": _one_of(
        list(WEIGHT_BITS),
        None,
        "Quantize the matrices of layers to it as they are read. Default: the recipe's, or no.",
    ),
    "kv_dtype": _one_of(
        list(KEPT_DTYPES),
        None,
        "Keep and send KV in it: half of bfloat16's memory and bytes. Default: the recipe's, or the"
        " type of the weights.",
    ),
    "prefill": _text(None, "Layout of a prefill mesh, such as dp=1,tp=2."),
    "decode": _text(None, "Layout of a decode mesh, or of the one mesh."),
    "layout": _text(None, "Layout of the mesh, such as dp=1,tp=2."),
    "slots_per_rank": _count(None, "Sequences that decode at once, per dp rank."),
    "chunk_tokens": _count(None, "Tokens of a prefill chunk, a multiple of 16."),
    "page_size": _count(None, "Tokens of a KV page."),
    "pages_per_rank": _count(
        None, "KV pages of a dp rank. Default: for all slots, or what memory has room for.", least=1
    ),
    "context_tokens": _count(
        None, "Longest prompt and answer. Default: the model's own, or what memory has room for."
    ),
    "memory_fraction": _real(
        None, "Of a device's memory, for a mesh. Default: 0.9 of an accelerator's, 0.5 of a host's."
    ),
    "device_gib": _real(
        None, "Memory of each device, in GiB, of another machine. Default: this host's.", least=0.0
    ),
    "codec": _one_of(CODECS, None, "How KV travels."),
    "hardware": _text(
        None, "What the devices are: h100, ... or a file of launch.measure_costs; for predictions."
    ),
    "prefix_cache": _yes(
        None, "Keep KV for later requests that begin alike. Default: the recipe's, or no."
    ),
    "host_cache_gib": _real(
        None,
        "GiB of host memory of each worker, for KV that its pages have no room for: sequences that"
        " are set aside, and with --prefix_cache what prefill workers keep. Default: the recipe's,"
        " or 0.",
        least=0.0,
    ),
    "disk_cache_dir": _text(
        None,
        "With --host_cache_gib: folder of this host's prefill workers for KV that was used twice,"
        " which outlives them. Default: the recipe's, or none.",
    ),
    "disk_cache_gib": _real(
        None, "GiB of it, for each prefill worker. Default: the recipe's, or 0.", least=0.0
    ),
    "disk_cache_ttl_hours": _real(
        None,
        "Blocks that were written there so many hours ago are removed. Default: the recipe's, or 0:"
        " they stay while there is room.",
        least=0.0,
    ),
    "peer_fetch": _yes(
        None,
        "With --prefix_cache: prefill workers fetch what others keep, prefill and decode workers."
        " Default: the recipe's; launch.cluster: yes.",
    ),
    "append_tokens": _count(
        None,
        "With --prefix_cache: decode workers compute themselves what they lack of a prompt, up to"
        " so many tokens, where that is cheaper. Default: the recipe's, or 0: prefill workers do.",
        least=0,
    ),
    "compilation_cache": _text(None, "Folder for compiled programs; '' switches it off."),
    "devices": _count(
        None, "Virtual devices on CPU. Default: as many as the layouts need.", least=1
    ),
    "set": _many(
        "path.to.field=value of the configuration: limits.max_attempts=4, decode.growth_tokens=64;"
        " instance.FIELD is both prefill's and decode's. May be repeated."
    ),
    # how many
    "prefill_workers": _count(None, "Prefill workers. Default: the recipe's, or 1.", least=0),
    "decode_workers": _count(None, "Decode workers. Default: the recipe's, or 1.", least=0),
    "mixed_workers": _count(
        None, "Workers that do both on one mesh of --decode's layout; instead of the two others."
    ),
    "processes_per_instance": _count(1, "Processes that one worker's mesh is spread over."),
    "gpus": _text(
        None, "GPUs to use, such as 0-3,6; 0,0: two workers share one. Default: all of the host."
    ),
    "gpus_per_worker": _count(None, "GPUs of each process. Default: as its layout needs.", least=1),
    "routers": _count(
        1, "Routers over the same workers, on ports that follow each other.", least=1
    ),
    # where it listens, and whom it lets in
    "host": _text(None, "The one interface to listen on; also how others reach it."),
    "port": _count(None, "Port; 0 lets the system choose."),
    "http_port": _count(
        None, "Port of the OpenAI-compatible HTTP door; 0 lets the system choose. Default: none."
    ),
    "http_cors_origins": _text(
        None, "Origins of the pages whose scripts may use the HTTP door, by commas; * is any."
    ),
    "tool_parser": _one_of(
        [AUTO, NONE, *TOOL_FORMS], None, "How the model writes calls; auto: as its template does."
    ),
    "reasoning_parser": _one_of(
        [AUTO, NONE, *REASONING], None, "How it writes what it thinks first; auto: likewise."
    ),
    "drain_seconds": _real(None, "How long running requests may take at the end."),
    "tls_certificate": _text(None, "PEM file; with it every gRPC port speaks TLS alone."),
    "tls_key": _text(None, "PEM file of the certificate's key."),
    "tls_client_ca": _text(
        None, "PEM file; clients and workers must show a certificate that it signed."
    ),
    "token_file": _text(None, "File of bearer tokens, one a line; a client shows the first."),
    "cluster_token_file": _text(None, "File of the token that router and workers show each other."),
    "kv_channel": _one_of(
        KV_CHANNELS,
        None,
        "By what KV comes from other processes. Default: on one host by shared memory; else NIXL"
        " where both sides have it and RDMA, else JAX's transfer engine; engine: without NIXL;"
        " nixl: by NIXL from all that have it, over TCP and on one host, too; cuda: on one host"
        " from GPU to GPU, where both sides say so.",
    ),
    # a worker
    "role": _one_of([role.value for role in WorkerRole], None, "What the worker does."),
    "name": _text(None, "Its name."),
    "router": _list([], "Routers to register with, one at least: host:port, by commas."),
    "place": _text(
        None, "Where it stands: rack/host/domain/process, as far as known. Default: /HOSTNAME."
    ),
    "num_processes": _count(
        1, "Processes of this worker; 0: as Slurm, Kubernetes or Open MPI say."
    ),
    "process_id": _count(0, "Which of them this is; 0 leads."),
    "coordinator": _text(None, "host:port where they meet (jax.distributed)."),
    "config_file": _text(
        None, "JSON file of all that this process is, as launch.cluster writes it; no other flag."
    ),
    # a router
    "canary_seconds": _real(
        5.0, "How often a small request proves that KV moves, for readiness; 0: never.", least=0
    ),
    "elastic": _yes(False, "Let workers change their roles as the load asks for it."),
    "decision_log": _text(
        "", "File for every decision of the router; see launch.replay_decisions. '' is off."
    ),
    # how it is observed
    "metrics_port": _count(0, "Port of Prometheus metrics (GET /metrics); 0 is off."),
    "metrics_host": _text("127.0.0.1", "The one interface on which metrics are served."),
    "timelines": _text("", "Folder for timelines, at the end and at SIGUSR1; see launch.trace."),
    "log_format": _one_of(FORMATS, "text", "Lines for people, or one JSON object a line."),
    "log_requests": _yes(False, "A line in the log for every request that ended or was refused."),
    "otlp_endpoint": _text("", "OpenTelemetry collector for spans, http://host:4317; '' is off."),
    "slowest": _count(0, "Only so many requests, those that took longest.", least=0),
    "record": _text(
        "", "Folder for recordings of every mesh's commands, for launch.replay; with the prompts."
    ),
    "cluster_log_dir": _text(None, "Folder for a log file of each process."),
    "table": _yes(None, "Show the live table; by default where stderr is a terminal."),
    # a client
    "target": _text("localhost:8700", "Address of the server, host:port."),
    "authority": _text(
        "", "PEM file of who signed the server's certificate; with it TLS is spoken."
    ),
    "certificate": _text("", "PEM file of our own certificate, where the server asks for one."),
    "key": _text("", "PEM file of its key."),
    "server_name": _text("", "Name in the server's certificate, where not the one in --target."),
    "deadline_seconds": _real(None, "Give up after so long.", least=0),
    # a request
    "prompt": _text(None, "The prompt."),
    "prompts_file": _text(None, "A file with one prompt a line."),
    "chat": _yes(False, "Send the prompt as a user's message, by the model's chat template."),
    "system": _text(None, "With --chat: the system message."),
    "max_tokens": _count(None, "Tokens to generate at most. Default: the server's."),
    "min_tokens": _count(None, "Fewest tokens before an end token may come."),
    "temperature": _real(None, "0 is greedy."),
    "top_k": _count(None, "Choose among the k most likely tokens; 0 is all."),
    "top_p": _real(None, "Choose among the likely tokens that hold this probability together."),
    "seed": _count(None, "Everything random follows from it.", least=0),
    "stop": _many("A text that ends the stream; may be repeated."),
    "ignore_eos": _yes(None, "Go on past the end token."),
    "n": _count(1, "How many answers; several are printed when all have ended."),
    # a workload
    "trace": _text(None, "The workload: a .csv or .jsonl trace, .gz or not (docs/simulator.md)."),
    "speed": _real(None, "How much faster than the trace requests come."),
    "rate": _real(None, "Requests a second on average; a trace's times are stretched to it."),
    "limit": _count(None, "The trace's first so many requests alone."),
    "requests": _count(1000, "Without a trace: how many requests.", least=1),
    "spread_tick_seconds": _real(
        None, "Where the trace's clock is coarse: spread arrivals over ticks of so many seconds."
    ),
    "variation": _real(
        1.0, "Without a trace: variation of the gaps; 0 even, 1 Poisson, above bursts."
    ),
    "turns": _real(
        None,
        "Without a trace: conversations of so many turns on average, of which --prompt_tokens and"
        " --output_tokens are a turn's own.",
    ),
    "think_seconds": _real(30.0, "With --turns: on average from a turn to the next one."),
    "system_tokens": _count(0, "With --turns: what all conversations begin with.", least=0),
    "concurrency": _count(
        None,
        "A closed loop of so many users, each of whom asks for the next request when its last one"
        " has ended; a trace gives lengths and order alone.",
        least=1,
    ),
    "prompt_tokens": _count(None, "Tokens of a prompt."),
    "output_tokens": _count(128, "Tokens of an answer."),
    "max_prompt_tokens": _count(None, "Cut longer prompts."),
    "max_output_tokens": _count(None, "Cut longer answers."),
    "block_tokens": _count(512, "Tokens of one hashed block of the trace (Mooncake: 512)."),
    "mixture": _list(
        None, "Instead of a trace: weight:prompt/output,... such as 0.8:1000/200,0.2:8000/300."
    ),
    "arrivals": _one_of(["poisson", "trace"], "poisson", "Random, or the trace's, stretched."),
    "ttft": _real(None, "Seconds within which the first token must come."),
    "tpot": _real(None, "Seconds a token after the first."),
    "attainment": _real(0.9, "Part of the requests that must keep both."),
    "requests_table": _text(None, "Write one row a request to this .csv or .parquet."),
    # simulated hardware
    "prefill_hardware": _text("h100", f"{', '.join(HARDWARE)}, or a file of measure_costs."),
    "decode_hardware": _text(None, "Default: as for prefill."),
    "prefill_stages": _count(None, "Pipeline stages of a prefill worker; default 1."),
    "decode_stages": _count(1, "Likewise of a decode worker."),
    "fused": _yes(
        False,
        "A chunk of chunked prefill and a decode step run as one; else in turns, as in our engine.",
    ),
    "link": _text(None, f"Between workers, beyond the fast domain: {', '.join(LINKS)}."),
    "host_devices": _count(0, "Devices that share the fast link; 0: the hardware's domain."),
    "switch_seconds": _real(20.0, "With --elastic: how long a drained worker needs to come back."),
    "fault": _many(
        "death:decode-0:10:5, stall:W:at:back, slow:W:at:factor:seconds, cancels:at:part."
    ),
    "out": _text(None, "Folder for requests.csv (or .parquet), report.json and the pictures."),
    "format": _one_of(["csv", "parquet"], "csv", "Of the table of requests."),
    "plots": _yes(True, "Pictures in --out; by default where matplotlib is installed."),
    # a plan
    "accelerators": _count(8, "How many there are in all."),
    "devices_per_node": _count(None, "Of them in a host; default: as the hardware is built."),
    "domain_devices": _count(None, "Of them joined by NVLink or ICI; default: likewise."),
    "modes": _list(MODES, "Modes to look at."),
    "finalists": _count(3, "Candidates of each mode that are simulated."),
    "most_requests": _count(4000, "Of one simulated run; up to eight times as many if needed."),
    "processes": _count(None, "That simulate side by side; default: as many as there are cores."),
    "output": _text(None, "File to write."),
    "choose": _count(1, "Which row of the table --output writes."),
    "model_directory": _text("", "Checkpoint that the recipe names; default: --model."),
    "json": _text(None, "Write the figures to this file."),
    "tokens_per_second": _real(None, "Prompt tokens handed off a second; default: one prompt's."),
    "links": _list(list(LINKS), "Links to price."),
    "parallel_links": _count(1, "How many of a link work side by side."),
    # measuring
    "rounds": _count(5, "Repetitions of each setting; the fastest counts."),
    "prompts": _list(["64", "128", "256", "512"], "Prompt lengths, multiples of 16."),
    "batches": _list(["1", "2", "4", "8"], "Sequences that decode at once, per dp rank."),
    "steps": _count(None, "How many steps.", least=1),
    "text": _text("", "A file of text, UTF-8; default: one that comes with launch/."),
    "tokens": _count(2048, "Tokens of it that are looked at.", least=1),
    "memory_gigabytes": _real(None, "Memory of a device; default: what it reports."),
    # recordings, logs and files
    "recording": _list(None, "Files, by commas: every mesh that handed KV to another."),
    "log": _text(None, "The decision log."),
    "show": _count(10, "At most so many differences are shown.", least=0),
    "inputs": _text(None, "Folder with *.timeline.json files."),
    "request": _text(None, "Only this request id."),
    "worker": _text(None, "Name of the worker."),
    "source": _text(None, "Directory with config.json and safetensors files."),
    "destination": _text(None, "Directory to write; made if it does not exist."),
    "family": _one_of(["llama", "qwen3_moe"], "llama", "Which of the two tiny models."),
    "minutes": _real(60.0, "Stop after so many minutes, and write what there is.", least=0.0),
    "keep": _text(None, "File that keeps the state of training, to go on from."),
}
DEFAULTS = {"model": SHIPPED_MODEL, "compilation_cache": EngineConfig.compilation_cache}


class Given:
    """The flags of one page; `Given.name` is the value of --name."""

    def __init__(self, names: Sequence[str], required: Sequence[str], **changes: object) -> None:
        self.values = absl.FlagValues()
        self.names = tuple(names)
        self.required = tuple(required)
        for name in names:
            define, default, text, options = FLAGS[name]
            changed = changes.get(name, default)
            if name == "dtype" and changed == "auto":
                options = {"enum_values": ["auto", *DTYPES]}
            if isinstance(changed, tuple):  # a default, and a help of the page's own
                changed, text = changed
            define(
                name,
                default=changed,
                help=text,
                flag_values=self.values,
                required=name in required,
                **options,
            )

    def __getattr__(self, name: str) -> Any:
        return self.values[name].value

    def present(self, name: str) -> bool:
        """Whether it stands on the command line."""
        return bool(self.values[name].present)

    def help_text(self, page: str, doc: str) -> str:
        """The page's docstring and its flags, within the terminal's width."""
        width = min(100, shutil.get_terminal_size((80, 24)).columns)
        if page.startswith("jdisagg "):
            doc = doc.replace("python -m launch.", "jdisagg ")
        lines = [f"usage: {page} [--flag=value ...]", "", doc.strip(), "", "flags:"]
        for name in self.names:
            flag = self.values[name]
            default = "" if flag.default in (None, "", []) else f" ({_shown(flag.default)})"
            head = f"  --[no]{name}" if flag.boolean else f"  --{name}=..."
            text = f"{flag.help}{default}"
            lines += [head] if len(head) > 25 else []
            start = "" if len(head) > 25 else head
            lines += textwrap.wrap(
                text, width, initial_indent=f"{start:<26}", subsequent_indent=" " * 26
            )
        return "\n".join([*lines, "  --version"])

    def given(self) -> dict[str, object]:
        """The flags that stand on the command line."""
        return {name: self.values[name].value for name in self.names if self.present(name)}

    def defaults_text(self) -> str:
        """What was left at its default and has one, on one line: a report without it tells half."""
        left = [
            f"{name}={_plain(self.values[name].value)}"
            for name in self.names
            if not self.present(name) and self.values[name].value not in (None, "", [])
        ]
        return f"Left at their defaults: {', '.join(left)}." if left else ""


def define(*names: str, required: Sequence[str] = (), **changes: object) -> Given:
    """`changes`: of a default, or as (default, help)."""
    assert set(changes) <= set(names), f"{set(changes) - set(names)} are not the page's flags"
    return Given(names, required, **changes)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shown(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, list) else str(default)
