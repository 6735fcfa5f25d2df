"""What a model's KV weighs, and what moving it asks of links: `python -m launch.kv_calculator
--model=llama-3-70b --prompt_tokens=8192`

`--model` is a directory with a config.json, or a name of the catalogue (`--model=help` lists it).
The table on stdout: KV bytes a token and a prompt, how many tokens an instance has room for (with
--hardware), the time a prompt takes over each link, and what part of the link a rate of prompt
tokens needs. Loads no weights and no JAX."""

import math
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import LINKS, Link, link
from jdisagg.costs.model_geometry import CATALOG, CostGeometry, dtype_bytes
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.hardware_files import find_accelerator
from launch.console import run
from launch.cost_inputs import find_geometry
from launch.flags import define

flags = define(
    "model",
    "dtype",
    "prompt_tokens",
    "tokens_per_second",
    "codec",
    "links",
    "parallel_links",
    "hardware",
    "layout",
    required=("model",),
    dtype="bfloat16",
    codec="none",
    links=list(LINKS),
    hardware="",
    layout="dp=1,tp=1,ep=1",
)


def main() -> None:
    _print_tables()


def _print_tables() -> None:
    if flags.model == "help":
        known = [
            (item.name, _count(item.parameters), f"{item.kv_bytes_per_token():,}")
            for item in CATALOG.values()
        ]
        _show(("model", "parameters", "KV bytes a token"), known)
        return
    shape = find_geometry(flags.model)
    prompt, rate, links = _checked(shape)
    value_bytes = dtype_bytes(flags.dtype)
    wire, kept = (
        wire_bytes_per_token(shape, value_bytes, flags.codec),
        shape.kv_bytes_per_token(flags.dtype),
    )
    facts = [
        ("parameters", f"{_count(shape.parameters)}, {_count(shape.active_parameters)} active"),
        (
            "KV a token",
            (
                f"{kept:,} bytes ({shape.layers} layers x {shape.attention.kv_values} values x"
                f" {value_bytes})"
            ),
        ),
        (
            "on the wire a token",
            f"{wire:,.0f} bytes (codec {flags.codec}, {wire / kept:.2f} of it)",
        ),
        (f"KV of {prompt:,} tokens", _bytes(kept * prompt)),
        (f"bandwidth for {rate:,.0f} tokens/s", f"{_bytes(wire * rate)}/s"),
        *_instance_facts(shape, prompt),
    ]
    rows = []
    for one in links:
        reached = one.bytes_per_second * one.efficiency * flags.parallel_links
        milliseconds = 1e3 * (one.latency_seconds + wire * prompt / reached)
        needed = f"{100 * wire * rate / reached:.1f} %"
        rows.append(
            (
                one.name,
                f"{one.bytes_per_second / 1e9:g}",
                f"{reached / 1e9:g}",
                f"{milliseconds:,.2f}",
                needed,
            )
        )
    _show((shape.name, ""), facts)
    _show(
        (
            "link",
            "GB/s",
            f"reached by {flags.parallel_links}",
            "ms a prompt",
            "needed for the rate",
        ),
        rows,
    )


def _checked(shape: CostGeometry) -> tuple[int, float, list[Link]]:
    """(prompt tokens, tokens a second, links) of the flags."""
    prompt = min(8192, shape.context_tokens) if flags.prompt_tokens is None else flags.prompt_tokens
    if not 1 <= prompt <= shape.context_tokens:
        raise ConfigError(
            f"--prompt_tokens must be within 1 and the model's context of {shape.context_tokens},"
            f" got {prompt}"
        )
    if flags.parallel_links < 1:
        raise ConfigError(f"--parallel_links must be at least 1, got {flags.parallel_links}")
    rate = float(prompt) if flags.tokens_per_second is None else flags.tokens_per_second
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"--tokens_per_second must be a positive number, got {rate}")
    return prompt, rate, [link(name) for name in flags.links]


def _instance_facts(shape: CostGeometry, prompt: int) -> list[tuple[str, str]]:
    if not flags.hardware:
        return []
    layout, hardware = Layout.parse(flags.layout), find_accelerator(flags.hardware)
    model = CostModel(shape, hardware, layout, kv_dtype=flags.dtype)
    weights, tokens = model.weight_bytes_per_device, model.kv_tokens_per_rank()
    name = f"on {layout.devices} {hardware.name}"
    if not tokens:
        return [
            (
                name,
                (
                    f"weights of {_bytes(weights)} a device do not fit"
                    f" {_bytes(hardware.memory_bytes)}; use a larger tp or ep"
                ),
            )
        ]
    return [
        (
            name,
            (
                f"{_bytes(weights)} of weights a device, room for {tokens:,} tokens a dp rank"
                f" ({tokens // prompt:,} prompts)"
            ),
        )
    ]


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
    run(main, flags)
