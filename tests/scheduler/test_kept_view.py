"""The list of what stays, against what goes when room is needed, and against what lies there."""

from jdisagg.messages.ports import Offer
from jdisagg.scheduler.disk_blocks import DiskBlocks
from jdisagg.scheduler.host_blocks import HostBlocks, HostPiece
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.residency import BlockNames, Chain, Residency
from jdisagg.worker.cached_kv import KeptBlock, kept_blocks
from tests.fakes.cluster import toy_request

PAGE, GRAIN = 4, 8
REQUEST = toy_request(0)


def a_mesh(pages: int = 12) -> tuple[Residency, PageLedger]:
    """Of blocks of two pages."""
    ledger = PageLedger(pages)
    return Residency([ledger], PAGE, BlockNames(b"secret", "model", GRAIN)), ledger


def left(kept: Residency, owner: int, token: int, blocks: int) -> Chain:
    """A sequence of one token over and over came and went."""
    chain = kept.chain(REQUEST, (token,) * blocks * GRAIN)
    kept.reserve(0, owner, chain, 0, 2 * blocks)
    kept.let_go(0, owner, chain)
    return chain


def shown(name: bytes) -> str:
    return name.hex()[:16]


def test_blocks_in_pages_are_listed_in_the_order_in_which_they_go() -> None:
    kept, ledger = a_mesh()
    first, second, third = (left(kept, owner, owner, 2) for owner in (1, 2, 3))
    _, held = kept.hold(0, first[:1])  # used, and in use still
    kept.reserve(0, 8, second, 2 * GRAIN, 4)
    kept.let_go(0, 8, second)  # used later than the third
    listed = list(kept_blocks("w", kept, {}))
    expected = [first[1], third[1], third[0], second[1], second[0], first[0]]
    assert [block.name for block in listed] == [shown(name) for name in expected]
    assert [block.index for block in listed] == [1, 1, 0, 1, 0, 0]
    assert [block.in_use for block in listed] == [False] * 5 + [True]
    assert {(block.worker, block.tier, block.rank, block.tokens) for block in listed} == {
        ("w", "pages", 0, GRAIN)
    }
    assert ledger.reserve(7, ledger.free_pages) is not None and len(held) == 2
    gone = [shown(one.name) for one in kept.take_evicted()]
    assert gone == [block.name for block in listed if not block.in_use]


def test_what_lies_in_host_memory_and_on_disk_is_listed_by_last_use_and_looking_is_no_use() -> None:
    kept, _ = a_mesh()
    chain = left(kept, 1, 5, 3)
    host, disk = HostBlocks(8), DiskBlocks(8)
    for index, name in enumerate(chain):
        pieces = (HostPiece(Offer(index, 0, index * GRAIN, GRAIN, GRAIN, 0)),)
        block, _ = host.begin(name, pieces, index=index)
        assert block is not None
        if index < 2:
            host.written(block, pieces)
    host.let_go(host.hold(chain[:1]))  # used just now
    disk.found({chain[2]: 0.0, chain[1]: 0.0})  # used longest ago first
    (reading,) = disk.hold(chain[1:2])
    for _ in range(2):
        tiers = {"host": host.listed(), "disk": disk.listed()}
        listed = list(kept_blocks("w", kept, tiers))
        assert [
            (one.tier, one.name, one.index, one.in_use) for one in listed if one.tier != "pages"
        ] == [
            ("host", shown(chain[1]), 1, False),
            ("host", shown(chain[2]), 2, True),  # on its way
            ("host", shown(chain[0]), 0, False),
            ("disk", shown(chain[2]), 0, False),
            ("disk", shown(chain[1]), 0, True),
        ]
    assert reading.readers == 1


def test_nothing_is_listed_where_nothing_stays() -> None:
    assert list(kept_blocks("w", Residency([PageLedger(4)], PAGE), {})) == []
    assert list[KeptBlock](kept_blocks("w", a_mesh()[0], {})) == []
