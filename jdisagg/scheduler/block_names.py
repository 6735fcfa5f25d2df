"""Names of cached blocks, and of the tails behind them.

A block's name is a keyed 32-byte hash of its tokens and the preceding block's name. So a name
identifies the block, its images, and all tokens before it, and blocks of two namespaces never have
the same name. With a shorter hash, or without a key, a client could construct collisions.

A tail is the KV of a sequence that gave way, after its last full block. It stays cached beside the
full blocks, in pages or in host memory, so that the sequence goes on without computing anything
again. It is a block of its own, shorter than others, and is found by what precedes it (its stem)
and its tokens of the answer. Routers do not know tails. The sequence that finds one takes it,
because it writes further positions to the same pages.

Invariants (each is a test of the same name in tests/scheduler/test_tails.py):
- a_tail_is_found_by_a_sequence_that_has_its_first_tokens_alone
- tails_found_last_are_forgotten_last
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from jdisagg.config import PrefixConfig
from jdisagg.messages.kept_blocks import named_model
from jdisagg.plain import plain
from jdisagg.prompt.images import block_content
from jdisagg.request import Request

NAME_BYTES = 32
MOST_TAILS = 1 << 12  # that a worker remembers

Chain = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Computes the names (hashes) of cached blocks, which are equal on all workers of a cluster.

    Args:
        secret: Key of the hashes, up to 64 bytes. Names reveal nothing about prompts to anyone
            without the key.
        model: Model fingerprint and KV dtype. Workers can share KV only if both are equal.
        grid_tokens: Prompts are split between chunks, and prefill starts after cached blocks, only
            at multiples of this number of tokens; None means the block size. If it equals the
            largest chunk, a cache hit runs the same programs on the same rows as a miss, so results
            are bit-identical. If it is set, KV of decode steps is not cached, because decode steps
            round differently from prefill.
    """

    secret: bytes
    model: str
    grain_tokens: int = 128
    grid_tokens: int | None = None
    weights: str = ""

    @classmethod
    def of(cls, config: PrefixConfig, secret: bytes, model: str) -> "BlockNames | None":
        if not config.reuse:
            return None
        return cls(secret, model, config.grain_tokens, config.grid_tokens)

    @property
    def cut_tokens(self) -> int:
        return self.grid_tokens or self.grain_tokens

    def chain(
        self, request: Request, tokens: Sequence[int], block_tokens: int, known: Chain = ()
    ) -> Chain:
        known = known[: len(tokens) // block_tokens]
        content = np.asarray(tokens[len(known) * block_tokens :], "<u4").tobytes()
        step, every = 4 * self.grain_tokens, block_tokens // self.grain_tokens
        link, names = known[-1] if known else self._root(request), []
        first = len(known) * block_tokens
        for end in range(step, len(content) + 1, step):
            part = content[end - step : end]
            if request.images:
                stop = first + end // 4
                part += block_content(request.images, stop - self.grain_tokens, stop)
            link = blake2b(part, key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return (*known, *names[every - 1 :: every])

    def stem(self, request: Request, chain: Chain, start: int) -> bytes:
        """Returns a hash of the blocks of `chain`, which end at position `start`, and of the
        prompt's tokens and images after it."""
        prompt = request.prompt_token_ids
        content = np.asarray(prompt[start:], "<u4").tobytes()
        if request.images:
            content += block_content(request.images, start, max(start, len(prompt)))
        link = chain[-1] if chain else self._root(request)
        stem = blake2b(content, key=link, digest_size=NAME_BYTES, person=b"jdisagg stem")
        return stem.digest()

    def digest(self, purpose: bytes, *parts: str) -> bytes:
        """Returns a hash of the model and of `parts`, keyed with the secret. Different values of
        `purpose` (up to 16 bytes) give unrelated hashes. Each part is hashed together with its
        length, so different lists of parts never have the same input."""
        root = blake2b(key=self.secret, digest_size=NAME_BYTES, person=purpose)
        model = named_model(self.model, self.weights)
        for part in (model, str(self.grain_tokens), *parts):
            text = part.encode("utf-8", "surrogatepass")
            root.update(len(text).to_bytes(8, "little") + text)
        return root.digest()

    def _root(self, request: Request) -> bytes:
        adapter = () if request.adapter is None else (request.adapter.digest,)
        return self.digest(b"jdisagg kv", request.tenant, request.cache_scope, *adapter)


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
