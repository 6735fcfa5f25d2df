"""Classes for the results of commands. The dispatch thread creates them from device arrays without
blocking. The completion thread waits for the arrays and converts them to plain data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.executor.block_sums import ChunkSums, Found
from jdisagg.executor.choose import Chosen
from jdisagg.executor.decode_program import Stepped
from jdisagg.executor.prompt_scorer import read_scores
from jdisagg.messages.step_commands import (
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
from jdisagg.ops.token_scores import TokenScores
from jdisagg.request import TokenLogprobs
from jdisagg.transfer.channel import Pull
from jdisagg.transfer.host_store import HostCopy
from jdisagg.transfer.polled_pull import is_ready

Tokens = tuple[tuple[tuple[int, ...], ...], ...]  # by rank and row


def start_reading(arrays: Iterable[jax.Array | None]) -> None:
    """Starts to copy arrays to the host, so that the copies overlap with other work."""
    # Only this code may read from devices; a transfer guard can forbid all other reads.
    with jax.transfer_guard_device_to_host("allow"):
        for array in arrays:
            if array is not None:
                array.copy_to_host_async()


@dataclass
class Finished:
    """The result of a command that completes when it is issued."""

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
    scores: TokenScores | None = None

    def is_ready(self) -> bool:
        last = self.last if self.chosen is None else self.chosen.token
        scored = self.scores[:1] if self.scores else ()
        return all(map(is_ready, (last, *self.sums.groups, *scored)))

    def result(self) -> PrefillResult:
        prompts = read_scores(self.command, self.scores) if self.scores else ()
        if self.chosen is None:
            self.last.block_until_ready()
            return PrefillResult(self.command.step, (), self.sums.read(), prompts)
        host = _Host(self.chosen)
        samples: list[SampledToken] = []
        used: dict[int, int] = {}
        for row in self.command.rows:
            for spec in row.samples:
                column = used.get(row.rank, 0)
                used[row.rank] = column + 1
                token = host.token(row.rank, column)
                samples.append(
                    SampledToken(
                        row.sequence,
                        spec.child,
                        token,
                        host.logprobs(row.rank, column, spec.sampling.logprobs),
                    )
                )
        return PrefillResult(self.command.step, tuple(samples), self.sums.read(), prompts)


@dataclass
class BlockReading:
    """The result of inserting or extracting a block: its checksum, and whether it is intact. `copy`
    is the block's copy to host memory, or None."""

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


@dataclass
class DecodeReading:
    """The tokens of one or more decode steps, which are all read at once."""

    command: DecodeSteps
    stepped: list[Stepped]
    wanted: tuple[tuple[int | None, ...], ...]
    in_order: bool = True

    def is_ready(self) -> bool:
        return is_ready(self.stepped[-1].chosen.token)

    def result(self) -> DecodeResult:
        chosen_steps = [step.chosen for step in self.stepped]
        # One conversion for all, because token by token took 2 ms for 8 ranks of 256 rows.
        by_rank = np.stack([jax.device_get(chosen.token) for chosen in chosen_steps], -1).tolist()
        tokens = tuple(
            tuple(map(tuple, by_rank[rank][: len(slots)]))
            for rank, slots in enumerate(self.command.slots)
        )
        if any(step.forced for step in self.stepped):
            tokens = self._with_forced(tokens)
        if not any(count is not None for row in self.wanted for count in row):
            return DecodeResult(self.command.step, tokens)
        # Rows with log-probabilities have no forced tokens.
        steps = [_Host(chosen) for chosen in chosen_steps]
        rows = [(rank, range(len(slots))) for rank, slots in enumerate(self.command.slots)]
        logprobs = tuple(
            tuple(
                tuple(step.logprobs(rank, row, self.wanted[rank][row]) for step in steps)
                for row in indices
            )
            for rank, indices in rows
        )
        return DecodeResult(self.command.step, tokens, logprobs)

    def _with_forced(self, chosen: Tokens) -> Tokens:
        """Inserts, before each chosen token, the tokens that the grammar forced in the same
        step."""
        return tuple(
            tuple(
                tuple(
                    token
                    for step, last in zip(self.stepped, of_row, strict=True)
                    for token in (*step.forced.get((rank, row), ()), last)
                )
                for row, of_row in enumerate(rows)
            )
            for rank, rows in enumerate(chosen)
        )


@dataclass
class PullReading:
    """The result of a pull in progress. A failed pull is a result, not an exception, because the
    worker decides about retries."""

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
    def __init__(self, chosen: Chosen) -> None:
        self._token, *self._rest = (
            None if array is None else jax.device_get(array) for array in chosen[:4]
        )

    def token(self, rank: int, row: int) -> int:
        assert self._token is not None
        return int(self._token[rank, row])

    def logprobs(self, rank: int, row: int, wanted: int | None) -> TokenLogprobs | None:
        logprob, top_ids, top = self._rest
        if wanted is None or logprob is None or top_ids is None or top is None:
            return None
        pairs = zip(
            top_ids[rank, row, :wanted].tolist(), top[rank, row, :wanted].tolist(), strict=True
        )
        # Masked ids have no log-probability.
        possible = tuple(pair for pair in pairs if pair[1] > -math.inf)
        return TokenLogprobs(float(logprob[rank, row]), possible)
