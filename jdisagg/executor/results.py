"""What the completion thread waits for: device arrays on their way to plain results. Reading blocks; issuing does not."""

from dataclasses import dataclass

import jax

from jdisagg.executor.choose import Chosen
from jdisagg.request import TokenLogprobs
from jdisagg.scheduler.commands import DecodeResult, DecodeSteps, Done, PrefillChunk, PrefillResult, PullResult, SampledToken
from jdisagg.transfer.channel import Pull


def start_reading(chosen: Chosen) -> None:
    """Asks for the copies to the host, so that they are under way before anyone waits."""
    with jax.transfer_guard_device_to_host("allow"):  # the one place that reads back: a guard may forbid all others
        for array in chosen:
            if array is not None:
                array.copy_to_host_async()


def is_ready(array: jax.Array) -> bool:
    """Whether an array is computed. Never blocks."""
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # missing from JAX's stubs


@dataclass
class Finished:
    """Nothing to wait for."""

    step: int
    in_order: bool = True

    def is_ready(self) -> bool:
        return True

    def result(self) -> Done:
        return Done(self.step)


@dataclass
class PrefillReading:
    """The tokens sampled at the end of a chunk. A chunk that samples nothing is over when its last activations are there."""

    command: PrefillChunk
    last: jax.Array
    chosen: Chosen | None
    in_order: bool = True

    def is_ready(self) -> bool:
        return is_ready(self.last if self.chosen is None else self.chosen.token)

    def result(self) -> PrefillResult:
        if self.chosen is None:
            self.last.block_until_ready()
            return PrefillResult(self.command.step, ())
        host = _Host(self.chosen)
        samples: list[SampledToken] = []
        used: dict[int, int] = {}
        for row in self.command.rows:
            for spec in row.samples:
                column = used.get(row.rank, 0)
                used[row.rank] = column + 1
                token = host.token(row.rank, column)
                samples.append(SampledToken(row.sequence, spec.child, token, host.logprobs(row.rank, column, spec.sampling.logprobs)))
        return PrefillResult(self.command.step, tuple(samples))


@dataclass
class DecodeReading:
    """The tokens of one or several steps, all read at once."""

    command: DecodeSteps
    chosen: list[Chosen]
    wanted: tuple[tuple[int | None, ...], ...]
    in_order: bool = True

    def is_ready(self) -> bool:
        return is_ready(self.chosen[-1].token)

    def result(self) -> DecodeResult:
        steps = [_Host(chosen) for chosen in self.chosen]
        rows = [(rank, range(len(slots))) for rank, slots in enumerate(self.command.slots)]
        tokens = tuple(tuple(tuple(step.token(rank, row) for step in steps) for row in indices) for rank, indices in rows)
        if not any(count is not None for row in self.wanted for count in row):
            return DecodeResult(self.command.step, tokens)
        logprobs = tuple(
            tuple(tuple(step.logprobs(rank, row, self.wanted[rank][row]) for step in steps) for row in indices) for rank, indices in rows
        )
        return DecodeResult(self.command.step, tokens, logprobs)


@dataclass
class PullReading:
    """A transfer under way; a failed one is a result, not an exception: the scheduler decides what next."""

    step: int
    offer_id: int
    pull: Pull
    in_order: bool = False

    def is_ready(self) -> bool:
        return self.pull.is_ready()

    def result(self) -> PullResult:
        error = self.pull.failed()
        return PullResult(self.step, self.offer_id, self.pull.bytes_moved, error.message if error else "")


class _Host:
    """One step's choices as numpy arrays."""

    def __init__(self, chosen: Chosen) -> None:
        self._token, *self._rest = (None if array is None else jax.device_get(array) for array in chosen[:4])

    def token(self, rank: int, row: int) -> int:
        assert self._token is not None
        return int(self._token[rank, row])

    def logprobs(self, rank: int, row: int, wanted: int | None) -> TokenLogprobs | None:
        logprob, top_ids, top = self._rest
        if wanted is None or logprob is None or top_ids is None or top is None:
            return None
        pairs = zip(top_ids[rank, row, :wanted].tolist(), top[rank, row, :wanted].tolist(), strict=True)
        return TokenLogprobs(float(logprob[rank, row]), tuple(pairs))
