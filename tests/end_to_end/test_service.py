"""The generation service over the real engine: many streams at once, clients that disconnect,
deadlines, full queues."""

import asyncio
from itertools import accumulate

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from jdisagg.client import AsyncClient
from jdisagg.config import LimitsConfig
from jdisagg.messages.step_commands import DecodeSteps
from jdisagg.request import FinishReason
from jdisagg.service.grpc import common_pb2, generation_pb2, generation_pb2_grpc
from tests.end_to_end.clusters import dense_greedy
from tests.end_to_end.doors import Served, answers, mixed_requests, served
from tests.fakes.cluster import Collected
from tests.shapes import LLAMA, config

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


async def test_what_comes_over_the_wire_is_what_a_dense_forward_pass_gives(door: Served):
    ids = door.run.tokenizer.encode("Once upon a time")
    done = await door.client.complete(
        "Once upon a time", temperature=0, max_tokens=40, ignore_eos=True
    )
    assert done.choices[0].token_ids == dense_greedy(LLAMA, ids, 40)
    assert (
        done.text
        == door.run.tokenizer.decode(ids + done.choices[0].token_ids)[
            len(door.run.tokenizer.decode(ids)) :
        ]
    )
    assert done.usage and (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids), 40)
    assert done.timings and done.timings.kv_bytes_moved > 0


class Watched:
    """How many commands the decode mesh had been given when the worker heard that a stream is
    over."""

    def __init__(self, door: Served) -> None:
        self.commands = door.run.recording.decode
        self.heard_at: list[int] = []
        self._ports = door.run.cluster.path._context.cluster.decode
        self._worker = self._ports["decode-0"]

    def __enter__(self) -> "Watched":
        self._ports["decode-0"] = self  # type: ignore[index]
        return self

    def __exit__(self, *_: object) -> None:
        self._ports["decode-0"] = self._worker  # type: ignore[index]

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    async def generate(self, call: object):
        spans = self._worker.generate(call)  # type: ignore[arg-type]
        try:
            async for span in spans:
                yield span
        finally:
            self.heard_at.append(len(self.commands))
            await spans.aclose()  # type: ignore[attr-defined]

    def steps_of(self, prompt_tokens: int) -> list[int]:
        """At which commands the sequence with a prompt of that length, admitted last, was
        stepped."""
        rank = slot = start = -1
        for index, command in enumerate(self.commands):
            for admit in command.admits if isinstance(command, DecodeSteps) else ():
                if admit.position == prompt_tokens:
                    rank, slot, start = admit.rank, admit.slot, index
        assert start >= 0
        steps = enumerate(self.commands[start:], start)
        return [
            index
            for index, command in steps
            if isinstance(command, DecodeSteps) and slot in command.slots[rank]
        ]


@pytest.mark.parametrize("how", ["cancels the call", "closes its channel"])
async def test_a_client_that_disappears_frees_its_slot_within_a_step_and_all_its_pages(
    door: Served, how: str
):
    prompt = door.run.tokenizer.encode("a little dog lived in the big forest and one day")
    others = [door.client.complete(**request) for request in mixed_requests(4, seed=5)]
    alone = [answers(await other) for other in others]
    with Watched(door) as watched:
        client = AsyncClient(door.target)
        events = client.generate(token_ids=prompt, max_tokens=200, ignore_eos=True, temperature=0)
        seen = [await anext(events) for _ in range(5)]
        bystanders = asyncio.gather(
            *(door.client.complete(**request) for request in mixed_requests(4, seed=5))
        )
        if how == "cancels the call":
            await events.aclose()
        else:
            await client.close()
        async with asyncio.timeout(10):
            while not watched.heard_at:
                await asyncio.sleep(0.001)
        issued = watched.heard_at[0]
        assert [answers(done) for done in await bystanders] == alone
        await client.close()
    begun = Collected()
    for event in seen:
        begun.add(event)
    steps = watched.steps_of(len(prompt))
    assert all(index < issued for index in steps), "its slot was stepped after the worker had heard"
    assert len(steps) < 150
    await door.quiet()


async def test_a_client_that_stops_reading_is_let_go_at_its_deadline(door: Served):
    """More than the transport's window holds, so that the server waits for a reader; then the pages
    are free and so is all else."""
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
