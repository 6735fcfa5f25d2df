"""Measures a machine for the cost model, from which the router predicts times.

The first part measures ceilings: the highest rates of a matrix product, of memory access, and of a
copy between devices. The second part measures prefills and decode steps of the real engine on one
mesh. The third part fits the constants of the cost model, which are the fractions of the ceilings
that the engine's programs reach."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.costs.fitting import Errors, Observation, fit, relative_errors
from jdisagg.costs.hardware import Accelerator, Efficiency, Link
from jdisagg.costs.model_geometry import CostGeometry, dtype_bytes
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.deployment import Deployment
from jdisagg.request import Request, SamplingParams

Deploy = Callable[[EngineConfig], Deployment]

START = Efficiency(0.7, 0.7, 0.4, 0.6, 5e-6, 0.0, 0.0, 0.0, 1e-3, 1e-3, 20e-6, 20e-6, 0.5)
FREE = (
    "gemm_compute", "gemm_memory", "attention_compute", "attention_memory", "op_seconds",
    "step_seconds", "prefill_seconds", "sequence_seconds",
)  # fmt: skip
FREE_SHARDED = (*FREE, "collective_seconds", "collective_bandwidth")


@dataclass(frozen=True, slots=True)
class MeasuredSettings:
    """The settings of a measurement.

    Attributes:
        lengths: Prompt lengths in tokens. Each prompt runs alone.
        batches: Numbers of sequences per dp rank that decode together.
    """

    model: str
    layout: Layout
    dtype: str
    lengths: list[int]
    batches: list[int]
    rounds: int
    steps: int

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.steps < 4:
            raise ConfigError(
                f"--rounds must be at least 1 and --steps at least 4, got {self.rounds} and"
                f" {self.steps}"
            )

    def context_tokens(self, shape: CostGeometry) -> int:
        """Raises ConfigError if the model's context is shorter."""
        longest = max(self.lengths)
        context = longest + self.steps + 2
        if context > shape.context_tokens:
            raise ConfigError(
                f"--prompts: {longest} tokens and {self.steps} steps exceed the model's context of"
                f" {shape.context_tokens}; shorten"
            )
        return context


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Highest measured rates of one device.

    Attributes:
        flops: Floating-point operations per second of a matrix product.
        memory: Memory bandwidth in bytes/s.
        link: Bytes/s of a copy between two devices. If there is only one device, half of `memory`.
    """

    flops: float
    memory: float
    link: float


@dataclass(frozen=True, slots=True)
class Fitted:
    accelerator: Accelerator
    errors: list[float]
    held_out: Errors


def measure_ceilings(dtype: str) -> Ceilings:
    """Measures the ceilings of this machine's device. Each operation is measured at the first size
    that takes 20 ms. The result is the best of a few runs."""
    # The sum is in place, because the time would otherwise include the allocation of new memory.
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
    wanted: MeasuredSettings, shape: CostGeometry, deploy: Deploy
) -> list[Observation]:
    """Measures the duration of prefills (from prompt to first token) and of decode steps, as a
    client observes them. Returns the fastest run of each setting."""
    lengths, batches, longest = wanted.lengths, wanted.batches, max(wanted.lengths)
    chunk = 1 << (longest - 1).bit_length()
    instance = InstanceConfig(
        layout=wanted.layout,
        slots_per_rank=max(batches),
        chunk_tokens=chunk,
        min_chunk_tokens=min(chunk, InstanceConfig.min_chunk_tokens),
        growth_tokens=wanted.steps + 2,
    )
    config = EngineConfig(
        model=ModelConfig(wanted.model, wanted.dtype, context_tokens=wanted.context_tokens(shape)),
        mode=Mode.UNIFIED,
        decode=instance,
        warm_up=False,
    )
    deployment = deploy(config)
    await deployment.start()
    found: list[Observation] = []
    rng = np.random.default_rng(0)
    try:
        settings = [(length, 0) for length in lengths] + [
            (length, batch) for length in (min(lengths), longest) for batch in batches
        ]
        times: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
        # Rounds are the outer loop, because a machine's speed drifts. The first round compiles. The
        # result is the fastest run, because disturbances only add time.
        with tqdm(
            total=len(settings) * (wanted.rounds + 1),
            desc="measuring",
            unit="run",
            file=sys.stderr,
            leave=False,
        ) as bar:
            for _ in range(wanted.rounds + 1):
                for length, batch in settings:
                    times[length, batch].append(
                        await _measure(
                            deployment.cluster, rng, length, batch * wanted.layout.dp, wanted.steps
                        )
                    )
                    bar.update()
        for (length, batch), seconds in times.items():
            rows = ((batch, length + wanted.steps // 2),) if batch else ((length, 0),)
            phase = "decode" if batch else "prefill"
            found.append(
                Observation(shape, wanted.layout, phase, rows, min(seconds[1:]), dtype=wanted.dtype)
            )
    finally:
        await deployment.cluster.stop()
    return found


def fit_and_judge(start: Accelerator, steps: list[Observation], layout: Layout) -> Fitted:
    """To validate the method, first fits to every second measurement and predicts the others."""
    free = FREE_SHARDED if layout.devices > 1 else FREE
    half = fit(start, steps[::2], free)
    held_out = Errors.of(relative_errors(half, steps[1::2]))
    fitted = fit(start, steps, free)
    return Fitted(fitted, list(relative_errors(fitted, steps)), held_out)


def notes_of(fitted: Fitted, steps: list[Observation], layout: Layout) -> dict[str, object]:
    return {
        "device": jax.devices()[0].device_kind,
        "dtype": steps[0].dtype,
        "layout": str(layout),
        "model": steps[0].geometry.name,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "median_error": round(Errors.of(fitted.errors).median, 4),
        "median_error_held_out": round(fitted.held_out.median, 4),
        "steps": [
            {"phase": seen.phase, "rows": seen.rows, "seconds": seen.seconds} for seen in steps
        ],
    }


def describe(
    ceilings: Ceilings, name: str, dtype: str, memory_bytes: float | None = None
) -> Accelerator:
    """If `memory_bytes` is None, the size that the device reports is used."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(jax.devices())
    if stats and "bytes_limit" in stats:
        memory = float(stats["bytes_limit"])
    link = Link("measured", ceilings.link, 20e-6, 1.0)
    return Accelerator(
        name=name,
        peak_flops=ceilings.flops * dtype_bytes(dtype) / 2,
        memory_bytes_per_second=ceilings.memory,
        memory_bytes=memory_bytes or memory,
        domain_devices=len(jax.devices()),
        scale_up=link,
        host=link,
        scale_out=link,
        efficiency=START,
    )


async def _measure(
    cluster: EmbeddedCluster, rng: np.random.Generator, length: int, sequences: int, steps: int
) -> float:
    count = steps if sequences else 1

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
            f"--steps={steps} is too few for {sequences} sequences to decode together; give more"
        )
    return (inside[-1] - inside[0]) / sum(when > inside[0] for when in inside)


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
    while True:
        seconds, rate = measure(size)
        if seconds >= 0.02 or size >= largest:
            return rate
        size *= 2
