"""Tails of answers that gave way: which sequence finds one."""

from jdisagg.scheduler.block_names import Tail, Tails


def tail(stem: bytes = b"s" * 32, answer: tuple[int, ...] = (1, 2, 3)) -> Tail:
    return Tail.of(stem, 16, 18 + len(answer), answer)


def test_a_tail_is_found_by_a_sequence_that_has_its_first_tokens_alone() -> None:
    tails, one, other = Tails(), tail(), tail(b"t" * 32)
    for left in (one, other):
        tails.add(left)
    assert one.name != other.name and one.tokens == 5
    for known in ((), (1,), (1, 2), (1, 2, 3)):
        assert tails.find(one.stem, known) == one
    for unknown in ((1, 2, 3, 4), (2,), (1, 3)):
        assert tails.find(one.stem, unknown) is None
    assert tails.find(b"u" * 32, (1,)) is None
    tails.add(longer := tail(answer=(1, 2, 3, 4)))
    assert tails.find(one.stem, (1, 2)) == longer, "the newest"
    tails.clear()
    assert not len(tails) and tails.find(one.stem, ()) is None


def test_tails_found_last_are_forgotten_last() -> None:
    tails = Tails(most=2)
    first, second, third = (tail(bytes([number]) * 32) for number in range(3))
    tails.add(first)
    tails.add(second)
    assert tails.find(first.stem, ()) == first
    tails.add(third)
    assert len(tails) == 2
    assert tails.find(second.stem, ()) is None
    assert tails.find(first.stem, ()) == first
    tails.add(first)
    assert len(tails) == 2, "each is there once"
