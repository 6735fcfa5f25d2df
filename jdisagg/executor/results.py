"""Classes for the results of commands. The dispatch thread creates them from device arrays without
blocking. The completion thread waits for the arrays and converts them to plain data."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import jax
import msgspec
import numpy as np

from jdisagg.executor.block_sums import ChunkSums, Found
from jdisagg.executor.choose import Chosen, read_row
from jdisagg.executor.expert_reader import ExpertArrays
from jdisagg.executor.prompt_scorer import read_scores
from jdisagg.messages.step_commands import (
    NO_TOKEN,
    BlockChecksum,
    DecodeResult,
    DecodeSteps,
    Done,
    ExtractResult,
    InsertResult,
    PrefillChunk,
    PrefillResult,
    PullResult,
    SampledToken,
)
from jdisagg.request import TokenLogprobs
from jdisagg.transfer.channel import Pull, is_ready
from jdisagg.transfer.host_store import HostCopy

Tokens = tuple[int, ...]


def start_reading(arrays: Iterable[jax.Array | None]) -> None:
    """Starts to copy arrays to the host, so that the copies overlap with other work."""
    # Only this code may read from devices, so that a transfer guard can forbid all other reads.
    with jax.transfer_guard_device_to_host("allow"):
        for array in arrays:
            if array is not None:
                array.copy_to_host_async()


@dataclass
class Finished:
    step: int
    in_order: bool = True

    def is_ready(self) -> bool:
        return True

    def result(self) -> Done:
        return Done(self.step)


@dataclass
class PrefillReading:
    """The result of a prefill chunk: sampled tokens, checksums of offered blocks, and requested
    log-probabilities of prompts. For a chunk without samples, reading waits for the activations of
    the last layer."""

    command: PrefillChunk
    last: jax.Array
    chosen: Chosen | None
    sums: ChunkSums
    in_order: bool = True
    scores: tuple[jax.Array, ...] = ()  # of `PromptScorer.run`
    experts: dict[int, ExpertArrays] = field(default_factory=dict)  # by sequence

    def is_ready(self) -> bool:
        last = self.last if self.chosen is None else self.chosen.token
        experts = [array for one in self.experts.values() for array in one.parts]
        return all(map(is_ready, (last, *self.sums.groups, *self.scores, *experts)))

    def result(self) -> PrefillResult:
        prompts = read_scores(self.command, self.scores) if self.scores else ()
        if self.chosen is None:
            self.last.block_until_ready()
            return PrefillResult(self.command.step, (), self.sums.read(), prompts)
        host = _Host(StepChoice((self.chosen,)))
        samples: list[SampledToken] = []
        used: dict[int, int] = {}
        for row in self.command.rows:
            for spec in row.samples:
                column = used.get(row.rank, 0)
                used[row.rank] = column + 1
                token = host.token(row.rank, column)
                logprobs = host.logprobs((row.rank, column), spec.sampling.logprobs)
                if logprobs is not None and row.sequence in self.experts:
                    read, count = self.experts[row.sequence], row.start + len(row.tokens)
                    experts = read.record(read.host(row.rank)[:count])
                    logprobs = msgspec.structs.replace(logprobs, experts=experts)
                samples.append(SampledToken(row.sequence, spec.child, token, logprobs))
        return PrefillResult(self.command.step, tuple(samples), self.sums.read(), prompts)


@dataclass
class BlockReading:
    """`copy` is the block's copy to host memory, or None."""

    step: int
    offer_id: int
    found: jax.Array
    extracted: bool = False
    in_order: bool = True
    copy: HostCopy | None = None

    def is_ready(self) -> bool:
        return is_ready(self.found) and (self.copy is None or self.copy.is_ready())

    def result(self) -> InsertResult | ExtractResult:
        if self.copy is not None:
            self.copy.done.result()
        found = Found.read(self.found)
        if self.extracted:
            return ExtractResult(self.step, BlockChecksum(self.offer_id, found.checksum))
        return InsertResult(self.step, self.offer_id, found.checksum, found.intact)


@dataclass(frozen=True)
class StepChoice:
    """The tokens of one decode step, as device arrays.

    Attributes:
        places: Index of each of the step's rows among the rows of all parts, int32 [ranks, rows].
            None if there is one part in the order of the rows.
    """

    parts: tuple[Chosen, ...]
    places: np.ndarray | None = None

    def start_reading(self, scored: bool) -> None:
        for part in self.parts:
            start_reading(part if scored else (part.token,))

    def is_ready(self) -> bool:
        return all(is_ready(part.token) for part in self.parts)

    def read(self, field: int) -> np.ndarray:
        """Returns field number `field` of `Chosen` for the step's rows. Blocks until it is
        computed."""
        arrays = [jax.device_get(part[field]) for part in self.parts]
        if self.places is None:
            return arrays[0]
        # Only parts with drafts have several tokens per row.
        most = max(array.shape[2] for array in arrays)
        filler = NO_TOKEN if field == 0 else 0
        alike = [
            np.pad(
                array,
                [(0, 0), (0, 0), (0, most - array.shape[2])] + [(0, 0)] * (array.ndim - 3),
                constant_values=filler,
            )
            for array in arrays
        ]
        rank = np.arange(len(self.places))[:, None]
        return np.concatenate(alike, axis=1)[rank, self.places]


@dataclass
class DecodeReading:
    """The tokens of one or more decode steps, which are read together. `wanted` is, for each row,
    the number of most likely tokens whose log-probabilities the request asks for, or None for
    none; empty if no row asks. `experts` are those of the last positions of each slot."""

    command: DecodeSteps
    steps: list[StepChoice]
    wanted: tuple[tuple[int | None, ...], ...]
    experts: ExpertArrays | None = None
    in_order: bool = True

    @property
    def scored(self) -> bool:
        return any(count is not None for row in self.wanted for count in row)

    def is_ready(self) -> bool:
        experts = self.experts.parts if self.experts else []
        return self.steps[-1].is_ready() and all(map(is_ready, experts))

    def result(self) -> DecodeResult:
        # All tokens are converted at once, because token by token took 2 ms for 8 ranks of 256
        # rows.
        by_step = [step.read(0) for step in self.steps]
        by_rank = np.concatenate(by_step, -1).tolist()
        rows = [(rank, range(len(slots))) for rank, slots in enumerate(self.command.slots)]
        # In a step with drafts, NO_TOKEN fills a row after its last token.
        real: Callable[[Iterable[int]], Tokens] = (
            tuple
            if all(tokens.shape[-1] == 1 for tokens in by_step)
            else lambda row: tuple([token for token in row if token != NO_TOKEN])
        )
        tokens = tuple(tuple(map(real, by_rank[rank][: len(indices)])) for rank, indices in rows)
        if not self.scored:
            return DecodeResult(self.command.step, tokens)
        steps = [_Host(chosen) for chosen in self.steps]
        logprobs = tuple(
            tuple(
                tuple(
                    step.logprobs((rank, row, offset), self.wanted[rank][row])
                    for step in steps
                    for offset in step.offsets(rank, row)
                )
                for row in indices
            )
            for rank, indices in rows
        )
        if self.experts is not None:
            logprobs = self._with_experts(self.experts, tokens, logprobs)
        return DecodeResult(self.command.step, tokens, logprobs)

    def _with_experts(
        self,
        experts: ExpertArrays,
        tokens: tuple[tuple[Tokens, ...], ...],
        logprobs: tuple[tuple[tuple[TokenLogprobs | None, ...], ...], ...],
    ) -> tuple[tuple[tuple[TokenLogprobs | None, ...], ...], ...]:
        """Adds to each row's log-probabilities the experts of the positions before its tokens,
        which are the row's last positions."""
        made: list[tuple[tuple[TokenLogprobs | None, ...], ...]] = []
        for rank, (slots, rows) in enumerate(zip(self.command.slots, logprobs, strict=True)):
            of_slots, of_rank = experts.host(rank), []
            for slot, of_row, row in zip(slots, rows, tokens[rank], strict=True):
                first = of_slots.shape[1] - sum(token != NO_TOKEN for token in row)
                if (rank, slot) not in experts.asked:
                    of_rank.append(of_row)
                    continue
                records = [
                    experts.record(of_slots[slot, at : at + 1])
                    for at in range(first, first + len(of_row))
                ]
                of_rank.append(
                    tuple(
                        one and msgspec.structs.replace(one, experts=record)
                        for one, record in zip(of_row, records, strict=True)
                    )
                )
            made.append(tuple(of_rank))
        return tuple(made)


@dataclass
class MixedReading:
    prefill: PrefillReading
    decode: DecodeReading
    in_order: bool = True

    def is_ready(self) -> bool:
        return self.prefill.is_ready() and self.decode.is_ready()

    def result(self) -> DecodeResult:
        chunk = self.prefill.result()
        return msgspec.structs.replace(self.decode.result(), chunk=chunk)


@dataclass
class PullReading:
    """A failed pull is a result, not an exception, because the worker decides about retries."""

    step: int
    offer_id: int
    pull: Pull
    in_order: bool = False

    def is_ready(self) -> bool:
        return self.pull.is_ready()

    def result(self) -> PullResult:
        error = self.pull.failed()
        return PullResult(
            self.step, self.offer_id, self.pull.bytes_moved, error.message if error else ""
        )


class _Host:
    def __init__(self, chosen: StepChoice) -> None:
        self._chosen, self._token = chosen, chosen.read(0)

    def token(self, rank: int, row: int) -> int:
        return int(self._token[rank, row])

    def offsets(self, rank: int, row: int) -> list[int]:
        own, *others = self._token[rank, row].tolist()
        return [0, *(at for at, token in enumerate(others, 1) if token != NO_TOKEN)]

    @cached_property
    def _scores(self) -> np.ndarray:
        return self._chosen.read(1)

    def logprobs(self, at: tuple[int, ...], wanted: int | None) -> TokenLogprobs | None:
        if wanted is None:
            return None
        logprob, pairs = read_row(self._scores[at], wanted)
        # Masked ids have no log-probability.
        return TokenLogprobs(logprob, tuple(pair for pair in pairs if pair[1] > -math.inf))
