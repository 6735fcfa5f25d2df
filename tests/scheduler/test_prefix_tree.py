"""The prefix tree against a naive model of it, and against other people's hit rates."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jdisagg.router.prefix_index import Numbering, PrefixIndex
from jdisagg.scheduler.prefix_tree import EVENT_LIMIT, PrefixError, PrefixTree, page_hashes

BLOCKS = (
    Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "mooncake_synthetic_blocks.csv.gz"
)


def chain(path: str) -> list[int]:
    """'abc' -> hashes of 'a', 'ab', 'abc': a page is known by all that leads to it."""
    return [int.from_bytes(path[: end + 1].encode()) for end in range(len(path))]


PATHS = st.text("ab", min_size=1, max_size=5)


class TreeAgainstNaiveModel(RuleBasedStateMachine):
    """The naive model: for each page its holders' count and when it was used last; eviction
    searches for the least."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.index = PrefixIndex()
        self.references: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.clock = 0
        self.fresh = 0

    def known(self, path: str) -> str:
        return next(
            path[:end]
            for end in range(len(path), -1, -1)
            if all(path[:part] in self.references for part in range(1, end + 1))
        )

    @rule(target=held, path=PATHS)
    def insert(self, path: str) -> str:
        numbers = [self.fresh + end for end in range(len(path))]
        self.fresh += len(path)
        surplus = [number for end, number in enumerate(numbers, 1) if path[:end] in self.references]
        assert list(self.tree.insert(chain(path), numbers)) == surplus
        for end, number in enumerate(numbers, 1):
            self.references[path[:end]] = self.references.get(path[:end], 0) + 1
            self.numbers.setdefault(path[:end], number)
        return path

    @rule(target=held, path=PATHS)
    def hold(self, path: str) -> str:
        known = self.known(path)
        assert self.tree.match(chain(path)) == len(known)
        assert self.tree.hold(chain(path)) == tuple(
            self.numbers[known[:end]] for end in range(1, len(known) + 1)
        )
        for end in range(1, len(known) + 1):
            self.references[known[:end]] += 1
        return known

    @rule(path=consumes(held))
    def release(self, path: str) -> None:
        assert self.tree.release(chain(path)) == ()
        for end in range(1, len(path) + 1):
            self.references[path[:end]] -= 1
        # What is still held is used until its last holder lets go: then it is counted as used.
        for end in range(len(path), 0, -1):
            if not self.references[path[:end]]:
                self.clock += 1
                self.used[path[:end]] = self.clock

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        expected = []
        for _ in range(count):
            free = [path for path, references in self.references.items() if not references]
            leaves = [
                path
                for path in free
                if not any(other != path and other.startswith(path) for other in self.references)
            ]
            assert bool(free) == bool(leaves)
            if leaves:
                oldest = min(leaves, key=self.used.__getitem__)
                expected.append(self.numbers.pop(oldest))
                del self.references[oldest]
        assert list(self.tree.evict(count)) == expected

    @rule()
    def tell_the_index(self) -> None:
        assert self.index.apply("w", self.tree.take_events())
        assert len(self.index) == len(self.tree)

    @invariant()
    def the_tree_is_the_model(self) -> None:
        assert {chain(path)[-1]: references for path, references in self.references.items()} == {
            page_hash: self.tree.references(page_hash) for page_hash in self.tree
        }
        assert self.tree.evictable == sum(not references for references in self.references.values())
        assert all(references >= 0 for references in self.references.values())

    @invariant()
    def every_known_page_has_its_parent(self) -> None:
        assert all(path[:-1] in self.references for path in self.references if len(path) > 1)


TestTreeAgainstNaiveModel = TreeAgainstNaiveModel.TestCase
TestTreeAgainstNaiveModel.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)


def test_references_are_never_negative() -> None:
    tree = PrefixTree()
    tree.insert(chain("ab"), (0, 1))
    tree.release(chain("ab"))
    with pytest.raises(PrefixError, match="more often than it was held"):
        tree.release(chain("ab"))


def test_a_held_page_is_never_evicted() -> None:
    tree = PrefixTree()
    tree.insert(chain("abc"), (0, 1, 2))
    tree.release(chain("abc"))
    tree.hold(chain("ab"))
    assert tree.evict(3) == (2,)
    assert tree.match(chain("abc")) == 2


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    tree = PrefixTree()
    tree.insert(chain("abc"), (0, 1, 2))
    tree.insert(chain("axy"), (3, 4, 5))
    tree.release(chain("axy"))
    tree.release(chain("abc"))
    assert tree.evict(9) == (5, 4, 2, 1, 0)


def test_a_page_number_is_stored_once() -> None:
    tree = PrefixTree()
    tree.insert(chain("a"), (7,))
    with pytest.raises(PrefixError, match="page 7 is in the tree already"):
        tree.insert(chain("b"), (7,))


def test_of_two_equal_pages_the_first_stays_and_the_second_comes_back() -> None:
    tree = PrefixTree()
    assert tree.insert(chain("ab"), (0, 1)) == ()
    assert tree.insert(chain("abc"), (0, 5, 6)) == (5,)
    assert tree.hold(chain("abc")) == (0, 1, 6)


def test_capacity_is_kept_when_holders_let_go() -> None:
    tree = PrefixTree(capacity=2)
    tree.insert(chain("abc"), (0, 1, 2))
    assert len(tree) == 3
    assert tree.release(chain("abc")) == (2,)
    assert len(tree) == 2


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 7))
def test_hashes_are_of_full_pages_and_chained(tokens: list[int], page_size: int) -> None:
    hashes = page_hashes(tokens, page_size)
    assert len(hashes) == len(tokens) // page_size
    assert page_hashes(tokens + [1], page_size)[: len(hashes)] == hashes
    if hashes:
        other = page_hashes([tokens[0] ^ 1, *tokens[1:]], page_size)
        assert not set(other) & set(hashes)


def test_tenants_do_not_share_pages() -> None:
    assert not set(page_hashes(range(64), 16, "one")) & set(page_hashes(range(64), 16, "two"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["p0", "p1", "p2"]), PATHS), max_size=40), PATHS)
def test_events_replayed_give_the_same_pages(uses: list[tuple[str, str]], asked: str) -> None:
    trees = {name: PrefixTree(capacity=6) for name in ("p0", "p1", "p2")}
    index = PrefixIndex()
    for name, path in uses:
        trees[name].touch(chain(path))
        assert index.apply(name, trees[name].take_events())
    expected = {name: tree.match(chain(asked)) for name, tree in trees.items()}
    assert dict(index.matches(chain(asked))) == {
        name: count for name, count in expected.items() if count
    }
    assert len(index) == len({page_hash for tree in trees.values() for page_hash in tree})


def test_an_index_that_missed_events_says_so_and_is_mended_by_a_snapshot() -> None:
    tree, index = PrefixTree(), PrefixIndex()
    tree.touch(chain("ab"))
    tree.take_events()
    tree.touch(chain("abc"))
    assert not index.apply("w", tree.take_events())
    assert index.matches(chain("abc")) == {}
    index.replace("w", tree.snapshot())
    assert index.matches(chain("abc")) == {"w": 3}
    tree.evict(1)
    events = tree.take_events()
    assert index.apply("w", events) and index.apply("w", events)
    assert index.matches(chain("abc")) == {"w": 2}


def test_events_that_nobody_takes_do_not_pile_up_and_the_gap_is_noticed() -> None:
    tree, index = PrefixTree(capacity=2), PrefixIndex()
    for page in range(EVENT_LIMIT):
        tree.touch([page])
    events = tree.take_events()
    assert len(events) <= EVENT_LIMIT
    assert not index.apply("w", events)
    index.replace("w", tree.snapshot())
    assert index.matches([EVENT_LIMIT - 1]) == {"w": 1}


def test_a_forgotten_worker_leaves_nothing_and_its_place_is_used_again() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        tree = PrefixTree()
        tree.touch(chain("xy"))
        index.apply(name, tree.take_events())
    index.forget("a")
    index.forget("a")
    assert index.matches(chain("xy")) == {"b": 2}
    index.replace("c", (4, frozenset(chain("x"))))
    assert index.matches(chain("xy")) == {"b": 2, "c": 1}
    index.forget("b")
    index.forget("c")
    assert len(index) == 0


def test_indices_of_one_numbering_give_each_worker_a_number_of_its_own() -> None:
    numbering = Numbering()
    one, other = PrefixIndex(numbering=numbering), PrefixIndex(numbering=numbering)
    one.replace("a", (1, frozenset(chain("xy"))))
    other.replace("b", (1, frozenset(chain("x"))))
    one.replace("c", (1, frozenset(chain("xyz"))))
    found, rest = one.matches(chain("xyz")), other.matches(chain("xyz"))
    assert (found, rest) == ({"a": 2, "c": 3}, {"b": 1})
    assert found.roster is rest.roster
    assert (found + rest).counts.tolist() == [2, 1, 3]
    one.forget("a")
    other.replace("d", (1, frozenset(chain("xy"))))
    assert other.matches(chain("xy")).roster.names == ("d", "b", "c")
    assert found == {"a": 2, "c": 3}, "what was found before is as it was"
    assert found.get("a") == 2 and "d" not in found and found.get("nobody", 7) == 7
    with pytest.raises(KeyError):
        found["b"]


def naive_hits(requests: list[list[int]], capacity: int, children_first: bool) -> int:
    """Blocks known in a row from the first on, of a list that is searched; used last at its end."""
    cache: list[int] = []
    hits = 0
    for blocks in requests:
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks) if children_first else blocks:
            if block in cache:
                cache.remove(block)
            cache.append(block)
        del cache[: max(0, len(cache) - capacity)]
    return hits


@pytest.mark.parametrize("children_first", [True, False])
@pytest.mark.parametrize("capacity", [100, 1000])
def test_hits_on_a_real_trace_are_those_of_a_naive_cache(
    capacity: int, children_first: bool
) -> None:
    with gzip.open(BLOCKS, "rt") as lines:
        requests = [[int(block) for block in line.split(",")] for line in lines][:300]
    tree, index = PrefixTree(capacity, children_first=children_first), PrefixIndex()
    hits = 0
    for blocks in requests:
        hits += index.matches(blocks).get("w", 0)
        tree.touch(blocks)
        assert index.apply("w", tree.take_events())
        assert len(tree) <= capacity
    assert hits == naive_hits(requests, capacity, children_first) > 0
