"""Runs decode steps of an instance with pipeline stages.

The slots are divided into as many batches as there are stages, so that all stages work at the same
time: while one stage computes the first batch, the stage before it computes the second. A slot
belongs to the batch (slot number) modulo (number of stages), which never changes.

After each step of a batch the last stage's tokens and positions are copied to the devices of the
earlier stages, where the batch's next step begins."""

from collections.abc import Sequence

import jax
import numpy as np

from jdisagg.executor.choose import Chosen
from jdisagg.executor.decode_program import DecodePrograms
from jdisagg.executor.draft_rows import DraftPlan, Guesses, Slots
from jdisagg.executor.programs import Programs
from jdisagg.executor.results import StepChoice
from jdisagg.messages.step_commands import SlotAdmit, SlotGrow


class _Earlier:
    def __init__(
        self,
        stages: Sequence[tuple[Programs, DecodePrograms]],
        last: Programs,
        newest: DecodePrograms,
    ) -> None:
        self._stages, self._last, self._newest = stages, last, newest
        self._hot: dict[int, list[jax.Array]] = {}  # by batch: on each of these stages
        self.turn = 0

    def run(self, slots: Slots, bucket: int, plan: DraftPlan | None) -> jax.Array:
        x: jax.Array | tuple[()] = ()
        if self.turn not in self._hot:
            self.copy_state()
        for (programs, stage), hot in zip(self._stages, self._hot[self.turn], strict=True):
            x = stage.part(
                slots, bucket, plan, hot, x if isinstance(x, tuple) else programs.receive(x)
            )
        assert not isinstance(x, tuple)
        return self._last.receive(x)

    def copy_state(self) -> None:
        self._hot[self.turn] = [programs.receive(self._newest.hot) for programs, _ in self._stages]

    def forget(self, turn: int) -> None:
        """Drops the copy of a batch, so that its next step begins with the newest tokens and
        positions."""
        self._hot.pop(turn, None)


class DecodeStages:
    """The decode programs of all stages. Used by the dispatch thread only."""

    def __init__(self, stages: Sequence[tuple[Programs, DecodePrograms]]) -> None:
        self._stages = [stage for _, stage in stages]
        self._last = self._stages[-1]
        self._earlier = None
        if len(stages) > 1:
            self._earlier = _Earlier(stages[:-1], stages[-1][0], self._last)
            self._last.earlier = self._earlier

    @property
    def only(self) -> DecodePrograms:
        assert self._earlier is None, "there are several stages"
        return self._last

    def update(self, admits: Sequence[SlotAdmit], grows: Sequence[SlotGrow]) -> None:
        for stage in self._stages:
            stage.update(admits, grows)
        if self._earlier is not None:
            for admit in admits:
                self._earlier.forget(admit.slot % len(self._stages))

    def step(self, slots: Slots, masked: bool, guesses: Guesses | None = None) -> StepChoice:
        """For the arguments see `DecodePrograms.step`. Rows are in the order of `slots`."""
        if self._earlier is None:
            return StepChoice((self._last.step(slots, masked, guesses),))
        count, guesses = len(self._stages), guesses or {}
        parts: list[Chosen] = []
        places = np.zeros((len(slots), max(map(len, slots))), np.int32)
        first = 0
        for turn in range(count):
            rows = [
                [index for index, slot in enumerate(row) if slot % count == turn] for row in slots
            ]
            if not any(rows):
                continue
            of_turn = {
                (rank, at): guesses[rank, index]
                for rank, indices in enumerate(rows)
                for at, index in enumerate(indices)
                if (rank, index) in guesses
            }
            batch = tuple(
                tuple(slots[rank][index] for index in indices) for rank, indices in enumerate(rows)
            )
            self._earlier.turn = turn
            chosen = self._last.step(batch, masked, of_turn)
            self._earlier.copy_state()
            for rank, indices in enumerate(rows):
                places[rank, indices] = first + np.arange(len(indices))
            first += chosen.token.shape[1]
            parts.append(chosen)
        return StepChoice(tuple(parts), places)

    def warm_up(self, bucket: int) -> None:
        self._last.warm_up(bucket)

    def warm_pair(self, bucket: int, drafts: bool) -> None:
        self._last.warm_pair(bucket, drafts)

    def warm_updates(self) -> None:
        for stage in self._stages:
            stage.warm_updates()
