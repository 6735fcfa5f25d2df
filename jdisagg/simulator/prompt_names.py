"""How blocks of simulated prompts are named: by what the workload says of them, in place of tokens.

A simulated prompt has a length and no text. A trace names its blocks of `block_tokens` positions
(equal names mean equal tokens so far); `PromptNames` makes of these the same keyed chain that live
workers make of tokens (`scheduler/residency.py`), in the fleet's own grain, so that the live trees,
records and index know simulated blocks as they know any. A block of the grain is named by the names
of all blocks of the trace that it lies in. Beyond what the workload names nothing is known: where
it names an answer's blocks too, behind the prompt's, a decode worker keeps what it generated.

Knows requests that are under way by their ids. Invariant: names say no more than the workload
does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from jdisagg.request import Request
from jdisagg.scheduler.residency import NAME_BYTES, BlockNames, Chain
from jdisagg.simulator.workloads import Arrival


class PromptBook:
    """What the requests under way are made of, in blocks of `block_tokens`; and their names, once
    somebody has asked for them."""

    def __init__(self, block_tokens: int = 512) -> None:
        self.block_tokens = block_tokens
        self.chains: dict[str, Chain] = {}
        self._arrivals: dict[str, Arrival] = {}

    def add(self, request_id: str, arrival: Arrival) -> None:
        if arrival.block_hashes:
            self._arrivals[request_id] = arrival

    def forget(self, request_id: str) -> None:
        """It has ended. Idempotent."""
        self._arrivals.pop(request_id, None)
        self.chains.pop(request_id, None)

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """The names of a request's blocks, and how many positions they tell of."""
        arrival = self._arrivals.get(request_id)
        if arrival is None:
            return (), 0
        names, size = arrival.block_hashes, self.block_tokens
        prompts = -(-arrival.prompt_tokens // size)  # the last one may be shorter
        return names, arrival.prompt_tokens if len(names) == prompts else len(names) * size


@dataclass(frozen=True, slots=True)
class PromptNames(BlockNames):
    """`BlockNames` of a simulated fleet. `book`: what requests are made of."""

    book: PromptBook = field(default_factory=PromptBook)

    def chain(
        self, request: Request, tokens: Sequence[int], block_tokens: int, known: Chain = ()
    ) -> Chain:
        """As `BlockNames.chain`; of `tokens` the number alone counts. What is known of a request
        that has ended is not named any further."""
        whole = self.book.chains.get(request.request_id)
        if whole is None:
            whole = self._named(request)
            if whole:
                self.book.chains[request.request_id] = whole
        count, every = len(tokens) // block_tokens, block_tokens // self.grain_tokens
        named = whole[every - 1 : count * every : every]
        return named if len(named) >= len(known[:count]) else known[:count]

    def _named(self, request: Request) -> Chain:
        """Of all its grains that the workload tells of."""
        blocks, tokens = self.book.blocks(request.request_id)
        if not blocks:
            return ()
        grain, size = self.grain_tokens, self.book.block_tokens
        link, names = self._root(request), []
        for start in range(0, tokens - grain + 1, grain):
            said = blocks[start // size : (start + grain - 1) // size + 1]
            content = repr(said).encode()
            link = blake2b(content, key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return tuple(names)
