"""Computes the block hashes of simulated prompts, so that the live prefix caches work without
tokens.

A workload has a number, its *name*, for each block of `block_tokens` tokens of a prompt. Equal
names mean that all tokens up to the block's end are equal. Live workers compute a chain of keyed
hashes from tokens, one for each block of the prefix cache (`scheduler/block_names.py`).
`PromptNames` computes this chain from the workload's names instead.

Invariant: blocks that the workload does not name, such as those of answers, are found by their own
request only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from jdisagg.request import Request
from jdisagg.scheduler.block_names import NAME_BYTES, BlockNames, Chain
from jdisagg.simulator.workloads import Arrival


class PromptBook:
    """Stores, for each running request, the workload's block names and the chain of hashes that was
    computed from them."""

    def __init__(self, block_tokens: int = 512) -> None:
        self.block_tokens = block_tokens
        self.chains: dict[str, Chain] = {}
        self._arrivals: dict[str, Arrival] = {}

    def add(self, request_id: str, arrival: Arrival) -> None:
        self._arrivals[request_id] = arrival

    def forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)
        self.chains.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], int]:
        arrival = self._arrivals[request_id]
        names, size = arrival.block_hashes, self.block_tokens
        prompts = -(-arrival.prompt_tokens // size)  # the last one may be shorter
        return names, arrival.prompt_tokens if len(names) == prompts else len(names) * size


@dataclass(frozen=True, slots=True)
class PromptNames(BlockNames):
    """Computes the names of cached blocks for a simulated fleet."""

    book: PromptBook = field(default_factory=PromptBook)

    def chain(
        self, request: Request, tokens: Sequence[int], block_tokens: int, known: Chain = ()
    ) -> Chain:
        """Returns the hashes of the request's blocks, as `BlockNames.chain`. Only the number of
        `tokens` is used, not their values. For a request that has ended, returns `known`, the part
        of the chain that is already computed."""
        count, every = len(tokens) // block_tokens, block_tokens // self.grain_tokens
        if request.request_id not in self.book:
            return known[:count]
        whole = self.book.chains.get(request.request_id)
        if whole is None or len(whole) < count * every:
            whole = self._extended(request, whole or self._named(request), count * every)
            self.book.chains[request.request_id] = whole
        return whole[every - 1 : count * every : every]

    def _extended(self, request: Request, chain: Chain, count: int) -> Chain:
        link, names = chain[-1] if chain else self._root(request), list(chain)
        while len(names) < count:
            link = blake2b(request.request_id.encode(), key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return tuple(names)

    def _named(self, request: Request) -> Chain:
        blocks, tokens = self.book.blocks(request.request_id)
        grain, size = self.grain_tokens, self.book.block_tokens
        link, names = self._root(request), []
        for start in range(0, tokens - grain + 1, grain):
            covered = blocks[start // size : (start + grain - 1) // size + 1]
            content = repr(covered).encode()
            link = blake2b(content, key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return tuple(names)
