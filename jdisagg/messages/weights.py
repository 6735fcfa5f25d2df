"""Calls that update the weights of workers without a restart, or let workers sleep.

All workers stage the new weights while they serve the present ones; then all commit. Weights are
identified by `VERSION@FINGERPRINT`, where the version is the caller's text and the fingerprint a
hash of the checkpoint's files. The identity is part of the hashes of cached KV blocks and of each
hand-off. KV is therefore never used with other weights than those that computed it."""

import enum
from typing import Protocol

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.layout.reshard_plan import Box
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.plain import Message

# Usual time limits: of an update or a wake, and for sequences to finish before a sleep.
UPDATE_SECONDS, SLEEP_SECONDS = 600.0, 60.0


class UpdateMode(enum.Enum):
    """What happens to running requests at an update. `RECOMPUTE`: they keep their accepted tokens,
    and their KV is recomputed with the new weights. `DRAIN`: new requests wait, and the update
    begins when all running requests have finished. `KEEP`: sequences that decode continue with the
    KV of the old weights, which is not cached."""

    RECOMPUTE = "recompute"
    DRAIN = "drain"
    KEEP = "keep"


UPDATE_MODES = tuple(mode.value for mode in UpdateMode)


def mode_of(text: str) -> UpdateMode:
    """Returns the update mode with the name `text`. An empty text means the default mode. Raises
    InvalidRequestError for an unknown name."""
    try:
        return UpdateMode(text or UpdateMode.RECOMPUTE.value)
    except ValueError:
        names = ", ".join(UPDATE_MODES)
        raise InvalidRequestError(f"mode must be one of {names}, got {text[:80]!r}") from None


# Prefix of an offer's name. The name is "offer:NUMBER" in the process that offers, and
# "offer:HOST:PORT/ID" in other processes. If several processes each hold a part of the weights, the
# names of the parts are joined by commas.
OFFER_PREFIX = "offer:"


class OfferedTensor(Message, frozen=True):
    """One array of an offer. `boxes` has, for each device of the offering process, the device's
    number and the part of the array that it holds. Replicas are listed separately."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, Box], ...]


class OfferCard(Message, frozen=True):
    """The arrays that one process offers.

    Attributes:
        content: Hash of the arrays' values.
        parameters: Whether the arrays are a worker's parameters in the form in which the worker
            serves them. False means tensors of a checkpoint.
        end, transports: Endpoint of the process for transfers, and the number of connections of its
            transfer engine.
    """

    content: str
    parameters: bool
    tensors: tuple[OfferedTensor, ...]
    end: KvEnd
    transports: int


class OfferedPart(Message, frozen=True):
    """A part of an offered array that one device holds. `tensor` is the array's index in the card,
    and `box` the part."""

    tensor: int
    device: int
    box: Box


class PreparedBlock(Message, frozen=True):
    """A block of bytes that the offering process offers for transfer: its id there, the number of
    bytes, and their checksum (`ops.checksum.byte_sum`)."""

    offer_id: int
    size: int
    checksum: bytes


class OfferPort(Protocol):
    """Calls of workers to a process that offers weights. All methods raise InvalidRequestError if
    the offer is closed or its lease has ended."""

    async def describe(self, name: str) -> OfferCard: ...

    async def check(self, name: str) -> None:
        """Checks that the offer is still valid. A reply also shows that the process is alive."""
        ...

    async def prepare(
        self, name: str, blocks: tuple[tuple[OfferedPart, ...], ...], deadline_seconds: float
    ) -> tuple[PreparedBlock, ...]:
        """Offers blocks for transfer for at most `deadline_seconds`. Each block is given as a list
        of parts, and its bytes are the bytes of these parts in order."""
        ...

    async def release(self, offer_ids: tuple[int, ...]) -> None:
        """Ends the offers of these blocks. Ignores unknown ids."""
        ...


class OfferName(Message, frozen=True):
    """Name of an offer. It is a message because gRPC changes a reply that is a bare text."""

    name: str


class StageCall(Message, frozen=True):
    """Reads weights. `folder` is a checkpoint folder on the worker's hosts, or the name of an
    offer. `version` becomes the version in the weights' identity. If it is empty, the beginning of
    the fingerprint is used."""

    folder: str
    version: str
    deadline_seconds: float


class StagedWeights(Message, frozen=True):
    """Weights that a worker has staged: their identity, and the bytes that they take on the
    worker's devices. The number of bytes is 0 if the worker serves them already.

    If `missing_bytes` is set, nothing is staged, because a device lacks this many bytes for a
    second copy of the weights. The worker has enough memory while it sleeps."""

    weights: str
    bytes: int = 0
    missing_bytes: int = 0


class CommitCall(Message, frozen=True):
    """Replaces the served weights by the staged weights with the identity `weights`. If `keep` is
    set, sequences that decode keep their KV."""

    weights: str
    keep: bool = False


class SleepCall(Message, frozen=True):
    """Frees KV pages and weights. Level 1 copies the weights to host memory. Level 2 drops them,
    and the worker reads them again when it wakes."""

    level: int
    deadline_seconds: float


class WeightsPort(Protocol):
    async def stage_weights(self, call: StageCall) -> StagedWeights:
        """Reads weights while the worker serves its present ones. They replace weights that were
        staged before. Raises InvalidRequestError for a folder that this worker cannot serve,
        DeadlineExceededError and UnavailableError."""
        ...

    async def commit_weights(self, call: CommitCall) -> WorkerStatus:
        """Serves the staged weights from the next command on. Does nothing if the worker serves
        them already. Raises InvalidRequestError if they are not staged."""
        ...

    async def drop_weights(self) -> None:
        """Frees staged weights. Idempotent."""
        ...

    async def offer_weights(self, lease_seconds: float) -> OfferName:
        """Offers the served weights to other workers, and returns the name of the offer. The offer
        ends with its lease, or when the worker changes its weights or sleeps. Raises
        InvalidRequestError if this worker cannot offer its weights."""
        ...

    async def sleep(self, call: SleepCall) -> WorkerStatus:
        """Ends running sequences as preempted and frees pages and weights. Does nothing if the
        worker sleeps already. Raises UnavailableError if the worker cannot sleep now."""
        ...

    async def wake(self, deadline_seconds: float) -> WorkerStatus:
        """Ends the sleep. The worker then has its weights and empty pages again. Idempotent."""
        ...


class WeightsReport(Message, frozen=True):
    """Outcome of an update.

    Attributes:
        failed: Text "NAME: reason" for each worker that staged the new weights but failed to
            commit. The router does not pair such a worker with workers that serve them.
        pause_seconds: Time during which placement was paused.
    """

    weights: str
    workers: tuple[str, ...]
    failed: tuple[str, ...] = ()
    bytes: int = 0
    stage_seconds: float = 0.0
    pause_seconds: float = 0.0


def identity_of(version: str, fingerprint: str) -> str:
    """Returns the identity `VERSION@FINGERPRINT` of weights. If `version` is empty, the beginning
    of the fingerprint is used."""
    return f"{version or fingerprint[:12]}@{fingerprint}"


def version_of(identity: str) -> str:
    """Returns the version in an identity, or "" for the initial weights."""
    return identity.rpartition("@")[0]


def fingerprint_of(identity: str) -> str:
    """Returns the fingerprint in an identity, or "" for the initial weights."""
    return identity.rpartition("@")[2]
