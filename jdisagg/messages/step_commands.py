"""Step commands, which a scheduler issues to a mesh (`StepCommand -> Executor.run -> StepResult`).

A command refers to sequences, dp ranks, pages and slots by number and carries every token id that
the mesh does not hold. It holds no arrays, clock or randomness, so a command stream can be
broadcast to the processes of an instance, recorded, replayed, or run by a cost model. Positions are
absolute in the sequence. Page ids are local to a dp rank.

State of a sequence with tokens t_0..t_(n-1): pages hold the KV of positions 0..n-2, and the slot
holds `token` = t_(n-1) and `position` = n-1. A decode step writes the KV of `token`, samples t_n
and increments `position`, as long as position < limit."""

from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.plain import Message
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import SamplingParams, TokenLogprobs

# Peer name for pulls from this mesh's own host memory. It is always connected.
HOST = "host memory"
SLOW = "slow"  # `DiskResult.error`: the deadline passed


class SampleSpec(Message, frozen=True):
    """Sampling parameters of one child. `prompt_history` and `output_history` are filled only if
    sampling depends on them, and include the slot's own `token`. `min_position` is the first
    position at which a stop id may be sampled."""

    child: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    min_position: int = 0
    prompt_history: tuple[int, ...] = ()
    output_history: tuple[int, ...] = ()


class OfferSpec(Message, frozen=True):
    """A KV block to offer from a prefill row: tokens [offset, offset + block_tokens) of the rank's
    chunk, for `groups` layer groups from `group` on."""

    offer_id: int
    group: int
    offset: int
    block_tokens: int
    groups: int = 1


class PrefillRow(Message, frozen=True):
    """One sequence's part of a packed chunk: `tokens` at `offset` of dp rank `rank`'s chunk, from
    position `start` on.

    Attributes:
        pages: Pages of positions [0, start + len(tokens)).
        samples: One per child in the prompt's last row. Empty in earlier rows.
        state: Slot of the sequence's state, read as of `start` and written as of the row's end.
        prompt_logprobs: Number of most likely tokens to report for the token that follows each of
            `tokens`. None reports no log-probabilities.
        following: Token after the last of `tokens`, or -1 at the prompt's end.
    """

    sequence: int
    rank: int
    offset: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    samples: tuple[SampleSpec, ...] = ()
    offers: tuple[OfferSpec, ...] = ()
    state: int = 0
    prompt_logprobs: int | None = None
    following: int = -1


class PrefillChunk(Message, frozen=True):
    """Runs one packed chunk of `chunk_tokens` tokens (a bucket) per dp rank. Rows that continue
    (start > 0) come first on their rank. `checksum_key` keys the checksums of offers
    (ops/checksum.py)."""

    step: int
    chunk_tokens: int
    rows: tuple[PrefillRow, ...]
    checksum_key: int = 0


class ReleaseOffers(Message, frozen=True):
    """Frees acknowledged or aborted offers, on the device or in host memory."""

    step: int
    offer_ids: tuple[int, ...]
    from_host: bool = False


class ExtractBlock(Message, frozen=True):
    """Offers KV from this mesh's pages, for a running sequence that moves to another worker. The
    result is an `ExtractResult`.

    The block holds tokens [start, start + valid_tokens) of `groups` layer groups from `group` on,
    on dp rank `rank`, padded to `block_tokens`.

    Attributes:
        pages: As in `InsertBlock`.
        to_host: Whether to copy the block to host memory, from where peer `HOST` offers it. The
            mesh is not blocked, and the result follows after the copy.
        kind: Content of the block. STATE is read from slot `pages[0]`. WINDOW has its own layer
            groups and `pages`.
    """

    step: int
    offer_id: int
    rank: int
    group: int
    start: int
    valid_tokens: int
    block_tokens: int
    pages: tuple[int, ...]
    checksum_key: int = 0
    groups: int = 1
    to_host: bool = False
    kind: KvKind = KvKind.POSITIONS


class ConnectPeer(Message, frozen=True):
    """Allows pulls from `peer`, a name that contains the boot id and is never reused."""

    step: int
    peer: str
    card: MeshCard


class DisconnectPeer(Message, frozen=True):
    """Disallows pulls from `peer`. Pulls in flight fail."""

    step: int
    peer: str


class PullBlock(Message, frozen=True):
    """Starts to pull one offered block from `peer` to dp rank `rank`, without blocking the mesh.
    The result follows when the block has arrived or the pull has failed.

    `codec` names the block's compression (transfer/codec.py). `source_rank` is the peer's dp rank.
    `kind` is as in `ExtractBlock`."""

    step: int
    offer_id: int
    rank: int
    group: int
    block_tokens: int
    deadline_seconds: float
    peer: str = ""
    codec: str = "none"
    source_rank: int = 0
    groups: int = 1
    kind: KvKind = KvKind.POSITIONS


class InsertBlock(Message, frozen=True):
    """Writes a pulled block's first `valid_tokens` tokens into its rank's pages, from position
    `start` on.

    `pages` covers positions [0, start + valid_tokens): position p lies in pages[p // page_size].
    The `InsertResult` has the checksum, under `checksum_key`, of the values read back from the
    pages. A STATE block is written to slot `pages[0]`, a WINDOW block to the `pages` of layers with
    a window."""

    step: int
    offer_id: int
    rank: int
    group: int
    block_tokens: int
    valid_tokens: int
    start: int
    pages: tuple[int, ...]
    checksum_key: int = 0
    peer: str = ""
    codec: str = "none"
    groups: int = 1
    kind: KvKind = KvKind.POSITIONS


class DropBlocks(Message, frozen=True):
    """Frees pulled blocks that will not be inserted."""

    step: int
    offer_ids: tuple[int, ...]


class CopyPages(Message, frozen=True):
    """Copies pages for copy-on-write, as (rank, source page, destination page). `states` lists
    state slots to copy in the same form, with their window ring buffers."""

    step: int
    copies: tuple[tuple[int, int, int], ...]
    states: tuple[tuple[int, int, int], ...] = ()


class SlotAdmit(Message, frozen=True):
    """Puts a sequence into a slot. `limit` is the first position that must not be written: the end
    of its pages or of its allowed length. `state` is the slot of its recurrent state."""

    sequence: int
    rank: int
    slot: int
    token: int
    position: int
    limit: int
    pages: tuple[int, ...]
    sample: SampleSpec
    state: int = 0


class SlotGrow(Message, frozen=True):
    """Extends a running sequence: replaces its slot's row of page ids and its limit."""

    rank: int
    slot: int
    limit: int
    pages: tuple[int, ...]


class DecodeSteps(Message, frozen=True):
    """Admits and grows slots, then runs `steps` decode steps over `slots[rank]`. A slot at its
    limit yields no token (-1). `masked` means that a row has a grammar."""

    step: int
    steps: int
    slots: tuple[tuple[int, ...], ...]
    shaped: bool
    sampled: bool
    admits: tuple[SlotAdmit, ...] = ()
    grows: tuple[SlotGrow, ...] = ()
    masked: bool = False


class FindSaved(Message, frozen=True):
    """Opens this mesh's disk tier and lists the blocks of `namespace`, which covers everything that
    a block's KV depends on except its tokens. Must precede other disk commands. The `DiskResult`
    has the blocks' names, least recently used first.

    Disk commands never block the mesh. Each returns a `DiskResult` within `deadline_seconds`."""

    step: int
    namespace: bytes
    deadline_seconds: float


class SaveBlock(Message, frozen=True):
    """Writes block `index` of a chain of blocks from host memory to disk. `offer_ids` and
    `checksums` are those of the block in host memory."""

    step: int
    name: bytes
    index: int
    offer_ids: tuple[int, ...]
    checksums: tuple[int, ...]
    deadline_seconds: float


class LoadBlock(Message, frozen=True):
    """Reads a block from disk into host memory and offers it. Its result has checksums."""

    step: int
    name: bytes
    index: int
    offer_ids: tuple[int, ...]
    deadline_seconds: float


class RemoveSaved(Message, frozen=True):
    """Removes the blocks `names` from disk. `everything` removes the whole namespace, including
    blocks of dead workers."""

    step: int
    names: tuple[bytes, ...]
    deadline_seconds: float
    everything: bool = False


DiskCommand = FindSaved | SaveBlock | LoadBlock | RemoveSaved

StepCommand = (
    PrefillChunk
    | ReleaseOffers
    | ExtractBlock
    | ConnectPeer
    | DisconnectPeer
    | PullBlock
    | InsertBlock
    | DropBlocks
    | CopyPages
    | DecodeSteps
    | FindSaved
    | SaveBlock
    | LoadBlock
    | RemoveSaved
)


class SampledToken(Message, frozen=True):
    sequence: int
    child: int
    token: int
    logprobs: TokenLogprobs | None = None


class BlockChecksum(Message, frozen=True):
    """Keyed checksum of an offered block's valid tokens, computed by the sender."""

    offer_id: int
    checksum: int


class PrefillResult(Message, frozen=True):
    """Result of a `PrefillChunk`. `prompts` has the requested prompt log-probabilities of each
    row's tokens, by sequence."""

    step: int
    samples: tuple[SampledToken, ...]
    checksums: tuple[BlockChecksum, ...] = ()
    prompts: tuple[tuple[int, PromptLogprobs], ...] = ()


class DecodeResult(Message, frozen=True):
    """Result of `DecodeSteps`. `tokens[rank][row]` has one entry per step for slot
    `slots[rank][row]`, which may be NO_TOKEN, BROKEN_TOKEN or STUCK_TOKEN. A row with a grammar may
    have more entries, because a step adds the tokens that the grammar forces. `logprobs` has the
    same shape if requested and is empty otherwise."""

    step: int
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    logprobs: tuple[tuple[tuple[TokenLogprobs | None, ...], ...], ...] = ()


class PullResult(Message, frozen=True):
    """Result of a pull. `error` is empty on success. `bytes_moved` counts bytes between devices."""

    step: int
    offer_id: int
    bytes_moved: int = 0
    error: str = ""


class InsertResult(Message, frozen=True):
    """Result of an insertion. `checksum` is the keyed checksum of the values read back from the
    pages. `intact` is False if a lossy codec was used and either the received data differ from the
    packed data or the pages differ from the unpacked values. It is True without a lossy codec."""

    step: int
    offer_id: int
    checksum: int
    intact: bool = True


class ExtractResult(Message, frozen=True):
    step: int
    checksum: BlockChecksum


class DiskResult(Message, frozen=True):
    """Result of a disk command. `skipped` counts files that hold no usable block, by reason.
    `error` and these reasons are from a small fixed set (transfer/block_file.py). `ages` are
    seconds since each of `names` was written. `bytes_moved` counts the file's bytes."""

    step: int
    error: str = ""
    names: tuple[bytes, ...] = ()
    ages: tuple[float, ...] = ()
    checksums: tuple[int, ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    bytes_moved: int = 0


class Done(Message, frozen=True):
    step: int


StepResult = (
    PrefillResult | DecodeResult | PullResult | InsertResult | ExtractResult | DiskResult | Done
)


NO_TOKEN = -1  # the slot was at its limit
BROKEN_TOKEN = -2  # the sequence's logits are not finite
STUCK_TOKEN = -3  # the grammar allows no token because it exceeded its compiler's limits
