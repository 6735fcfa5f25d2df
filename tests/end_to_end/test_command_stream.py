"""The commands of a mesh determine its results: the commands of a cluster, sent as bytes to fresh
meshes, give the same tokens and checksums."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import pytest

from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.messages.packed import Unpacker, pack
from jdisagg.messages.step_commands import (
    DecodeResult,
    InsertBlock,
    InsertResult,
    PrefillResult,
    PullBlock,
    ReleaseOffers,
    StepCommand,
    StepResult,
)
from jdisagg.request import Grammar, GrammarKind, Request, SamplingParams
from launch.grammars import grammar_compiler
from launch.model import loader
from models.tokenizer import Tokenizer
from tests.end_to_end.clusters import collect
from tests.shapes import LLAMA, config, share_programs

pytestmark = pytest.mark.ci

TOKENIZER = Tokenizer.from_directory(LLAMA)
unpack_command = Unpacker[StepCommand](StepCommand)
unpack_result = Unpacker[StepResult](StepResult)


@dataclass
class Stream:
    """The commands of all meshes in the order in which they were issued, each with the number of
    its mesh, and their results."""

    commands: list[tuple[int, bytes]] = field(default_factory=list)
    results: list[asyncio.Future[StepResult]] = field(default_factory=list)

    def listen(self, mesh: int, executor: MeshExecutor) -> None:
        run = executor.run

        def noted(command: StepCommand) -> asyncio.Future[StepResult]:
            self.commands.append((mesh, pack(command)))
            self.results.append(run(command))
            return self.results[-1]

        executor.run = noted  # type: ignore[method-assign]


def built() -> EmbeddedCluster:
    engine = config()
    cluster = EmbeddedCluster(
        engine, loader(str(LLAMA), engine.model.dtype), TOKENIZER, jax.devices()
    )
    for replica in cluster.replicas:
        share_programs(replica.executor)
    cluster.constrain(grammar_compiler(str(LLAMA)))
    return cluster


def requests() -> list[Request]:
    """Greedy over several chunks, sampled and forked, and with a grammar."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=9, n=2)
    digits = Grammar(GrammarKind.REGEX, "[0-9]{7}")
    constrained = SamplingParams(max_tokens=7, seed=4, grammar=digits)
    return [
        Request("greedy", tuple(range(20, 120)), greedy),
        Request("sampled", tuple(range(40, 60)), sampled),
        Request("constrained", tuple(range(30, 60)), constrained, TOKENIZER.eos_ids),
    ]


async def recorded() -> tuple[Stream, list[StepResult]]:
    cluster, stream = built(), Stream()
    for mesh, replica in enumerate(cluster.replicas):
        stream.listen(mesh, replica.executor)

    async def complete(request: Request) -> None:
        collect([event async for event in cluster.stream(request)])

    await cluster.start()
    await asyncio.gather(*map(complete, requests()))
    results = await asyncio.gather(*stream.results)
    await cluster.stop()
    return stream, results


async def repeated(commands: Sequence[tuple[int, bytes]]) -> list[StepResult]:
    """Issues the commands to fresh meshes. Waits for blocks before they are inserted or released,
    as workers do."""
    cluster = built()
    executors = [replica.executor for replica in cluster.replicas]
    results: list[asyncio.Future[StepResult]] = []
    pulls: list[asyncio.Future[StepResult]] = []
    for mesh, data in commands:
        command = unpack_command(data)
        if isinstance(command, InsertBlock | ReleaseOffers):
            await asyncio.gather(*pulls)
        result = executors[mesh].run(command)
        results.append(result)
        if isinstance(command, PullBlock):
            pulls.append(result)
    done = await asyncio.gather(*results)
    await cluster.stop()
    return done


async def test_a_recorded_command_stream_gives_the_same_results() -> None:
    stream, results = await recorded()
    again = await repeated(stream.commands)
    assert [unpack_result(pack(result)) for result in again] == again
    determined = PrefillResult | DecodeResult | InsertResult
    pairs = zip(results, again, strict=True)
    compared = [(before, after) for before, after in pairs if isinstance(before, determined)]
    assert all(before == after for before, after in compared)
    assert {type(before) for before, _ in compared} == {PrefillResult, DecodeResult, InsertResult}
