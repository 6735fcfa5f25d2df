"""The flags of all commands, so that a flag means the same in all commands.

    flags = define("config", "port", *CLIENT, required=("prompt",), port=8700)

A command lists the flags that it accepts and may change a default. `launch.console.run` parses the
command line. Then the value of each flag is an attribute of `flags`.

The flag of a setting is made from the setting (`settings/declared.py`): name, type, choices and
help. It has no default, because the recipe has it. `ARGUMENTS` has the flags of commands that are
no settings, and forms of a setting's flag that take more than the setting."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from absl import flags as absl
from msgspec import Meta

from jdisagg.chat.formats import AUTO, NONE, REASONING, TOOL_FORMS
from jdisagg.config import EngineConfig, Mode, ObserveConfig
from jdisagg.costs.engines import ENGINES, PRECISION_BITS
from jdisagg.costs.hardware import LINKS
from jdisagg.messages.weights import UPDATE_MODES
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.settings.declared import (
    Amount,
    Count,
    NotNegative,
    OneOf,
    Positive,
    Setting,
    Settings,
    setting,
    settings_of,
    texts_of,
)
from launch.shipped import DEFAULT_RECIPE

MODES = [mode.value for mode in Mode]
ROOT = Path(DEFAULT_RECIPE).parent.parent
# The flags that --help shows; --helpfull shows all.
FIRST = (
    "config", "model", "mode", "prefill", "decode", "prefill_workers", "decode_workers", "gpus",
    "context_tokens", "weights", "kv_dtype", "slots_per_rank", "memory_fraction", "hardware",
    "prefix_cache", "host", "port", "http_port", "served_model_name", "token_file", "metrics_port",
    "target", "role", "router", "input", "output", "set",
)  # fmt: skip
ENVIRONMENT = "An environment variable JDISAGG_NAME sets flag --name, if it is not given."
FEW = 20  # --help of a command with at most this many flags shows all
_TITLES = {"": "General", "prefix": "Prefix cache", "observe": "Observation"}


def one_of(values: Iterable[str]) -> Any:
    return Annotated[str, OneOf(tuple(values))]


@dataclass(frozen=True, slots=True)
class CommandFlag:
    """A flag. `paths` are the settings that it sets, and `shown` the commands that have it."""

    form: Setting
    default: object
    text: str
    title: str = ""
    paths: tuple[str, ...] = ()
    shown: str = ""


def flag(kind: Any, default: object, text: str) -> CommandFlag:
    return CommandFlag(setting("", kind), default, text)


# By title. A list is separated by commas, and a tuple repeats the flag.
ARGUMENTS: dict[str, dict[str, CommandFlag]] = {
    "General": {
        "config": flag(str, DEFAULT_RECIPE, "Recipe: Python with get_config(), YAML or JSON."),
        "config_file": flag(str, None, "JSON file with all settings of this process."),
        "set": flag(tuple, (), "Sets any setting; instance.FIELD sets both sides. Repeatable."),
    },
    "Model": {
        "revision": flag(str, None, "Branch, tag or commit of a Hugging Face name."),
        "dtype": flag(
            one_of(("float32", "bfloat16", "auto")),
            None,
            "Type of weights and KV. auto: the checkpoint's own, also the default with --model.",
        ),
        "engine": flag(one_of(ENGINES), "jdisagg", "Engine whose kernels and host are estimated."),
        "speculation": flag(
            str, None, "TOKENS:ACCEPTANCE, e.g. 2:0.8: drafts per step, and their chance."
        ),
        "family": flag(
            one_of(["llama", "qwen3_moe", "hybrid"]), "llama", "Architecture of the tiny model."
        ),
        "source": flag(str, None, "Directory with config.json and safetensors files."),
        "destination": flag(str, None, "Directory to write, created if missing."),
    },
    "Instance": {
        "layout": flag(str, None, "Layout of the mesh, e.g. dp=1,tp=2."),
        "devices": flag(Count, None, "Virtual CPU devices. Default: as the layouts need."),
        "device_gib": flag(
            NotNegative, None, "Memory of a device, in GiB. Default: its own report."
        ),
    },
    "Cluster": {
        "prefill_workers": flag(Amount, None, "Prefill workers. Default: the recipe's, or 1."),
        "decode_workers": flag(Amount, None, "Decode workers. Default: the recipe's, or 1."),
        "mixed_workers": flag(int, None, "Workers that prefill and decode on one mesh."),
        "processes_per_instance": flag(int, 1, "Processes that share one worker's mesh."),
        "routers": flag(Count, 1, "Routers over the same workers, on consecutive ports."),
        "on": flag(one_of(("host", "ray")), "host", "On this host, or on a Ray cluster."),
        "gpus": flag(str, None, "GPUs, e.g. 0-3,6; 0,0 shares one. Default: all of the host."),
        "gpus_per_worker": flag(Count, None, "GPUs of each process. Default: as its layout needs."),
        "canary_seconds": flag(NotNegative, 5.0, "Time between checks of readiness. 0: never."),
        "elastic": flag(bool, False, "Let workers change their role with the load."),
    },
    "Worker": {
        "role": flag(one_of([role.value for role in WorkerRole]), None, "Role of the worker."),
        "name": flag(str, None, "Name of the worker, unique in the cluster."),
        "router": flag(list, [], "Routers to register with: host:port, separated by commas."),
        "place": flag(str, None, "Location rack/host/domain/process. Default: /HOSTNAME."),
        "num_processes": flag(int, 1, "Processes of this worker. 0: as Slurm or Kubernetes say."),
        "process_id": flag(int, 0, "Index of this process. 0 is the leader."),
        "coordinator": flag(str, None, "host:port of the leader's jax.distributed service."),
    },
    "Service": {
        "http_port": flag(
            Annotated[int, Meta(ge=-1)],
            8000,
            "Port of the HTTP API, or of the guide. 0: chosen by the system. -1: disabled.",
        ),
        "tool_parser": flag(
            one_of([AUTO, NONE, *TOOL_FORMS]),
            None,
            "Format of tool calls. auto: from the chat template.",
        ),
        "reasoning_parser": flag(
            one_of([AUTO, NONE, *REASONING]),
            None,
            "Format of reasoning. auto: from the chat template.",
        ),
    },
    "Observation": {
        "decision_log": flag(str, "", "File for the router's decisions, as JSON lines."),
        "cluster_log_dir": flag(str, None, "Folder for one log file per process."),
        "table": flag(bool, None, "Show the live table. Default: on where stderr is a terminal."),
    },
    "Server to call": {
        "target": flag(str, "localhost:8700", "gRPC address of the server, host:port."),
        "authority": flag(str, "", "PEM CA of the server's certificate. It switches to TLS."),
        "certificate": flag(str, "", "PEM client certificate, if the server requires one."),
        "key": flag(str, "", "PEM private key of the client certificate."),
        "server_name": flag(str, "", "Name in the certificate, if not the host of --target."),
        "deadline_seconds": flag(NotNegative, None, "Time after which the request is cancelled."),
        "worker": flag(str, None, "Name of the worker."),
        "weights_version": flag(str, "", "Version of the weights. Default: of their hash."),
        "update_mode": flag(one_of(UPDATE_MODES), "recompute", "What happens to running requests."),
        "sleep_level": flag(Count, 1, "1: weights to host memory. 2: read again at wake."),
    },
    "Request": {
        "prompt": flag(str, None, "Prompt text."),
        "prompts_file": flag(str, None, "File with one prompt per line."),
        "chat": flag(bool, False, "Send the prompt as a user message of a chat."),
        "system": flag(str, None, "System message, with --chat."),
        "max_tokens": flag(int, None, "Most tokens to generate. Default: the server's."),
        "min_tokens": flag(int, None, "Number of tokens before the answer may end."),
        "temperature": flag(float, None, "Sampling temperature, 0: greedy. Default: the server's."),
        "top_k": flag(int, None, "Sample among the k most likely tokens. 0: all."),
        "top_p": flag(float, None, "Sample among the likeliest tokens of this total."),
        "seed": flag(Amount, None, "Random seed."),
        "stop": flag(tuple, (), "Text that ends the answer. Repeatable."),
        "ignore_eos": flag(bool, None, "Generate past the end token."),
        "n": flag(int, 1, "Number of answers. Several are printed when all have ended."),
    },
    "Workload": {
        "trace": flag(str, None, "Workload file, .csv or .jsonl, .gz or not (docs/simulator.md)."),
        "mixture": flag(
            list, None, "Instead of a trace: weight:prompt/output,... e.g. 1:1000/200."
        ),
        "shared_tokens": flag(Amount, 0, "Leading tokens that prompts of --mixture share."),
        "hit_rate": flag(
            Annotated[float, Meta(ge=0, lt=1)],
            0.0,
            "Part of each prompt of --mixture that is cached.",
        ),
        "arrivals": flag(
            one_of(["poisson", "trace"]),
            "poisson",
            "Poisson arrivals, or the trace's times, scaled.",
        ),
        "speed": flag(Positive, None, "Factor by which the trace's times are divided."),
        "rate": flag(Positive, None, "Mean requests per second. A trace's times are scaled to it."),
        "limit": flag(int, None, "First requests of the trace to use."),
        "requests": flag(Count, 1000, "Requests, without a trace."),
        "spread_tick_seconds": flag(
            Positive, None, "Tick of the trace, over which arrivals are spread."
        ),
        "variation": flag(float, 1.0, "Variation of gaps without a trace. 0: even, 1: Poisson."),
        "turns": flag(
            float, None, "Mean turns of a conversation, without a trace; token flags are per turn."
        ),
        "think_seconds": flag(float, 30.0, "Mean seconds between two turns, with --turns."),
        "system_tokens": flag(Amount, 0, "Shared prefix of all conversations, with --turns."),
        "concurrency": flag(
            Count, None, "Users of a closed loop, each with one request at a time."
        ),
        "prompt_tokens": flag(int, None, "Tokens of a prompt."),
        "output_tokens": flag(int, 128, "Tokens of an answer."),
        "max_prompt_tokens": flag(int, None, "Length to which longer prompts are cut."),
        "max_output_tokens": flag(int, None, "Length to which longer answers are cut."),
        "block_tokens": flag(int, 512, "Tokens of a hashed block of the trace (Mooncake: 512)."),
        "ttft": flag(float, None, "Objective for the time to the first token, in seconds."),
        "tpot": flag(float, None, "Objective for the time per later token, in seconds."),
        "attainment": flag(float, 0.9, "Fraction of the requests that must meet both objectives."),
        "requests_table": flag(str, None, "File with one row per request, .csv or .parquet."),
    },
    "Simulated hardware": {
        "prefill_hardware": flag(str, "h100", "A name of costs/hardware.py, or a measured file."),
        "decode_hardware": flag(str, None, "Of decode workers. Default: --prefill_hardware."),
        "fused": flag(
            bool,
            True,
            "Chunked mode runs a chunk and a decode step as one program; else they alternate.",
        ),
        "link": flag(str, None, "Link beyond the fast domain, a name of costs/hardware.py."),
        "host_devices": flag(int, 0, "Devices that share the fast link. 0: as usually built."),
        "switch_seconds": flag(
            NotNegative, 20.0, "Time from a drain to serving again, with --elastic."
        ),
        "fault": flag(
            tuple,
            (),
            "Fault death:W:at:back, stall:W:at:back, slow:W:at:factor:seconds or cancels:at:part."
            " Repeatable.",
        ),
        "accelerators": flag(int, 8, "Total number of accelerators."),
        "devices_per_node": flag(int, None, "Accelerators of a host. Default: as usually built."),
        "domain_devices": flag(
            int, None, "Accelerators joined by NVLink or ICI. Default: as usual."
        ),
        "pool": flag(
            tuple, (), "Accelerators KIND:NUMBER@DOLLARS per hour, e.g. h100:16@2.5. Repeatable."
        ),
        "between": flag(str, None, "Link of an accelerator between pools. Default: the slower."),
        "best": flag(
            one_of(["rate", "dollars", "joules"]),
            "rate",
            "Rank by requests a second, dollar or joule.",
        ),
        "memory_gigabytes": flag(Positive, None, "Memory of a device, in GB. Default: its report."),
        "tokens_per_second": flag(Positive, None, "Prompt tokens per second. Default: one prompt."),
        "links": flag(list, list(LINKS), "Links to compare."),
        "parallel_links": flag(Count, 1, "Links used in parallel."),
    },
    "Search": {
        "modes": flag(list, MODES, "Modes to compare."),
        "finalists": flag(int, 3, "Candidates to simulate, with one pool and with two."),
        "most_requests": flag(int, 2000, "Requests of a simulated run, up to 16 times if needed."),
        "serve_rate": flag(float, None, "Requests per second whose accelerators are counted."),
        "dollars_per_hour": flag(
            float, None, "Price of an accelerator. Default: costs/hardware.py."
        ),
        "processes": flag(int, None, "Simulations at a time. Default: one per core."),
        "choose": flag(int, 1, "Row of the table that --output writes."),
        "model_directory": flag(str, "", "Checkpoint that the recipe names. Default: --model."),
    },
    "Measurement": {
        "rounds": flag(int, 5, "Repetitions of each setting. The fastest counts."),
        "prompts": flag(list, ["64", "128", "256", "512"], "Prompt lengths, multiples of 16."),
        "batches": flag(list, ["1", "2", "4", "8"], "Decode batch sizes, per dp rank."),
        "steps": flag(Count, None, "Number of steps."),
        "text": flag(str, "", "UTF-8 text file. Default: a text that comes with jdisagg."),
        "tokens": flag(Count, 2048, "Tokens of the text to run."),
        "minutes": flag(NotNegative, 60.0, "Minutes after which the work stops and is written."),
        "keep": flag(str, None, "File with the state of training, to continue from."),
    },
    "Files": {
        "input": flag(str, None, "File to read."),
        "output": flag(str, None, "File to write."),
        "json": flag(str, None, "File for the figures as JSON."),
        "out": flag(str, None, "Folder for requests.csv, report.json and plots."),
        "format": flag(one_of(["csv", "parquet"]), "csv", "Format of the table of requests."),
        "plots": flag(bool, True, "Plots in --out, where matplotlib is installed."),
    },
}


# For commands that compare engines, some of which have more types than jdisagg.
ESTIMATED_WEIGHTS = flag(
    one_of(PRECISION_BITS), None, "Type of the layers' matrices. jdisagg's own kernels have no fp4."
)


def _of_settings(config: Settings, at: str, defaults: bool) -> Iterator[tuple[str, CommandFlag]]:
    title = _TITLES.get(config.section, config.section.capitalize())
    texts = texts_of(type(config))
    for form in settings_of(type(config)):
        value = getattr(config, form.name)
        if isinstance(value, Settings):
            yield from _of_settings(value, f"{at}{form.name}.", defaults)
        elif form.flag:
            section = at.rstrip(".").rpartition(".")[2]
            name = form.flag.name.format(field=form.name, section=section)
            default = value if defaults else None
            path = f"{at}{form.name}"
            yield (
                name,
                CommandFlag(form, default, texts[form.name], title, (path,), form.flag.shown),
            )


def _flags() -> dict[str, CommandFlag]:
    found: dict[str, CommandFlag] = {}
    for config in (EngineConfig(), ObserveConfig()):
        observes = isinstance(config, ObserveConfig)  # which no recipe has
        for name, flag in _of_settings(config, "", observes):
            first = found.get(name)
            paths = (*first.paths, *flag.paths) if first else flag.paths
            found[name] = replace(first or flag, paths=() if observes else paths)
    for title, group in ARGUMENTS.items():
        for name, made in group.items():
            of = found.get(name, made)
            found[name] = replace(made, title=title, paths=of.paths, shown=of.shown)
    return found


FLAGS = _flags()
TITLES = tuple(dict.fromkeys([*ARGUMENTS, *(flag.title for flag in FLAGS.values())]))


def shown(*sets: str) -> tuple[str, ...]:
    """Returns the flags of settings that are declared for these sets of commands."""
    return tuple(name for name, flag in FLAGS.items() if flag.shown in sets)


CLIENT = ("target", "authority", "certificate", "key", "server_name")
HTTP_TARGET = ("localhost:8000", "Address of the HTTP API: host:port or URL.")
OBSERVE, SERVICE, HTTP = shown("observe"), shown("service"), shown("http")
ENGINE = ("config", "revision", *shown("engine"), "set")
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "chat")
_SHORT = {"input": "i", "output": "o"}
_DEFINE = {
    int: absl.DEFINE_integer,
    float: absl.DEFINE_float,
    bool: absl.DEFINE_bool,
    list: absl.DEFINE_list,
    tuple: absl.DEFINE_multi_string,
}


def _define(
    values: absl.FlagValues, name: str, flag: CommandFlag, default: object, required: bool
) -> None:
    options: dict[str, object] = {"flag_values": values, "required": required}
    options["short_name"] = _SHORT.get(name)
    if flag.form.values:
        absl.DEFINE_enum(name, default, list(flag.form.values), flag.text, **options)  # type: ignore[arg-type]
        return
    define = _DEFINE.get(flag.form.kind, absl.DEFINE_string)
    define(name, list(default) if isinstance(default, tuple) else default, flag.text, **options)  # type: ignore[operator]


class Given:
    """The flags of one command. The value of each flag is an attribute."""

    def __init__(self, names: Sequence[str], required: Sequence[str], **changes: object) -> None:
        self.values = absl.FlagValues()
        self.names = tuple(names)
        self.required = tuple(required)
        self.texts: dict[str, str] = {}
        self._flags: dict[str, CommandFlag] = {}
        for name in names:
            flag, default = FLAGS[name], changes.get(name, FLAGS[name].default)
            if isinstance(default, CommandFlag):
                flag, default = default, default.default
            text = flag.text
            if isinstance(default, tuple) and default:  # (default, the command's own help text)
                default, text = default
            self.texts[name], self._flags[name] = text, flag
            _define(self.values, name, flag, default, name in required)

    def __getattr__(self, name: str) -> Any:
        return self.values[name].value

    def check(self) -> None:
        """Raises SettingError if a number breaks the bounds of its flag."""
        for name in self.names:
            form, value = self._flags[name].form, getattr(self, name)
            if value is not None and form.kind in (int, float):
                form.check(value, f"--{name}")

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
            every: Whether to show all flags with their whole texts, or the first sentences of the
                flags that most need.
        """
        width = min(100, shutil.get_terminal_size((80, 24)).columns)
        lines = [f"usage: {command} [--flag=value ...]", "", doc.strip()]
        every = every or len(self.names) <= FEW
        order = FLAGS if every else dict.fromkeys((*self.required, *FIRST))
        first = [name for name in order if name in self.names]
        for title in TITLES:
            taken = [name for name in first if FLAGS[name].title == title]
            lines += ["", f"{title}:"] if taken else []
            for name in taken:
                lines += self._flag_lines(name, recipe, width, every)
        hidden = len(self.names) - len(first)
        more = f"  --helpfull ({hidden} more flags), --version" if hidden else "  --version, --help"
        return "\n".join([*lines, "", more, f"  {ENVIRONMENT}"])

    def help_of(self, name: str, every: bool = True) -> str:
        """Returns the help of a flag, with its values, or only the first sentence."""
        text, values = self.texts[name], self._flags[name].form.values
        if not every:
            text = re.split(r"(?<!e\.g)\. ", text)[0].rstrip(".") + "."
        return f"{text} One of {', '.join(values)}." if values else text

    def _flag_lines(
        self, name: str, recipe: Mapping[str, object], width: int, every: bool
    ) -> list[str]:
        flag = self.values[name]
        head = f"  --[no]{name}" if flag.boolean else f"  --{name}=..."
        default = shown_default(flag.default if flag.default is not None else recipe.get(name))
        text = self.help_of(name, every) + (f" ({default})" if default else "")
        start = "" if len(head) > 25 else head
        indent = " " * 26
        lines = textwrap.wrap(text, width, initial_indent=f"{start:<26}", subsequent_indent=indent)
        return lines if start else [head, *lines]

    def given(self) -> dict[str, object]:
        """Returns the names and values of the flags that are on the command line."""
        return {name: self.values[name].value for name in self.names if self.present(name)}

    def defaults_text(self, unused: Sequence[str] = ()) -> str:
        """Lists on one line the flags whose defaults are in use, so that a printed report states
        all settings. `unused`: flags that other flags replace."""
        left = [
            f"{name}={_plain(self.values[name].value)}"
            for name in self.names
            if not self.present(name)
            and name not in unused
            and self.values[name].value not in (None, "", [])
        ]
        return f"Left at their defaults: {', '.join(left)}." if left else ""


def define(*names: str, required: Sequence[str] = (), **changes: object) -> Given:
    """Defines the flags of a command. `changes`: for some flags, a default that replaces the
    table's, (default, help text) that replace both, or a flag of another form."""
    assert set(changes) <= set(names), f"{set(changes) - set(names)} are not the command's flags"
    return Given(names, required, **changes)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def shown_default(default: object) -> str:
    """Formats the default of a flag for help texts and tables. Returns "" if the flag has no
    default to show."""
    if default in (None, "", []):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    text = _plain(default)
    return str(Path(text).relative_to(ROOT)) if text.startswith(f"{ROOT}/") else text
