"""How much of the throughput of ideal pipeline stages does an engine with four stages reach?

    python -m benchmarks.stages --name=stages

The cluster is embedded: a prefill and a decode worker of `pp=4`, the shipped model, a layer and a
CPU device for each stage. Router, schedulers, step loops, programs and copies are the live ones. To
each stage's program a sleep is added, which is the same for all stages and needs no core, because
four devices cannot compute at the same time on two cores. Each sleep notes its beginning and end.
It is a custom call, because JAX runs programs with host callbacks on the calling thread.

- decode: four streams, one in each micro-batch, all running.
- prefill: four prompts of four chunks, all at once.

The ideal time of n batches is n + 3 sleeps: each stage sleeps without a pause once the first batch
has come to it. The share is the ideal time divided by the time between the first beginning and the
last end. What it loses is all that is not the sleep: the computation itself, dispatch, copies from
mesh to mesh, host work, and stages that wait for each other. So it proves that the order of
programs keeps all stages busy, and what the host costs per batch. It does not prove how fast
devices copy."""

import asyncio
import ctypes
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks.measure import save
from jdisagg.config import Mode
from jdisagg.engine import replica
from jdisagg.executor.programs import Programs
from tests.end_to_end.clusters import Running, config, running

_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
_WORK = flags.DEFINE_list("work", ["10", "20", "50"], "Milliseconds of a stage's sleep.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds; the first one compiles and is not counted.")

STAGES, CHUNK, CHUNKS, PROMPTS, TOKENS = 4, 64, 4, 4, 80
STAGE_PROGRAMS = {"group": "prefill", "decode": "decode", "forward": "decode"}

Span = tuple[int, float, float]  # stage, beginning, end


class Log:
    """The sleeps of all stages. Thread-safe."""

    def __init__(self) -> None:
        self.work_seconds = 0.0
        self._lock = threading.Lock()
        self._spans: dict[str, list[Span]] = {"prefill": [], "decode": []}

    def sleep(self, kind: str, stage: int) -> None:
        began = time.monotonic()
        time.sleep(self.work_seconds)
        with self._lock:
            self._spans[kind].append((stage, began, time.monotonic()))

    def take(self, kind: str) -> list[Span]:
        """Returns and forgets the spans of a kind of programs."""
        with self._lock:
            taken, self._spans = self._spans[kind], {"prefill": [], "decode": []}
        return taken


LOG = Log()
_CUSTOM_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_registered: list[object] = []  # keeps the functions that XLA calls


def register(kind: str, stage: int) -> str:
    """Registers the custom call that sleeps. Returns its name."""

    def target(out: int, inputs: int) -> None:
        LOG.sleep(kind, stage)
        ctypes.c_int32.from_address(out).value = 0

    function, name = _CUSTOM_CALL(target), f"sleep_{kind}_{stage}"
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    address = ctypes.cast(function, ctypes.c_void_p).value
    made = capsule(address, b"xla._CUSTOM_CALL_TARGET", None)
    jax.ffi.register_ffi_target(name, made, platform="cpu", api_version=0)
    _registered.append(function)
    return name


class SleepingPrograms(Programs):
    """Adds a sleep to the programs of each stage."""

    def __init__(self, mesh: jax.sharding.Mesh, *later: jax.sharding.Mesh, stage: int = 0) -> None:
        super().__init__(mesh)
        self.later = tuple(SleepingPrograms(one, stage=at) for at, one in enumerate(later, 1))
        self._stage = stage
        self._kinds = threading.local()

    def get(self, key: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        assert isinstance(key, tuple)
        self._kinds.kind = STAGE_PROGRAMS.get(key[0])
        return super().get(key, build)

    def compile(self, body: Callable[..., Any], *arguments: Any, **more: Any) -> Callable[..., Any]:
        kind = self._kinds.kind
        if kind is None:
            return super().compile(body, *arguments, **more)

        def slow(*inputs: Any) -> Any:
            shape = jax.ShapeDtypeStruct((), jnp.int32)
            sleeps = f"sleep_{kind}_{self._stage}"
            zero = jax.ffi.ffi_call(sleeps, shape, custom_call_api_version=1)()
            leaves, form = jax.tree.flatten(body(*inputs))
            least = min(range(len(leaves)), key=lambda at: leaves[at].size or 1 << 62)
            leaves[least] += zero.astype(leaves[least].dtype)
            return jax.tree.unflatten(form, leaves)

        return super().compile(slow, *arguments, **more)


def share(spans: list[Span]) -> dict[str, float]:
    """Returns the share of the ideal throughput, and the milliseconds that a batch loses. In the
    ideal time every stage sleeps without a pause after the first batch has come to it."""
    by_stage = [[span for span in spans if span[0] == stage] for stage in range(STAGES)]
    assert len({len(of_stage) for of_stage in by_stage}) == 1, "every batch passes every stage"
    count = len(by_stage[0])
    begun, ended = min(span[1] for span in spans), max(span[2] for span in spans)
    work = statistics.median(end - start for _, start, end in spans)
    ideal = (count + STAGES - 1) * work
    return {
        "batches": count,
        "work_ms": 1e3 * work,
        "share_percent": 100 * ideal / (ended - begun),
        "lost_ms_per_batch": 1e3 * (ended - begun - ideal) / count,
    }


async def decode(run: Running, number: int) -> dict[str, float]:
    """Runs four streams, and counts the steps after all have begun and before any ends."""
    requests = [
        run.request(
            range(30 + number + at, 50 + number + at), f"d{at}", max_tokens=TOKENS, ignore_eos=True
        )
        for at in range(STAGES)
    ]
    await run.complete_all(requests)
    spans = LOG.take("decode")
    batches = [sorted(span for span in spans if span[0] == stage) for stage in range(STAGES)]
    # Streams begin one after the other, and so they end.
    kept = slice(8 * STAGES, len(batches[0]) - 8 * STAGES)
    return share([span for of_stage in batches for span in of_stage[kept]])


async def prefill(run: Running, number: int) -> dict[str, float]:
    """Runs four prompts of four chunks. The first tokens differ, so that nothing is cached."""
    requests = [
        run.request(
            (10 + PROMPTS * number + at, *range(200, 199 + CHUNK * CHUNKS)), f"p{at}", max_tokens=1
        )
        for at in range(PROMPTS)
    ]
    await run.complete_all(requests)
    return share(LOG.take("prefill"))


async def measured(rounds: int) -> dict[str, dict[str, float]]:
    """Returns the medians of all rounds but the first."""
    engine = config(
        Mode.DISAGGREGATED, f"pp={STAGES}", f"pp={STAGES}", chunk=CHUNK, layer_groups=STAGES
    )
    found: dict[str, list[dict[str, float]]] = {"decode": [], "prefill": []}
    async with running(engine) as run:
        for number in range(rounds):
            for name, measure in (("decode", decode), ("prefill", prefill)):
                LOG.take(name)
                found[name].append(await measure(run, number))
                print(name, found[name][-1], flush=True)
    return {
        name: {key: statistics.median(one[key] for one in some[1:]) for key in some[0]}
        for name, some in found.items()
    }


def main(_: list[str]) -> None:
    replica.Programs = SleepingPrograms  # type: ignore[misc]
    for kind, stage in itertools.product(("prefill", "decode"), range(STAGES)):
        register(kind, stage)
    results = {}
    for milliseconds in _WORK.value:
        LOG.work_seconds = float(milliseconds) / 1e3
        results[f"{milliseconds} ms"] = asyncio.run(measured(_ROUNDS.value))
    if _NAME.value:
        print(save(_NAME.value, {"work": results}))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2 * STAGES)
    app.run(main)
