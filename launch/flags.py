"""Defines the flags of all commands, each once, so that a flag means the same in all commands.

    flags = define("config", "port", *CLIENT, required=("prompt",), port=8700)

A command lists the flags that it accepts and may change a default. `launch.console.run` parses the
command line. Then the value of each flag is an attribute of `flags`. A flag that sets a field of
the configuration has the field's name and no default, because the recipe has the default.

The table has one entry for each flag, in the groups that --help shows."""

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl

from jdisagg.chat.formats import AUTO, NONE, REASONING, TOOL_FORMS
from jdisagg.config import KV_CHANNELS, SPECULATE, Mode
from jdisagg.costs.cost_model import CODEC_BITS
from jdisagg.costs.engines import ENGINES, PRECISION_BITS
from jdisagg.costs.hardware import HARDWARE, LINKS
from jdisagg.layout.kv_spec import KEPT_DTYPES
from jdisagg.messages.weights import UPDATE_MODES
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.observe.logs import FORMATS
from launch.shipped import DEFAULT_RECIPE

MODES = [mode.value for mode in Mode]
DTYPES = ["float32", "bfloat16"]
CODECS = list(CODEC_BITS)
ROOT = Path(DEFAULT_RECIPE).parent.parent

OBSERVE = (
    "metrics_port", "metrics_host", "log_format", "log_requests", "otlp_endpoint",
)  # fmt: skip
CLIENT = ("target", "authority", "certificate", "key", "server_name")
SERVICE = (
    "host", "port", "drain_seconds", "tls_certificate", "tls_key", "tls_client_ca", "token_file",
    "cluster_token_file",
)  # fmt: skip
HTTP = (
    "served_model_name", "http_port", "http_cors_origins", "tool_parser", "reasoning_parser",
    "lora_modules",
)  # fmt: skip
ENGINE = (
    "config", "model", "revision", "mode", "dtype", "weights", "kv_dtype", "prefill", "decode",
    "slots_per_rank", "chunk_tokens", "page_size", "pages_per_rank", "context_tokens",
    "memory_fraction", "codec", "hardware", "speculate", "draft", "adapters", "adapter_rank",
    "adapter_experts", "prefix_cache", "host_cache_gib", "disk_cache_dir", "disk_cache_gib",
    "disk_cache_ttl_hours", "peer_fetch", "append_tokens", "compilation_cache", "kernels", "set",
)  # fmt: skip
# The flags that --help shows; --help=all shows all.
MOST_USED = (
    "model", "config", "mode", "prefill", "decode", "prefill_workers", "decode_workers",
    "context_tokens", "weights", "host", "port", "http_port", "target", "hardware", "output",
)  # fmt: skip
ENVIRONMENT = "An environment variable JDISAGG_NAME sets flag --name, if it is not given."
FEW = 16  # --help of a command with at most this many flags shows all
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


GROUPS: dict[str, dict[str, Spec]] = {
    "Model": {
        "config": _text(
            DEFAULT_RECIPE, "Recipe: a Python file with get_config(), or a YAML or JSON file."
        ),
        "model": _text(
            None,
            "Checkpoint directory in Hugging Face or Orbax form, or a Hugging Face name (org/name),"
            " which is downloaded into the Hugging Face cache.",
        ),
        "revision": _text(None, "Branch, tag or commit of a Hugging Face name."),
        "served_model_name": _text(
            None, "Model name in the APIs. Default: the folder's name, or the Hugging Face name."
        ),
        "mode": _one_of(
            MODES,
            None,
            "disaggregated: prefill and decode on separate meshes. chunked, unified: both on the"
            " mesh of --decode.",
        ),
        "dtype": _one_of(
            [*DTYPES, "auto"],
            None,
            "Type of weights and KV. auto: the checkpoint's own, also the default with --model.",
        ),
        "weights": _one_of(
            list(PRECISION_BITS),
            None,
            "Quantize the layers' matrices to this type while loading. fp4: only estimates of other"
            " engines (--engine).",
        ),
        "engine": _one_of(
            list(ENGINES), "jdisagg", "Engine whose kernels, host and precisions are estimated."
        ),
        "speculation": _text(
            None,
            "Multi-token prediction as TOKENS:ACCEPTANCE, such as 2:0.8: draft tokens per step, and"
            " the probability that a draft is accepted if all earlier ones are.",
        ),
        "adapters": _count(
            None, "Slots for LoRA adapters on each mesh (docs/adapters.md). Default: none.", least=0
        ),
        "adapter_rank": _count(None, "Largest rank of a LoRA adapter. Default: 64.", least=1),
        "adapter_experts": _yes(
            None, "Let LoRA adapters change routed experts, too. This takes far more memory."
        ),
        "lora_modules": _text(
            None, "LoRA adapters to offer from the start: name=folder, separated by commas."
        ),
        "kv_dtype": _one_of(
            list(KEPT_DTYPES),
            None,
            "Type of the KV cache in memory and in transfers. Default: the type of the weights.",
        ),
        "kernels": _text(
            None,
            "Hand-written kernels on accelerators. auto: those that pass a check at the start; xla:"
            " none; or names.",
        ),
        "context_tokens": _count(
            None, "Longest prompt plus answer. Default: the model's limit, or what fits in memory."
        ),
        "hardware": _text(
            None,
            "Device type (h100, ...) or a file of `jdisagg measure_costs`. Enables the router's"
            " latency predictions.",
        ),
        "family": _one_of(["llama", "qwen3_moe"], "llama", "Architecture of the tiny model."),
        "source": _text(None, "Directory with config.json and safetensors files."),
        "destination": _text(None, "Directory to write, created if missing."),
    },
    "Layout": {
        "prefill": _text(None, "Layout of a prefill mesh, e.g. dp=1,tp=2."),
        "decode": _text(None, "Layout of a decode mesh, or of the only mesh."),
        "layout": _text(None, "Layout of the mesh, e.g. dp=1,tp=2."),
        "prefill_workers": _count(None, "Prefill workers. Default: the recipe's, or 1.", least=0),
        "decode_workers": _count(None, "Decode workers. Default: the recipe's, or 1.", least=0),
        "mixed_workers": _count(
            None, "Workers that prefill and decode on one mesh of --decode's layout."
        ),
        "processes_per_instance": _count(1, "Processes that share one worker's mesh."),
        "routers": _count(1, "Routers over the same workers, on consecutive ports.", least=1),
        "on": _one_of(("host", "ray"), "host", "Run on this host, or on a Ray cluster's nodes."),
        "gpus": _text(
            None,
            "GPUs to use, e.g. 0-3,6. 0,0 lets two workers share one. Default: all of the host.",
        ),
        "gpus_per_worker": _count(
            None, "GPUs of each process. Default: as many as its layout needs.", least=1
        ),
        "devices": _count(
            None, "Virtual CPU devices. Default: as many as the layouts need.", least=1
        ),
    },
    "Memory and batching": {
        "slots_per_rank": _count(None, "Sequences that decode at the same time, per dp rank."),
        "chunk_tokens": _count(None, "Largest prefill chunk, in tokens, a multiple of 16."),
        "page_size": _count(None, "Tokens of a KV page."),
        "pages_per_rank": _count(
            None,
            "KV pages per dp rank. Default: enough for all slots, or what fits in memory.",
            least=1,
        ),
        "memory_fraction": _real(
            None,
            "Fraction of each device's memory that a mesh may use. Default: 0.9 on accelerators,"
            " 0.5 of the host's memory on CPUs.",
        ),
        "device_gib": _real(
            None, "Memory of each device, in GiB. Default: this host's devices.", least=0.0
        ),
        "codec": _one_of(CODECS, None, "Compression of KV in transfers."),
        "speculate": _one_of(
            SPECULATE,
            None,
            "Source of draft tokens, which change no stream: the checkpoint's next-token layer"
            " (mtp), the EAGLE-3 head of --draft (eagle), the sequence's own tokens (ngram), the"
            " first available of eagle, mtp and ngram (auto), or none (off).",
        ),
        "draft": _text(None, "Folder of an EAGLE-3 head, which drafts tokens."),
        "compilation_cache": _text(None, "Folder for compiled programs. '' disables it."),
    },
    "Prefix cache": {
        "prefix_cache": _yes(
            None, "Reuse the KV of earlier requests with a shared prefix. Default: yes."
        ),
        "host_cache_gib": _real(
            None,
            "Host memory per worker, in GiB, for evicted prefixes. 0: none."
            " Default: 0.2 of the free memory, divided among the workers of this host.",
            least=0.0,
        ),
        "disk_cache_dir": _text(
            None, "Folder on this host for prefixes that were used twice. It survives restarts."
        ),
        "disk_cache_gib": _real(
            None, "Size limit of --disk_cache_dir per worker, in GiB.", least=0.0
        ),
        "disk_cache_ttl_hours": _real(
            None, "Age in hours at which blocks on disk are removed. 0: no limit.", least=0.0
        ),
        "peer_fetch": _yes(
            None,
            "Let workers that compute prompts fetch cached prefixes from other workers. Default:"
            " yes, except in `jdisagg serve`, which has no others.",
        ),
        "append_tokens": _count(
            None,
            "Let decode workers prefill the uncached end of a prompt themselves, up to this many"
            " tokens, when that is faster than a transfer. 0: never. Default: 256.",
            least=0,
        ),
    },
    "Network": {
        "host": _text(None, "Address to listen on, and at which other processes call this one."),
        "advertise_host": _text(None, "Host at which others call this worker, if not --host."),
        "kv_host": _text(None, "Address of the network interface for KV, if not --host."),
        "port": _count(None, "gRPC port. 0: chosen by the system."),
        "http_port": _count(
            8000,
            "Port of the HTTP API, or of the guide. 0: chosen by the system. -1: disabled.",
            least=-1,
        ),
        "http_cors_origins": _text(None, "Origins that may call the HTTP API, by commas. *: any."),
        "tool_parser": _one_of(
            [AUTO, NONE, *TOOL_FORMS],
            None,
            "Format of the model's tool calls. auto: from the chat template.",
        ),
        "reasoning_parser": _one_of(
            [AUTO, NONE, *REASONING],
            None,
            "Format of the model's reasoning. auto: from the chat template.",
        ),
        "drain_seconds": _real(None, "Seconds that running requests may take after SIGTERM."),
        "kv_channel": _one_of(
            KV_CHANNELS,
            None,
            "Channel for KV from other processes. auto: shared memory on one host, else NIXL if"
            " both sides have it and RDMA, else JAX's transfer engine. engine: never NIXL. nixl:"
            " NIXL if both sides have it.",
        ),
        "canary_seconds": _real(
            5.0, "Seconds between the small requests that check readiness. 0: never.", least=0
        ),
        "elastic": _yes(False, "Let workers change their role with the load."),
        "role": _one_of([role.value for role in WorkerRole], None, "Role of the worker."),
        "name": _text(None, "Name of the worker, unique in the cluster."),
        "router": _list([], "Routers to register with: host:port, separated by commas."),
        "place": _text(
            None, "Location rack/host/domain/process, as far as known. Default: /HOSTNAME."
        ),
        "num_processes": _count(
            1, "Processes of this worker. 0: as Slurm, Kubernetes or Open MPI define."
        ),
        "process_id": _count(0, "Index of this process. 0 is the leader."),
        "coordinator": _text(None, "host:port of the leader's jax.distributed service."),
        "config_file": _text(
            None, "JSON file with this process's whole configuration, instead of other flags."
        ),
    },
    "Security": {
        "tls_certificate": _text(
            None, "PEM certificate. It switches all gRPC and HTTP ports to TLS."
        ),
        "tls_key": _text(None, "PEM private key of the certificate."),
        "tls_client_ca": _text(
            None, "PEM CA that must have signed the certificates of clients and workers."
        ),
        "token_file": _text(None, "File of bearer tokens, one per line. A client sends the first."),
        "cluster_token_file": _text(None, "File with the token of calls between processes."),
    },
    "Observation": {
        "metrics_port": _count(0, "Port of Prometheus metrics (GET /metrics). 0: disabled."),
        "metrics_host": _text("127.0.0.1", "Address on which metrics are served."),
        "log_format": _one_of(FORMATS, "text", "Log lines as text or as JSON objects."),
        "log_requests": _yes(False, "Log a line for every request that ended or was refused."),
        "otlp_endpoint": _text(
            "", "OpenTelemetry collector for spans, e.g. http://host:4317. '' disables it."
        ),
        "decision_log": _text("", "File for the router's decisions, one JSON object a line."),
        "cluster_log_dir": _text(None, "Folder for one log file per process."),
        "table": _yes(None, "Show the live table. Default: on where stderr is a terminal."),
    },
    "Server to call": {
        "target": _text("localhost:8700", "gRPC address of the server, host:port."),
        "authority": _text("", "PEM CA of the server's certificate. It switches to TLS."),
        "certificate": _text("", "PEM client certificate, if the server requires one."),
        "key": _text("", "PEM private key of the client certificate."),
        "server_name": _text("", "Name in the server's certificate, if not the host of --target."),
        "deadline_seconds": _real(None, "Seconds after which the request is cancelled.", least=0),
        "worker": _text(None, "Name of the worker."),
        "weights_version": _text("", "Version of the weights. Default: a part of their hash."),
        "update_mode": _one_of(UPDATE_MODES, "recompute", "What happens to running requests."),
        "sleep_level": _count(1, "1: weights to host memory. 2: read again at wake.", least=1),
    },
    "Request": {
        "prompt": _text(None, "Prompt text."),
        "prompts_file": _text(None, "File with one prompt per line."),
        "chat": _yes(False, "Send the prompt as a user message through the chat template."),
        "system": _text(None, "System message, with --chat."),
        "max_tokens": _count(None, "Largest number of tokens to generate. Default: the server's."),
        "min_tokens": _count(None, "Number of tokens before the answer may end."),
        "temperature": _real(None, "Sampling temperature. 0 is greedy. Default: the server's."),
        "top_k": _count(None, "Sample among the k most likely tokens. 0: all."),
        "top_p": _real(None, "Sample among the most likely tokens with this total probability."),
        "seed": _count(None, "Random seed.", least=0),
        "stop": _many("Text that ends the answer. Repeatable."),
        "ignore_eos": _yes(None, "Generate past the end token."),
        "n": _count(1, "Number of answers. Several are printed when all have ended."),
    },
    "Workload": {
        "trace": _text(None, "Workload file, .csv or .jsonl, .gz or not (docs/simulator.md)."),
        "mixture": _list(
            None, "Instead of a trace: weight:prompt/output,... e.g. 0.8:1000/200,0.2:8000/300."
        ),
        "shared_tokens": _count(0, "Leading tokens that all prompts of --mixture share.", 0),
        "hit_rate": _real(0.0, "Fraction of each prompt of --mixture that the prefix cache holds."),
        "arrivals": _one_of(
            ["poisson", "trace"], "poisson", "Poisson arrivals, or the trace's times, scaled."
        ),
        "speed": _real(None, "Factor by which the trace's times are divided."),
        "rate": _real(None, "Mean requests per second. A trace's times are scaled to it."),
        "limit": _count(None, "First requests of the trace to use."),
        "requests": _count(1000, "Requests, without a trace.", least=1),
        "spread_tick_seconds": _real(
            None, "Tick of the trace's clock in seconds, over which arrivals are spread."
        ),
        "variation": _real(
            1.0,
            "Coefficient of variation of the gaps, without a trace. 0: even, 1: Poisson, above:"
            " bursts.",
        ),
        "turns": _real(
            None,
            "Mean turns of a conversation, without a trace. --prompt_tokens and --output_tokens"
            " then apply to each turn.",
        ),
        "think_seconds": _real(30.0, "Mean seconds between two turns, with --turns."),
        "system_tokens": _count(
            0, "Tokens of the prefix that all conversations share, with --turns.", least=0
        ),
        "concurrency": _count(
            None,
            "Users of a closed loop. Each sends its next request when its last one has ended.",
            least=1,
        ),
        "prompt_tokens": _count(None, "Tokens of a prompt."),
        "output_tokens": _count(128, "Tokens of an answer."),
        "max_prompt_tokens": _count(None, "Length to which longer prompts are cut, in tokens."),
        "max_output_tokens": _count(None, "Length to which longer answers are cut, in tokens."),
        "block_tokens": _count(512, "Tokens of one hashed block of the trace (Mooncake: 512)."),
        "ttft": _real(None, "Objective for the time to the first token, in seconds."),
        "tpot": _real(None, "Objective for the time per later token, in seconds."),
        "attainment": _real(0.9, "Fraction of the requests that must meet both objectives."),
        "requests_table": _text(None, "File with one row per request, .csv or .parquet."),
    },
    "Simulated hardware": {
        "prefill_hardware": _text(
            "h100", f"{', '.join(HARDWARE)}, or a file of `jdisagg measure_costs`."
        ),
        "decode_hardware": _text(None, "Hardware of decode workers. Default: --prefill_hardware."),
        "fused": _yes(
            True,
            "Chunked mode runs a prefill chunk and a decode step as one program. If not, they"
            " alternate, as for models with recurrent state.",
        ),
        "link": _text(None, f"Link between workers beyond the fast domain: {', '.join(LINKS)}."),
        "host_devices": _count(
            0, "Devices that share the fast link. 0: the hardware's usual domain."
        ),
        "switch_seconds": _real(
            20.0, "Seconds from the end of a drain until the worker serves again, with --elastic."
        ),
        "fault": _many(
            "Injected fault: death:decode-0:10:5, stall:W:at:back, slow:W:at:factor:seconds or"
            " cancels:at:part. Repeatable."
        ),
        "pool": _many(
            "Accelerators of one kind, e.g. h100:16@2.5: name or file, number, dollars per hour of"
            " each. Repeatable; replaces --hardware and --accelerators."
        ),
        "between": _text(None, "Link of each accelerator between pools. Default: the slower one."),
        "best": _one_of(
            ["rate", "dollars", "joules"],
            "rate",
            "What to make most of: requests per second, per dollar, or per joule.",
        ),
        "accelerators": _count(8, "Total number of accelerators."),
        "devices_per_node": _count(
            None, "Accelerators of one host. Default: as the hardware is usually built."
        ),
        "domain_devices": _count(
            None, "Accelerators joined by NVLink or ICI. Default: as usually built."
        ),
        "memory_gigabytes": _real(None, "Memory of a device, in GB. Default: its own report."),
        "tokens_per_second": _real(
            None, "Prompt tokens transferred per second. Default: one prompt per second."
        ),
        "links": _list(list(LINKS), "Links to compare."),
        "parallel_links": _count(1, "Links used in parallel."),
    },
    "Search": {
        "modes": _list(MODES, "Modes to compare."),
        "finalists": _count(3, "Candidates to simulate, with one pool and with two."),
        "most_requests": _count(
            2000, "Requests of a simulated run, up to 16 times as many if needed (docs/planner.md)."
        ),
        "serve_rate": _real(
            None, "Requests per second to serve. Also reports how many accelerators they need."
        ),
        "dollars_per_hour": _real(None, "Price of an accelerator. Default: costs/hardware.py."),
        "processes": _count(None, "Simulations at the same time. Default: one per core."),
        "choose": _count(1, "Row of the table that --output writes."),
        "model_directory": _text("", "Checkpoint that the recipe names. Default: --model."),
    },
    "Measurement": {
        "rounds": _count(5, "Repetitions of each setting. The fastest counts."),
        "prompts": _list(["64", "128", "256", "512"], "Prompt lengths, multiples of 16."),
        "batches": _list(["1", "2", "4", "8"], "Decode batch sizes, per dp rank."),
        "steps": _count(None, "Number of steps.", least=1),
        "text": _text("", "UTF-8 text file. Default: a text that comes with jdisagg."),
        "tokens": _count(2048, "Tokens of the text to run.", least=1),
        "minutes": _real(60.0, "Minutes after which the work stops and is written.", least=0.0),
        "keep": _text(None, "File with the state of training, to continue from."),
    },
    "Files": {
        "output": _text(None, "File to write."),
        "json": _text(None, "File for the figures as JSON."),
        "out": _text(None, "Folder for requests.csv (or .parquet), report.json and plots."),
        "format": _one_of(["csv", "parquet"], "csv", "Format of the table of requests."),
        "plots": _yes(True, "Plots in --out, where matplotlib is installed."),
    },
    "Other settings": {
        "set": _many(
            "Set any configuration field, e.g. --set decode.growth_tokens=64. instance.FIELD sets"
            " both sides. Repeatable."
        )
    },
}
FLAGS: dict[str, Spec] = {name: spec for group in GROUPS.values() for name, spec in group.items()}


class Given:
    """The flags of one command. The value of each flag is an attribute."""

    def __init__(self, names: Sequence[str], required: Sequence[str], **changes: object) -> None:
        self.values = absl.FlagValues()
        self.names = tuple(names)
        self.required = tuple(required)
        for name in names:
            define, default, text, options = FLAGS[name]
            changed = changes.get(name, default)
            if name == "dtype" and changed == "auto":
                options = {"enum_values": ["auto", *DTYPES]}
            if isinstance(changed, tuple):  # (default, the command's own help text)
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
        """Returns whether the flag is on the command line."""
        return bool(self.values[name].present)

    def help_text(
        self, command: str, doc: str, recipe: Mapping[str, object], every: bool = True
    ) -> str:
        """Formats a command's docstring and its flags for the terminal's width.

        Args:
            command: Command as the user types it, e.g. "jdisagg serve".
            doc: Docstring of the command's module.
            recipe: For each flag without a default, the value in the default recipe.
            every: Whether to show all flags, in groups, or only required and most used flags.
        """
        width = min(100, shutil.get_terminal_size((80, 24)).columns)
        lines = [f"usage: {command} [--flag=value ...]", "", doc.strip()]
        shown = [name for name in MOST_USED if name in self.names and name not in self.required]
        if not every and len(self.names) > FEW and len(shown) > 3:
            lines += ["", "Most used flags:"]
            for name in (*self.required, *shown):
                lines += self._flag_lines(name, recipe, width)
            hidden = len(self.names) - len(self.required) - len(shown)
            more = f"  --help=all ({hidden} more flags, in groups), --version"
            return "\n".join([*lines, "", more, f"  {ENVIRONMENT}"])
        for title, group in GROUPS.items():
            taken = [name for name in group if name in self.names]
            lines += ["", f"{title}:"] if taken else []
            for name in taken:
                lines += self._flag_lines(name, recipe, width)
        return "\n".join([*lines, "", "  --version, --help", f"  {ENVIRONMENT}"])

    def _flag_lines(self, name: str, recipe: Mapping[str, object], width: int) -> list[str]:
        flag = self.values[name]
        head = f"  --[no]{name}" if flag.boolean else f"  --{name}=..."
        default = shown_default(flag.default if flag.default is not None else recipe.get(name))
        text = f"{help_of(flag)} ({default})" if default else help_of(flag)
        start = "" if len(head) > 25 else head
        indent = " " * 26
        lines = textwrap.wrap(text, width, initial_indent=f"{start:<26}", subsequent_indent=indent)
        return lines if start else [head, *lines]

    def given(self) -> dict[str, object]:
        """Returns the names and values of the flags that are on the command line."""
        return {name: self.values[name].value for name in self.names if self.present(name)}

    def defaults_text(self) -> str:
        """Lists on one line the flags whose defaults are in use, so that a printed report states
        all settings."""
        left = [
            f"{name}={_plain(self.values[name].value)}"
            for name in self.names
            if not self.present(name) and self.values[name].value not in (None, "", [])
        ]
        return f"Left at their defaults: {', '.join(left)}." if left else ""


def define(*names: str, required: Sequence[str] = (), **changes: object) -> Given:
    """Defines the flags of a command. `changes`: for some flags, a default that replaces the
    table's, or (default, help text) that replace both."""
    assert set(changes) <= set(names), f"{set(changes) - set(names)} are not the command's flags"
    return Given(names, required, **changes)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def help_of(flag: absl.Flag) -> str:
    """Returns the help text of a flag, without the additions of absl. The text of an enum flag ends
    with the allowed values."""
    text = str(flag.help).partition(";\n")[0]
    if isinstance(flag, absl.EnumFlag):
        text = text.partition(">: ")[2]
        return f"{text} One of {', '.join(flag.parser.enum_values)}."
    return text


def shown_default(default: object) -> str:
    """Formats the default of a flag for help texts and tables. Returns "" if the flag has no
    default to show."""
    if default in (None, "", []):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    text = _plain(default)
    return str(Path(text).relative_to(ROOT)) if text.startswith(f"{ROOT}/") else text
