"""Fits the cost model to this machine: `python -m launch.measure_costs --model=DIR
--output=this_machine.json`

Measures the machine's ceilings (a matrix product, a pass over memory, a copy between devices), then
the real engine in one mesh (whole prompts and whole decode steps, through the request path), and
fits what programs reach of the ceilings. Half of the settings are fitted to, the others predicted;
errors of both go to stderr and into the file. `--hardware=this_machine.json` of the other scripts
reads it.

Ceilings are those of the model's dtype: the file states the peak as of bfloat16, which the cost
model halves for float32."""

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
from tqdm import tqdm

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.costs.fitting import Errors, Observation, fit, relative_errors
from jdisagg.costs.hardware import Accelerator, Efficiency, Link
from jdisagg.costs.model_geometry import CostGeometry, dtype_bytes
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.limits import GRANULE_TOKENS
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.deployment import prepare_runtime
from jdisagg.node.hardware_files import write_accelerator
from jdisagg.request import Request, SamplingParams
from launch.console import run
from launch.cost_inputs import find_geometry
from launch.flags import define
from launch.model import deployment as deployment_of
from launch.shipped import SHIPPED_MODEL

flags = define(
    "model",
    "layout",
    "output",
    "name",
    "dtype",
    "devices",
    "rounds",
    "prompts",
    "batches",
    "steps",
    "memory_gigabytes",
    model="",
    layout="dp=1,tp=1,ep=1",
    output="this_machine.json",
    name="this-machine",
    dtype="float32",
    devices=1,
    steps=32,
)

START = Efficiency(0.7, 0.7, 0.4, 0.6, 5e-6, 0.0, 0.0, 0.0, 1e-3, 1e-3, 20e-6, 20e-6, 0.5)
FREE = (
    "gemm_compute", "gemm_memory", "attention_compute", "attention_memory", "op_seconds",
    "step_seconds", "prefill_seconds", "sequence_seconds",
)  # fmt: skip
FREE_SHARDED = (*FREE, "collective_seconds", "collective_bandwidth")


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one device: FLOP/s, bytes/s of its memory, bytes/s from device to device (or through
    memory, where there is one)."""

    flops: float
    memory: float
    link: float


def main() -> None:
    model, layout = flags.model or SHIPPED_MODEL, Layout.parse(flags.layout)
    shape = dataclasses.replace(find_geometry(model), name=Path(model).resolve().name)
    lengths, batches = (
        _counts("prompts", flags.prompts, GRANULE_TOKENS),
        _counts("batches", flags.batches),
    )
    if flags.rounds < 1 or flags.steps < 4:
        raise ConfigError(
            f"--rounds must be at least 1 and --steps at least 4, got {flags.rounds} and"
            f" {flags.steps}"
        )
    if flags.memory_gigabytes is not None and not 0 < flags.memory_gigabytes < float("inf"):
        raise ConfigError(
            f"--memory_gigabytes must be positive, got {flags.memory_gigabytes:g}; leave it"
            " away to take what the device reports"
        )
    _context_tokens(shape, lengths)
    if not Path(flags.output).resolve().parent.is_dir():
        raise ConfigError(f"--output={flags.output}: its folder does not exist; make it first")
    prepare_runtime(max(flags.devices, layout.devices), EngineConfig.compilation_cache)
    ceilings = measure_ceilings(flags.dtype)
    steps = asyncio.run(measure_steps(model, shape, layout, lengths, batches))
    _report(_describe(ceilings), steps, layout)


def measure_ceilings(dtype: str) -> Ceilings:
    """The best of a few runs each, at the size from which on a run takes 20 ms."""
    # In place: fresh memory would be priced as the operating system's clearing of pages.
    product, add = (
        jax.jit(lambda a, b: a @ b),
        jax.jit(lambda a: a + jnp.ones((), a.dtype), donate_argnums=0),
    )

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


async def measure_steps(
    model: str, shape: CostGeometry, layout: Layout, lengths: list[int], batches: list[int]
) -> list[Observation]:
    """Whole prompts to their first token, and whole decode steps, as requests see them."""
    longest, context = max(lengths), _context_tokens(shape, lengths)
    chunk = 1 << (longest - 1).bit_length()
    instance = InstanceConfig(
        layout=layout,
        slots_per_rank=max(batches),
        chunk_tokens=chunk,
        min_chunk_tokens=min(chunk, InstanceConfig.min_chunk_tokens),
        growth_tokens=flags.steps + 2,
    )
    config = EngineConfig(
        model=ModelConfig(model, flags.dtype, context_tokens=context),
        mode=Mode.UNIFIED,
        decode=instance,
        warm_up=False,
    )
    deployment = deployment_of(config)
    await deployment.start()
    found: list[Observation] = []
    rng = np.random.default_rng(0)
    try:
        settings = [(length, 0) for length in lengths] + [
            (length, batch) for length in (min(lengths), longest) for batch in batches
        ]
        times: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
        # Rounds outermost: a machine's speed drifts. The first round compiles. The fastest counts:
        # what disturbs a run only adds to it.
        with tqdm(
            total=len(settings) * (flags.rounds + 1),
            desc="measuring",
            unit="run",
            file=sys.stderr,
            leave=False,
        ) as bar:
            for _ in range(flags.rounds + 1):
                for length, batch in settings:
                    times[length, batch].append(
                        await _measure(deployment.cluster, rng, length, batch * layout.dp)
                    )
                    bar.update()
        for (length, batch), seconds in times.items():
            rows = ((batch, length + flags.steps // 2),) if batch else ((length, 0),)
            phase = "decode" if batch else "prefill"
            found.append(
                Observation(shape, layout, phase, rows, min(seconds[1:]), dtype=flags.dtype)
            )
    finally:
        await deployment.cluster.stop()
    return found


async def _measure(
    cluster: EmbeddedCluster, rng: np.random.Generator, length: int, sequences: int
) -> float:
    """Seconds of a prefill (0 sequences), or of one decode step while all sequences run."""
    count = flags.steps if sequences else 1

    async def stream(prompt: tuple[int, ...]) -> list[float]:
        times: list[float] = []
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        async for event in cluster.stream(
            Request(f"measured-{rng.integers(1 << 62)}", prompt, sampling)
        ):
            times.extend([time.perf_counter()] * len(event.token_ids))
        return times

    prompts = [
        tuple(rng.integers(3, cluster.model.vocabulary, length).tolist())
        for _ in range(max(1, sequences))
    ]
    started = time.perf_counter()
    streams = await asyncio.gather(*(stream(prompt) for prompt in prompts))
    if not sequences:
        return streams[0][0] - started
    low, high = max(times[1] for times in streams), min(times[-1] for times in streams)
    inside = [when for when in streams[0] if low <= when <= high]
    if len(inside) < 2 or inside[-1] <= inside[0]:
        raise ConfigError(
            f"--steps={flags.steps} is too few for {sequences} sequences to decode together; give"
            " more"
        )
    return (inside[-1] - inside[0]) / sum(when > inside[0] for when in inside)


def _describe(ceilings: Ceilings) -> Accelerator:
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(jax.devices())
    if stats and "bytes_limit" in stats:
        memory = float(stats["bytes_limit"])
    link = Link("measured", ceilings.link, 20e-6, 1.0)
    return Accelerator(
        name=flags.name,
        peak_flops=ceilings.flops * dtype_bytes(flags.dtype) / 2,
        memory_bytes_per_second=ceilings.memory,
        memory_bytes=flags.memory_gigabytes * 1e9 if flags.memory_gigabytes else memory,
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
        print(
            f"{seen.phase:8} {seen.rows!s:14} measured {seen.seconds * 1e3:8.2f} ms, predicted"
            f" {100 * error:+.1f} %",
            file=sys.stderr,
        )
    inside = Errors.of(errors)
    print(
        f"median error {100 * inside.median:.1f} % in sample, {100 * held_out.median:.1f} % held"
        " out (every other setting)",
        file=sys.stderr,
    )
    notes: dict[str, object] = {
        "device": jax.devices()[0].device_kind,
        "dtype": flags.dtype,
        "layout": str(layout),
        "model": steps[0].geometry.name,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "median_error": round(inside.median, 4),
        "median_error_held_out": round(held_out.median, 4),
        "steps": [
            {"phase": seen.phase, "rows": seen.rows, "seconds": seen.seconds} for seen in steps
        ],
    }
    write_accelerator(Path(flags.output), fitted, notes)
    print(flags.output)


def _counts(flag: str, values: list[str], of: int = 1) -> list[int]:
    """Of a flag's list; each a multiple of `of`."""
    try:
        found = [int(value) for value in values]
    except ValueError as error:
        raise ConfigError(f"--{flag} must be whole numbers, got {','.join(values)!r}") from error
    if not found or min(found) < 1:
        raise ConfigError(
            f"--{flag} must be at least one number of at least 1, got {','.join(values)!r}"
        )
    for value in found:
        if value % of:
            raise ConfigError(
                f"--{flag} must be multiples of {of}, got {value}; take {value + of - value % of}"
            )
    return found


def _context_tokens(shape: CostGeometry, lengths: list[int]) -> int:
    """How much context the measuring takes. Raises ConfigError where the model has less."""
    longest = max(lengths)
    context = longest + flags.steps + 2
    if context > shape.context_tokens:
        raise ConfigError(
            f"--prompts: {longest} tokens and {flags.steps} steps exceed the model's context of"
            f" {shape.context_tokens}; shorten"
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


def _grown(
    measure: Callable[[int], tuple[float, float]], size: int = 512, largest: int = 16384
) -> float:
    """The rate at the first size whose run takes 20 ms, or the largest."""
    while True:
        seconds, rate = measure(size)
        if seconds >= 0.02 or size >= largest:
            return rate
        size *= 2


if __name__ == "__main__":
    run(main, flags)
