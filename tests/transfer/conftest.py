"""Both ends of the channel between processes, in one process.

A module chooses the backend by a fixture `memories` of its own; without one all goes through the
transfer engine. The in-process suite has `ends` of its own."""

from collections.abc import Iterator

import pytest

from jdisagg.transfer.negotiated_channel import Memories
from tests.transfer.conformance import Ends
from tests.transfer.loopback import Loopback, Pair


@pytest.fixture
def loopback() -> Loopback:
    return Loopback()


@pytest.fixture
def memories() -> tuple[Memories, Memories]:
    return Memories(), Memories()


@pytest.fixture
def pair(loopback: Loopback, memories: tuple[Memories, Memories]) -> Iterator[Pair]:
    pair = Pair.of(loopback, *memories)
    yield pair
    pair.close()


@pytest.fixture
def ends(pair: Pair) -> Ends:
    return pair.ends


@pytest.fixture(scope="module", autouse=True)
def collected_alone(few_objects: None) -> None:
    """Many tests of channels wait until arrays are collected."""
