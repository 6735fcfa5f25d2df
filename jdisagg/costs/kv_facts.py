"""Computes the size and the transfer time of a model's KV, and formats both as rows of text.
`jdisagg kv_calculator` prints the rows."""

from collections.abc import Iterable
from dataclasses import dataclass

from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import Link
from jdisagg.costs.model_geometry import CostGeometry, LatentAttention, dtype_bytes
from jdisagg.layout.kv_spec import ring_pages

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkUse:
    """How long a link needs for a prompt's KV, and how much of the link's bandwidth is used.

    Attributes:
        share: Fraction of `reached` that the given rate of prompt tokens uses.
    """

    link: str
    peak: float
    reached: float
    seconds: float
    share: float


def catalog_rows() -> list[Row]:
    return [
        (item.name, count_text(item.parameters), f"{item.kv_bytes_per_token():,}")
        for item in CATALOG.values()
    ]


def sent_part(shape: CostGeometry, prompt_tokens: int) -> float:
    """Returns the fraction of a prompt's KV that a hand-off transfers without a prefix cache. In a
    model with windowed and full layers, windowed layers send only the positions in the window."""
    seen = min(prompt_tokens, max(0, shape.widest_window - 1))
    return 1 - shape.windowed_part * (1 - seen / prompt_tokens)


def held_bytes(shape: CostGeometry, dtype: str, tokens: int, page_size: int) -> int:
    """Returns the bytes of the KV pages that a decode worker holds for a sequence of `tokens`
    tokens. In a model with windowed and full layers, windowed layers hold at most a ring buffer."""
    pages, windowed = -(-tokens // page_size), shape.windowed_bytes_per_token(dtype)
    ring = min(pages, ring_pages(shape.widest_window, page_size))
    whole = shape.kv_bytes_per_token(dtype) - windowed
    return page_size * (pages * whole + ring * windowed)


def kv_facts(
    shape: CostGeometry,
    dtype: str,
    codec: str,
    prompt_tokens: int,
    tokens_per_second: float,
    page_size: int = 128,
) -> list[Row]:
    wire = wire_bytes_per_token(shape, dtype_bytes(shape.kv_dtype or dtype), codec)
    kept = shape.kv_bytes_per_token(dtype)
    active = count_text(shape.active_parameters)
    state = shape.state_bytes(dtype)  # bytes of recurrent layers, which hold no KV
    beside = (
        [("state per sequence", f"{bytes_text(state)}, independent of its length")] if state else []
    )
    part = sent_part(shape, prompt_tokens)
    if windowed := shape.windowed_bytes_per_token(dtype):
        held = bytes_text(held_bytes(shape, dtype, prompt_tokens, page_size))
        beside += [
            (
                "of it in windowed layers",
                f"{windowed:,} bytes, of {shape.widest_window:,} positions",
            ),
            (
                f"of {prompt_tokens:,} tokens",
                f"{held} held by a decode worker (pages of {page_size}), {part:.2f} transferred;"
                " all with --prefix_cache",
            ),
        ]
    return [
        ("parameters", f"{count_text(shape.parameters)}, {active} active"),
        ("KV per token", f"{kept:,} bytes ({kv_formula(shape, dtype)})"),
        *beside,
        ("on the wire per token", f"{wire:,.0f} bytes (codec {codec}, {wire / kept:.2f} of it)"),
        (f"KV of {prompt_tokens:,} tokens", bytes_text(kept * prompt_tokens)),
        (
            f"bandwidth for {tokens_per_second:,.0f} tokens/s",
            f"{bytes_text(wire * part * tokens_per_second)}/s",
        ),
    ]


def kv_formula(shape: CostGeometry, dtype: str) -> str:
    parts = []
    for kind, layers in shape.kv_kinds:
        if isinstance(kind, LatentAttention):
            index = f" + {kind.index_dim} index" if kind.index_dim else ""
            values = f"{kind.kv_rank} latent + {kind.rope_dim} rotary{index}"
            parts.append(f"{layers} layers x ({values})")
        else:
            sizes = f"{layers} layers x {kind.kv_heads} KV heads"
            values = f"{sizes} x ({kind.head_dim} + {kind.value_size})"
            parts.append(values if kind.value_dim else f"2 x {sizes} x {kind.head_dim}")
            if kind.indexed_layers:
                parts.append(f"{kind.indexed_layers} layers x {kind.index_dim} index")
    values = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
    return f"{values} x {dtype_bytes(shape.kv_dtype or dtype)} bytes"


def link_uses(
    links: Iterable[Link],
    parallel: int,
    wire_bytes: float,
    prompt_tokens: int,
    tokens_per_second: float,
) -> list[LinkUse]:
    uses = []
    for link in links:
        reached = link.bytes_per_second * link.efficiency * parallel
        seconds = link.latency_seconds + wire_bytes * prompt_tokens / reached
        share = wire_bytes * tokens_per_second / reached
        uses.append(LinkUse(link.name, link.bytes_per_second, reached, seconds, share))
    return uses


def link_rows(
    links: Iterable[Link],
    parallel: int,
    wire_bytes: float,
    prompt_tokens: int,
    tokens_per_second: float,
) -> list[Row]:
    return [
        (
            use.link,
            f"{use.peak / 1e9:g}",
            f"{use.reached / 1e9:g}",
            f"{1e3 * use.seconds:,.2f}",
            f"{100 * use.share:.1f} %",
        )
        for use in link_uses(links, parallel, wire_bytes, prompt_tokens, tokens_per_second)
    ]


def instance_facts(model: CostModel, prompt_tokens: int) -> list[Row]:
    """If the weights do not fit, a row reports this."""
    layout, hardware = model.layout, model.accelerator
    weights, tokens = model.weight_bytes_per_device, model.kv_tokens_per_rank()
    name = f"on {layout.devices} {hardware.name}"
    if not tokens:
        return [
            (
                name,
                (
                    f"weights of {bytes_text(weights)} a device do not fit"
                    f" {bytes_text(hardware.memory_bytes)}; use a larger tp or ep"
                ),
            )
        ]
    return [
        (
            name,
            (
                f"{bytes_text(weights)} of weights per device, room for {tokens:,} tokens per dp"
                f" rank ({tokens // prompt_tokens:,} prompts)"
            ),
        )
    ]


def bytes_text(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def count_text(number: float) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"
