"""How fast is the engine against a plain jitted loop over the same model on one device?

    python -m benchmarks.throughput --dtype=float32 --parts=prefill,decode,offline,sampled,grpc
    --rounds=5

Engine: the embedded cluster in unified mode, through the whole request path (tokens in, tokens out;
no text). Loop: `benchmarks/plain_loop.py`. Both run in one process, round by round in turn; a
figure is the median over rounds of loop seconds / engine seconds. Prefill: one prompt to its first
token. Decode: seconds a step with B sequences at context 512 and on. Offline: 32 requests, 512
tokens in, 64 out. Sampled: engine with temperature 0.8 and top-p 0.95 against engine greedy. gRPC:
the offline workload sent by a client process against the same workload called directly."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import plain_loop
from benchmarks.measure import paired, save
from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.dispatch.frontend import Frontend, ModelInfo
from jdisagg.engine.compilation import use_compilation_cache
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.host_settings import keep_freed_memory
from jdisagg.layout.axes import Layout
from jdisagg.ops.parameters import layout_mesh
from jdisagg.request import Request, SamplingParams
from models.catalog import read_config
from models.checkpoint import LoadedModel
from models.decoder import Decoder, init_model
from models.hf_config import HfConfig

_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Weights and KV.")
_PARTS = flags.DEFINE_list(
    "parts", ["prefill", "decode", "offline", "sampled", "grpc"], "What to measure."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds of each part.")
_STEPS = flags.DEFINE_integer(
    "steps_per_dispatch", 4, "The engine's decode steps per dispatch when nothing waits."
)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

PROMPT, OUTPUT, BATCH, SLOT = 512, 64, 32, 576


class NoText:
    """A detokenizer for runs that look at tokens alone."""

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        return ""


class MeasuredEngine:
    """The embedded cluster over the measured model."""

    def __init__(self, model: Decoder, dtype: str) -> None:
        config = EngineConfig(
            model=ModelConfig(dtype=dtype, context_tokens=2304),
            mode=Mode.UNIFIED,
            decode=InstanceConfig(
                layout=Layout(),
                page_size=128,
                slots_per_rank=BATCH,
                growth_tokens=OUTPUT,
                min_chunk_tokens=512,
                steps_per_dispatch=_STEPS.value,
            ),
            warm_up=False,
        )
        mesh = layout_mesh(Layout(), plain_loop.KV_HEADS, jax.devices()[:1])
        self.cluster = EmbeddedCluster(
            config, lambda *_: LoadedModel(model, mesh, Layout()), NoText(), jax.devices()[:1]
        )
        self._count = 0

    async def first_token(self, prompt: np.ndarray) -> int:
        return (await self.stream(prompt, 1))[0][0]

    async def stream(
        self, prompt: np.ndarray, count: int, **sampling: object
    ) -> tuple[list[int], list[float]]:
        """Tokens, and when each came."""
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
    ) -> tuple[float, float, list[list[int]]]:
        """Seconds for all, seconds a decode step while all of them run, and their tokens."""
        started = time.perf_counter()
        streams = await asyncio.gather(
            *(self.stream(prompt, count, **sampling) for prompt in prompts)
        )
        total = time.perf_counter() - started
        low = max(times[2] for _, times in streams)  # all are decoding
        high = min(times[-2] for _, times in streams)
        reference = streams[0][1]
        inside = [when for when in reference if low <= when <= high]
        # Tokens of one dispatch come at one instant: those that came with the first instant took
        # their time before it.
        step = (inside[-1] - inside[0]) / sum(when > inside[0] for when in inside)
        return total, step, [tokens for tokens, _ in streams]


class Loop:
    """The plain loop with caches of fixed shape."""

    def __init__(self, model: Decoder, dtype: str) -> None:
        self.weights, self.dtype = plain_loop.weights_of(model), dtype
        self._caches: dict[int, plain_loop.Cache] = {}

    def first_token(self, prompt: np.ndarray) -> int:
        """Into a cache that is there already, as the engine's pages are."""
        cache = self._caches.pop(len(prompt), None) or plain_loop.new_cache(
            1, len(prompt), self.dtype
        )
        self._caches[len(prompt)], token = plain_loop.prefill(
            self.weights, cache, jnp.asarray(prompt, jnp.int32), jnp.int32(0)
        )
        return int(token[0])

    def batch(self, prompts: np.ndarray, count: int) -> tuple[float, float, list[list[int]]]:
        """As `MeasuredEngine.batch`: prompts one after the other, then all rows step together,
        tokens read one step late."""
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
    dtype = _DTYPE.value
    model = init_model(
        read_config(HfConfig(plain_loop.MEASURED_MODEL, "the measured model")),
        jax.random.key(0),
        dtype=dtype,
    )
    engine, loop = MeasuredEngine(model, dtype), Loop(model, dtype)
    await engine.cluster.start()
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, plain_loop.VOCABULARY, (BATCH, PROMPT))
    figures: dict[str, object] = {"dtype": dtype}
    try:
        if "prefill" in _PARTS.value:
            for length in (512, 2048):
                prompt = rng.integers(3, plain_loop.VOCABULARY, length)
                figures[f"prefill {length}"] = await rounds(
                    lambda p=prompt: timed(engine.first_token(p)),
                    lambda p=prompt: clocked(lambda: loop.first_token(p)),
                )
        for size in (1, 8) if "decode" in _PARTS.value else ():
            figures[f"decode B={size}"] = await rounds(
                lambda n=size: second(engine.batch(prompts[:n], OUTPUT)),
                lambda n=size: loop.batch(prompts[:n], OUTPUT)[1],
            )
        if "offline" in _PARTS.value:
            ours: list[tuple[float, float]] = []
            theirs: list[tuple[float, float]] = []
            for number in range(_ROUNDS.value + 1):
                mine, other = await engine.batch(prompts, OUTPUT), loop.batch(prompts, OUTPUT)
                if number:
                    ours.append(mine[:2])
                    theirs.append(other[:2])
                else:
                    same = sum(a == b for a, b in zip(mine[2], other[2], strict=True))
                    figures["streams equal to the loop's"] = f"{same} of {BATCH}"
            figures["offline 32 x (512 in, 64 out)"] = paired(
                [one[0] for one in ours], [one[0] for one in theirs]
            )
            figures["decode B=32"] = paired([one[1] for one in ours], [one[1] for one in theirs])
        for size in (1, 8, 32) if "sampled" in _PARTS.value else ():
            figures[f"sampled B={size}"] = await rounds(
                lambda n=size: second(
                    engine.batch(prompts[:n], OUTPUT, temperature=0.8, top_p=0.95)
                ),
                lambda n=size: second(engine.batch(prompts[:n], OUTPUT)),
            )
        if "grpc" in _PARTS.value:
            figures["gRPC"] = await grpc_cost(engine, prompts)
    finally:
        await engine.cluster.stop()
    return figures


async def grpc_cost(engine: MeasuredEngine, prompts: np.ndarray) -> dict[str, object]:
    """The offline workload by a client process over gRPC, against the same called directly."""
    from jdisagg.config import LimitsConfig, ServiceConfig
    from jdisagg.service.server import GenerationServer

    info = ModelInfo(
        "measured",
        "llama",
        plain_loop.VOCABULARY,
        2304,
        _DTYPE.value,
        Mode.UNIFIED,
        None,
        Layout(),
        0,
    )
    codec: object = type("Codec", (NoText,), {"eos_ids": ()})()
    frontend = Frontend(engine.cluster.path, codec, info, LimitsConfig())  # type: ignore[arg-type]
    server = GenerationServer(frontend, ServiceConfig(port=0))
    port = await server.start()
    command = (
        sys.executable,
        "-m",
        "benchmarks.offline_client",
        f"--target=127.0.0.1:{port}",
        f"--output={OUTPUT}",
        f"--count={BATCH}",
        f"--prompt={PROMPT}",
    )
    client = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdin and client.stdout

    async def over_the_wire() -> float:
        assert client.stdin and client.stdout
        client.stdin.write(b"go\n")
        return float((await client.stdout.readline()).decode())

    try:
        return await rounds(over_the_wire, lambda: first(engine.batch(prompts, OUTPUT)))
    finally:
        client.stdin.close()
        await client.wait()
        await server.drain()


async def rounds(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, object]:
    """One warm-up of each, then rounds in turn."""

    async def value(call: Callable[[], object]) -> float:
        result = call()
        return float(await result if isinstance(result, Awaitable) else result)  # type: ignore[arg-type]

    pairs = [(await value(ours), await value(theirs)) for _ in range(_ROUNDS.value + 1)][1:]
    return paired([pair[0] for pair in pairs], [pair[1] for pair in pairs])


async def timed(call: Awaitable[object]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def clocked(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


async def first(call: Awaitable[tuple[float, float, object]]) -> float:
    return (await call)[0]


async def second(call: Awaitable[tuple[float, float, object]]) -> float:
    return (await call)[1]


def main(_: list[str]) -> None:
    keep_freed_memory()
    use_compilation_cache("~/.cache/jdisagg/xla")
    figures = asyncio.run(run())
    for name, value in figures.items():
        if isinstance(value, dict):
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
