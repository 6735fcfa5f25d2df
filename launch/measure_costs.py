"""Fits the cost model to this machine: `python -m launch.measure_costs --model=DIR --output=this_machine.json`

Measures the machine's ceilings (a matrix product, a pass over memory, a copy between devices), then the real engine in one mesh (whole
prompts and whole decode steps, through the request path), and fits what programs reach of the ceilings. Half of the settings are fitted
to, the others predicted; errors of both go to stderr and into the file. `--hardware=this_machine.json` of the other scripts reads it.

Ceilings are those of the model's dtype: the file states the peak as of bfloat16, which the cost model halves for float32.
"""

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.limits import GRANULE_TOKENS
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.request import Request, SamplingParams
from jdisagg.router.fitting import Errors, Observation, fit, relative_errors
from jdisagg.router.hardware import Accelerator, Efficiency, Link
from jdisagg.router.model_geometry import CostGeometry, dtype_bytes
from launch.assembly import Deployment, prepare_runtime
from launch.console import quiet_end, refuse_words
from launch.cost_inputs import find_geometry, write_accelerator
from launch.shipped import SHIPPED_MODEL

_MODEL = flags.DEFINE_string("model", "", "Checkpoint directory. Default: the shipped dense model.")
_LAYOUT = flags.DEFINE_string("layout", "dp=1,tp=1,ep=1", "Layout of the one mesh.")
_OUTPUT = flags.DEFINE_string("output", "this_machine.json", "File to write.")
_NAME = flags.DEFINE_string("name", "this-machine", "What the hardware is called in reports.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights and KV.")
_DEVICES = flags.DEFINE_integer("devices", 1, "Virtual devices on CPU.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Repetitions of each setting; the fastest counts.")
_PROMPTS = flags.DEFINE_list("prompts", ["64", "128", "256", "512"], "Prompt lengths, multiples of 16.")
_BATCHES = flags.DEFINE_list("batches", ["1", "2", "4", "8"], "Sequences that decode at once, per dp rank.")
_STEPS = flags.DEFINE_integer("steps", 32, "Decode steps of each setting.")
_MEMORY = flags.DEFINE_float("memory_gigabytes", None, "Memory of a device. Default: what it reports; on CPU the host's, divided.")

START = Efficiency(0.7, 0.7, 0.4, 0.6, 5e-6, 0.0, 0.0, 0.0, 1e-3, 1e-3, 20e-6, 20e-6, 0.5)
FREE = (
    "gemm_compute", "gemm_memory", "attention_compute", "attention_memory", "op_seconds",
    "step_seconds", "prefill_seconds", "sequence_seconds",
)  # fmt: skip
FREE_SHARDED = (*FREE, "collective_seconds", "collective_bandwidth")


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one device: FLOP/s, bytes/s of its memory, bytes/s from device to device (or through memory, where there is one)."""

    flops: float
    memory: float
    link: float


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        model, layout = _MODEL.value or SHIPPED_MODEL, Layout.parse(_LAYOUT.value)
        shape = dataclasses.replace(find_geometry(model), name=Path(model).resolve().name)
        lengths, batches = _counts("prompts", _PROMPTS.value, GRANULE_TOKENS), _counts("batches", _BATCHES.value)
        if _ROUNDS.value < 1 or _STEPS.value < 4:
            raise ConfigError(f"--rounds must be at least 1 and --steps at least 4, got {_ROUNDS.value} and {_STEPS.value}")
        if _MEMORY.value is not None and not 0 < _MEMORY.value < float("inf"):
            raise ConfigError(f"--memory_gigabytes must be positive, got {_MEMORY.value:g}; leave it away to take what the device reports")
        _context_tokens(shape, lengths)
        if not Path(_OUTPUT.value).resolve().parent.is_dir():
            raise ConfigError(f"--output={_OUTPUT.value}: its folder does not exist; make it first")
        prepare_runtime(max(_DEVICES.value, layout.devices), EngineConfig.compilation_cache)
        with quiet_end():
            ceilings = measure_ceilings(_DTYPE.value)
            steps = asyncio.run(measure_steps(model, shape, layout, lengths, batches))
            _report(_describe(ceilings), steps, layout)
    except JdisaggError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure_ceilings(dtype: str) -> Ceilings:
    """The best of a few runs each, at the size from which on a run takes 20 ms."""
    # In place: fresh memory would be priced as the operating system's clearing of pages.
    product, add = jax.jit(lambda a, b: a @ b), jax.jit(lambda a: a + jnp.ones((), a.dtype), donate_argnums=0)

    def flops(size: int) -> tuple[float, float]:
        matrix = jnp.ones((size, size), dtype)
        seconds = _fastest(lambda: product(matrix, matrix).block_until_ready())
        return seconds, 2 * size**3 / seconds

    def memory(size: int) -> tuple[float, float]:
        values = jnp.ones((size * size,), dtype)
        size_bytes = values.nbytes

        def run() -> None:
            nonlocal values
            values = add(values).block_until_ready()

        seconds = _fastest(run)
        return seconds, 2 * size_bytes / seconds

    reached = _grown(memory)
    if len(jax.devices()) < 2:
        return Ceilings(_grown(flops), reached, reached / 2)
    values = jax.device_put(np.ones(1 << 23, np.float32), jax.devices()[0])
    seconds = _fastest(lambda: jax.device_put(values, jax.devices()[1]).block_until_ready())
    return Ceilings(_grown(flops), reached, values.nbytes / seconds)


async def measure_steps(model: str, shape: CostGeometry, layout: Layout, lengths: list[int], batches: list[int]) -> list[Observation]:
    """Whole prompts to their first token, and whole decode steps, as requests see them."""
    longest, context = max(lengths), _context_tokens(shape, lengths)
    chunk = 1 << (longest - 1).bit_length()
    instance = InstanceConfig(
        layout=layout,
        slots_per_rank=max(batches),
        chunk_tokens=chunk,
        min_chunk_tokens=min(chunk, InstanceConfig.min_chunk_tokens),
        growth_tokens=_STEPS.value + 2,
    )
    config = EngineConfig(model=ModelConfig(model, _DTYPE.value, context_tokens=context), mode=Mode.UNIFIED, decode=instance, warm_up=False)
    deployment = Deployment(config)
    await deployment.start()
    found: list[Observation] = []
    rng = np.random.default_rng(0)
    try:
        settings = [(length, 0) for length in lengths] + [(length, batch) for length in (min(lengths), longest) for batch in batches]
        times: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
        # Rounds outermost: a machine's speed drifts. The first round compiles. The fastest counts: what disturbs a run only adds to it.
        with tqdm(total=len(settings) * (_ROUNDS.value + 1), desc="measuring", unit="run", file=sys.stderr, leave=False) as bar:
            for _ in range(_ROUNDS.value + 1):
                for length, batch in settings:
                    times[length, batch].append(await _measure(deployment.cluster, rng, length, batch * layout.dp))
                    bar.update()
        for (length, batch), seconds in times.items():
            rows = ((batch, length + _STEPS.value // 2),) if batch else ((length, 0),)
            phase = "decode" if batch else "prefill"
            found.append(Observation(shape, layout, phase, rows, min(seconds[1:]), dtype=_DTYPE.value))
    finally:
        await deployment.cluster.stop()
    return found


async def _measure(cluster: EmbeddedCluster, rng: np.random.Generator, length: int, sequences: int) -> float:
    """Seconds of a prefill (0 sequences), or of one decode step while all sequences run."""
    count = _STEPS.value if sequences else 1

    async def stream(prompt: tuple[int, ...]) -> list[float]:
        times: list[float] = []
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        async for event in cluster.stream(Request(f"measured-{rng.integers(1 << 62)}", prompt, sampling)):
            times.extend([time.perf_counter()] * len(event.token_ids))
        return times

    prompts = [tuple(rng.integers(3, cluster.model.vocabulary, length).tolist()) for _ in range(max(1, sequences))]
    started = time.perf_counter()
    streams = await asyncio.gather(*(stream(prompt) for prompt in prompts))
    if not sequences:
        return streams[0][0] - started
    low, high = max(times[1] for times in streams), min(times[-1] for times in streams)
    inside = [when for when in streams[0] if low <= when <= high]
    if len(inside) < 2 or inside[-1] <= inside[0]:
        raise ConfigError(f"--steps={_STEPS.value} is too few for {sequences} sequences to decode together; give more")
    return (inside[-1] - inside[0]) / sum(when > inside[0] for when in inside)


def _describe(ceilings: Ceilings) -> Accelerator:
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(jax.devices())
    if stats and "bytes_limit" in stats:
        memory = float(stats["bytes_limit"])
    link = Link("measured", ceilings.link, 20e-6, 1.0)
    return Accelerator(
        name=_NAME.value,
        peak_flops=ceilings.flops * dtype_bytes(_DTYPE.value) / 2,
        memory_bytes_per_second=ceilings.memory,
        memory_bytes=_MEMORY.value * 1e9 if _MEMORY.value else memory,
        domain_devices=len(jax.devices()),
        scale_up=link,
        host=link,
        scale_out=link,
        efficiency=START,
    )


def _report(start: Accelerator, steps: list[Observation], layout: Layout) -> None:
    """Fits to every other setting, judges by the others, and writes what is fitted to all."""
    free = FREE_SHARDED if layout.devices > 1 else FREE
    half = fit(start, steps[::2], free)
    held_out = Errors.of(relative_errors(half, steps[1::2]))
    fitted = fit(start, steps, free)
    errors = relative_errors(fitted, steps)
    for seen, error in zip(steps, errors, strict=True):
        print(f"{seen.phase:8} {seen.rows!s:14} measured {seen.seconds * 1e3:8.2f} ms, predicted {100 * error:+.1f} %", file=sys.stderr)
    inside = Errors.of(errors)
    print(
        f"median error {100 * inside.median:.1f} % in sample, {100 * held_out.median:.1f} % held out (every other setting)",
        file=sys.stderr,
    )
    notes: dict[str, object] = {
        "device": jax.devices()[0].device_kind,
        "dtype": _DTYPE.value,
        "layout": str(layout),
        "model": steps[0].geometry.name,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "median_error": round(inside.median, 4),
        "median_error_held_out": round(held_out.median, 4),
        "steps": [{"phase": seen.phase, "rows": seen.rows, "seconds": seen.seconds} for seen in steps],
    }
    write_accelerator(Path(_OUTPUT.value), fitted, notes)
    print(_OUTPUT.value)


def _counts(flag: str, values: list[str], of: int = 1) -> list[int]:
    """Of a flag's list; each a multiple of `of`."""
    try:
        found = [int(value) for value in values]
    except ValueError as error:
        raise ConfigError(f"--{flag} must be whole numbers, got {','.join(values)!r}") from error
    if not found or min(found) < 1:
        raise ConfigError(f"--{flag} must be at least one number of at least 1, got {','.join(values)!r}")
    for value in found:
        if value % of:
            raise ConfigError(f"--{flag} must be multiples of {of}, got {value}; take {value + of - value % of}")
    return found


def _context_tokens(shape: CostGeometry, lengths: list[int]) -> int:
    """How much context the measuring takes. Raises ConfigError where the model has less."""
    longest = max(lengths)
    context = longest + _STEPS.value + 2
    if context > shape.context_tokens:
        raise ConfigError(
            f"--prompts: {longest} tokens and {_STEPS.value} steps exceed the model's context of {shape.context_tokens}; shorten"
        )
    return context


def _fastest(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _grown(measure: Callable[[int], tuple[float, float]], size: int = 512, largest: int = 16384) -> float:
    """The rate at the first size whose run takes 20 ms, or the largest."""
    while True:
        seconds, rate = measure(size)
        if seconds >= 0.02 or size >= largest:
            return rate
        size *= 2


if __name__ == "__main__":
    app.run(main)
