"""The sending side: leases that acknowledgements renew, never beyond the request's deadline; late
listeners hear everything."""

import asyncio

import pytest

from jdisagg.config import LimitsConfig
from jdisagg.errors import HandoffError, UnavailableError
from jdisagg.messages.ports import (
    Child,
    GenerateCall,
    HandoffEnd,
    HandoffSource,
    Offer,
    OfferChecksum,
    PeerPort,
    PrefillCall,
    ReserveCall,
)
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Faults


def call(deadline_seconds: float = 100.0, from_token: int = 0) -> PrefillCall:
    return PrefillCall(
        toy_request(1, prompt_tokens=21), 1, (Child(0),), 7, "decode0", from_token, deadline_seconds
    )


async def test_a_receiver_that_is_still_at_it_keeps_the_lease_until_the_requests_deadline() -> None:
    async with Cluster(limits=LimitsConfig(handoff_lease_seconds=4)) as cluster:
        await cluster.prefill.prefill(call(deadline_seconds=30.0))
        for _ in range(14):
            await asyncio.sleep(2.0)
            await cluster.prefill.acknowledge(7, ())
            assert (await cluster.prefill.status()).handoffs == 1
        await asyncio.sleep(2.0)
        for _ in range(3):
            await cluster.prefill.acknowledge(7, ())
            await asyncio.sleep(1.0)
        assert cluster.prefill.counters["leases_expired"] == 1


@pytest.mark.parametrize(
    ("comes", "lease_seconds"), [("before the prefill", 60.0), ("after it", 60.0), ("never", None)]
)
async def test_blocks_of_a_receiver_that_is_silent_or_never_comes_are_freed_within_ten_seconds(
    comes: str, lease_seconds: float | None
) -> None:
    async with Cluster(
        limits=LimitsConfig(handoff_lease_seconds=lease_seconds)
        if lease_seconds
        else LimitsConfig()
    ) as cluster:
        offers = aiter(cluster.prefill.offers(7, 1))
        listening = asyncio.ensure_future(anext(offers)) if comes == "before the prefill" else None
        await asyncio.sleep(0.1)
        await cluster.prefill.prefill(call())
        if comes == "after it":
            await asyncio.sleep(5.0)
            await anext(offers)
        for _ in range(4 if comes != "never" else 0):
            await asyncio.sleep(2.0)
            await cluster.prefill.acknowledge(7, ())
        await asyncio.sleep(5.0)
        assert (await cluster.prefill.status()).handoffs == 1
        await asyncio.sleep(4.0)
        assert cluster.prefill.counters["leases_expired"] == 1
        assert listening is None or listening.done()


async def test_a_prompt_that_is_held_back_for_a_receiver_that_fell_silent_gives_its_pages_back():
    async with Cluster() as cluster:
        long = PrefillCall(
            toy_request(1, prompt_tokens=120), 1, (Child(0),), 7, "decode0", 0, 100.0
        )
        prefilling = asyncio.ensure_future(cluster.prefill.prefill(long))
        await anext(aiter(cluster.prefill.offers(7, 1)))
        for _ in range(10):
            await asyncio.sleep(2.0)
            await cluster.prefill.acknowledge(7, ())
        assert cluster.prefill.counters["chunks_held_back"] > 0 and not prefilling.done()
        await asyncio.sleep(9.0)
        with pytest.raises(HandoffError, match="within their lease"):
            await prefilling


class Deaf:
    """A sender's port that loses farewells until `hears_at`; all else passes."""

    def __init__(self, inner: PeerPort, hears_at: float) -> None:
        self._inner, self._hears_at = inner, hears_at

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def abort(self, handoff_id: int, reason: str) -> None:
        if asyncio.get_running_loop().time() < self._hears_at:
            raise UnavailableError("stopped")
        await self._inner.abort(handoff_id, reason)


async def test_a_sender_that_could_not_hear_a_farewell_is_told_again_and_frees_before_its_lease():
    hears_at = asyncio.get_running_loop().time() + 4.0
    faults = Faults(pull_error=lambda _: "stall")
    async with Cluster(
        decode_faults=faults, wrap_peer=lambda port: Deaf(port, hears_at)
    ) as cluster:  # type: ignore[arg-type, return-value]
        reservation = await cluster.decode.reserve(
            ReserveCall(toy_request(1, prompt_tokens=21), 1, (Child(0),), 100.0)
        )
        source = HandoffSource("prefill0", 7)
        spans = cluster.decode.generate(GenerateCall(reservation.reservation_id, 1, 100.0, source))
        receiving = asyncio.ensure_future(anext(spans))  # type: ignore[arg-type]
        await cluster.prefill.prefill(call())
        await asyncio.sleep(1.0)
        await cluster.decode.cancel(reservation.reservation_id)
        assert (await cluster.prefill.status()).handoffs == 1
        await asyncio.sleep(4.5)
        assert cluster.prefill.counters["leases_expired"] == 0
        receiving.cancel()
        await cluster.check_quiet()


async def test_a_receiver_that_comes_when_all_is_over_is_told_at_once() -> None:
    async with Cluster() as cluster:
        await cluster.prefill.prefill(call())
        await cluster.prefill.abort(7, "nobody came")
        began = asyncio.get_running_loop().time()
        with pytest.raises(HandoffError, match="is over"):
            await anext(aiter(cluster.prefill.offers(7, 1)))
        assert asyncio.get_running_loop().time() == began


async def test_a_listener_that_leaves_before_the_hand_off_begins_takes_no_other_with_it() -> None:
    async with Cluster() as cluster:
        gone, stays = (
            asyncio.ensure_future(anext(aiter(cluster.prefill.offers(7, 1)))) for _ in range(2)
        )
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.sleep(0.1)
        await cluster.prefill.prefill(call())
        assert isinstance(await stays, Offer)
        await cluster.prefill.abort(7, "enough")


async def test_only_what_the_receiver_lacks_is_offered_and_all_of_it_is_summed() -> None:
    async with Cluster() as cluster:
        reply = await cluster.prefill.prefill(call(from_token=12))
        messages = [message async for message in cluster.prefill.offers(7, 1)]
        offers = [message for message in messages if isinstance(message, Offer)]
        assert {(offer.group, offer.start, offer.valid_tokens) for offer in offers} == {
            (0, 12, 4),
            (1, 12, 4),
            (0, 16, 4),
            (1, 16, 4),
            (0, 20, 1),
            (1, 20, 1),
        }
        sums = [message.offer_id for message in messages if isinstance(message, OfferChecksum)]
        assert sorted(sums) == sorted(offer.offer_id for offer in offers)
        end = messages[-1]
        assert isinstance(end, HandoffEnd)
        assert (end.offers, end.tokens, end.firsts) == (6, 21, reply.tokens)
        await cluster.prefill.abort(7, "enough")
