"""Chooses tokens from hidden states at the end of the prefill and decode programs: logits, shaping,
sampling, log-probabilities.

One program serves all rows. The host sets bits for the features that a row has
(`slot_state.RowFormat`), and each feature is computed only if an active row has its bit: a batch of
greedy rows pays for an argmax alone. A row's token does not depend on the other rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import DRAWN, MASKED, SCORED, SHAPED, RowFormat
from jdisagg.messages.step_commands import BROKEN_TOKEN, NO_TOKEN, STUCK_TOKEN
from jdisagg.model_api import Shards, Stem
from jdisagg.ops.logit_shaping import logprobs, mask_logits, shape_logits
from jdisagg.ops.sampling import greedy, sample
from jdisagg.request import MAX_TOP_LOGPROBS

SCORES = 1 + 2 * MAX_TOP_LOGPROBS


class Chosen(NamedTuple):
    """The tokens chosen for the B rows of a batch.

    Attributes:
        token: int32 [B]. NO_TOKEN if the row is not active, BROKEN_TOKEN if its logits are not
            finite, STUCK_TOKEN if its grammar mask allows no token.
        scores: float32 [B, SCORES], only of a batch in which a row asks for log-probabilities: that
            of the token, then those of the most likely tokens, and the bits of these tokens' ids.
            One array, because the host spends time on each result of a program.
    """

    token: jax.Array
    scores: jax.Array

    def on_rank(self, programs: Programs) -> "Chosen":
        """Returns one dp rank's arrays as a result of a program, in a form that the host can
        read."""
        return programs.readable(Chosen(self.token[None], self.scores[None]))

    @staticmethod
    def specs(programs: Programs) -> "Chosen":
        return Chosen(programs.readable_spec, programs.readable_spec)  # type: ignore[arg-type]


def logits(
    stem: Stem, y_BD: jax.Array, shards: Shards, vocabulary: int, *, apart: bool = False
) -> jax.Array:
    """Returns the logits from activations after the final norm, [B, V]. If `choose` follows in the
    same program, `apart` gives each device of tp only its share of the rows, if they have shares.
    """
    apart = apart and _share(len(y_BD), shards.tp) is not None
    return stem.project(y_BD, shards, apart=apart)[:, :vocabulary]


def _share(rows: int, tp: tuple[str, ...]) -> int | None:
    """Returns the number of rows for which each device of tp chooses, or None if each chooses for
    all, because `rows` is not a multiple of tp."""
    size, left = divmod(rows, lax.axis_size(tp)) if tp else (rows, 0)
    return None if left or size == rows else size


class RowsToChoose(NamedTuple):
    """The B rows of a batch.

    Attributes:
        ints, floats: Sampling parameters in the form of `RowFormat`.
        position: Position of the token to choose.
        mask: Bit mask of the tokens that each row's grammar allows (see `mask_logits`), all ones
            for a row without a grammar. None in a program that runs no rows with a grammar.
    """

    ints: jax.Array
    floats: jax.Array
    position: jax.Array
    active: jax.Array
    mask: jax.Array | None = None


def choose(
    form: RowFormat,
    logits_BV: jax.Array,
    rows: RowsToChoose,
    counts: Callable[[], jax.Array],
    shards: Shards,
) -> Chosen:
    """Chooses a token for each active row. The devices of tp share the rows (`_share`).

    Args:
        logits_BV: Logits of all rows, or of this device's share of them.
        counts: Function that returns the counts of the tokens in each row's sequence, [B, V]. It is
            called inside the condition, so that its operations do not run if no row needs them.
    """
    size = _share(len(rows.ints), shards.tp)
    if size is None:
        return _choose(form, logits_BV, rows, counts, shards.platform)
    first = lax.axis_index(shards.tp) * size

    def own(array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, first, size) if len(array) > size else array

    share: RowsToChoose = jax.tree.map(own, rows)
    chosen = _choose(form, own(logits_BV), share, lambda: own(counts()), shards.platform)
    bits_BK = lax.bitcast_convert_type(chosen.scores, jnp.int32)
    both_BK = jnp.concatenate((chosen.token[:, None], bits_BK), axis=1)  # one collective
    both_BK = lax.all_gather(both_BK, shards.tp, axis=0, tiled=True)
    return Chosen(both_BK[:, 0], lax.bitcast_convert_type(both_BK[:, 1:], jnp.float32))


def _choose(
    form: RowFormat,
    logits_BV: jax.Array,
    rows: RowsToChoose,
    counts: Callable[[], jax.Array],
    platform: str,
) -> Chosen:
    ints_BI, floats_BF, position_B, active_B, mask_BW = rows
    features_B = jnp.where(active_B, form.features(ints_BI), 0)
    features = lax.reduce(features_B, np.int32(0), lax.bitwise_or, (0,))
    no_scores = jnp.zeros((logits_BV.shape[0], SCORES), jnp.float32)

    def likeliest(logits_BV: jax.Array) -> jax.Array:
        return greedy(logits_BV, platform=platform)

    def adjusted(logits_BV: jax.Array) -> jax.Array:
        shaping = form.shaping(ints_BI, floats_BF)
        logits_BV = shape_logits(logits_BV, shaping, counts(), position_B)
        return logits_BV if mask_BW is None else mask_logits(logits_BV, mask_BW)

    def drawn(logits_BV: jax.Array) -> jax.Array:
        params = form.sampling(ints_BI, floats_BF, position_B)
        return sample(logits_BV, params, platform=platform)

    def with_features() -> tuple[jax.Array, jax.Array]:
        changes = SHAPED if mask_BW is None else SHAPED | MASKED
        own_BV = lax.cond(features & changes != 0, adjusted, lambda logits_BV: logits_BV, logits_BV)
        token_B = lax.cond(features & DRAWN != 0, drawn, likeliest, own_BV)
        scores_BK = lax.cond(
            features & SCORED != 0,
            lambda logits_BV: _scores(logits_BV, token_B),
            lambda _: no_scores,
            own_BV,
        )
        if mask_BW is None:
            return token_B, scores_BK
        stuck_B = (features_B & MASKED != 0) & jnp.all(mask_BW == 0, axis=1)
        return jnp.where(stuck_B, STUCK_TOKEN, token_B), scores_BK

    # A batch without features has a branch of its own. The inner branches that return the logits as
    # they are copy them.
    token_B, scores_BK = lax.cond(
        features == 0, lambda: (likeliest(logits_BV), no_scores), with_features
    )
    broken_B = (token_B < 0) & (token_B != STUCK_TOKEN)
    token_B = jnp.where(broken_B, BROKEN_TOKEN, token_B)
    return Chosen(jnp.where(active_B, token_B, NO_TOKEN), scores_BK)


def _scores(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    chosen_B, ids_BK, top_BK = logprobs(logits_BV, token_B, MAX_TOP_LOGPROBS)
    bits_BK = lax.bitcast_convert_type(ids_BK, jnp.float32)
    return jnp.concatenate((chosen_B[:, None], top_BK, bits_BK), axis=1)


def read_row(scores_K: np.ndarray, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Returns one row of `Chosen.scores` on the host: the log-probability of the token, and the ids
    and log-probabilities of the `most` most likely tokens."""
    top_K, bits_K = np.split(scores_K[1:], 2)
    ids_K = np.ascontiguousarray(bits_K).view(np.int32)
    return float(scores_K[0]), list(zip(ids_K[:most].tolist(), top_K[:most].tolist(), strict=True))
