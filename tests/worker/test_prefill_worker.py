"""The prefill worker by its two ports: offers, acknowledgements, aborts, leases, order."""

import asyncio

import msgspec
import pytest

from jdisagg.config import LimitsConfig
from jdisagg.errors import DeadlineExceededError, HandoffError, InvalidRequestError, OverloadedError
from jdisagg.messages.ports import Child, HandoffEnd, Offer, PeerMessage, PrefillCall, PrefillReply
from jdisagg.messages.step_commands import PrefillChunk, ReleaseOffers
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Costs, toy_limits
from tests.fakes.toy_model import expected_tokens
from tests.worker.calls import prefill_call


async def messages(cluster: Cluster, handoff_id: int = 7, attempt: int = 1) -> list[PeerMessage]:
    return [message async for message in cluster.prefill.offers(handoff_id, attempt)]


async def test_a_prompt_is_offered_whole_in_every_layer_group_and_freed_when_acknowledged() -> None:
    async with Cluster() as cluster:
        listening = asyncio.create_task(messages(cluster))
        await asyncio.sleep(0.01)
        reply = await cluster.prefill.prefill(prefill_call(prompt_tokens=37))
        *offers, end = await listening
        request = toy_request(1, prompt_tokens=37)
        assert reply.tokens[0].token_id == expected_tokens(request, 0, 128)[0][0]
        assert isinstance(end, HandoffEnd)
        assert (end.offers, end.tokens, end.firsts) == (len(offers) // 2, 37, reply.tokens), (
            "and a checksum for each"
        )
        for group in range(2):
            covered = [
                (offer.start, offer.valid_tokens)
                for offer in offers
                if isinstance(offer, Offer) and offer.group == group
            ]
            assert sum(tokens for _, tokens in covered) == 37
            assert all(a + n == b for (a, n), (b, _) in zip(covered, covered[1:], strict=False))
        assert (await cluster.prefill.status()).free_pages == (64,), (
            "its pages are free as soon as its tokens are sampled"
        )
        ids = tuple(offer.offer_id for offer in offers if isinstance(offer, Offer))
        await cluster.prefill.acknowledge(7, ids[:3])
        await cluster.prefill.acknowledge(7, ids)
        await cluster.prefill.acknowledge(7, ids)


async def test_offers_are_announced_while_later_chunks_still_compute() -> None:
    async with Cluster() as cluster:
        computing = asyncio.create_task(cluster.prefill.prefill(prefill_call(prompt_tokens=60)))
        first = await anext(aiter(cluster.prefill.offers(7, 1)))
        assert isinstance(first, Offer) and not computing.done()
        await computing
        await cluster.prefill.abort(7, "enough")


@pytest.mark.parametrize("after_seconds", [0.0, 0.0005, 0.002, 1.0])
async def test_an_abort_at_any_moment_frees_pages_and_offers(after_seconds: float) -> None:
    async with Cluster() as cluster:
        computing = asyncio.create_task(cluster.prefill.prefill(prefill_call(prompt_tokens=60)))
        listening = asyncio.create_task(messages(cluster))
        await asyncio.sleep(after_seconds)
        await cluster.prefill.abort(7, "the receiver preempted it")
        await cluster.prefill.abort(7, "again")
        answers = await asyncio.gather(computing, listening, return_exceptions=True)
        assert after_seconds == 1.0 or all(isinstance(answer, HandoffError) for answer in answers)


async def test_blocks_that_are_not_fetched_are_freed_by_their_lease_without_new_work() -> None:
    async with Cluster(limits=LimitsConfig(handoff_lease_seconds=8)) as cluster:
        await cluster.prefill.prefill(prefill_call(prompt_tokens=30))
        await asyncio.sleep(7)
        assert cluster.channel.offered
        await asyncio.sleep(5)
        assert cluster.prefill.counters["leases_expired"] == 1
        assert cluster.prefill_mesh.ran(ReleaseOffers)


async def test_a_listener_for_a_call_that_never_comes_gives_up() -> None:
    async with Cluster(limits=LimitsConfig(handoff_lease_seconds=8)) as cluster:
        with pytest.raises(HandoffError, match="did not begin"):
            await messages(cluster)


async def test_late_attempts_and_doubled_hand_offs_are_refused() -> None:
    async with Cluster() as cluster:
        await cluster.prefill.prefill(prefill_call(attempt=4))
        with pytest.raises(HandoffError, match="exists already"):
            await cluster.prefill.prefill(prefill_call(attempt=5))
        with pytest.raises(HandoffError, match="attempt 3 comes after attempt 4"):
            await cluster.prefill.prefill(prefill_call(attempt=3, handoff_id=8))
        with pytest.raises(HandoffError, match="belongs to attempt 4"):
            await messages(cluster, attempt=3)
        await cluster.prefill.abort(7, "done")


async def test_accepted_tokens_are_forced_not_resampled() -> None:
    async with Cluster() as cluster:
        accepted = (3, 1, 4, 1, 5)
        call = prefill_call(accepted=accepted, prompt_tokens=9, repetition_penalty=1.2)
        reply = await cluster.prefill.prefill(call)
        chunk = next(command for command in cluster.prefill_mesh.ran(PrefillChunk))
        assert chunk.rows[0].tokens == toy_request(1, prompt_tokens=9).prompt_token_ids + accepted
        assert chunk.rows[0].samples[0].output_history == accepted
        assert len(reply.tokens) == 1
        await cluster.prefill.abort(7, "done")


async def test_a_full_queue_refuses_and_a_prompt_that_never_fits_is_invalid() -> None:
    async with Cluster(prefill=toy_limits(pages_per_rank=8), queue_limit=2) as cluster:
        with pytest.raises(InvalidRequestError, match="33 tokens"):
            await cluster.prefill.prefill(prefill_call(prompt_tokens=33))
        calls = [
            cluster.prefill.prefill(prefill_call(number, handoff_id=number, prompt_tokens=30))
            for number in range(6)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, OverloadedError) for answer in answers) == 4
        for number in range(6):
            await cluster.prefill.abort(number, "done")


async def test_the_older_prompt_goes_first_however_late_it_calls() -> None:
    async with Cluster(prefill=toy_limits(pages_per_rank=8)) as cluster:
        ages = {1: 0.0, 2: 0.0, 3: 50.0}
        calls = [
            msgspec.structs.replace(
                prefill_call(number, handoff_id=number, prompt_tokens=30), age_seconds=age
            )
            for number, age in ages.items()
        ]
        order: list[int] = []

        async def run(call: PrefillCall) -> None:
            await cluster.prefill.prefill(call)
            order.append(call.handoff_id)

        tasks = []
        for call in calls:
            tasks.append(asyncio.create_task(run(call)))
            await asyncio.sleep(0.0001)
        await asyncio.gather(*tasks)
        assert order == [1, 3, 2]
        for number in ages:
            await cluster.prefill.abort(number, "done")


async def test_a_deadline_in_the_queue_is_a_typed_error_and_frees() -> None:
    async with Cluster() as cluster:
        with pytest.raises(DeadlineExceededError):
            await cluster.prefill.prefill(
                msgspec.structs.replace(prefill_call(prompt_tokens=100), deadline_seconds=0.001)
            )


async def test_prompts_are_spread_over_the_ranks() -> None:
    async with Cluster(prefill=toy_limits(ranks=2)) as cluster:
        calls = [
            cluster.prefill.prefill(prefill_call(number, handoff_id=number, prompt_tokens=16))
            for number in range(4)
        ]
        await asyncio.gather(*calls)
        rows = [
            row.rank for command in cluster.prefill_mesh.ran(PrefillChunk) for row in command.rows
        ]
        assert sorted(rows) == [0, 0, 1, 1]
        for number in range(4):
            await cluster.prefill.abort(number, "done")


@pytest.mark.parametrize(("ranks", "together"), [(2, [1, 2]), (1, [1, 1, 1])])
async def test_a_chunk_that_would_leave_ranks_idle_waits_for_the_one_before_it_and_goes_with_who_comes_meanwhile(  # noqa: E501
    ranks: int, together: list[int]
) -> None:
    """All ranks wait for the fullest: one prompt of two ranks' chunk costs both of them its time. A
    lone rank runs ahead."""
    async with Cluster(prefill=toy_limits(ranks=ranks), costs=Costs(prefill_token=1e-2)) as cluster:
        calls: list[asyncio.Task[object]] = []
        for number in range(1, 4):  # the first computes while the others come
            calls.append(
                asyncio.create_task(
                    cluster.prefill.prefill(
                        prefill_call(number, handoff_id=number, prompt_tokens=8)
                    )
                )
            )
            await asyncio.sleep(0.02)
        await asyncio.gather(*calls)
        assert [len(command.rows) for command in cluster.prefill_mesh.ran(PrefillChunk)] == together
        for number in range(1, 4):
            await cluster.prefill.abort(number, "enough")


async def test_a_caller_that_goes_away_frees_its_prompt() -> None:
    async with Cluster() as cluster:
        for number, after_seconds in enumerate([0.0, 0.0005, 0.003]):
            calling = asyncio.create_task(
                cluster.prefill.prefill(prefill_call(number, handoff_id=number, prompt_tokens=60))
            )
            await asyncio.sleep(after_seconds)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await cluster.check_quiet()


async def test_its_status_says_what_is_left_to_compute_until_it_is_computed() -> None:
    async with Cluster() as cluster:
        calls = [
            asyncio.create_task(
                cluster.prefill.prefill(prefill_call(number, number, prompt_tokens=60))
            )
            for number in (1, 2)
        ]
        await asyncio.sleep(0)
        status = await cluster.prefill.status()
        assert (status.queued_tokens, status.queued_pairs) == (120, 2 * 60 * 61 / 2)
        assert status.can_prefill and status.chunk_tokens == toy_limits().chunk_buckets[-1]
        await calls[0]
        assert (await cluster.prefill.status()).queued_tokens <= 60
        calls[1].cancel()
        await asyncio.gather(calls[1], return_exceptions=True)
        await cluster.prefill.abort(1, "enough")


async def test_who_waits_behind_a_prompt_that_is_given_up_goes_at_once() -> None:
    async with Cluster(prefill=toy_limits(pages_per_rank=40)) as cluster:

        def prefilling(number: int, tokens: int, destination: str) -> "asyncio.Task[PrefillReply]":
            call = PrefillCall(
                toy_request(number, prompt_tokens=tokens),
                1,
                (Child(0),),
                number,
                destination,
                0,
                300.0,
            )
            return asyncio.create_task(cluster.prefill.prefill(call))

        # nobody fetches it: it is held back in its midst, with most pages
        held = prefilling(1, 128, "silent")
        await asyncio.sleep(0.1)
        large, small = prefilling(2, 60, "other"), prefilling(3, 8, "other")
        await asyncio.sleep(0.1)
        assert not (held.done() or large.done() or small.done())
        await cluster.prefill.cancel_prefill(2)
        await asyncio.wait({small}, timeout=1.0)
        assert small.done() and not held.done()
        for number in (1, 3):
            await cluster.prefill.cancel_prefill(number)
        await asyncio.gather(held, large, return_exceptions=True)
