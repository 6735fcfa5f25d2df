"""The generation service over the real engine: many streams at once, clients that disconnect,
deadlines, full queues."""

from itertools import accumulate

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from jdisagg.config import LimitsConfig
from jdisagg.request import FinishReason
from jdisagg.service.grpc import common_pb2, generation_pb2, generation_pb2_grpc
from tests.end_to_end.doors import Served, answers, mixed_requests, served
from tests.shapes import config

pytestmark = [pytest.mark.ci, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door():
    async with served(config(limits=LimitsConfig(handoff_lease_seconds=5.0))) as door:
        yield door


async def test_a_hundred_streams_at_once_give_each_what_it_gets_alone(door: Served):
    requests = mixed_requests(25, seed=3)
    alone = [await door.client.complete(**request) for request in requests]
    together = await door.complete_all(requests * 4)
    for index, done in enumerate(together):
        reference, asked = alone[index % 25], requests[index % 25]
        assert answers(done) == answers(reference)
        assert len(done.choices) == asked.get("n", 1) and all(
            choice.finish_reason for choice in done.choices
        )
        assert done.usage == reference.usage
        assert done.usage and done.usage.completion_tokens == sum(
            len(choice.token_ids) for choice in done.choices
        )
        if asked.get("logprobs"):
            assert [len(choice.logprobs) for choice in done.choices] == [
                len(choice.token_ids) for choice in done.choices
            ]
    assert {choice.finish_reason for done in together for choice in done.choices} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    await door.quiet()


async def test_a_client_that_stops_reading_is_let_go_at_its_deadline(door: Served):
    """More than the transport's window holds, so that the server waits for a reader; then the pages
    are free and so is all else."""
    # The deadline is not spent on programs that compile.
    await door.client.complete("a dog", max_tokens=2, ignore_eos=True, n=4, logprobs=20)
    sampling = common_pb2.SamplingParams(max_tokens=220, ignore_eos=True, n=4, logprobs=20)
    request = generation_pb2.GenerateRequest(text="a dog", sampling=sampling, deadline_seconds=4.0)
    async with grpc.aio.insecure_channel(
        door.target, [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    ) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        received = [await call.read()]
        await door.quiet()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (message := await call.read()) is not grpc.aio.EOF:
                received.append(message)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(received) < 4 * 220
    for child in range(4):
        of_child = [message for message in received if message.child == child]
        assert [message.first_index for message in of_child] == list(
            accumulate((len(message.token_ids) for message in of_child[:-1]), initial=0)
        )
