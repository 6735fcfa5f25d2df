"""Routing by sigmoid scores against a loop in NumPy that says the same in words."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.routing import route_by_sigmoid

TOKENS, EXPERTS = 40, 12


def _in_words(
    scores_E: np.ndarray, correction_E: np.ndarray, chosen: int, groups: int, kept: int
) -> list[int]:
    """Groups by the sum of their two best corrected scores, experts by the corrected score."""
    corrected_E = scores_E + correction_E
    members = np.array_split(np.arange(EXPERTS), groups)
    worth = [sum(sorted(corrected_E[group])[-2:]) for group in members]
    best = sorted(range(groups), key=lambda group: -worth[group])[:kept]
    allowed = [expert for group in best for expert in members[group]]
    return sorted(allowed, key=lambda expert: -corrected_E[expert])[:chosen]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1), (6, 6)])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_correction_chooses_and_the_plain_scores_weigh(
    groups: int, kept: int, normalised: bool
) -> None:
    random = np.random.default_rng(groups)
    logits_TE = random.normal(size=(TOKENS, EXPERTS)).astype(np.float32)
    correction_E = random.normal(size=EXPERTS).astype(np.float32)
    got = route_by_sigmoid(
        jnp.asarray(logits_TE),
        jnp.asarray(correction_E),
        2,
        groups=groups,
        groups_per_token=kept,
        normalised=normalised,
        scaling=2.5,
    )
    for token, logits_E in enumerate(logits_TE):
        scores_E = 1 / (1 + np.exp(-logits_E))
        experts = _in_words(scores_E, correction_E, 2, groups, kept)
        assert np.asarray(got.experts_TJ[token]).tolist() == experts
        weights = scores_E[experts] / (scores_E[experts].sum() if normalised else 1)
        np.testing.assert_allclose(got.weights_TJ[token], 2.5 * weights, rtol=1e-5)


def test_without_a_correction_the_scores_choose() -> None:
    logits_TE = jnp.asarray([[0.0, 3.0, -1.0, 2.0]])
    got = route_by_sigmoid(logits_TE, None, 2, normalised=True)
    assert np.asarray(got.experts_TJ[0]).tolist() == [1, 3]
