"""Calls over real gRPC whose bytes are no message, beside a stream: each is refused to its sender,
and the stream gets every token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.errors import UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.packed import pack
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort, Span
from jdisagg.messages.roles import ClusterRolesPort, RolePort, SwitchCall, SwitchReport
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import protocol_metadata
from jdisagg.service.internal.role_services import worker_roles
from tests.service.doors import eventually
from tests.service.port_worker import PREFILL
from tests.service.remote_workers import Spanner, collect, connected, serving
from tests.service.role_desk import REPORT, Desk, served

WHOLE = pack((PREFILL,))
# What else is no message is in tests/messages.
SPOILED = (b"", WHOLE[: len(WHOLE) // 2], WHOLE + b"\x00", pack("arguments"), pack(()))


async def refused(address: str, protocol: type) -> dict[str, set[grpc.StatusCode]]:
    """The statuses with which spoiled calls of every method that takes arguments end, by method."""
    found: dict[str, set[grpc.StatusCode]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        for method in rpc.methods(protocol):
            if not method.parameters:
                continue
            path = f"/{rpc.service_name(protocol)}/{method.name}"
            open_call: Any = channel.unary_stream if method.streams else channel.unary_unary
            for spoiled in SPOILED:
                call = open_call(path)(spoiled, timeout=20, metadata=(protocol_metadata(),))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if method.streams:
                        async for _ in call:
                            pass
                    else:
                        await call
                found.setdefault(method.name, set()).add(await call.code())
    return found


@contextlib.asynccontextmanager
async def streaming(worker: Spanner) -> AsyncIterator[str]:
    """A stream over which a token goes before, and another after the block."""
    async with serving(worker) as (address, _), connected(address) as (remote,):
        reading = asyncio.ensure_future(collect(remote, 1))
        worker.of(1).put_nowait(Span(0, 0, (1,)))
        await eventually(lambda: worker.of(1).empty())
        yield address
        worker.of(1).put_nowait(Span(0, 1, (2,)))
        worker.of(1).put_nowait(None)
        spans = await asyncio.wait_for(reading, 20)
    assert [span.token_ids for span in spans] == [(1,), (2,)]


@pytest.mark.parametrize("protocol", [PrefillPort, DecodePort, PeerPort])
async def test_calls_that_are_no_message_are_refused_and_a_stream_beside_them_goes_on(
    protocol: type,
) -> None:
    worker = Spanner()
    async with streaming(worker) as address:
        before = list(worker.told)
        found = await refused(address, protocol)
        assert worker.told == before, "a spoiled call reached the worker"
    assert found and all(codes == {grpc.StatusCode.INVALID_ARGUMENT} for codes in found.values())


class Confused(Desk):
    """A worker of another version: its reply is no report the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[Any] = ["no report", REPORT]

    async def switch_report(self) -> SwitchReport:
        return self.replies.pop(0)


async def test_a_reply_that_is_no_message_costs_that_call_alone() -> None:
    async with served(Confused()) as address, worker_roles(address) as port:
        with pytest.raises(UnavailableError, match="both ends must run the same version"):
            await port.switch_report()
        assert await port.switch_report() == REPORT


ROLE_CALLS: list[tuple[type, str, tuple[object, ...]]] = [
    (ClusterRolesPort, "switch", ("p1", "boss", None, 5.0)),
    (RolePort, "switch_role", ((1, "boss", (1, 1, 1)),)),
    (ClusterRolesPort, "switch", ("p1", "decode", (0, 1, 1), 5.0)),
    (RolePort, "switch_role", ((1, "decode", (0, 1, 1)),)),
    (ClusterRolesPort, "switch", (7, "decode", None, 5.0)),
    (ClusterRolesPort, "switch", ("p1", "decode", None, "soon")),
]


async def test_a_change_of_role_that_makes_no_sense_is_refused_before_anybody_is_asked() -> None:
    desk = Desk()
    async with served(desk) as address, grpc.aio.insecure_channel(address) as channel:
        for protocol, method, arguments in ROLE_CALLS:
            call = channel.unary_unary(f"/{rpc.service_name(protocol)}/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(pack(arguments), timeout=20, metadata=(protocol_metadata(),))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, arguments
        assert not desk.asked, "a call that makes no sense was acted on"
        call = channel.unary_unary(f"/{rpc.service_name(RolePort)}/switch_role")
        good = SwitchCall(1, WorkerRole.DECODE, Layout(dp=2))
        await call(pack((good,)), timeout=20, metadata=(protocol_metadata(),))
        assert desk.asked == [good]
