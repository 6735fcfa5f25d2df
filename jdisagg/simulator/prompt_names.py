"""Computes block names of simulated prompts, which have no tokens, from the workload's names.

A simulated prompt has a length and no text. A trace names a prompt's blocks of `block_tokens`
positions; equal names mean that all tokens up to the block's end are equal. `PromptNames` converts
these names to the keyed chain that live workers compute from tokens (`scheduler/residency.py`), in
the fleet's block size, for the live prefix caches and the router's index. A block's name is made of
all trace blocks that the block overlaps. If the workload also names the answer's blocks, decode
workers cache generated tokens.

Invariant: blocks beyond the workload's names have no name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from jdisagg.request import Request
from jdisagg.scheduler.residency import NAME_BYTES, BlockNames, Chain
from jdisagg.simulator.workloads import Arrival


class PromptBook:
    """Trace blocks of `block_tokens` tokens, and computed chains, by id of running request."""

    def __init__(self, block_tokens: int = 512) -> None:
        self.block_tokens = block_tokens
        self.chains: dict[str, Chain] = {}
        self._arrivals: dict[str, Arrival] = {}

    def add(self, request_id: str, arrival: Arrival) -> None:
        if arrival.block_hashes:
            self._arrivals[request_id] = arrival

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended. Idempotent."""
        self._arrivals.pop(request_id, None)
        self.chains.pop(request_id, None)

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """Returns the names of a request's blocks and the positions that they cover."""
        arrival = self._arrivals.get(request_id)
        if arrival is None:
            return (), 0
        names, size = arrival.block_hashes, self.block_tokens
        prompts = -(-arrival.prompt_tokens // size)  # the last one may be shorter
        return names, arrival.prompt_tokens if len(names) == prompts else len(names) * size


@dataclass(frozen=True, slots=True)
class PromptNames(BlockNames):
    """Implements `BlockNames` for a simulated fleet. `book`: blocks of the running requests."""

    book: PromptBook = field(default_factory=PromptBook)

    def chain(
        self, request: Request, tokens: Sequence[int], block_tokens: int, known: Chain = ()
    ) -> Chain:
        """Implements `BlockNames.chain`, but uses only the number of `tokens`. Returns `known` for
        a request that has ended."""
        whole = self.book.chains.get(request.request_id)
        if whole is None:
            whole = self._named(request)
            if whole:
                self.book.chains[request.request_id] = whole
        count, every = len(tokens) // block_tokens, block_tokens // self.grain_tokens
        named = whole[every - 1 : count * every : every]
        return named if len(named) >= len(known[:count]) else known[:count]

    def _named(self, request: Request) -> Chain:
        """Returns the chain of all blocks that the workload names."""
        blocks, tokens = self.book.blocks(request.request_id)
        if not blocks:
            return ()
        grain, size = self.grain_tokens, self.book.block_tokens
        link, names = self._root(request), []
        for start in range(0, tokens - grain + 1, grain):
            covered = blocks[start // size : (start + grain - 1) // size + 1]
            content = repr(covered).encode()
            link = blake2b(content, key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return tuple(names)
