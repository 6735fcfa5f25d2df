"""The sending side: leases that acknowledgements renew, never beyond the request's deadline; late listeners hear everything."""

import asyncio

import pytest

from jdisagg.config import LimitsConfig
from jdisagg.dispatch.ports import Child, HandoffEnd, Offer, OfferChecksum, PrefillCall
from jdisagg.errors import HandoffError
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.virtual_time import run_virtually


def call(deadline_seconds: float = 100.0, from_token: int = 0) -> PrefillCall:
    return PrefillCall(toy_request(1, prompt_tokens=21), 1, (Child(0),), 7, "decode0", from_token, deadline_seconds)


def test_a_receiver_that_is_still_at_it_keeps_the_lease_until_the_requests_deadline() -> None:
    async def main() -> None:
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
            await cluster.check_quiet()

    run_virtually(main)


def test_a_receiver_that_comes_when_all_is_over_is_told_at_once() -> None:
    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.prefill.prefill(call())
            await cluster.prefill.abort(7, "nobody came")
            began = asyncio.get_running_loop().time()
            with pytest.raises(HandoffError, match="is over"):
                await anext(aiter(cluster.prefill.offers(7, 1)))
            assert asyncio.get_running_loop().time() == began
            await cluster.check_quiet()

    run_virtually(main)


def test_only_what_the_receiver_lacks_is_offered_and_all_of_it_is_summed() -> None:
    async def main() -> None:
        async with Cluster() as cluster:
            reply = await cluster.prefill.prefill(call(from_token=12))
            messages = [message async for message in cluster.prefill.offers(7, 1)]
            offers = [message for message in messages if isinstance(message, Offer)]
            assert {(offer.group, offer.start, offer.valid_tokens) for offer in offers} == {
                (0, 12, 4),
                (1, 12, 4),
                (0, 16, 5),
                (1, 16, 5),
            }
            sums = [message.offer_id for message in messages if isinstance(message, OfferChecksum)]
            assert sorted(sums) == sorted(offer.offer_id for offer in offers)
            end = messages[-1]
            assert isinstance(end, HandoffEnd) and (end.offers, end.tokens, end.firsts) == (4, 21, reply.tokens)
            await cluster.prefill.abort(7, "enough")
            await cluster.check_quiet()

    run_virtually(main)
