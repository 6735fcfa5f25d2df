"""The slots of LoRA adapters: one adapter in a slot, and a used adapter keeps its slot."""

import random

from jdisagg.request import Adapter, Request
from jdisagg.scheduler.prompt_room import AdapterTable


def of(digest: str) -> Request:
    return Request("r", (1,), adapter=Adapter(digest, "/", digest))


def test_the_least_recently_used_adapter_leaves_unless_it_is_used() -> None:
    table = AdapterTable(2)
    for digest in ("a", "b"):
        table.take(digest, ())
        table.load_ended(digest, loaded=True)
    table.use("a")
    assert table.take("c", {"b"}) == 1, "b was used less recently, but is in use"
    assert "a" not in table and table.slot_of(of("b")) == 2
    assert table.take("d", {"b"}) is None, "c is being loaded"
    table.load_ended("c", loaded=False)
    assert table.take("d", {"b"}) == 1, "a load that failed leaves the slot free"


def test_a_request_without_an_adapter_has_slot_0() -> None:
    assert AdapterTable(0).slot_of(Request("r", (1,))) == 0


def test_a_slot_holds_one_adapter_and_a_used_adapter_keeps_its_slot() -> None:
    rng, table = random.Random(3), AdapterTable(3)
    loading: list[str] = []
    for _ in range(2000):
        used = set(rng.sample(table.loaded, min(len(table.loaded), rng.randint(0, 3))))
        before = {digest: table.slot_of(of(digest)) for digest in used}
        digest = str(rng.randint(0, 9))
        if loading and rng.random() < 0.5:
            table.load_ended(loading.pop(0), loaded=rng.random() < 0.8)
        elif digest in table:
            table.use(digest)
        elif digest not in loading and table.take(digest, used) is not None:
            loading.append(digest)
        assert {digest: table.slot_of(of(digest)) for digest in used} == before
        slots = [table.slot_of(of(digest)) for digest in table.loaded]
        assert len(set(slots)) == len(slots) and set(slots) <= {1, 2, 3}
        assert len(slots) + len(loading) <= 3
    assert table.evictions > 100
