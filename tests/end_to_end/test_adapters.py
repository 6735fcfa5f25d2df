"""LoRA adapters on both meshes. The oracle is a checkpoint into which the adapter is merged."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from jdisagg.config import EngineConfig, PrefixConfig
from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.messages.step_commands import DecodeSteps, PrefillChunk, PutAdapter
from jdisagg.request import Adapter, Request
from tests.end_to_end.adapters import ATTENTION, merged, named, with_slots, write_adapter
from tests.end_to_end.clusters import Recording, Running, collect, dense_greedy, running
from tests.lanes import first_ci
from tests.shapes import DECODE, LLAMA, MOE, PREFILL, SLOTS, config

WORDS = (
    "once upon a time there was a little dog who lived in the forest and it liked to play with a"
    " red ball under the big tree"
)
TOKENS = 10


@dataclass
class Some:
    """Adapters, and the greedy answer of the model (first) and of each adapter."""

    adapters: list[Adapter]
    answers: list[list[int]]


@asynccontextmanager
async def some(
    tmp_path: Path, engine: EngineConfig, folders: Sequence[Path], base: Path = LLAMA
) -> AsyncIterator[tuple[Running, Some]]:
    async with running(engine) as run:
        prompt = run.tokenizer.encode(WORDS)
        checkpoints = [base]
        for folder in folders:
            checkpoints.append(merged(tmp_path / f"merged-{folder.name}", base, folder))
        answers = [dense_greedy(checkpoint, prompt, TOKENS) for checkpoint in checkpoints]
        assert len({tuple(answer) for answer in answers}) == len(answers), "no adapter has effect"
        yield run, Some([named(folder) for folder in folders], answers)


def request(run: Running, name: str, adapter: Adapter | None, **sampling: object) -> Request:
    asked = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
    return replace(run.request(WORDS, name, **asked), adapter=adapter)


def packed(recording: Recording) -> bool:
    """Whether prompts of several adapters were in one chunk, and most sequences in one step."""
    chunks = [one for one in recording.prefill if isinstance(one, PrefillChunk)]
    steps = [one for one in recording.decode if isinstance(one, DecodeSteps)]
    together = any(len({row.adapter for row in chunk.rows}) > 1 for chunk in chunks)
    return together and any(sum(map(len, step.slots)) >= SLOTS for step in steps)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode"), first_ci([(PREFILL, DECODE), ("pp=2", "pp=2,tp=2")])
)
async def test_a_batch_of_the_model_and_three_adapters_equals_the_merged_checkpoints(
    tmp_path: Path, prefill: str, decode: str
) -> None:
    folders = [
        write_adapter(tmp_path / "all", LLAMA, 1, rank=4),
        write_adapter(tmp_path / "attention", LLAMA, 2, rank=8, modules=ATTENTION, use_rslora=True),
        write_adapter(tmp_path / "queries", LLAMA, 3, rank=2, modules=("q_proj",), strength=2.0),
    ]
    engine = with_slots(config(prefill=prefill, decode=decode))
    async with some(tmp_path, engine, folders) as (run, found):
        kinds = [None, *found.adapters]
        unloaded = await run.complete(request(run, "unloaded", None, logprobs=0))
        for _ in range(6):  # adapters are loaded, and programs compiled, at first
            asked = [request(run, f"r{one}", kinds[one % 4]) for one in range(8)]
            done = await run.complete_all(asked)
            assert [one.tokens[0] for one in done] == [found.answers[one % 4] for one in range(8)]
            if packed(run.recording):
                break
        else:
            raise AssertionError("prompts of several adapters never shared a chunk and a step")
        loaded = await run.complete(request(run, "loaded", None, logprobs=0))
        assert loaded.logprobs == unloaded.logprobs, "adapters change no bit of others' rows"
    async with running(config(prefill=prefill, decode=decode)) as run:
        alone = await run.complete(request(run, "alone", None, logprobs=0))
    without, of_slots = ([t.logprob for t in one.logprobs[0]] for one in (alone, loaded))
    np.testing.assert_allclose(of_slots, without, atol=1e-5)


@pytest.mark.ci
async def test_adapters_of_routed_experts_equal_the_merged_checkpoint_where_experts_are_apart(
    tmp_path: Path,
) -> None:
    folders = [write_adapter(tmp_path / f"a{seed}", MOE, seed, rank=2) for seed in (1, 2)]
    engine = with_slots(
        config(prefill="tp=2,ep=2", decode="dp=2,ep=2", directory=MOE), 2, experts=True
    )
    async with some(tmp_path, engine, folders, MOE) as (run, found):
        kinds = [None, *found.adapters]
        done = await run.complete_all([request(run, f"r{n}", kinds[n % 3]) for n in range(6)])
        assert [one.tokens[0] for one in done] == [found.answers[n % 3] for n in range(6)]


@pytest.mark.ci
async def test_kv_is_shared_within_an_adapter_and_never_with_other_content_of_its_name(
    tmp_path: Path,
) -> None:
    first = write_adapter(tmp_path / "first", LLAMA, 1)
    second = write_adapter(tmp_path / "second", LLAMA, 2)
    prefix = PrefixConfig(reuse=True, grain_tokens=16, append_tokens=0, host_gib=0)
    engine = replace(with_slots(config()), prefix=prefix)
    async with some(tmp_path, engine, [first, second]) as (run, found):
        kinds = [None, named(first, "mine"), named(second, "mine")]
        for number, kind in enumerate(kinds):
            cold = await run.complete(request(run, f"cold{number}", kind))
            assert cold.tokens[0] == found.answers[number]
            assert cold.usage and cold.usage.cached_tokens == 0
        for number, kind in enumerate(kinds):
            warm = await run.complete(request(run, f"warm{number}", kind))
            assert warm.tokens[0] == found.answers[number]
            assert warm.usage and warm.usage.cached_tokens >= 16


@pytest.mark.ci
async def test_adapters_take_turns_in_too_few_slots_and_keep_them_while_used(
    tmp_path: Path,
) -> None:
    folders = [write_adapter(tmp_path / f"a{seed}", LLAMA, seed) for seed in range(3)]
    engine = with_slots(config(), 1)
    async with some(tmp_path, engine, folders) as (run, found):
        asked = [request(run, f"r{one}", found.adapters[one % 3]) for one in range(6)]
        done = await run.complete_all(asked)
        assert [one.tokens[0] for one in done] == [found.answers[1 + one % 3] for one in range(6)]
        puts = [one for one in run.recording.decode if isinstance(one, PutAdapter)]
        assert len(puts) >= 3 and {put.slot for put in puts} == {1}
        long = run.cluster.stream(request(run, "long", found.adapters[0], max_tokens=400))
        events = [await anext(long)]
        late = replace(request(run, "late", found.adapters[1]), deadline_seconds=0.2)
        with pytest.raises(DeadlineExceededError):
            await run.complete(late)
        events += [event async for event in long]
        assert collect(events).tokens[0][:TOKENS] == found.answers[1]


@pytest.mark.ci
async def test_an_adapter_that_cannot_be_served_fails_its_requests_by_name(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good", LLAMA, 1)
    wide = write_adapter(tmp_path / "wide", LLAMA, 2, rank=9)
    other = write_adapter(tmp_path / "other", LLAMA, 3, modules=("embed_tokens",))
    changed = replace(named(good, "changed"), digest="0" * 64)
    async with running(with_slots(config())) as run:
        for adapter, fault in (
            (named(wide), "rank 9 of .* exceeds the server's 8"),
            (named(other), "take no adapter: model.embed_tokens"),
            (changed, "its files changed"),
            (Adapter("gone", str(tmp_path / "gone"), "0" * 64), "cannot be read"),
        ):
            with pytest.raises(InvalidRequestError, match=fault):
                await run.complete(request(run, adapter.name, adapter))
        done = await run.complete(request(run, "good", named(good)))
        assert len(done.tokens[0]) == TOKENS
    async with running(config()) as run:
        with pytest.raises(InvalidRequestError, match="start it with --adapters"):
            await run.complete(request(run, "good", named(good)))
