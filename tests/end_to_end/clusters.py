"""Helpers of the end-to-end tests: embedded clusters over a real model, runs of requests, and an
independent oracle.

The oracle is a dense forward pass over the whole sequence for each token: no pages, no chunks, no
meshes, no KV cache."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdisagg.config import EngineConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.limits import GRANULE_TOKENS
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import StepCommand
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.request import Request, SamplingParams, StreamEvent
from launch.grammars import grammar_compiler
from launch.model import loader
from models.checkpoint import load_model
from models.tokenizer import Tokenizer
from tests.fakes.cluster import Collected
from tests.golden.arrays import arrays_of
from tests.shapes import GOLDEN as GOLDEN  # re-exported
from tests.shapes import LLAMA as LLAMA
from tests.shapes import MOE as MOE
from tests.shapes import PATIENT as PATIENT
from tests.shapes import TINY as TINY
from tests.shapes import config as config
from tests.shapes import share_programs


def golden_copy(name: str, folder: Path) -> Path:
    """A family's tiny checkpoint with some tokenizer; tests send and receive ids."""
    directory = Path(shutil.copytree(GOLDEN / name, folder / name))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / file, directory / file)
    return directory


def golden_greedy(directory: Path) -> tuple[list[int], list[int]]:
    """A prompt and the greedy tokens that transformers gives next."""
    found = arrays_of(directory / "expected.npz")
    return found["prompt"].tolist(), found["greedy"].tolist()


MOST_ROUNDS = 40


@dataclass
class Recording:
    """The commands of each mesh, in order."""

    prefill: list[StepCommand] = field(default_factory=list)
    decode: list[StepCommand] = field(default_factory=list)


@dataclass
class Running:
    cluster: EmbeddedCluster
    tokenizer: Tokenizer
    recording: Recording
    grammars: GrammarCompiler | None = None

    async def complete(self, request: Request) -> Collected:
        return collect([event async for event in self.cluster.stream(request)])

    async def complete_all(self, requests: Sequence[Request]) -> list[Collected]:
        return list(await asyncio.gather(*(self.complete(request) for request in requests)))

    async def complete_preempted(
        self, requests: Sequence[Request], enough: Callable[[], bool] = lambda: True
    ) -> tuple[list[Collected], int]:
        """Runs all at once until sequences were preempted and `enough` holds: while programs
        compile, too few may run together. All rounds have the same streams. Returns the last round
        and the preemptions of all rounds."""
        first: list[object] = []
        for _ in range(MOST_ROUNDS):
            done = await self.complete_all(requests)
            streams = [(one.tokens, one.finish) for one in done]
            first = first or streams
            assert streams == first, "a round has other streams than the first"
            preemptions = sum(status.preemptions for status in await self.cluster.status())
            if preemptions and enough():
                return done, preemptions
        counted = {one.name: one.counters.snapshot() for one in self.cluster._workers}
        raise AssertionError(f"too little happened in {MOST_ROUNDS} rounds: {counted}")

    def request(self, prompt: str | Sequence[int], name: str = "r", **sampling: object) -> Request:
        ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **sampling})  # type: ignore[arg-type]
        endless = params.ignore_eos and params.grammar is None
        stops = () if endless else self.tokenizer.eos_ids
        return Request(name, ids, params, (*stops, *params.stop_token_ids))


def collect(events: Sequence[StreamEvent]) -> Collected:
    """Puts a stream together. Rule 8: each token once and in order, one end a child, totals on the
    last event alone."""
    collected = Collected()
    for event in events:
        collected.add(event)
    assert collected.usage and collected.timings
    return collected


def moved_bytes(cluster: EmbeddedCluster, prompt_tokens: int) -> int:
    """Bytes of a prompt's hand-off by the KV spec: whole granules of KV, one granule of what
    windows still see where windows are apart, and one state, for each replica on a decode rank."""
    if cluster.prefill is None:
        return 0
    spec, granules = cluster.kv_spec, -(-prompt_tokens // GRANULE_TOKENS)
    parts = granules * GRANULE_TOKENS * spec.bytes_per_token
    if cluster.decode.executor.limits.windows_apart:
        kept = granules * spec.unwindowed.bytes_per_token + spec.windowed.bytes_per_token
        parts = kept * GRANULE_TOKENS
    return (parts + spec.state.bytes_per_token) * cluster.decode.loaded.mesh.shape["rep"]


async def check_bytes(
    run: Running, prompt: Sequence[int], greedy: Sequence[int], **sampling: object
) -> Collected:
    """Completes one prompt alone; checks its tokens and the bytes that its KV took."""
    before = sum(run.cluster.channel.bytes_per_pair().values())
    name = f"r{len(prompt)}"
    request = run.request(prompt, name, max_tokens=len(greedy), ignore_eos=True, **sampling)
    done = await run.complete(request)
    assert done.tokens[0] == list(greedy)
    moved = sum(run.cluster.channel.bytes_per_pair().values()) - before
    assert moved == moved_bytes(run.cluster, len(prompt))
    assert done.timings and done.timings.kv_bytes_moved == moved
    return done


@asynccontextmanager
async def running(
    engine: EngineConfig,
    *,
    first_device: int = 0,
    kind: type[EmbeddedCluster] = EmbeddedCluster,
    own_programs: bool = False,
) -> AsyncIterator[Running]:
    """A started cluster. On leaving, every page must be free again and no offer be left (rule 6).

    Args:
        own_programs: For tests that replace what programs are made of.
    """
    tokenizer = Tokenizer.from_directory(engine.model.directory)

    model, recording = engine.model, Recording()
    how = (model.weights, model.kv_dtype, engine.decode.speculate, model.draft)
    load = loader(model.directory, model.dtype, *how)
    cluster = kind(engine, load, tokenizer, jax.devices()[first_device:])
    for replica, commands in zip(
        cluster.replicas[::-1], (recording.decode, recording.prefill), strict=False
    ):

        def run(command: StepCommand, inner=replica.executor.run, commands=commands) -> object:
            commands.append(command)
            return inner(command)

        replica.executor.run = run  # type: ignore[method-assign]
    for mesh in () if engine.warm_up or own_programs else cluster._meshes:
        assert isinstance(mesh, MeshExecutor)
        share_programs(mesh)
    grammars = grammar_compiler(engine.model.directory)
    cluster.constrain(grammars)
    cluster.read_weights_with(load)
    await cluster.start()
    try:
        yield Running(cluster, tokenizer, recording, grammars)
        await assert_all_free(cluster)
    finally:
        await cluster.stop()


async def assert_all_free(cluster: EmbeddedCluster) -> None:
    for _ in range(3000):
        statuses = await cluster.status()
        if (
            all(status.free_pages == status.total_pages for status in statuses)
            and all(status.free_states == status.total_states for status in statuses)
            and cluster.channel.offered().offers == 0
        ):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(
        f"pages or offers were not freed: {await cluster.status()}, {cluster.channel.offered()}"
    )


@partial(jax.jit, static_argnums=0)
def _logprobs(graphdef: nnx.GraphDef, weights: nnx.State, tokens_T: jax.Array) -> jax.Array:
    """[T, V]: of what follows each token. Weights are arguments, so that all checkpoints of one
    form share a program."""
    model = nnx.merge(graphdef, weights)
    places = jnp.arange(len(tokens_T), dtype=jnp.int32)
    return jax.nn.log_softmax(model(tokens_T, places, dense_causal_attend))


@lru_cache(maxsize=4)
def _dense_model(directory: Path, changed_at: int) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(load_model(directory, Layout(), jax.devices()[-1:]).model)


def _dense(directory: Path, tokens: Sequence[int], length: int) -> np.ndarray:
    model = _dense_model(directory, (directory / "model.safetensors").stat().st_mtime_ns)
    padded = np.zeros(-(-length // 128) * 128, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logprobs(*model, padded))


def dense_greedy(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by a dense forward pass over the whole sequence, once a token."""
    tokens = list(prompt)
    for _ in range(count):
        logprobs_TV = _dense(directory, tokens, len(prompt) + count)
        tokens.append(int(np.argmax(logprobs_TV[len(tokens) - 1])))
    return tokens[len(prompt) :]


def dense_logprobs(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Of each of `tokens`, given all before it."""
    whole = [*prompt, *tokens]
    logprobs_TV = _dense(directory, whole, len(whole))
    return [float(logprobs_TV[at - 1, whole[at]]) for at in range(len(prompt), len(whole))]


def greedy_beginning(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of first tokens that are greedy, by a single dense forward pass."""
    whole = [*prompt, *tokens]
    following = np.argmax(_dense(directory, whole, len(whole)), axis=-1)
    wrong = np.flatnonzero(following[len(prompt) - 1 : len(whole) - 1] != np.asarray(tokens))
    return int(wrong[0]) if len(wrong) else len(tokens)


PROMPT = (
    "Once upon a time there was a little girl named Lily who lived in a small house near the"
    " forest. One day she"
)


TOKENS = 40


@cache
def expected(directory: Path) -> list[int]:
    return dense_greedy(directory, Tokenizer.from_directory(directory).encode(PROMPT), TOKENS)


async def check(engine: EngineConfig) -> None:
    async with running(engine) as run:
        directory = Path(engine.model.directory)
        await check_bytes(run, run.tokenizer.encode(PROMPT), expected(directory))


async def check_continuations(
    run: Running, directory: Path, starts: tuple[int, ...], counts: tuple[int, ...] = ()
) -> None:
    """Prompts that are beginnings of one golden text, all at once, go on as that text. With
    `counts`, children of each prompt, rounds are repeated until sequences were preempted."""
    prompt, greedy = golden_greedy(directory)
    whole, children = [*prompt, *greedy], counts or (1,) * len(starts)
    requests = [
        run.request(
            whole[:start],
            f"r{index}",
            max_tokens=len(whole) - start,
            ignore_eos=True,
            n=children[index],
        )
        for index, start in enumerate(starts)
    ]
    if counts:
        done, _ = await run.complete_preempted(requests)
    else:
        done = await run.complete_all(requests)
    for one, start, count in zip(done, starts, children, strict=True):
        assert one.tokens == {child: whole[start:] for child in range(count)}
