"""Shares the link from one sending worker fairly among the hand-offs that receive from it.

Pulls begin in turns that rotate among the hand-offs, so that a short prompt does not wait behind
all blocks of a long one. On a fast link many pulls are in flight, because each pull costs a round
trip. After a slow pull their number is halved, because concurrent pulls on a slow link only delay
each other."""

import asyncio
from collections import deque

MOST_PULLS = 64
SLOW, FAST = 1 / 2, 1 / 8  # limits of slow and fast pulls, as parts of the time limit


class LinkShare:
    """Schedules the pulls from one sender. Used on the event loop only."""

    def __init__(self) -> None:
        self.most = MOST_PULLS
        self._running = 0
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # by hand-off, in rotation

    def took(self, seconds: float, limit_seconds: float) -> None:
        """Adapts the number of simultaneous pulls to the time that a pull of a computed block took.
        `limit_seconds` is the time limit of the pull."""
        if seconds > SLOW * limit_seconds:
            self.most = max(1, min(self.most, self._running) // 2)
        elif seconds < FAST * limit_seconds:
            self.most = min(MOST_PULLS, self.most + 1)

    async def begin_turn(self, handoff: int) -> None:
        """The caller must call `end_turn` when the pull has ended."""
        if self._running < self.most and not self._waiting:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(handoff, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn began at the same time
                self._running -= 1
            self._give_turns()
            raise

    def end_turn(self) -> None:
        self._running -= 1
        self._give_turns()

    def _give_turns(self) -> None:
        while self._waiting and self._running < self.most:
            handoff = next(iter(self._waiting))
            turns = self._waiting.pop(handoff)
            turn = turns.popleft()
            if turns:
                self._waiting[handoff] = turns  # after the other hand-offs
            if not turn.done():
                self._running += 1
                turn.set_result(None)
