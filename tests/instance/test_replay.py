"""Recordings of an embedded cluster, replayed on fresh meshes."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import msgspec
import pytest

from jdisagg.config import ModelConfig
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.engine.replica import LoadModel, Replica
from jdisagg.errors import ConfigError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import DecodeResult, Done, InsertBlock
from jdisagg.model_api import Device
from jdisagg.node.commands.replay import replay
from jdisagg.node.recording import (
    Recording,
    RecordingExecutor,
    RecordingHeader,
    read_recording,
    record,
)
from jdisagg.request import Grammar, GrammarKind, Request, SamplingParams
from jdisagg.scheduler.executor import Executor
from launch.grammars import grammar_compiler
from launch.model import loader
from models.checkpoint import load_model
from models.tokenizer import Tokenizer
from tests.end_to_end.clusters import LLAMA, collect, config
from tests.instance.test_broadcast import NotingExecutor

pytestmark = pytest.mark.ci


def load_for(header: RecordingHeader) -> LoadModel:
    return loader(header.model, header.dtype, header.weights)


def grammars_for(header: RecordingHeader) -> GrammarCompiler | None:
    return grammar_compiler(header.model)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    """Some requests through tp=2 -> dp=2: greedy, sampled, forked, with a
    grammar, longer than a chunk."""
    folder = tmp_path_factory.mktemp("recordings")
    engine = config(prefill="tp=2", decode="dp=2")
    tokenizer = Tokenizer.from_directory(LLAMA)

    def load(layout: Layout, devices: Sequence[Device]) -> object:
        return load_model(LLAMA, layout, devices)

    def recorded(name: str, instance: Replica) -> Executor:
        layout = instance.config.layout
        return record(
            folder, name, instance.executor, instance.executor, layout, ModelConfig(str(LLAMA))
        )

    async def run() -> None:
        cluster = EmbeddedCluster(engine, load, tokenizer, jax.devices(), record=recorded)  # type: ignore[arg-type]
        cluster.constrain(grammar_compiler(str(LLAMA)))
        await cluster.start()
        greedy = SamplingParams(temperature=0.0, max_tokens=12)
        sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=9, n=2)
        grammar = Grammar(GrammarKind.REGEX, "[0-9]{7}")
        numbers = SamplingParams(max_tokens=7, seed=4, grammar=grammar)
        requests = [
            Request("a", tuple(range(20, 120)), greedy),
            Request("b", tuple(range(40, 60)), sampled),
            Request("c", tuple(range(30, 60)), numbers, tokenizer.eos_ids),
        ]

        async def one(request: Request) -> None:
            collect([event async for event in cluster.stream(request)])

        await asyncio.gather(*map(one, requests))
        await cluster.stop()

    asyncio.run(run())
    return [read_recording(folder / f"{name}.commands") for name in (PREFILL, DECODE)]


async def test_a_replay_gives_the_recorded_tokens(recordings: list[Recording]) -> None:
    assert any(isinstance(entry.command, InsertBlock) for entry in recordings[1].entries), (
        "KV must have moved"
    )
    replayed = await replay(recordings, load_for, grammars_for)
    assert replayed.difference == ""
    assert replayed.tokens >= 12 + 2 * 9 + 3, (
        "a step more may have been under way when a sequence ended"
    )


async def test_a_replay_names_the_first_token_that_differs(recordings: list[Recording]) -> None:
    number = next(
        entry.number for entry in recordings[1].entries if isinstance(entry.result, DecodeResult)
    )
    changed = [
        dataclasses.replace(
            entry,
            result=msgspec.structs.replace(entry.result, tokens=_plus_one(entry.result.tokens)),
        )
        if entry.number == number and isinstance(entry.result, DecodeResult)
        else entry
        for entry in recordings[1].entries
    ]
    replayed = await replay(
        [recordings[0], dataclasses.replace(recordings[1], entries=changed)], load_for, grammars_for
    )
    assert f"decode-0.commands, command {number} (DecodeSteps)" in replayed.difference


def _plus_one(
    tokens: tuple[tuple[tuple[int, ...], ...], ...],
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(tuple(token + 1 for token in row) for row in rank) for rank in tokens)


async def test_a_mesh_that_pulled_is_not_replayed_alone(recordings: list[Recording]) -> None:
    with pytest.raises(ConfigError, match="recordings of all meshes that sent KV"):
        await replay(recordings[1:], load_for)


async def test_a_recording_that_was_cut_short_is_read_up_to_there(
    recordings: list[Recording], tmp_path: Path
) -> None:
    whole = recordings[1].path.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) * 2 // 3])
    cut = read_recording(tmp_path / "cut")
    assert cut.header == recordings[1].header
    assert 0 < len(cut.entries) < len(recordings[1].entries)
    whole_commands = [entry.command for entry in recordings[1].entries]
    assert [entry.command for entry in cut.entries] == whole_commands[: len(cut.entries)]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="does not begin with"):
        read_recording(tmp_path / "text")
    with pytest.raises(ConfigError, match="cannot read"):
        read_recording(tmp_path / "missing")


async def test_failed_commands_are_recorded_as_such(
    recordings: list[Recording], tmp_path: Path
) -> None:
    inner = NotingExecutor(
        answers=lambda command: ValueError("boom") if command.step == 1 else Done(command.step)
    )
    executor = RecordingExecutor(inner, tmp_path / "x", recordings[0].header)
    commands = [entry.command for entry in recordings[0].entries]
    await asyncio.gather(
        *(executor.run(msgspec.structs.replace(commands[0], step=step)) for step in range(3)),
        return_exceptions=True,
    )
    await asyncio.sleep(0)  # what is done is noted in a turn of its own
    executor.close()
    entries = read_recording(tmp_path / "x").entries
    assert [entry.error for entry in entries] == ["", "boom", ""]
    assert inner.closed


async def test_a_full_disk_ends_the_recording_and_not_the_work(
    recordings: list[Recording], tmp_path: Path
) -> None:
    executor = RecordingExecutor(NotingExecutor(), tmp_path / "x", recordings[0].header)
    commands = [entry.command for entry in recordings[0].entries]
    await executor.run(commands[0])
    await asyncio.sleep(0)
    full = Path("/dev/full").open("wb")  # noqa: SIM115
    executor._file, written = full, executor._file
    assert await executor.run(commands[1]) == Done(commands[1].step)
    assert full.closed, "the fault took no effect"
    assert await executor.run(commands[2]) == Done(commands[2].step)
    written.close()
    executor.close()
    assert [entry.command for entry in read_recording(tmp_path / "x").entries] == commands[:1]


def test_a_recording_that_cannot_even_begin_is_refused(recordings: list[Recording]) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        RecordingExecutor(NotingExecutor(), Path("/dev/full"), recordings[0].header)
