"""What a model's KV weighs, and what moving it asks of links: `python -m launch.kv_calculator --model=llama-3-70b --prompt_tokens=8192`

`--model` is a directory with a config.json, or a name of the catalogue (`--model=help` lists it). The table on stdout: KV bytes a token
and a prompt, how many tokens an instance has room for (with --hardware), the time a prompt takes over each link, and what part of the
link a rate of prompt tokens needs. Loads no weights and no JAX.
"""

import math
import sys

from absl import app, flags
from rich import box
from rich.console import Console
from rich.table import Table

from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.router.cost_model import CODEC_BITS, CostModel, wire_bytes_per_token
from jdisagg.router.hardware import HARDWARE, LINKS, Link, link
from jdisagg.router.model_geometry import CATALOG, CostGeometry, dtype_bytes
from launch.console import quiet_end, refuse_words
from launch.cost_inputs import find_accelerator, find_geometry

_MODEL = flags.DEFINE_string("model", None, "Model directory, or a name of the catalogue; 'help' lists those.", required=True)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of the KV.")
_PROMPT = flags.DEFINE_integer("prompt_tokens", None, "Length of the prompt whose KV moves; default: 8192, or the context if shorter.")
_RATE = flags.DEFINE_float("tokens_per_second", None, "Prompt tokens handed off a second; default: one prompt a second.")
_CODEC = flags.DEFINE_string("codec", "none", f"How KV travels: {', '.join(CODEC_BITS)}.")
_LINKS = flags.DEFINE_list("links", list(LINKS), "Links to price.")
_PARALLEL = flags.DEFINE_integer("parallel_links", 1, "How many of a link work side by side.")
_HARDWARE = flags.DEFINE_string("hardware", "", f"Also what an instance on it holds: {', '.join(HARDWARE)}, or a measured .json.")
_LAYOUT = flags.DEFINE_string("layout", "dp=1,tp=1,ep=1", "Of that instance.")


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        with quiet_end():
            _print_tables()
    except JdisaggError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _print_tables() -> None:
    if _MODEL.value == "help":
        known = [(item.name, _count(item.parameters), f"{item.kv_bytes_per_token():,}") for item in CATALOG.values()]
        _show(("model", "parameters", "KV bytes a token"), known)
        return
    shape = find_geometry(_MODEL.value)
    prompt, rate, links = _checked(shape)
    value_bytes = dtype_bytes(_DTYPE.value)
    wire, kept = wire_bytes_per_token(shape, value_bytes, _CODEC.value), shape.kv_bytes_per_token(_DTYPE.value)
    facts = [
        ("parameters", f"{_count(shape.parameters)}, {_count(shape.active_parameters)} active"),
        ("KV a token", f"{kept:,} bytes ({shape.layers} layers x {shape.attention.kv_values} values x {value_bytes})"),
        ("on the wire a token", f"{wire:,.0f} bytes (codec {_CODEC.value}, {wire / kept:.2f} of it)"),
        (f"KV of {prompt:,} tokens", _bytes(kept * prompt)),
        (f"bandwidth for {rate:,.0f} tokens/s", f"{_bytes(wire * rate)}/s"),
        *_instance_facts(shape, prompt),
    ]
    rows = []
    for one in links:
        reached = one.bytes_per_second * one.efficiency * _PARALLEL.value
        milliseconds = 1e3 * (one.latency_seconds + wire * prompt / reached)
        needed = f"{100 * wire * rate / reached:.1f} %"
        rows.append((one.name, f"{one.bytes_per_second / 1e9:g}", f"{reached / 1e9:g}", f"{milliseconds:,.2f}", needed))
    _show((shape.name, ""), facts)
    _show(("link", "GB/s", f"reached by {_PARALLEL.value}", "ms a prompt", "needed for the rate"), rows)


def _checked(shape: CostGeometry) -> tuple[int, float, list[Link]]:
    """(prompt tokens, tokens a second, links) of the flags."""
    prompt = min(8192, shape.context_tokens) if _PROMPT.value is None else _PROMPT.value
    if not 1 <= prompt <= shape.context_tokens:
        raise ConfigError(f"--prompt_tokens must be within 1 and the model's context of {shape.context_tokens}, got {prompt}")
    if _PARALLEL.value < 1:
        raise ConfigError(f"--parallel_links must be at least 1, got {_PARALLEL.value}")
    rate = float(prompt) if _RATE.value is None else _RATE.value
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"--tokens_per_second must be a positive number, got {rate}")
    return prompt, rate, [link(name) for name in _LINKS.value]


def _instance_facts(shape: CostGeometry, prompt: int) -> list[tuple[str, str]]:
    if not _HARDWARE.value:
        return []
    layout, hardware = Layout.parse(_LAYOUT.value), find_accelerator(_HARDWARE.value)
    model = CostModel(shape, hardware, layout, kv_dtype=_DTYPE.value)
    weights, tokens = model.weight_bytes_per_device, model.kv_tokens_per_rank()
    name = f"on {layout.devices} {hardware.name}"
    if not tokens:
        return [(name, f"weights of {_bytes(weights)} a device do not fit {_bytes(hardware.memory_bytes)}; use a larger tp or ep")]
    return [(name, f"{_bytes(weights)} of weights a device, room for {tokens:,} tokens a dp rank ({tokens // prompt:,} prompts)")]


def _show(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*head, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


if __name__ == "__main__":
    app.run(main)
