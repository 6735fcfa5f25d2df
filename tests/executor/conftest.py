"""One pair of meshes for all tests that need no other: its programs are compiled once."""

from collections.abc import Iterator

import pytest

from tests.executor.meshes import Pair


@pytest.fixture(scope="package")
def shared_pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def two(shared_pair: Pair) -> Pair:
    shared_pair.forget()
    return shared_pair
