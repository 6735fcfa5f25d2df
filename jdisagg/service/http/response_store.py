"""Stores responses of /v1/responses, so that later requests can refer to them by id.

A stored response contains the whole conversation up to its end: the items of the requests and of
the answers, in order. It can thus be continued even after earlier responses were dropped. The store
is in the memory of one process, and has limits on size and time. The least recently used responses
are dropped first. A response can be read only by clients with the identity that created it."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from jdisagg.clock import MonotonicClock
from jdisagg.dispatch import caller
from jdisagg.service.http.errors import HttpRefusal

Json = dict[str, object]
Items = tuple[msgspec.Raw, ...]
Begun = Callable[[str, Json], None]

MAX_RESPONSES = 16_384
KEEP_SECONDS = 24 * 3600.0
# Estimated size of the Python objects for one response, and for one item of a conversation.
RESPONSE_BYTES, ITEM_BYTES = 1024, 64

_encode = msgspec.json.encode


@dataclass(slots=True)
class KeptResponse:
    """One stored response.

    Attributes:
        items: Items of the conversation. The items of the answer are the last ones.
        task: Task that generates the response in the background. None once the response is
            finished, or if it is not generated in the background.
        expires_at: Time at which the store drops the response, set by the store.
    """

    body: bytes
    items: Items
    inputs: int
    task: asyncio.Task[None] | None = None
    background: bool = False
    expires_at: float = 0.0

    @property
    def size_bytes(self) -> int:
        # An item that several responses contain is counted for each of them.
        items = sum(map(len, map(bytes, self.items))) + ITEM_BYTES * len(self.items)
        return RESPONSE_BYTES + len(self.body) + items


class ResponseStore:
    """Responses by id, within a limit of `limit_bytes`. Use it on one event loop."""

    def __init__(
        self,
        limit_bytes: int,
        seconds: float = KEEP_SECONDS,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._seconds = seconds
        self._now = now or MonotonicClock().now
        self._kept: OrderedDict[tuple[str, str, str], KeptResponse] = OrderedDict()
        self._sizes: dict[tuple[str, str, str], int] = {}
        self._size_bytes = 0

    def put(self, response_id: str, response: KeptResponse) -> None:
        """Replaces the caller's response with this id. A response that is larger than the whole
        store is dropped at once."""
        key = _key(response_id)
        self._drop(key)
        response.expires_at = self._now() + self._seconds
        self._kept[key], self._sizes[key] = response, response.size_bytes
        self._size_bytes += self._sizes[key]
        while self._size_bytes > self._limit_bytes or len(self._kept) > MAX_RESPONSES:
            self._drop(next(iter(self._kept)))

    def find(self, response_id: str) -> KeptResponse | None:
        key, now = _key(response_id), self._now()
        response = self._kept.get(key)
        if response is None:
            return None
        if response.expires_at <= now:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return response

    def given(self, response_id: str) -> KeptResponse:
        """Raises HttpRefusal (404) if the store has none with this id."""
        response = self.find(response_id)
        if response is None:
            raise HttpRefusal(
                f"Response with id {response_id[:80]!r} not found; responses are kept for"
                f" {self._seconds:g} s at most, by one server",
                404,
                "response_not_found",
            )
        return response

    def delete(self, response_id: str) -> None:
        """Deletes a response. If it is still being generated, cancels its task. Raises HttpRefusal
        (404) if the store has none with this id."""
        response = self.given(response_id)
        if response.task is not None:
            response.task.cancel()
        self._drop(_key(response_id))

    def _drop(self, key: tuple[str, str, str]) -> None:
        if self._kept.pop(key, None) is not None:
            self._size_bytes -= self._sizes.pop(key)


@dataclass(slots=True)
class Keep:
    store: ResponseStore
    items: Items
    begun: Begun | None = None

    def finished(self, response: Json, output: Sequence[Json]) -> None:
        answer = tuple(msgspec.Raw(_encode(item)) for item in output)
        items, behind = (*self.items, *answer), self.begun is not None
        kept = KeptResponse(_encode(response), items, len(self.items), background=behind)
        self.store.put(str(response["id"]), kept)


def _key(response_id: str) -> tuple[str, str, str]:
    who = caller.current()
    return who.tenant, who.token, response_id
