"""From hidden states to chosen tokens, the end of both programs: logits, shaping, sampling,
log-probabilities.

Variants, each a program of its own, so that greedy batches pay for nothing they do not use: GREEDY
(argmax), SAMPLED (temperature and filters), SHAPED (penalties, bias, minimum length,
log-probabilities as well), and the last two MASKED: some row has a grammar, and a mask says which
ids it allows. A row's token does not depend on the variant it runs in."""

import enum
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import RowFormat
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


class Chosen(NamedTuple):
    """`token` int32 [B]: NO_TOKEN where the row is not active, BROKEN_TOKEN where its logits are
    not finite, STUCK_TOKEN where its mask allows none. The rest is filled by the shaped ones alone:
    log-probability [B], the top ids and log-probabilities [B, 20], and the rows' new counts
    [B, V]."""

    token: jax.Array
    logprob: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    counts: jax.Array | None = None

    def on_rank(self, programs: Programs) -> "Chosen":
        """What leaves a program's body: one dp rank's part, without the counts (they are slot
        state), readable by the host."""
        extra = (
            None if part is None else part[None]
            for part in (self.logprob, self.top_ids, self.top_logprobs)
        )
        return programs.readable(Chosen(self.token[None], *extra))

    @staticmethod
    def specs(variant: Variant, programs: Programs) -> "Chosen":
        """How `on_rank`'s arrays lie on the mesh."""
        arrays = 4 if variant.shaped else 1
        return Chosen(*(programs.readable_spec for _ in range(arrays)))  # type: ignore[arg-type]


def logits(
    variant: Variant, stem: Stem, x_BD: jax.Array, shards: Shards, vocabulary: int
) -> tuple[jax.Array, VocabularyShard]:
    """The logits that `choose` takes, and which part of the vocabulary they are. On a GPU each
    device keeps its own part: to gather them would be the largest message of a step. What shapes
    or masks logits wants all of them."""
    if shards.platform != "gpu" or not shards.tp or variant.shaped or variant.masked:
        return stem.logits(x_BD, shards)[:, :vocabulary], WHOLE
    local_BV = stem.logits(x_BD, replace(shards, tp=()))
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
    """Chooses a token for each active row; `position_B` is the position the token will have. The
    logits are those of `logits`, `shard` with them; `mask_BW`: of the masked variants
    (`mask_logits`)."""
    if variant is Variant.GREEDY:
        return Chosen(_mark(greedy(logits_BV, shard), active_B))
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
