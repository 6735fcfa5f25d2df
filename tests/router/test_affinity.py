"""The router's index of known beginnings, as placement asks it."""

from jdisagg.request import Request
from jdisagg.router.affinity import PrefixAffinity
from jdisagg.scheduler.prefix_tree import PrefixTree, page_hashes

PAGE = 16


def hashes(request: Request) -> list[int]:
    return page_hashes(request.prompt_token_ids, PAGE, request.tenant)


def request(tokens: int, tenant: str = "", first: int = 0) -> Request:
    return Request("r", tuple(range(first, first + tokens)), tenant=tenant)


def test_workers_are_matched_by_the_positions_that_they_know_and_tenants_share_none() -> None:
    affinity, trees = PrefixAffinity(hashes, PAGE), {name: PrefixTree(100) for name in ("a", "b")}
    assert affinity.matches(hashes(request(100))) == {}
    trees["a"].touch(hashes(request(100)))
    trees["b"].touch(hashes(request(40)))
    assert all(affinity.heard(name, tree.take_events()) for name, tree in trees.items())
    assert affinity.matches(hashes(request(100))) == {"a": 96, "b": 32}
    assert (
        affinity.matches(hashes(request(100, tenant="other")))
        == affinity.matches(hashes(request(100, first=1)))
        == {}
    )
    affinity.forget("a")
    assert affinity.matches(hashes(request(100))) == {"b": 32}


def test_a_gap_in_the_events_is_told_and_healed_by_a_snapshot() -> None:
    affinity, tree = PrefixAffinity(hashes, PAGE), PrefixTree(100)
    tree.touch(hashes(request(64)))
    missed = tree.take_events()
    tree.touch(hashes(request(64, first=1000)))
    assert len(missed) == 4 and not affinity.heard("a", tree.take_events())
    affinity.replace("a", tree.snapshot())
    assert (
        affinity.matches(hashes(request(64)))
        == affinity.matches(hashes(request(64, first=1000)))
        == {"a": 64}
    )
