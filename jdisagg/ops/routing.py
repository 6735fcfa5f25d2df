"""Expert routing of DeepSeek's models, also used by GLM-4.5, MiniMax M2 and others: softmax scores
in V2 (arXiv 2405.04434, section 2.1.3), sigmoid scores from V3 on (arXiv 2412.19437, section
2.1.2).

A learned correction for load balance is added for the choice of experts, but weights use the plain
scores. Experts may form groups. Then only experts of a token's best groups are considered. A
group's score is its best score (softmax) or the sum of its two best corrected scores (sigmoid)."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.ops.moe import Routing

_GROUP_BEST = {"softmax": 1, "sigmoid": 2}


def route_by_scores(
    logits_TE: jax.Array,
    correction_E: jax.Array | None,
    experts_per_token: int,
    *,
    scores: Literal["softmax", "sigmoid"] = "sigmoid",
    groups: int = 1,
    groups_per_token: int = 1,
    normalised: bool,
    scaling: float = 1.0,
    not_zero: float = 1e-20,
) -> Routing:
    """Returns the experts of each token and their weights, in float32. Ties go to the smaller
    number. `not_zero` is added to the sum by which weights are divided."""
    wide_TE = logits_TE.astype(jnp.float32)
    scores_TE = jax.nn.sigmoid(wide_TE) if scores == "sigmoid" else jax.nn.softmax(wide_TE, axis=-1)
    choice_TE = scores_TE
    if correction_E is not None:
        choice_TE = scores_TE + correction_E.astype(jnp.float32)[None, :]
    if groups_per_token < groups:
        choice_TE = _within_best_groups(choice_TE, groups, groups_per_token, _GROUP_BEST[scores])
    _, experts_TJ = lax.top_k(choice_TE, experts_per_token)
    weights_TJ = jnp.take_along_axis(scores_TE, experts_TJ, axis=1)
    if normalised:
        weights_TJ = weights_TJ / (jnp.sum(weights_TJ, axis=-1, keepdims=True) + not_zero)
    return Routing(experts_TJ, weights_TJ * scaling)


def _within_best_groups(
    choice_TE: jax.Array, groups: int, kept: int, best_of_group: int
) -> jax.Array:
    tokens, experts = choice_TE.shape
    choice_TGE = choice_TE.reshape(tokens, groups, experts // groups)
    best = lax.top_k(choice_TGE, min(best_of_group, experts // groups))[0]
    _, groups_TJ = lax.top_k(jnp.sum(best, axis=-1), kept)
    taken_TG = jnp.any(groups_TJ[:, :, None] == jnp.arange(groups)[None, None, :], axis=1)
    return jnp.where(taken_TG[:, :, None], choice_TGE, -jnp.inf).reshape(tokens, experts)
