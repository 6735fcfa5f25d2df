"""Step commands: the work that a scheduler sends to a mesh (`StepCommand -> Executor.run ->
StepResult`).

A command refers to sequences, dp ranks, pages and decode slots by number. It contains every token
id that the mesh does not have yet. It contains no arrays and does not depend on the clock or on
randomness. Commands can therefore be broadcast to the processes of an instance, run by a cost
model, or repeated with the same results. Positions count from the sequence's first token. Page ids
are local to a dp rank.

State of a sequence with tokens t_0..t_(n-1): pages hold the KV of positions 0..n-2, and the slot
holds `token` = t_(n-1) and `position` = n-1. A decode step writes the KV of `token`, samples t_n
and increments `position`, as long as position < limit."""

from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.plain import Message
from jdisagg.prompt.images import PromptImage
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import SamplingParams, TokenLogprobs

# Peer name for pulls from this mesh's own host memory. It is always connected.
HOST = "host memory"
NO_ROOM = "room"  # in `DiskResult.skipped`
SLOW = "slow"  # `DiskResult.error`: the deadline passed


class SampleSpec(Message, frozen=True):
    """Sampling parameters of one child. `prompt_history` and `output_history` are all earlier
    tokens, including the newest. They are empty unless sampling depends on earlier tokens.
    `min_position` is the first position at which a stop token may be sampled."""

    child: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    min_position: int = 0
    prompt_history: tuple[int, ...] = ()
    output_history: tuple[int, ...] = ()


class OfferSpec(Message, frozen=True):
    """A KV block of a prefill row that is offered to a receiver: tokens [offset, offset +
    block_tokens) of the dp rank's chunk, for `groups` layer groups from `group` on."""

    offer_id: int
    group: int
    offset: int
    block_tokens: int
    groups: int = 1


class PrefillRow(Message, frozen=True):
    """The part of one sequence in a packed prefill chunk. `tokens` are at `offset` in the chunk of
    dp rank `rank`. The first of them has position `start` in its sequence.

    Attributes:
        pages: Pages of positions [0, start + len(tokens)).
        windows: Pages of these positions for sliding-window layers, if these layers have pages of
            their own. A page is used again when its positions have left the window.
        samples: Sampling parameters of each child, if the row ends the prompt. Empty in earlier
            rows.
        state: Slot of the sequence's recurrent state, which the row reads at its start and
            overwrites at its end.
        prompt_logprobs: Number of most likely tokens to report at each position of the prompt. None
            means that no log-probabilities are reported.
        following: Prompt token after the last of `tokens`, or -1 at the prompt's end.
        snapshot, snapshot_at: Slot to which the row also writes its recurrent state after position
            `snapshot_at` - 1, which is in the row. If `snapshot_at` is 0, no snapshot is written.
        shift: Rotary position minus position in the sequence, before the first of these images
            (`jdisagg/prompt/images.py`).
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
    snapshot: int = 0
    snapshot_at: int = 0
    adapter: int = 0
    images: tuple[PromptImage, ...] = ()
    shift: int = 0
    windows: tuple[int, ...] = ()


class PrefillChunk(Message, frozen=True):
    """Runs one packed prefill chunk, padded to `chunk_tokens` tokens, on each dp rank. On each
    rank, rows that continue a sequence (start > 0) come first. `checksum_key` is the key of the
    checksums of offered blocks (ops/checksum.py)."""

    step: int
    chunk_tokens: int
    rows: tuple[PrefillRow, ...]
    checksum_key: int = 0


class ReleaseOffers(Message, frozen=True):
    """Frees offered blocks, on the device or in host memory, after the receiver acknowledged or
    aborted them."""

    step: int
    offer_ids: tuple[int, ...]
    from_host: bool = False


class ExtractBlock(Message, frozen=True):
    """Copies KV from this mesh's pages into a block and offers the block, for a running sequence
    that moves to another worker. The result is an `ExtractResult`.

    The block holds tokens [start, start + valid_tokens) of `groups` layer groups from `group` on,
    on dp rank `rank`, padded to `block_tokens`.

    Attributes:
        pages: Pages of the sequence, as in `InsertBlock`.
        to_host: Whether to copy the block to host memory, from which it can later be pulled with
            the peer name `HOST`. The copy does not block the mesh, and the result follows after the
            copy.
        kind: Content of the block. STATE is read from slot `pages[0]`. WINDOW blocks have their own
            layer groups and `pages`.
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
    """Allows this mesh to pull KV from the worker `peer`. The name contains the worker's boot id
    and is never reused."""

    step: int
    peer: str
    card: MeshCard


class DisconnectPeer(Message, frozen=True):
    """Ends pulls from the worker `peer`. Pulls in flight fail."""

    step: int
    peer: str


class PullBlock(Message, frozen=True):
    """Starts to pull one offered block from the worker `peer` to dp rank `rank`, without blocking
    the mesh. The result follows when the block has arrived or the pull has failed.

    `codec` names the block's compression (transfer/codec.py). `kind` is as in `ExtractBlock`."""

    step: int
    offer_id: int
    rank: int
    group: int
    block_tokens: int
    deadline_seconds: float
    peer: str = ""
    codec: str = "none"
    groups: int = 1
    kind: KvKind = KvKind.POSITIONS


class InsertBlock(Message, frozen=True):
    """Writes the first `valid_tokens` tokens of a pulled block into pages of its dp rank, from
    position `start` on.

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
    """Frees pulled blocks that are not needed any more."""

    step: int
    offer_ids: tuple[int, ...]


class CopyPages(Message, frozen=True):
    """Copies pages that a sequence shares and is about to change (copy-on-write), as (dp rank,
    source page, destination page). `states` lists slots of recurrent state to copy, as (dp rank,
    source slot, destination slot), together with the sliding-window ring buffers of these slots."""

    step: int
    copies: tuple[tuple[int, int, int], ...]
    states: tuple[tuple[int, int, int], ...] = ()


class SlotAdmit(Message, frozen=True):
    """Puts a sequence into a decode slot. `limit` is the first position that must not be written:
    the end of its pages or of its allowed length. `state` is the slot of the sequence's recurrent
    state. `adapter` is the slot of its LoRA adapter (0: the base model). `shift` is rotary position
    minus position in the sequence, after the prompt's images."""

    sequence: int
    rank: int
    slot: int
    token: int
    position: int
    limit: int
    pages: tuple[int, ...]
    sample: SampleSpec
    state: int = 0
    adapter: int = 0
    shift: int = 0


class SlotGrow(Message, frozen=True):
    """Gives a running sequence more pages. The new page ids and limit replace those of its decode
    slot."""

    rank: int
    slot: int
    limit: int
    pages: tuple[int, ...]


class DraftRow(Message, frozen=True):
    """Draft tokens for one row of a decode step: slot `slots[rank][row]`. `tokens` are the
    predicted tokens of the positions from `start` on. The step verifies at most `count` of them. It
    begins after the position that the slot has actually reached."""

    rank: int
    row: int
    start: int
    tokens: tuple[int, ...]
    count: int


class DecodeSteps(Message, frozen=True):
    """Applies `SlotAdmit` and `SlotGrow` commands, then runs `steps` decode steps over the slots
    `slots[rank]` of each dp rank. A slot at its limit yields -1 in place of a token. `masked` means
    that at least one row has a grammar. The first step verifies `drafts`. The tokens are the same
    as without drafts.

    `chunk` is a prefill chunk that runs together with the command's only step, which then has no
    drafts. The sequences of the chunk are not in the step."""

    step: int
    steps: int
    slots: tuple[tuple[int, ...], ...]
    admits: tuple[SlotAdmit, ...] = ()
    grows: tuple[SlotGrow, ...] = ()
    masked: bool = False
    drafts: tuple[DraftRow, ...] = ()
    chunk: PrefillChunk | None = None


class FindSaved(Message, frozen=True):
    """Opens this mesh's disk tier and lists its blocks. Must be the first disk command. `namespace`
    is a fingerprint of everything that determines KV, apart from the tokens. The `DiskResult` has
    the names of the blocks of this namespace, least recently used first.

    Disk commands never block the mesh. Each returns a `DiskResult` within `deadline_seconds`."""

    step: int
    namespace: bytes
    deadline_seconds: float


class SaveBlock(Message, frozen=True):
    """Writes one block from host memory to disk. `index` is the block's number in its sequence,
    counted from 0. `offer_ids` and `checksums` are those of the block's pieces in host memory."""

    step: int
    name: bytes
    index: int
    offer_ids: tuple[int, ...]
    checksums: tuple[int, ...]
    deadline_seconds: float


class LoadBlock(Message, frozen=True):
    """Reads a block from disk into host memory and offers the block. The result has the block's
    checksums."""

    step: int
    name: bytes
    index: int
    offer_ids: tuple[int, ...]
    deadline_seconds: float


class RemoveSaved(Message, frozen=True):
    """Removes the blocks `names` from disk. If `everything` is set, removes all blocks of the
    namespace, including blocks of dead workers."""

    step: int
    names: tuple[bytes, ...]
    deadline_seconds: float
    everything: bool = False


class ReadAdapter(Message, frozen=True):
    """Reads the LoRA adapter in the folder `path` into device memory, without blocking the mesh.
    The `DiskResult` has an error if the adapter cannot be served, or if the hash of its content is
    not `digest`."""

    step: int
    digest: str
    path: str


class PutAdapter(Message, frozen=True):
    """Writes the adapter `digest` into an adapter slot. A `ReadAdapter` must have read the adapter.
    Slots count from 1. No sequence may use the slot."""

    step: int
    digest: str
    slot: int


class ReadWeights(Message, frozen=True):
    """Reads new weights of the same model into device memory, while the mesh serves its present
    weights. `folder` is a checkpoint folder or the name of an offer.

    The `DiskResult` has an error if the weights cannot be served on this mesh. Otherwise its only
    name is the fingerprint of the folder's content. `staged` identifies the weights in later
    commands. Weights that an earlier command staged and that were not put into use are dropped."""

    step: int
    staged: int
    folder: str


class PutWeights(Message, frozen=True):
    """Replaces the mesh's weights by the weights that the `ReadWeights` with number `staged` has
    read. LoRA adapters stay in their slots."""

    step: int
    staged: int


class DropWeights(Message, frozen=True):
    """Frees weights that were staged but not put into use."""

    step: int


class OfferWeights(Message, frozen=True):
    """Offers the mesh's weights to other workers for `lease_seconds`. `content` is the fingerprint
    of the weights. The `DiskResult` has the offer's name, or an error. `PutWeights` and `SleepMesh`
    end the offer."""

    step: int
    content: str
    lease_seconds: float


class SleepMesh(Message, frozen=True):
    """Frees the KV pages and the weights of this mesh. If `keep` is set, the weights are copied to
    host memory first. Until `WakeMesh` only `ReadWeights`, `PutWeights` and commands without device
    memory may follow."""

    step: int
    keep: bool


class WakeMesh(Message, frozen=True):
    """Allocates empty KV pages, and copies the weights back if they are in host memory."""

    step: int


DiskCommand = FindSaved | SaveBlock | LoadBlock | RemoveSaved
# Commands of which each process of an instance runs a part, with its own result.
IN_PARTS = (PullBlock, FindSaved, SaveBlock, LoadBlock, RemoveSaved, ReadAdapter, ReadWeights)

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
    | ReadAdapter
    | PutAdapter
    | ReadWeights
    | PutWeights
    | DropWeights
    | OfferWeights
    | SleepMesh
    | WakeMesh
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
    """Result of a `PrefillChunk`. `prompts` maps each sequence to the log-probabilities of its
    prompt tokens in this chunk, if requested."""

    step: int
    samples: tuple[SampledToken, ...]
    checksums: tuple[BlockChecksum, ...] = ()
    prompts: tuple[tuple[int, PromptLogprobs], ...] = ()


class DecodeResult(Message, frozen=True):
    """Result of `DecodeSteps`. `tokens[rank][row]` has one entry per step for slot
    `slots[rank][row]`, which may be NO_TOKEN, BROKEN_TOKEN or STUCK_TOKEN. A row with drafts or a
    grammar may have more than one entry per step, because a step also returns the tokens after
    accepted drafts and after tokens that the grammar forces. `logprobs` has the shape of `tokens`,
    or is empty if none were requested. `chunk` is the result of the command's prefill chunk."""

    step: int
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    logprobs: tuple[tuple[tuple[TokenLogprobs | None, ...], ...], ...] = ()
    chunk: PrefillResult | None = None


class PullResult(Message, frozen=True):
    """Result of a pull. `error` is empty on success. `bytes_moved` is the number of bytes
    transferred between devices."""

    step: int
    offer_id: int
    bytes_moved: int = 0
    error: str = ""


class InsertResult(Message, frozen=True):
    """Result of an insertion. `checksum` is the keyed checksum of the values read back from the
    pages. With a lossy codec this checksum differs from the sender's, so `intact` replaces the
    comparison: it is False if the received data differ from the sent data, or the pages differ from
    the unpacked values. With other codecs `intact` is always True."""

    step: int
    offer_id: int
    checksum: int
    intact: bool = True


class ExtractResult(Message, frozen=True):
    step: int
    checksum: BlockChecksum


class DiskResult(Message, frozen=True):
    """Result of a disk command, a `ReadAdapter`, a `ReadWeights` or an `OfferWeights`.

    Attributes:
        error: Reason of a failure, or "". It is from a small fixed set (transfer/block_file.py).
            For a `ReadAdapter` or `ReadWeights` it is a text for the client.
        ages: Seconds since the block of each of `names` was written.
        skipped: Number of files without a usable block, by reason. If a `ReadWeights` lacks room,
            the entry NO_ROOM has the missing bytes of a device.
    """

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
