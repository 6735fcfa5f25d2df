"""What a decode worker keeps of prompts and answers a prefill worker fetches, over fake meshes that
check what lies in every page they read: streams are those of the oracle whatever becomes of holder,
asker and blocks on their way, running sequences lose nothing, and afterwards every page is free on
both sides."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.config import RoutingConfig
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.messages.ports import FetchCall, FetchReply
from jdisagg.messages.step_commands import DecodeSteps, ExtractBlock, StepCommand
from jdisagg.request import Request
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.worker import given_kv
from tests.fakes.cluster import Collected, Fleet
from tests.fakes.fake_executor import Costs, Faults
from tests.worker.conversations import Talk, asked, converse, limits
from tests.worker.peering import EveryoneKnown, counted, failed, faults_of, settled
from tests.worker.peering import fleet as peers
from tests.worker.tiers import BLOCK_BYTES, BLOCK_TOKENS, other

DECODES = ("decode0", "decode1")
FETCHED = 96  # six blocks of a history of 100


def fleet(**more: object) -> Fleet:
    """One prefill worker, which is told what the decode worker keeps."""
    return peers(**({"hinted": "d", "prefills": 1} | more))


def long_answer(number: int, token_ids: tuple[int, ...], tokens: int = 20) -> Request:
    request = asked(number, token_ids)
    return replace(request, sampling=replace(request.sampling, max_tokens=tokens))


async def turn(
    fleet: Fleet, request: Request, path: RequestPath | None = None
) -> tuple[Request, int]:
    """Sends a prompt; returns the one that goes on from its answer, and how many tokens of this one
    were computed."""
    collected = await fleet.ask(request, path)
    assert collected.usage is not None
    history = request.prompt_token_ids + tuple(collected.tokens[0])
    following = long_answer(int(request.request_id[1:]) + 100, (*history, 1, 2, 3))
    return following, len(request.prompt_token_ids) - collected.cached_tokens


async def first_turn(fleet: Fleet, request: Request | None = None) -> Request:
    """The prompt of the second, 103 tokens, of which decode workers alone keep anything: all but
    the newest token, six whole blocks."""
    following, computed = await turn(fleet, request or long_answer(1, other(1).prompt_token_ids))
    assert computed == 80
    for name in fleet.processes:
        if name.startswith("p"):
            fleet.prefill_worker(name)._kept.clear()
    return following


async def test_prompt_and_answer_of_a_turn_are_fetched_for_the_next_and_not_computed() -> None:
    async with fleet(wire=True) as one:
        following = await first_turn(one)
        decode = counted(one, "decode0")
        known = decode("prefix_hit_tokens")
        _, computed = await turn(one, following)
        assert computed == 103 - FETCHED
        asker = counted(one, "prefill0")
        assert asker("peer_blocks_fetched") == FETCHED // BLOCK_TOKENS
        assert asker("peer_fetch_failed") == 0
        assert decode("peer_blocks_given") == FETCHED // BLOCK_TOKENS
        # and none of it goes back
        assert decode("prefix_hit_tokens") - known == FETCHED
        await settled(one)


@pytest.mark.parametrize(
    ("seed", "pages", "ranks", "rows", "host"),
    [(0, (4, 4), (1, 1), 1, 0), (1, (8, 16), (2, 1), 3, 12), (2, (32, 32), (1, 2), 2, 0)],
)
async def test_streams_are_the_oracles_whoever_keeps_what_is_fetched(
    seed: int, pages: tuple[int, int], ranks: tuple[int, int], rows: int, host: int
) -> None:
    """Between pages and ranks that differ; few pages, blocks that are spoiled, lost or stalled,
    prompts that are given up, and a holder that dies."""
    rng = random.Random(seed)
    faults = {
        name: Faults(pull_error=lambda _: rng.choice([""] * 5 + ["garble", "no route", "stall"]))
        for name in ("prefill0", "prefill1")
    }
    async with fleet(
        prefill=limits(ranks[0], 320 // pages[0], pages[0], rows),
        decode=limits(ranks[1], 480 // pages[1], pages[1]),
        tiers=TierRoom(host * BLOCK_BYTES, always=True),
        faults=lambda name: faults.get(name, Faults()),
        hinted="pd",
        prefills=2,
        decodes=2,
        wire=True,
        seed=seed,
    ) as both:
        talk = Talk(seed, tenants=("", "a"))
        await converse(both, talk, 40, cancels=0.1)
        given = [counted(both, name)("peer_blocks_given") for name in both.processes]
        assert min(sum(given[:2]), sum(given[2:])) > 0, "both kinds of holders"
        assert both.counted("checksums_mismatched") > 0
        assert both.counted("peer_fetch_failed") > 0
        await both.kill("decode0")
        await both.start("decode0")
        await converse(both, talk, 15, cancels=0.1)
        await settled(both)


async def test_a_decode_mesh_that_breaks_midway_is_not_waited_for() -> None:
    extracts = 0

    def at_the_third_block(command: StepCommand) -> bool:
        nonlocal extracts
        extracts += isinstance(command, ExtractBlock)
        return extracts > 4  # two pieces a block

    faults = faults_of("decode0", Faults(breaks_at=at_the_third_block))
    async with fleet(faults=faults, decodes=2, ends_quiet=False) as both:
        request = long_answer(1, other(1).prompt_token_ids)
        following, _ = await turn(both, request, both.new_path("prefill0", "decode0"))
        both.prefill_worker("prefill0")._kept.clear()
        began = both.clock.now()
        path = both.new_path("prefill0", "decode1")
        assert 103 - FETCHED < (await turn(both, following, path))[1] <= 103
        assert both.clock.now() - began < 1.0
        assert extracts > 4, "it broke"
        assert failed(both, "prefill0") == {"lost": 1}
        holder = both.decode_worker("decode0")
        assert not len(holder._given) and not len(holder._outgoing)


async def test_between_two_steps_of_running_sequences_few_blocks_are_extracted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given_kv, "BETWEEN_STEPS", 4)
    # so that otherwise more would be offered at a time
    mesh = replace(limits(pages=400), chunk_buckets=(16, 128))
    async with fleet(decode=mesh) as one:
        talk = [
            await first_turn(one, long_answer(number, other(number).prompt_token_ids, 90))
            for number in (1, 2)
        ]
        log, heard = one.processes["decode0"].mesh.log, Collected()
        running = asyncio.ensure_future(one.collect(long_answer(9, (1, 2, 3), 200), into=heard))
        while len(heard.tokens.get(0, ())) < 5:
            await asyncio.sleep(1e-3)
        await asyncio.gather(*(turn(one, following) for following in talk))
        assert not running.done(), "there were steps all the time"
        await running
        runs, extracts = [0], 0
        for command in log:
            if isinstance(command, DecodeSteps):
                runs.append(0)
            runs[-1] += isinstance(command, ExtractBlock)
            extracts += isinstance(command, ExtractBlock)
        pieces = len(list(split_blocks(BLOCK_TOKENS, mesh.granule_tokens)))
        assert extracts == 2 * 2 * (160 // BLOCK_TOKENS) * pieces  # two layer groups
        # some may have ended before a step that was late to be issued
        assert 0 < max(runs) <= 2 * given_kv.BETWEEN_STEPS
        await settled(one)


async def test_transfers_that_were_given_up_let_later_ones_extract_no_more_between_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a prefill worker, which has no such limit and becomes a decode worker."""
    monkeypatch.setattr(given_kv, "BETWEEN_STEPS", 2)
    mesh = replace(limits(), chunk_buckets=(16,))
    async with fleet(prefill=mesh, prefills=2, costs=Costs(pull=1e-5, other=1e-2)) as both:
        request, holder = other(1, tokens=150), both.prefill_worker("prefill0")
        await both.ask(request, both.new_path("prefill0"))
        names = holder._kept.chain(request, request.prompt_token_ids)

        async def fetch(handoff_id: int) -> None:
            call = FetchCall(handoff_id, "prefill1", names, 0, BLOCK_TOKENS, 99.0)
            assert (await holder.fetch(call)).blocks == len(names) == 9

        for handoff_id in range(3):
            await fetch(handoff_id)
            await asyncio.sleep(1.0)  # the rest waits for what is offered
            await holder.abort(handoff_id, "it is not wanted")
        await both.change_role("prefill0")
        extracts = lambda: len(both.processes["prefill0"].mesh.ran(ExtractBlock))  # noqa: E731
        before = extracts()
        await fetch(3)
        await asyncio.sleep(5e-3)  # less than one takes
        assert extracts() - before == given_kv.BETWEEN_STEPS
        await holder.abort(3, "it is not wanted")
        await settled(both)


async def test_a_sequence_takes_pages_that_are_held_for_others_before_one_is_preempted() -> None:
    stalled = faults_of("prefill0", Faults(pull_error=lambda nth: "stall" if nth > 0 else ""))
    async with fleet(
        faults=stalled, costs=Costs(other=1e-5), decode=limits(pages=80), prefills=2
    ) as both:
        through = both.new_path("prefill1")
        first = long_answer(1, other(1, tokens=150).prompt_token_ids, 70)
        collected = await both.collect(first, through)
        history = (*first.prompt_token_ids, *collected.tokens[0], 1)
        both.prefill_worker("prefill1")._kept.clear()
        holder = both.decode_worker("decode0")
        kept = holder._kept
        names = kept.chain(first, history)
        known = kept.match(0, names) * BLOCK_TOKENS
        assert known == 208
        call = FetchCall(77, "prefill0", names[: known // BLOCK_TOKENS], 0, BLOCK_TOKENS, 99.0)
        assert (await holder.fetch(call)).blocks == known // BLOCK_TOKENS
        await asyncio.sleep(0.01)
        free = sum((await holder.status()).free_pages)
        assert free == 80 - known // 4, "what is not fetched is held"
        # 40 pages in the end
        growing = long_answer(2, (5, 6, 7), 150)
        await both.ask(growing, through)
        assert holder.counters["peer_gives_cut"] == 1
        assert (await holder.status()).preemptions == 0
        await settled(both)


@pytest.mark.parametrize("why", ["codec", "draining", "reset"])
async def test_a_decode_worker_gives_nothing_that_it_should_not(why: str) -> None:
    """What came by a codec that loses something is not what the asker would compute."""
    async with fleet() as one:
        following = await first_turn(one)
        holder = one.decode_worker("decode0")
        names = holder._kept.chain(following, following.prompt_token_ids)
        call = FetchCall(1, "prefill0", names, 0, BLOCK_TOKENS, 1.0)
        if why == "codec":
            holder._config = replace(holder._config, codec="fp8")
        elif why == "draining":
            holder._draining = True
        else:
            await holder.reset_cache()
        assert await holder.fetch(call) == FetchReply()
        if why != "draining":
            holder._config = replace(holder._config, codec="none")
            assert (await turn(one, following))[1] == 103 - (why == "codec") * FETCHED
        await settled(one)


@pytest.mark.parametrize("returns", [True, False])
async def test_the_router_says_which_decode_worker_keeps_more_than_the_only_prefill_worker(
    returns: bool,
) -> None:
    index, routing = EveryoneKnown(), RoutingConfig(peer_fetch=True, fetch_from_decode=returns)
    async with fleet(
        prefill=limits(pages=80), hints=False, affinity=index, routing=routing, decodes=2
    ) as one:
        index.fleet = one
        await converse(one, Talk(7), 40, cancels=0.1)
        placed = [getattr(one.answer, "peer", "") for one in one.path.placer._entries]
        assert {name for name in placed if name} == (set(DECODES) if returns else set())
        assert (one.counted("peer_blocks_fetched") > 0) == returns
        await settled(one)
