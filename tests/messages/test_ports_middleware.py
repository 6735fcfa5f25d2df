"""Middleware of ports: calls with a method pass through it, other calls reach the port directly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import pytest

from jdisagg.dispatch.frontend import ServingPath
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.messages.ports_middleware import port_methods, through

T = TypeVar("T")


class Port(Protocol):
    async def add(self, left: int, right: int = 1) -> int: ...

    async def double(self, number: int) -> int: ...

    def count(self, most: int) -> AsyncIterator[int]: ...

    def triple(self, number: int, times: int) -> int: ...


class Adder:
    async def add(self, left: int, right: int = 1) -> int:
        return left + right

    async def double(self, number: int) -> int:
        return 2 * number

    async def count(self, most: int) -> AsyncIterator[int]:
        for number in range(most):
            yield number

    def triple(self, number: int, times: int) -> int:
        return 3 * number * times


class Everything:
    """Records every call and adds one to its result."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    async def unary(self, proceed: Callable[..., Awaitable[int]], *args: int, **named: int) -> int:
        self.seen.append((*args, *named.items()))
        return 1 + await proceed(*args, **named)

    async def stream(
        self, proceed: Callable[..., AsyncIterator[int]], *args: int
    ) -> AsyncIterator[int]:
        self.seen.append(args)
        async for item in proceed(*args):
            yield 1 + item


class DoubleAlone:
    async def double(self, proceed: Callable[[int], Awaitable[int]], number: int) -> int:
        return -await proceed(number)


def test_every_unary_and_stream_call_passes_with_its_arguments() -> None:
    async def main() -> None:
        everything = Everything()
        port = through(Port, Adder(), everything)
        assert await port.add(2) == 4 and await port.add(2, right=5) == 8
        assert [item async for item in port.count(3)] == [1, 2, 3]
        assert everything.seen == [(2,), (2, ("right", 5)), (3,)]

    asyncio.run(main())


def test_a_named_method_stands_before_its_own_call_alone_and_the_rest_costs_nothing() -> None:
    async def main() -> None:
        inner = Adder()
        port = through(Port, inner, DoubleAlone())
        assert await port.double(4) == -8 and await port.add(1, 1) == 2
        assert port.add == inner.add, "the port's own method, with nothing between"

    asyncio.run(main())


def test_a_function_that_is_no_call_reaches_the_port_unless_middleware_has_its_name() -> None:
    class Tripled:
        def triple(self, proceed: Callable[[int, int], int], number: int, times: int) -> int:
            return -proceed(number, times)

    everything = Everything()
    assert through(Port, Adder(), everything).triple(2, 5) == 30 and not everything.seen
    assert through(Port, Adder(), Tripled()).triple(2, 5) == -30


def test_middleware_stacks() -> None:
    async def main() -> None:
        port = through(Port, through(Port, Adder(), DoubleAlone()), Everything())
        assert await port.double(4) == -7

    asyncio.run(main())


@pytest.mark.parametrize(
    ("protocol", "streams", "others"),
    [
        (PrefillPort, set(), set()),
        (DecodePort, {"generate"}, set()),
        (PeerPort, {"offers"}, set()),
        (ServingPath, {"stream"}, {"resume", "end"}),
    ],
)
def test_a_ports_streams_are_known_by_its_protocol(
    protocol: type, streams: set[str], others: set[str]
) -> None:
    methods = dict(port_methods(protocol))
    assert {name for name, kind in methods.items() if kind == "stream"} == streams
    assert {name for name, kind in methods.items() if not kind} == others
    assert len(methods) >= 3
