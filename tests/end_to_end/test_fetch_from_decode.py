"""What a decode mesh keeps of the last turn, prompt and answer, the prefill mesh fetches, with real
programs: between layouts and pages that differ, and the streams are those of a server that keeps
nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, assert_all_free, running
from tests.end_to_end.conversations import Conversations
from tests.end_to_end.fetching import Returning
from tests.shapes import config

# of prompts of 150, 70 and 40 tokens and answers of 20, less the newest token
WHOLE_BLOCKS = (160, 80, 48)


def asked(run: Running, name: str, at: int, ids: tuple[int, ...]) -> Request:
    options: dict[str, object] = {"max_tokens": 20, "ignore_eos": True}
    if at == 1:
        options |= {"temperature": 0.8, "seed": 5}
    return run.request(ids, f"{name} {at}", **options)


async def two_turns(run: Running, between: Callable[[], None]) -> tuple[list[object], list[int]]:
    """The streams of two turns, and how many tokens of the second prompts were not computed."""
    talk, streams, cached = Conversations(run, seed=3), [], []
    prompts = [talk.words(length) for length in (150, 70, 40)]
    for turn in ("first", "second"):
        for at, ids in enumerate(prompts):
            done = await run.complete(asked(run, turn, at, ids))
            assert done.usage is not None
            streams.append(done.tokens)
            prompts[at] = (*ids, *done.tokens[0], *talk.words(3))
            cached.append(done.usage.cached_tokens)
        between()
    return streams, cached[len(prompts) :]


@pytest.mark.ci
async def test_what_is_fetched_from_the_decode_mesh_changes_no_token() -> None:
    async with running(config(Mode.UNIFIED)) as alone:
        expected, cached = await two_turns(alone, lambda: None)
        assert cached == [0, 0, 0]
    engine = replace(config(), prefix=PrefixConfig(True, 16, peer_fetch=True))
    async with running(engine, kind=Returning) as run:
        cluster = run.cluster
        assert isinstance(cluster, Returning)
        prefill, decode = cluster._workers
        streams, cached = await two_turns(run, lambda: prefill._kept.clear() and None)
        assert streams == expected
        assert tuple(cached) == WHOLE_BLOCKS
        assert prefill.counters["peer_tokens_restored"] == sum(WHOLE_BLOCKS)
        assert decode.counters["peer_blocks_given"] == sum(WHOLE_BLOCKS) // 16
        failures = ("peer_fetch_failed", "checksums_mismatched")
        assert not [prefill.counters.labelled() for name in failures if prefill.counters[name]]
        await assert_all_free(cluster)
