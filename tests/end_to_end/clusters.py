"""What the end-to-end tests share: embedded clusters over a real model, runs of requests, and an
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
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import StepCommand
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.quantized_weights import checked_weights
from jdisagg.request import FinishReason, Request, SamplingParams, StreamEvent
from launch.grammars import grammar_compiler
from models.checkpoint import load_model
from models.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LLAMA, MOE = TINY / "llama", TINY / "qwen3_moe"


def golden_copy(name: str, folder: Path) -> Path:
    """A family's tiny checkpoint, with a tokenizer: any, for ids go in and come out."""
    directory = Path(shutil.copytree(GOLDEN / name, folder / name))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / file, directory / file)
    return directory


def golden_greedy(directory: Path) -> tuple[list[int], list[int]]:
    """A prompt, and what transformers says next."""
    found = np.load(directory / "expected.npz")
    return found["prompt"].tolist(), found["greedy"].tolist()


# Where nothing is warmed up the first use of a program compiles it, on a busy machine for longer
# than a transfer may take by default.
PATIENT = LimitsConfig(
    pull_seconds=60.0, handoff_lease_seconds=60.0, reservation_lease_seconds=60.0
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
) -> EngineConfig:
    common = InstanceConfig(
        chunk_tokens=chunk,
        min_chunk_tokens=min(chunk, 64),
        slots_per_rank=slots,
        layer_groups=2,
        block_bytes=block_bytes,
        growth_tokens=growth,
        steps_per_dispatch=steps,
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
    """The commands each mesh was given, in order."""

    prefill: list[StepCommand] = field(default_factory=list)
    decode: list[StepCommand] = field(default_factory=list)


@dataclass
class Running:
    cluster: EmbeddedCluster
    tokenizer: Tokenizer
    recording: Recording
    grammars: GrammarCompiler | None = None

    async def complete(self, request: Request) -> "Completed":
        return collect([event async for event in self.cluster.stream(request)])

    async def complete_all(self, requests: Sequence[Request]) -> list["Completed"]:
        return list(await asyncio.gather(*(self.complete(request) for request in requests)))

    async def complete_preempted(
        self,
        requests: Sequence[Request],
        rounds: int = 6,
        enough: Callable[[], bool] = lambda: True,
    ) -> tuple[list["Completed"], int]:
        """All at once, and again until sequences were preempted, and `enough`: while programs are
        compiled, or on a busy machine, too few may run together. The last round, and the
        preemptions of all."""
        for _ in range(rounds):
            done = await self.complete_all(requests)
            preemptions = sum(status.preemptions for status in await self.cluster.status())
            if preemptions and enough():
                return done, preemptions
        raise AssertionError("the pages were not few enough")

    def request(self, prompt: str | Sequence[int], name: str = "r", **sampling: object) -> Request:
        ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **sampling})  # type: ignore[arg-type]
        endless = params.ignore_eos and params.grammar is None
        stops = () if endless else self.tokenizer.eos_ids
        return Request(name, ids, params, (*stops, *params.stop_token_ids))


@dataclass
class Completed:
    """What one request's stream said, per child."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    last: StreamEvent | None = None


def collect(events: Sequence[StreamEvent]) -> Completed:
    """Puts a stream together and checks rule 8: each token once, in order, one end a child, totals
    on the last event alone."""
    done = Completed(last=events[-1])
    for event in events:
        tokens = done.tokens.setdefault(event.child, [])
        if event.token_ids:
            assert event.first_index == len(tokens), "a token was lost or doubled"
            assert event.child not in done.finish, "tokens after the end"
        tokens.extend(event.token_ids)
        done.text[event.child] = done.text.get(event.child, "") + event.text
        done.logprobs.setdefault(event.child, []).extend(event.logprobs)
        if event.finish_reason:
            assert event.child not in done.finish, "two ends"
            done.finish[event.child] = event.finish_reason
    assert done.last and done.last.usage and done.last.timings
    assert all(event.usage is None for event in events[:-1])
    return done


@asynccontextmanager
async def running(
    engine: EngineConfig, *, first_device: int = 0, kind: type[EmbeddedCluster] = EmbeddedCluster
) -> AsyncIterator[Running]:
    """A started cluster; on leaving, once quiet, every page must be free again and nothing be on
    offer (rule 6)."""
    tokenizer = Tokenizer.from_directory(engine.model.directory)

    def load(layout: Layout, devices: Sequence[jax.Device]) -> object:
        model = engine.model
        return load_model(
            model.directory,
            layout,
            devices,
            dtype=model.dtype,
            weights=checked_weights(model.weights),
            kv_dtype=model.kv_dtype,
        )

    cluster = kind(engine, load, tokenizer, jax.devices()[first_device:])  # type: ignore[arg-type]
    recording = Recording()
    _record(cluster, recording)
    grammars = grammar_compiler(engine.model.directory)
    cluster.constrain(grammars)
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


def _record(cluster: EmbeddedCluster, recording: Recording) -> None:
    for instance, commands in (
        (cluster.prefill, recording.prefill),
        (cluster.decode, recording.decode),
    ):
        if instance is None:
            continue

        def run(command: StepCommand, inner=instance.executor.run, commands=commands) -> object:
            commands.append(command)
            return inner(command)

        instance.executor.run = run  # type: ignore[method-assign]


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
