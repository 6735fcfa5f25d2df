"""KV that stays on workers, over fake meshes that check what lies in every page they read: whatever
is found again, streams are those of the oracle, and at the end every page is free or kept.

Prompts share their beginnings as conversations do: a system prompt, then turns, of which several
may go on from the same answer."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from jdisagg.config import Mode
from jdisagg.errors import BrokenModelError, JdisaggError
from tests.fakes.cluster import Cluster, until
from tests.fakes.fake_executor import Faults
from tests.worker.calls import prefill_call
from tests.worker.conversations import NAMES, SEEDS, Talk, asked, cached_of, limits, prompt, storm


def hits(cluster: Cluster) -> tuple[int, int]:
    """Tokens found on the prefill side and on the decode side."""
    return (
        cluster.prefill.counters["prefix_hit_tokens"],
        cluster.decode.counters["prefix_hit_tokens"],
    )


@SEEDS
@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "ranks", "rows"),
    [(4, 4, 1, 1), (4, 8, 2, 3), (32, 4, 1, 2), (8, 24, 2, 1)],
)
async def test_what_is_found_again_changes_no_token(
    seed: int, prefill_size: int, decode_size: int, ranks: int, rows: int
) -> None:
    async with Cluster(
        decode=limits(ranks, 640 // decode_size, decode_size),
        prefill=limits(ranks, 640 // prefill_size, prefill_size, rows),
        names=NAMES,
        wire=True,
        seed=seed,
    ) as cluster:
        await storm(cluster, Talk(seed), requests=40, at_once=4, cancels=0.1)
        assert min(hits(cluster)) > 0


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.UNIFIED])
@SEEDS
async def test_one_mesh_finds_its_own_again(mode: Mode, seed: int) -> None:
    async with Cluster(mode, decode=limits(2, 160, rows=2), names=NAMES, seed=seed) as cluster:
        await storm(cluster, Talk(seed), requests=40, at_once=4, cancels=0.1)
        assert hits(cluster)[1] > 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_preempted_sequences_go_on_right_where_pages_are_few(mode: Mode) -> None:
    """So few pages that kept ones are given away and running sequences preempted."""
    async with Cluster(
        mode,
        decode=limits(pages=72),
        prefill=limits(pages=64),
        growth_tokens=4,
        names=NAMES,
        wire=True,
    ) as cluster:
        await storm(cluster, Talk(7), requests=60, at_once=6)
        state = cluster.decode._state
        assert state.preemptions > 0
        evicted = state.residency.evicted_blocks
        assert 0 < cluster.decode.counters["prefix_blocks_evicted"] <= evicted
        assert hits(cluster)[1] > 0


@pytest.mark.parametrize("fault", ["lost", "garble"])
async def test_blocks_that_are_lost_or_spoiled_are_never_found_again(fault: str) -> None:
    """Every seventh pull fails or brings something else; only what was verified stays."""
    faults = Faults(pull_error=lambda number: fault if number % 7 == 0 else "")
    async with Cluster(
        decode=limits(), prefill=limits(), decode_faults=faults, names=NAMES
    ) as cluster:
        await storm(cluster, Talk(3), requests=40, at_once=4)
        assert min(hits(cluster)) > 0
        assert cluster.decode.counters["blocks_pulled_again"] > 0


async def test_usage_says_how_much_of_the_prompt_was_not_computed() -> None:
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES) as cluster:
        assert await cached_of(cluster, asked(1, prompt(50))) == 0
        assert await cached_of(cluster, asked(2, prompt(50))) == 48
        assert await cached_of(cluster, asked(3, prompt(50, tail=20))) == 48
        assert await cached_of(cluster, asked(4, prompt(31))) == 16


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole_and_kept(mode: Mode) -> None:
    async with Cluster(mode, decode=limits(), prefill=limits(), names=NAMES) as cluster:
        for number, (wanted, hit) in enumerate(((1, 0), (0, 0), (None, 48))):
            request = asked(number, prompt(50))
            sampling = replace(request.sampling, prompt_logprobs=wanted)
            request = replace(request, sampling=sampling)
            collected = await cluster.ask(request)
            assert collected.cached_tokens == hit


async def test_a_prompt_that_is_known_whole_is_sent_nothing_and_computes_one_token_at_least():
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES, wire=True) as cluster:
        first = asked(1, prompt(48))
        await cluster.collect(first)
        again = replace(first, request_id="again")
        collected = await cluster.ask(again)
        assert collected.usage is not None and collected.timings is not None
        assert collected.cached_tokens == 32  # of 48; the last block is computed
        assert collected.timings.kv_bytes_moved == 0


async def test_only_what_the_decode_side_lacks_is_sent() -> None:
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES) as cluster:
        whole = await cluster.collect(asked(1, prompt(64)))
        part = await cluster.collect(asked(2, prompt(64, tail=16)))
        assert whole.timings is not None and part.timings is not None
        assert part.timings.kv_bytes_moved * 4 == whole.timings.kv_bytes_moved


async def test_what_the_prefill_side_knows_and_the_decode_side_does_not_is_sent_from_pages():
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES) as cluster:
        await cluster.collect(asked(1, prompt(60)))
        cluster.decode._state.residency.clear()
        assert await cached_of(cluster, asked(2, prompt(60, tail=9))) == 48
        assert cluster.decode.counters["prefix_hit_tokens"] == 0


async def test_an_answer_is_known_to_the_next_turn() -> None:
    async with Cluster(Mode.CHUNKED, decode=limits(), names=NAMES) as cluster:
        request = asked(1, prompt(30), 40)
        collected = await cluster.collect(request)
        history = request.prompt_token_ids + tuple(collected.tokens[0])
        assert await cached_of(cluster, asked(2, history + (1, 2, 3))) == 64


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED])
async def test_a_tenant_never_finds_what_another_left(mode: Mode) -> None:
    async with Cluster(mode, decode=limits(), prefill=limits(), names=NAMES) as cluster:
        tokens = prompt(50)
        for number, (tenant, scope) in enumerate(
            [("a", ""), ("b", ""), ("", ""), ("a", "x"), ("a", "y"), ("", "a"), ("ax", "")]
        ):
            request = asked(number, tokens, tenant=tenant, cache_scope=scope)
            assert await cached_of(cluster, request) == 0, (tenant, scope)
        assert await cached_of(cluster, asked(99, tokens, tenant="a", cache_scope="x")) == 48


async def test_a_prefill_worker_that_dies_of_a_broken_mesh_leaves_what_the_decode_side_knows():
    """The hand-off fails for want of a source; nothing is written into what others hold too."""
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES, ends_quiet=False) as cluster:
        await cluster.collect(asked(1, prompt(60)))
        cluster.prefill._loop.break_down(RuntimeError("the mesh is gone"))
        with pytest.raises(JdisaggError):
            await cluster.collect(replace(asked(2, prompt(60)), deadline_seconds=5.0))
        await asyncio.sleep(10.0)
        status = await cluster.decode.status()
        assert status.free_pages == status.total_pages


async def test_a_sequence_whose_logits_are_not_finite_leaves_nothing_and_empties_its_rank() -> None:
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES) as cluster:
        await cluster.collect(asked(1, prompt(60)))
        long = asked(2, prompt(60), 100)
        running = asyncio.ensure_future(cluster.collect(long))
        state = cluster.decode._state
        await until(lambda: any(state.running), 0.01)
        cluster.decode.fail(next(iter(state.groups.values())), BrokenModelError())
        with pytest.raises(BrokenModelError):
            await running
        assert len(state.residency.trees[0]) == 0
        assert cluster.decode.counters.labelled()["prefix_blocks_evicted", (("cause", "broken"),)]


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED])
async def test_a_reset_empties_all_and_what_runs_leaves_nothing_either(mode: Mode) -> None:
    async with Cluster(mode, decode=limits(), prefill=limits(), names=NAMES, wire=True) as cluster:
        first = asked(1, prompt(60))
        await cluster.collect(first)
        long = asked(2, prompt(60), 100)
        running = asyncio.ensure_future(cluster.collect(long))
        await until(lambda: any(cluster.decode._state.running), 0.01)
        assert await cluster.path.reset_cache() > 0
        cluster.check(long, await running)
        assert await cached_of(cluster, asked(3, prompt(60))) == 0
        assert await cached_of(cluster, asked(4, prompt(60))) == 48


async def test_a_prefill_worker_says_of_its_queue_what_is_to_be_computed_and_not_what_it_keeps():
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES) as cluster:
        await cached_of(cluster, asked(1, prompt(64)))
        first = msgspec.structs.replace(prefill_call(2, 2), request=asked(2, prompt(64, tail=20)))
        other = msgspec.structs.replace(prefill_call(3, 3), request=asked(3, (7,) * 50))
        calls = [asyncio.create_task(cluster.prefill.prefill(one)) for one in (first, other)]
        await asyncio.sleep(0)
        assert (await cluster.prefill.status()).queued_tokens == 20 + 50
        reply = await calls[0]
        assert reply.cached.pages == 64
        await calls[1]
        assert (await cluster.prefill.status()).queued_tokens == 0
        for handoff in (2, 3):
            await cluster.prefill.abort(handoff, "enough")
