"""Computes the size of a model's KV cache and the time to transfer it.

    jdisagg kv_calculator --model=llama-3-70b --prompt_tokens=8192

--model is a directory with a config.json, or a name of the model catalogue (--model=help lists the
names). The first table shows the KV bytes of a token and of a prompt and, with --hardware, the
number of tokens whose KV fits into an instance. The second table shows for each link the transfer
time of a prompt's KV, and the part of the bandwidth that --tokens_per_second uses. Loads neither
weights nor JAX."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import LINKS, Link, link
from jdisagg.costs.kv_facts import catalog_rows, instance_facts, kv_facts, link_rows, sent_part
from jdisagg.costs.model_geometry import CostGeometry, dtype_bytes
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.hardware_files import find_accelerator
from launch.console import run
from launch.cost_inputs import find_geometry
from launch.flags import define

flags = define(
    "model",
    "dtype",
    "kv_dtype",
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
    if flags.model == "help":
        _show(("model", "parameters", "KV bytes per token"), catalog_rows())
        return
    shape = find_geometry(flags.model, flags.kv_dtype)
    prompt, rate, links = _checked(shape)
    kept = shape.kv_dtype or flags.dtype
    if shape.kv_dtype and flags.codec != "none":
        raise ConfigError(
            f"--codec={flags.codec} packs values of 2 or 4 bytes, and --kv_dtype={flags.kv_dtype}"
            " keeps them in one; leave one of the two out"
        )
    facts = kv_facts(shape, flags.dtype, flags.codec, prompt, rate)
    if flags.hardware:
        layout, hardware = Layout.parse(flags.layout), find_accelerator(flags.hardware)
        facts += instance_facts(CostModel(shape, hardware, layout, kv_dtype=kept), prompt)
    wire = wire_bytes_per_token(shape, dtype_bytes(kept), flags.codec)
    wire *= sent_part(shape, prompt)
    head = ("link", "GB/s", f"reached by {flags.parallel_links}", "ms a prompt")
    rows = link_rows(links, flags.parallel_links, wire, prompt, rate)
    _show((shape.name, ""), facts)
    _show((*head, "needed for the rate"), rows)


def _checked(shape: CostGeometry) -> tuple[int, float, list[Link]]:
    prompt = min(8192, shape.context_tokens) if flags.prompt_tokens is None else flags.prompt_tokens
    if not 1 <= prompt <= shape.context_tokens:
        raise ConfigError(
            f"--prompt_tokens must be within 1 and the model's context of {shape.context_tokens},"
            f" got {prompt}"
        )
    rate = float(prompt) if flags.tokens_per_second is None else flags.tokens_per_second
    return prompt, rate, [link(name) for name in flags.links]


def _show(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*head, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    run(main, flags)
