"""Chooses tokens from hidden states at the end of the prefill and decode programs: logits, shaping,
sampling, log-probabilities.

Each variant is a separate program, so that a batch pays only for the features that it uses: GREEDY
(argmax), SAMPLED (temperature and filters), SHAPED (also penalties, bias, minimum length,
log-probabilities), and MASKED variants of the last two, if some row has a grammar. A row's token
does not depend on the variant."""

import enum
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import RowFormat
from jdisagg.layout.platforms import traits_of
from jdisagg.messages.step_commands import BROKEN_TOKEN, NO_TOKEN, STUCK_TOKEN
from jdisagg.model_api import Shards, Stem
from jdisagg.ops.logit_shaping import logprobs, mask_logits, shape_logits, update_counts
from jdisagg.ops.sampling import WHOLE, VocabularyShard, greedy, sample
from jdisagg.request import MAX_TOP_LOGPROBS


class Variant(enum.Enum):
    GREEDY = "greedy"
    SAMPLED = "sampled"
    SHAPED = "shaped"
    MASKED = "masked"
    MASKED_SHAPED = "masked_shaped"

    @classmethod
    def of(cls, sampled: bool, shaped: bool, masked: bool = False) -> "Variant":
        if masked:
            return cls.MASKED_SHAPED if shaped else cls.MASKED
        return cls.SHAPED if shaped else cls.SAMPLED if sampled else cls.GREEDY

    @property
    def shaped(self) -> bool:
        return self in (Variant.SHAPED, Variant.MASKED_SHAPED)

    @property
    def masked(self) -> bool:
        return self in (Variant.MASKED, Variant.MASKED_SHAPED)

    @property
    def unmasked(self) -> "Variant":
        """The variant without grammar masks."""
        return Variant.of(True, self.shaped) if self.masked else self


class Chosen(NamedTuple):
    """The tokens chosen for the B rows of a batch. Fields other than `token` are set only in SHAPED
    variants.

    Attributes:
        token: int32 [B]. NO_TOKEN if the row is not active, BROKEN_TOKEN if its logits are not
            finite, STUCK_TOKEN if its grammar mask allows no token.
        logprob: Log-probability of the token, [B].
        top_ids, top_logprobs: Ids and log-probabilities of the 20 most likely tokens, [B, 20].
        counts: Updated counts of the tokens in each row's sequence, [B, V].
    """

    token: jax.Array
    logprob: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    counts: jax.Array | None = None

    def on_rank(self, programs: Programs) -> "Chosen":
        """Returns one dp rank's arrays as a result of a program, in a form that the host can read.
        Omits `counts`, which stay in the slot state."""
        extra = (
            None if part is None else part[None]
            for part in (self.logprob, self.top_ids, self.top_logprobs)
        )
        return programs.readable(Chosen(self.token[None], *extra))

    @staticmethod
    def specs(variant: Variant, programs: Programs) -> "Chosen":
        """Returns the PartitionSpecs of the arrays that `on_rank` returns."""
        arrays = 4 if variant.shaped else 1
        return Chosen(*(programs.readable_spec for _ in range(arrays)))  # type: ignore[arg-type]


def logits(
    variant: Variant, stem: Stem, y_BD: jax.Array, shards: Shards, vocabulary: int
) -> tuple[jax.Array, VocabularyShard]:
    """Returns the logits for `choose` from activations after the final norm, and the part of the
    vocabulary that they cover. On an accelerator each device keeps the logits of its own
    vocabulary part, because gathering all would be the largest message of a step. Shaped and masked
    variants gather all logits."""
    sharded = traits_of(shards.platform).sharded_logits and shards.tp
    if not sharded or variant.shaped or variant.masked:
        return stem.project(y_BD, shards)[:, :vocabulary], WHOLE
    local_BV = stem.project(y_BD, replace(shards, tp=()))
    first = lax.axis_index(shards.tp) * local_BV.shape[1]
    real_V = first + jnp.arange(local_BV.shape[1], dtype=jnp.int32) < vocabulary
    return jnp.where(real_V[None], local_BV, -jnp.inf), VocabularyShard(shards.tp, first)


def choose(
    variant: Variant,
    rows: RowFormat,
    logits_BV: jax.Array,
    ints_BI: jax.Array,
    floats_BF: jax.Array,
    position_B: jax.Array,
    active_B: jax.Array,
    counts_BV: jax.Array | None,
    shard: VocabularyShard,
    platform: str,
    mask_BW: jax.Array | None = None,
) -> Chosen:
    """Chooses a token for each active row.

    Args:
        variant: Features that the rows need.
        rows: Column layout of `ints_BI` and `floats_BF`.
        logits_BV: Logits returned by `logits`.
        ints_BI, floats_BF: Packed sampling parameters of each row.
        position_B: Position of the token to choose, for each row.
        active_B: Whether the row chooses a token.
        counts_BV: Counts of the tokens in each row's sequence. Only for shaped variants.
        shard: Part of the vocabulary that `logits_BV` covers, as returned by `logits`.
        platform: JAX platform of the mesh, such as "cpu".
        mask_BW: Bit mask of the tokens that each row's grammar allows (see `mask_logits`). Only for
            masked variants.
    """
    if variant is Variant.GREEDY:
        return Chosen(_mark(greedy(logits_BV, shard, platform=platform), active_B))
    params = rows.sampling(ints_BI, floats_BF, position_B)
    if variant.shaped:
        assert counts_BV is not None
        shaping = rows.shaping(ints_BI, floats_BF)
        logits_BV = shape_logits(logits_BV, shaping, counts_BV, position_B)
    if mask_BW is not None:
        logits_BV = mask_logits(logits_BV, mask_BW)
    token_B = sample(logits_BV, params, shard, platform=platform)
    marked_B = _mark(token_B, active_B)
    if mask_BW is not None:
        stuck_B = active_B & jnp.all(mask_BW == 0, axis=1)
        marked_B = jnp.where(stuck_B, STUCK_TOKEN, marked_B)
    if not variant.shaped:
        return Chosen(marked_B)
    assert counts_BV is not None
    chosen_B, top_ids_BK, top_BK = logprobs(logits_BV, token_B, MAX_TOP_LOGPROBS)
    return Chosen(
        marked_B, chosen_B, top_ids_BK, top_BK, update_counts(counts_BV, token_B, active_B)
    )


def _mark(token_B: jax.Array, active_B: jax.Array) -> jax.Array:
    return jnp.where(active_B, jnp.where(token_B < 0, BROKEN_TOKEN, token_B), NO_TOKEN)
