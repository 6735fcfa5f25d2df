"""Routing by sigmoid scores against an explicit loop in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.routing import route_by_scores

pytestmark = pytest.mark.one_device

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
    got = route_by_scores(
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
    got = route_by_scores(logits_TE, None, 2, normalised=True)
    assert np.asarray(got.experts_TJ[0]).tolist() == [1, 3]


def test_by_softmax_a_group_is_worth_its_best_expert() -> None:
    random = np.random.default_rng(5)
    logits_TE = random.normal(size=(TOKENS, EXPERTS)).astype(np.float32)
    got = route_by_scores(
        jnp.asarray(logits_TE),
        None,
        3,
        scores="softmax",
        groups=4,
        groups_per_token=2,
        normalised=False,
        scaling=2.0,
    )
    for token, logits_E in enumerate(logits_TE):
        scores_E = np.exp(logits_E) / np.exp(logits_E).sum()
        best = np.argsort(-scores_E.reshape(4, -1).max(axis=1))[:2]
        allowed = [expert for expert in range(EXPERTS) if expert // (EXPERTS // 4) in best]
        experts = sorted(allowed, key=lambda expert: -scores_E[expert])[:3]
        assert np.asarray(got.experts_TJ[token]).tolist() == experts
        np.testing.assert_allclose(got.weights_TJ[token], 2.0 * scores_E[experts], rtol=1e-5)
