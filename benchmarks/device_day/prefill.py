"""Measures chunks of our own executor: one prompt, one prompt after cached tokens, and eight packed
prompts.

`MFU`: 2 operations per weight and token (only weights of experts that the token uses) plus those of
attention, divided by the seconds and by the rate that a large product reaches on this device."""

from functools import partial

import jax

from benchmarks.device_day.day import Day, Figures
from benchmarks.device_day.engine import Engine, Sizes
from benchmarks.device_day.probe import product
from jdisagg.costs.model_geometry import GroupedAttention


def run(day: Day) -> None:
    ceiling: dict[str, float] = {}

    def ceilings() -> Figures:
        ceiling.update(product(512 if day.small else 8192, "bfloat16"))
        return ceiling

    day.row("large product", ceilings)
    for model in ("llama-3-8b", "qwen3-30b-a3b"):
        layers = 2 if day.small else 32 if model == "llama-3-8b" else 8
        for tokens in (64,) if day.small else (512, 2048, 8192):
            sizes = Sizes(model, layers, 8, 4 * tokens, tokens, day.small)
            measured(day, sizes, ceiling.get("TFLOP/s", float("nan")))


def measured(day: Day, sizes: Sizes, ceiling: float) -> None:
    engines: list[Engine] = []

    def build() -> Figures:
        jax.clear_caches()
        engines.append(Engine(sizes))
        return {"weights GB": engines[0].weight_bytes / 1e9}

    name, tokens = f"{sizes.model}, {sizes.layers} layers, {sizes.chunk} tokens", sizes.chunk
    day.row(f"{name}: made", build)
    if not engines:
        return
    forms = {
        "one": ((tokens,), 0), "past": ((tokens,), tokens), "packed": ((tokens // 8,) * 8, 0),
    }  # fmt: skip
    for form, (lengths, past) in forms.items():
        day.row(f"{name}: {form}", partial(chunk, engines[0], lengths, past, ceiling))
    engines.pop().close()


def chunk(engine: Engine, lengths: tuple[int, ...], past: int, ceiling: float) -> Figures:
    seconds = engine.prefill(engine.chunk(lengths, past), 2 if engine.sizes.small else 8)
    geometry = engine.config.cost_geometry(engine.sizes.model)
    assert isinstance(geometry.attention, GroupedAttention)
    pairs = sum(size * (size + 1) / 2 for size in lengths) + past * lengths[0]
    heads = geometry.attention.query_heads * geometry.attention.head_dim * geometry.layers
    weights = geometry.active_parameters - geometry.embedding_parameters
    operations = 2 * sum(lengths) * weights + 4 * pairs * heads
    return {
        "ms": 1e3 * seconds,
        "tokens/s": sum(lengths) / seconds,
        "MFU": operations / seconds / 1e12 / ceiling,
    }
