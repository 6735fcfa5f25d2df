"""Measures decode steps of our own executor: milliseconds per step, fraction of the memory
bandwidth, and host time to issue a step.

`of copy`: (bytes of weights and of KV read) / seconds, divided by the rate that a copy reaches on
this device. All sequences are near the end of their context."""

from functools import partial

import jax

from benchmarks.device_day.day import Day, Figures
from benchmarks.device_day.engine import Engine, Sizes
from benchmarks.device_day.kernels import WrongAnswer
from benchmarks.device_day.probe import copy
from jdisagg.request import SamplingParams

VARIANTS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95),
    "shaped": SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.5, logprobs=5),
}
# a loop of traced length is driven by the host unless it is captured into the graph
CAPTURE = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,WHILE"
}


def run(day: Day) -> None:
    ceiling: dict[str, float] = {}

    def ceilings() -> Figures:
        ceiling.update(copy(16 if day.small else 4096))
        return ceiling

    day.row("copy on the device", ceilings)
    whole = [("llama-3-8b", 32, 1), ("llama-3-8b", 32, 32), ("llama-3-8b", 32, 128)]
    cut = [("llama-3-8b", 8, 256), ("qwen3-30b-a3b", 8, 32), ("qwen3-30b-a3b", 8, 128)]
    small = [("llama-3-8b", 2, 4), ("qwen3-30b-a3b", 2, 2)]
    for model, layers, batch in small if day.small else whole + cut:
        sizes = Sizes(model, layers, batch, 256 if day.small else 2048, 64, day.small)
        measured(day, sizes, ceiling.get("GB/s", float("nan")))


def measured(day: Day, sizes: Sizes, ceiling: float) -> None:
    """Measures the rows of one model and batch."""
    name = f"{sizes.model}, {sizes.layers} layers, B={sizes.batch}"
    engines: list[Engine] = []

    def build() -> Figures:
        engines.append(Engine(sizes))
        return {"weights GB": engines[0].weight_bytes / 1e9}

    day.row(f"{name}: made", build)
    if not engines:
        return
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for variant in VARIANTS:
        for steps in (1, 4):
            row = f"{name}: {variant}, {steps} steps a dispatch"
            day.row(row, partial(steps_of, engines[0], variant, steps, ceiling, tokens))
    engines.pop().close()
    if sizes.batch <= 32:
        captured = partial(with_capture, sizes, ceiling, tokens)
        day.row(f"{name}: sampled, loops captured", captured, gpu=True)


def steps_of(
    engine: Engine,
    variant: str,
    steps: int,
    ceiling: float,
    tokens: dict[str, list[tuple[int, ...]]],
) -> Figures:
    sizes = engine.sizes
    dispatches = (8 if sizes.small else 64) // steps
    found, seconds, host = engine.decode(sizes.batch, steps, dispatches, VARIANTS[variant])
    if any(token < 0 for row in found for token in row):
        raise WrongAnswer("a row gave no token, or one of logits that are not finite")
    tokens[variant] = found
    kv = sizes.batch * sizes.context * engine.executor.limits.kv_spec.bytes_per_token
    rate = (engine.weight_bytes + kv) / seconds / 1e9
    return {
        "ms": 1e3 * seconds,
        "of copy": rate / ceiling,
        "host ms": 1e3 * host,
        "tokens/s": sizes.batch / seconds,
    }


def with_capture(sizes: Sizes, ceiling: float, tokens: dict[str, list[tuple[int, ...]]]) -> Figures:
    """Measures sampled decode with its loops captured in the graph. Checks that the tokens are
    equal."""
    jax.clear_caches()
    engine = Engine(sizes, dict(CAPTURE))
    try:
        before = tokens["sampled"]
        figures = steps_of(engine, "sampled", 4, ceiling, tokens)
        if tokens["sampled"] != before:
            raise WrongAnswer("captured loops choose other tokens")
        return figures
    finally:
        engine.close()
