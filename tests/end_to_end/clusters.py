"""Helpers of the end-to-end tests: embedded clusters over a real model, runs of requests, and an
independent oracle.

The oracle is a dense forward pass over the whole sequence for each token: no pages, no chunks, no
meshes, no KV cache."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.config import EngineConfig, InstanceConfig, LimitsConfig, Mode, ModelConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.limits import GRANULE_TOKENS
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

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LLAMA, MOE = TINY / "llama", TINY / "qwen3_moe"


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


# Without warm-up the first use of a program compiles it, which on a busy machine takes longer than
# the default limits of a transfer and of a step.
PATIENT = LimitsConfig(
    pull_seconds=60.0,
    handoff_lease_seconds=60.0,
    reservation_lease_seconds=60.0,
    step_seconds=600.0,
)


def config(
    mode: Mode = Mode.DISAGGREGATED,
    prefill: str = "tp=2",
    decode: str = "dp=2",
    *,
    directory: Path = LLAMA,
    prefill_page: int = 16,
    decode_page: int = 16,
    chunk: int = 64,
    slots: int = 8,
    pages: int | None = None,
    dtype: str = "float32",
    context: int = 512,
    warm_up: bool = False,
    limits: LimitsConfig | None = None,
    growth: int = 64,
    steps: int = 1,
    block_bytes: int | None = None,
    layer_groups: int | None = 2,
    speculate: str = "off",
) -> EngineConfig:
    common = InstanceConfig(
        chunk_tokens=chunk,
        min_chunk_tokens=min(chunk, 64),
        slots_per_rank=slots,
        layer_groups=layer_groups,
        block_bytes=block_bytes,
        growth_tokens=growth,
        steps_per_dispatch=steps,
        speculate=speculate,
    )
    return EngineConfig(
        model=ModelConfig(str(directory), dtype, context),
        mode=mode,
        prefill=replace(common, layout=Layout.parse(prefill), page_size=prefill_page),
        decode=replace(
            common, layout=Layout.parse(decode), page_size=decode_page, pages_per_rank=pages
        ),
        limits=limits or (LimitsConfig() if warm_up else PATIENT),
        warm_up=warm_up,
    )


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
        compile, or on a busy machine, too few may run together. Returns the last round and the
        preemptions of all rounds."""
        async with asyncio.timeout(300):
            while True:
                done = await self.complete_all(requests)
                preemptions = sum(status.preemptions for status in await self.cluster.status())
                if preemptions and enough():
                    return done, preemptions

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
    engine: EngineConfig, *, first_device: int = 0, kind: type[EmbeddedCluster] = EmbeddedCluster
) -> AsyncIterator[Running]:
    """A started cluster. On leaving, every page must be free again and no offer be left (rule
    6)."""
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
    for _ in range(200):
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


def dense_greedy(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by a dense forward pass over the whole sequence, once a token, padded to one
    length."""
    model = load_model(directory, Layout(), jax.devices()[-1:]).model
    length = -(-(len(prompt) + count) // 64) * 64
    forward = jax.jit(
        lambda tokens: model(tokens, jnp.arange(length, dtype=jnp.int32), dense_causal_attend)
    )
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.argmax(np.asarray(forward(padded))[len(tokens) - 1])))
    return tokens[len(prompt) :]
