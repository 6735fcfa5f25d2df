"""Tails: the KV of sequences that gave way, after their last full block.

A tail stays cached beside the full blocks, in pages or in host memory, so that the sequence goes on
without computing anything again. It is a block of its own, shorter than others, and is found by
what precedes it (its stem) and its tokens of the answer. Routers do not know tails. The sequence
that finds one takes it, because it writes further positions to the same pages.

Invariants (each is a test of the same name in tests/scheduler/test_tails.py):
- a_tail_is_found_by_a_sequence_that_has_its_first_tokens_alone
- tails_found_last_are_forgotten_last
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from jdisagg.plain import plain

MOST_TAILS = 1 << 12  # that a worker remembers


@plain
class Tail:
    """The KV of the positions [start, end) of a sequence.

    Attributes:
        name: Hash of the stem and the answer. No block has the same name.
        stem: Hash of the blocks before `start` and of the prompt's tokens after it.
        answer: Tokens of the answer among the positions.
    """

    name: bytes
    stem: bytes
    start: int
    end: int
    answer: tuple[int, ...]

    @classmethod
    def of(cls, stem: bytes, start: int, end: int, answer: Sequence[int]) -> "Tail":
        tokens = tuple(answer)
        content = b"".join([token.to_bytes(8, "little") for token in tokens])
        name = blake2b(content, key=stem, digest_size=len(stem), person=b"jdisagg tail")
        return cls(name.digest(), stem, start, end, tokens)

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Tails:
    """The tails that sequences left lately. Their KV may be gone since."""

    def __init__(self, most: int = MOST_TAILS) -> None:
        self._most = most
        self._by_name: OrderedDict[bytes, Tail] = OrderedDict()  # longest unused first
        self._by_stem: dict[bytes, list[Tail]] = {}  # newest last

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, tail: Tail) -> None:
        self.forget(tail.name)
        self._by_name[tail.name] = tail
        self._by_stem.setdefault(tail.stem, []).append(tail)
        if len(self._by_name) > self._most:
            self.forget(next(iter(self._by_name)))

    def find(self, stem: bytes, answer: Sequence[int]) -> Tail | None:
        """Returns the newest tail after `stem` whose answer begins with `answer`. The sequence that
        left it may have generated more tokens than its client received."""
        wanted = tuple(answer)
        for tail in reversed(self._by_stem.get(stem, ())):
            if tail.answer[: len(wanted)] == wanted:
                self._by_name.move_to_end(tail.name)
                return tail
        return None

    def forget(self, name: bytes) -> None:
        tail = self._by_name.pop(name, None)
        if tail is not None:
            of_stem = self._by_stem[tail.stem]
            of_stem.remove(tail)
            if not of_stem:
                del self._by_stem[tail.stem]

    def clear(self) -> None:
        self._by_name.clear()
        self._by_stem.clear()
