"""Serves an offer of new weights to workers in other processes.

Descriptions of the arrays are sent over gRPC. The bytes are sent over the channels that also
transfer KV: shared memory on one host, the transfer engine or NIXL between hosts. A block of bytes
is prepared when a worker requests it. It is kept until the worker has read it or the request's
deadline has passed."""

import asyncio
import secrets

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ids import random_id
from jdisagg.errors import InvalidRequestError
from jdisagg.messages.weights import OFFER_PREFIX, OfferCard, OfferedPart, OfferPort, PreparedBlock
from jdisagg.node.kv_endpoint import TRANSPORTS, KvEndpoint
from jdisagg.service.internal import rpc
from jdisagg.service.server import read_tokens
from jdisagg.transfer.offered_weights import OfferedWeights

MOST_HELD_SECONDS = 600.0


def serve_offer(offered: OfferedWeights, service: ServiceConfig) -> OfferedWeights:
    """The server stops when the offer is closed or its lease ends. Raises ConfigError if the
    address cannot be bound."""
    server = OfferServer(offered, service)
    offered.name = server.name
    offered.when_closed(server.close)
    return offered


class OfferServer:
    """Implements `OfferPort` for one offer."""

    def __init__(self, offered: OfferedWeights, service: ServiceConfig) -> None:
        self._offered = offered
        tokens = read_tokens(service.cluster_token_file)
        self._endpoint = KvEndpoint(service, (rpc.service(OfferPort, self, tokens),))
        self._endpoint.later(offered.seconds_left(), offered.close)
        self.name = f"{OFFER_PREFIX}{self._endpoint.end.control}/{secrets.token_hex(8)}"

    def close(self) -> None:
        self._endpoint.close()

    async def describe(self, name: str) -> OfferCard:
        self._check(name)
        content, tensors = await asyncio.to_thread(
            lambda: (self._offered.content(), self._offered.described())
        )
        end = self._endpoint.end
        return OfferCard(content, self._offered.parameters, tensors, end, TRANSPORTS)

    async def check(self, name: str) -> None:
        self._check(name)

    async def prepare(
        self, name: str, blocks: tuple[tuple[OfferedPart, ...], ...], deadline_seconds: float
    ) -> tuple[PreparedBlock, ...]:
        self._check(name)
        if not all(blocks) or not 0 < deadline_seconds <= MOST_HELD_SECONDS:
            raise InvalidRequestError(
                f"weights {name!r}: blocks must have parts, and deadline_seconds be positive and at"
                f" most {MOST_HELD_SECONDS:g}, got {deadline_seconds}"
            )
        found = await asyncio.to_thread(lambda: [self._offered.block(parts) for parts in blocks])
        prepared: list[PreparedBlock] = []
        loop, channel = asyncio.get_running_loop(), self._endpoint.channel
        for array, checksum in found:
            offer_id = random_id()
            channel.offer(offer_id, array, 0)
            loop.call_later(deadline_seconds, channel.release, offer_id)
            prepared.append(PreparedBlock(offer_id, array.nbytes, checksum))
            self._offered.count(array.nbytes)
        return tuple(prepared)

    async def release(self, offer_ids: tuple[int, ...]) -> None:
        for offer_id in offer_ids:
            self._endpoint.channel.release(offer_id)

    def _check(self, name: str) -> None:
        if name != self.name:
            raise InvalidRequestError(
                f"weights {name!r}: the process at {self._endpoint.end.control} has no such offer;"
                " it offers new weights now"
            )
        self._offered.check()
