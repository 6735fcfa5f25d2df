"""One engine for all tests that need no other: its programs are compiled once."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from jdisagg.engine.research.face import Engine
from jdisagg.engine.research.kv_cache import KVCache
from tests.engine.research.research_engines import (
    NAME,
    TP4,
    EngineOf,
    Expected,
    hugging_face,
    ledgers,
    open_engine,
)


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    with open_engine(NAME, fingerprint="f00d") as engine:
        yield engine
        for ledger in ledgers(engine):
            assert ledger.free_pages == ledger.total_pages


@pytest.fixture(scope="package")
def golden() -> Expected:
    return hugging_face(NAME)


@pytest.fixture(scope="package")
def kv(engine: Engine, golden: Expected) -> KVCache:
    """Of the prompt: 24 tokens, in blocks of 16 and 8."""
    return engine.prefill(golden.prompt, layout=TP4)


@pytest.fixture
def engine_of(engine: Engine) -> EngineOf:
    """An engine of a golden checkpoint, which a test has for itself if it is another than the
    shared one."""
    return lambda name: nullcontext(engine) if name == NAME else open_engine(name)
