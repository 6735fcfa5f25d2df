"""`StepCommand -> Executor.run -> StepResult`: what a scheduler asks of a mesh, as plain
serialisable data.

A command names sequences, dp ranks, pages and slots by number and carries every token id the mesh
does not hold. It holds no arrays, no clock and no randomness, so that a command stream can be
broadcast to the processes of an instance, recorded, replayed, and run by a cost model. Positions
are absolute in the sequence. Page ids are local to a dp rank.

Sequence state on the mesh: tokens t_0..t_(n-1) are known, KV is in pages for positions 0..n-2, the
slot holds `token` = t_(n-1) and `position` = n-1. A decode step writes that token's KV, samples t_n
and moves on, while position < limit."""

from jdisagg.layout.mesh_card import MeshCard
from jdisagg.plain import Message
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import SamplingParams, TokenLogprobs

# The peer of pulls from this mesh's own host memory. It is always connected.
HOST = "host memory"
SLOW = "slow"  # of a `DiskResult`: its deadline passed


class SampleSpec(Message, frozen=True):
    """How the next tokens of one child are chosen. `history` (prompt, generated ids) is filled only
    when the choice depends on it; generated ids are all of them so far, the slot's own `token`
    included. `min_position` is the first position at which a stop id may be sampled."""

    child: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    min_position: int = 0
    prompt_history: tuple[int, ...] = ()
    output_history: tuple[int, ...] = ()


class OfferSpec(Message, frozen=True):
    """A piece of a row's KV to offer: `groups` layer groups from `group` on, tokens [offset, offset
    + block_tokens) of the rank's chunk."""

    offer_id: int
    group: int
    offset: int
    block_tokens: int
    groups: int = 1


class PrefillRow(Message, frozen=True):
    """One sequence's part of a packed chunk: `tokens` at `offset` of dp rank `rank`'s chunk, from
    position `start` on.

    `pages` covers positions [0, start + len(tokens)). `samples` is non-empty on the sequence's last
    part: one per child. `state`: the slot that holds its state as of `start`, and then as of its
    end, in a model that keeps some.

    `prompt_logprobs`: of each token that follows one of `tokens` its log-probability is wanted,
    with so many of the most likely ones; `following`: the token behind the last of them, -1 where
    the prompt ends."""

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
    """Run one packed chunk of `chunk_tokens` tokens (a bucket) per dp rank. Rows that continue
    (start > 0) come first on their rank.

    `checksum_key` keys the checksums of what is offered (ops/checksum.py)."""

    step: int
    chunk_tokens: int
    rows: tuple[PrefillRow, ...]
    checksum_key: int = 0


class ReleaseOffers(Message, frozen=True):
    """Forget offered blocks: pulled and acknowledged, or given up; or those in host memory."""

    step: int
    offer_ids: tuple[int, ...]
    from_host: bool = False


class ExtractBlock(Message, frozen=True):
    """Offer KV that lies in this mesh's pages (a running sequence moves to another worker): tokens
    [start, start + valid_tokens) of `groups` layer groups from `group` on, on dp rank `rank`, as a
    block of `block_tokens`. `pages` as in `InsertBlock`. Gives an `ExtractResult`. `to_host`: keep
    it in host memory instead, for a pull whose peer is `HOST`; the result comes when it is there,
    and nothing waits for it.

    `state`: not KV but the sequence's state in all layers, which lies in the slot `pages[0]`: a
    block of one token. `window`: KV of the layers with a window, where that is sent apart; groups
    are then those that these layers alone are cut into, and `pages` those that they lie in."""

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
    state: bool = False
    window: bool = False


class ConnectPeer(Message, frozen=True):
    """From now on blocks may be pulled from `peer` (a name that is never used for another mesh: it
    holds the boot id)."""

    step: int
    peer: str
    card: MeshCard


class DisconnectPeer(Message, frozen=True):
    """Nothing will be pulled from `peer` any more; pulls under way fail."""

    step: int
    peer: str


class PullBlock(Message, frozen=True):
    """Begin pulling one offered block from `peer` to dp rank `rank`; the result comes when it has
    arrived or failed.

    Never blocks the mesh. `codec` names how the block travels (transfer/codec.py); `source_rank` is
    the peer's dp rank that offers it. `state`, `window`: a block of these (`ExtractBlock`)."""

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
    state: bool = False
    window: bool = False


class InsertBlock(Message, frozen=True):
    """Write a pulled block's first `valid_tokens` tokens into its rank's pages, from position
    `start` on.

    `pages` covers positions [0, start + valid_tokens), as in `PrefillRow`: position p lies in
    pages[p // page_size]. Gives an `InsertResult`: what was written is read back and summed under
    `checksum_key`. `state`: a block of state (`ExtractBlock`), which goes into the slot
    `pages[0]`; `window`: one of KV of the layers with a window, and `pages` those of their own."""

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
    state: bool = False
    window: bool = False


class DropBlocks(Message, frozen=True):
    """Forget pulled blocks that will not be inserted."""

    step: int
    offer_ids: tuple[int, ...]


class CopyPages(Message, frozen=True):
    """Copy-on-write: (rank, source page, destination page) triples; `states`: the same of slots of
    state, and of their rings of pages."""

    step: int
    copies: tuple[tuple[int, int, int], ...]
    states: tuple[tuple[int, int, int], ...] = ()


class SlotAdmit(Message, frozen=True):
    """Put a sequence into a slot. `limit`: first position that may not be written (pages or length
    end there). `state`: the slot of its state, in a model that keeps some."""

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
    """A running slot got more pages: its whole page row again, and the new limit."""

    rank: int
    slot: int
    limit: int
    pages: tuple[int, ...]


class DecodeSteps(Message, frozen=True):
    """Admit and grow, then run `steps` decode steps over `slots[rank]`. A slot at its limit yields
    no token (-1). `masked`: some row has a grammar."""

    step: int
    steps: int
    slots: tuple[tuple[int, ...], ...]
    shaped: bool
    sampled: bool
    admits: tuple[SlotAdmit, ...] = ()
    grows: tuple[SlotGrow, ...] = ()
    masked: bool = False


class FindSaved(Message, frozen=True):
    """Opens what this mesh keeps on disk and looks at what lies there of `namespace`: what must be
    equal for KV to be, beside the names of blocks. Before any other command on disk. Gives a
    `DiskResult` with names, used longest ago first.

    No command on disk blocks the mesh; each gives a `DiskResult`, after `deadline_seconds` at the
    latest."""

    step: int
    namespace: bytes
    deadline_seconds: float


class SaveBlock(Message, frozen=True):
    """Write the `index`-th block of its chain, which lies in host memory as these offers with these
    sums, to disk."""

    step: int
    name: bytes
    index: int
    offer_ids: tuple[int, ...]
    checksums: tuple[int, ...]
    deadline_seconds: float


class LoadBlock(Message, frozen=True):
    """Read a block from disk into host memory, as these offers. Gives their sums."""

    step: int
    name: bytes
    index: int
    offer_ids: tuple[int, ...]
    deadline_seconds: float


class RemoveSaved(Message, frozen=True):
    """Remove blocks from disk; `everything`: all of the namespace, those of workers that are gone
    among them."""

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
    """The keyed sum of an offered block's valid tokens, taken where they were computed."""

    offer_id: int
    checksum: int


class PrefillResult(Message, frozen=True):
    """`prompts`: of the rows that ask for them, by sequence, those of the row's part."""

    step: int
    samples: tuple[SampledToken, ...]
    checksums: tuple[BlockChecksum, ...] = ()
    prompts: tuple[tuple[int, PromptLogprobs], ...] = ()


class DecodeResult(Message, frozen=True):
    """`tokens[rank][row]` of row i of `slots[rank]`: one a step, NO_TOKEN, BROKEN_TOKEN and
    STUCK_TOKEN included. A row with a grammar may have more: forced tokens, which a step takes
    beside the one that it chooses.

    `logprobs` alike where asked for, else empty.
    """

    step: int
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    logprobs: tuple[tuple[tuple[TokenLogprobs | None, ...], ...], ...] = ()


class PullResult(Message, frozen=True):
    """`error` is empty on success; `bytes_moved` counts what crossed between devices."""

    step: int
    offer_id: int
    bytes_moved: int = 0
    error: str = ""


class InsertResult(Message, frozen=True):
    """`checksum`: the keyed sum of the inserted tokens, read back from the pages. `intact`: what
    came was what its (lossy) codec had packed, and the pages hold what was unpacked; always true
    without a lossy codec, where `checksum` says it all."""

    step: int
    offer_id: int
    checksum: int
    intact: bool = True


class ExtractResult(Message, frozen=True):
    step: int
    checksum: BlockChecksum


class DiskResult(Message, frozen=True):
    """`error`: why not, in a word of a small fixed set (transfer/block_file.py); empty on success.
    `ages`: seconds since each of `names` was written. `skipped`: files that hold no block, by the
    same words. `bytes_moved`: of the file."""

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


NO_TOKEN = -1  # a slot that stood at its limit
BROKEN_TOKEN = -2  # a sequence whose logits are not finite
STUCK_TOKEN = -3  # a sequence whose grammar allows no token: it broke its compiler's limits
