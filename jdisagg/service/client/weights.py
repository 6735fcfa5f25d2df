"""Client calls that replace the weights of a cluster, or free the device memory of idle workers
(sleep)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jdisagg.messages.weights import SLEEP_SECONDS, UPDATE_SECONDS, WeightsReport, mode_of
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire, wire_generation


class _Caller(Protocol):
    _stub: Any
    _timeout_seconds: float

    async def _unary(
        self, method: Callable[..., Any], request: Any, seconds: float | None = None
    ) -> Any: ...


class WeightsCalls:
    async def update_weights(
        self: _Caller,
        folder: str,
        *,
        version: str = "",
        mode: str = "recompute",
        deadline_seconds: float = UPDATE_SECONDS,
    ) -> WeightsReport:
        """Replaces the weights of all workers by another checkpoint of the same model.

        Args:
            folder: Folder of a checkpoint on the hosts of all workers, with the served model's
                config.json. Or the name of an offer (`jdisagg.weights.offer`).
            version: Text that identifies the weights in replies. Empty uses a part of their hash.
            mode: What happens to running requests. "recompute": they keep their tokens, and their
                KV is recomputed. "drain": the update waits until they have finished with the old
                weights. "keep": they keep their KV.
            deadline_seconds: Time limit for reading the weights, and for the drain.

        Raises:
            InvalidRequestError: The mode is unknown, or a worker cannot serve the new weights. In
                either case, all workers keep the old weights.
            UnauthenticatedError: The token belongs to a tenant.
        """
        request = pb.UpdateWeightsRequest(
            folder=folder,
            version=version,
            mode=f"UPDATE_MODE_{mode_of(mode).name}",
            deadline_seconds=deadline_seconds,
        )
        seconds = 2 * deadline_seconds + self._timeout_seconds
        reply = await self._unary(self._stub.UpdateWeights, request, seconds)
        return wire_generation.weights_report_from_proto(reply)

    async def sleep(
        self: _Caller,
        level: int = 1,
        workers: Sequence[str] = (),
        *,
        deadline_seconds: float = SLEEP_SECONDS,
    ) -> tuple[WorkerStatus, ...]:
        """Frees the KV pages and the weights in device memory. The workers accept no requests until
        `wake`.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them, and `wake` reads them again.
            workers: Names of the workers. Empty means all workers.
            deadline_seconds: Time limit for running sequences to finish.

        Returns:
            The status of each of these workers.

        Raises:
            InvalidRequestError: A worker is unknown.
            UnavailableError: A worker cannot sleep now.
        """
        request = pb.SleepRequest(level=level, workers=workers, deadline_seconds=deadline_seconds)
        seconds = deadline_seconds + self._timeout_seconds
        reply = await self._unary(self._stub.Sleep, request, seconds)
        return tuple(map(wire.worker_status_from_proto, reply.workers))

    async def wake(
        self: _Caller, workers: Sequence[str] = (), *, deadline_seconds: float = UPDATE_SECONDS
    ) -> tuple[WorkerStatus, ...]:
        """Ends the sleep of workers. The arguments, the result and the errors are those of
        `sleep`."""
        request = pb.WakeRequest(workers=workers, deadline_seconds=deadline_seconds)
        seconds = deadline_seconds + self._timeout_seconds
        reply = await self._unary(self._stub.Wake, request, seconds)
        return tuple(map(wire.worker_status_from_proto, reply.workers))
