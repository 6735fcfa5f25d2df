"""The research face goes on where it holds KV: the next turn, scores of given tokens, several
prompts at once, and what a codec does to a cache on its way.

Oracles: logits and greedy tokens of Hugging Face transformers for the whole, a dense forward pass,
and the codecs' stated bounds."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from jdisagg.engine.research.face import DecoderLayout, Engine, PrefillLayout
from jdisagg.engine.research.kv_cache import KVCache
from jdisagg.engine.research.scores import Scores
from jdisagg.errors import ConfigError, InvalidRequestError, OverloadedError
from jdisagg.layout.axes import Layout
from tests.engine.research.research_engines import (
    CONTEXT_TOKENS,
    DP2,
    NAME,
    NEW_TOKENS,
    TP4,
    EngineOf,
    Expected,
    assert_same_kv,
    dense_pass,
    hugging_face,
    open_engine,
)
from tests.lanes import first_quick


class Words:
    """A tokenizer of numbers, which begins every text with token 1."""

    eos_ids = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize(
    ("name", "layout", "cuts"),
    first_quick(
        [
            (NAME, DP2, (9, 20)),
            ("gemma3_text", DecoderLayout(dp=2, tp=2), (5, 17)),
            ("deepseek_v3", DecoderLayout(tp=2), (11,)),
            ("qwen3_moe", DecoderLayout(dp=2, ep=2), (13,)),
        ]
    ),
)
def test_a_prompt_in_turns_gives_the_tokens_of_the_whole(
    engine_of: EngineOf, name: str, layout: Layout, cuts: tuple[int, ...]
) -> None:
    """Layers with a window, latents, experts."""
    expected = hugging_face(name)
    edges = [*cuts, len(expected.prompt)]
    with engine_of(name) as engine:
        kv = engine.prefill(expected.prompt[: cuts[0]], layout=TP4)
        with engine.create_session("s", layout=layout) as session:
            session.push(kv)
            for first, stop in pairwise(edges):
                turn = session.append(expected.prompt[first:stop])
                assert turn.token_ids == tuple(expected.prompt[first:stop])
            assert turn.next_token == session.next_token
            assert session.next_token.token_id == expected.greedy[0]
            assert session.token_ids == tuple(expected.prompt)
            assert_same_kv(session.pull(), engine.prefill(expected.prompt, layout=TP4), atol=5e-4)
            tokens = engine.generate_tokens(session, NEW_TOKENS, ignore_eos=True).token_ids
        assert tokens == tuple(expected.greedy[:NEW_TOKENS])


@pytest.mark.ci
def test_a_turn_after_an_answer_is_as_a_prefill_of_all_of_it(
    engine: Engine, golden: Expected
) -> None:
    """The turn is longer than a chunk. What was chosen and not accepted is left aside."""
    turn = golden.prompt[::-1]
    with engine.create_session("s", layout=DP2) as session:
        session.push(engine.prefill(golden.prompt, layout=TP4))
        engine.generate_tokens(session, 5)
        session.append(turn)
        tokens = (*golden.prompt, *golden.greedy[:5], *turn)
        assert session.token_ids == tokens
        whole = engine.prefill(tokens, layout=TP4)
        assert_same_kv(session.pull(), whole, atol=5e-5)
        logits, _ = dense_pass(NAME, tokens)
        assert session.next_token.token_id == logits[-1].argmax()
        seeded = {"temperature": 1.5, "seed": 7}
        found = engine.generate_tokens(session, 6, **seeded).token_ids
    assert found == engine.generate_tokens(whole, 6, **seeded).token_ids


def test_a_turn_that_does_not_fit_leaves_the_session_as_it_was(
    engine: Engine, golden: Expected
) -> None:
    with engine.create_session("s", layout=DP2) as session:
        with pytest.raises(InvalidRequestError, match="holds no KV"):
            session.append([5])
        session.push(engine.prefill(golden.prompt, layout=TP4))
        for turn, message in (
            ([], "continuation is empty"),
            ([131], r"continuation\[0\]=131"),
            (
                [5] * 89,
                "89 tokens, and with the 24 tokens so far .* context of 112; give at most 8",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                session.append(turn)
        with pytest.raises(ConfigError, match="continuation is text and the engine has no token"):
            session.append("text")
        hog = [engine.create_session(str(number), layout=DP2) for number in range(8)]
        full = engine.prefill([5] * CONTEXT_TOKENS, layout=TP4)
        for other in hog[:7]:
            other.push(full)
        with pytest.raises(OverloadedError, match="close sessions"):
            hog[7].push(engine.prefill([5] * 60, layout=TP4))
            session.append([5] * 80)
        for other in hog:
            other.close()
        assert session.token_ids == tuple(golden.prompt)
        assert engine.generate_tokens(session, 4).token_ids == tuple(golden.greedy[:4])


def test_text_that_continues_gets_no_token_before_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "tokenizer", Words())
    kv = engine.prefill("5 6", layout=TP4)
    with engine.create_session("s", layout=DP2) as session:
        session.push(kv)
        assert session.append("7 8").token_ids == (7, 8)
        assert session.token_ids == (1, 5, 6, 7, 8)
    assert engine.score("7 8", after=kv).token_ids == (7, 8)
    assert engine.score("7 8", layout=TP4).token_ids == (7, 8), "after the token that begins a text"


@pytest.mark.parametrize(
    ("name", "layout"),
    first_quick([(NAME, TP4), ("gpt_oss", PrefillLayout(dp=2, tp=2)), ("gemma3_text", TP4)]),
)
def test_scores_of_a_prompt_are_those_of_transformers(
    engine_of: EngineOf, name: str, layout: Layout
) -> None:
    expected = hugging_face(name)
    with engine_of(name) as engine:
        scores = engine.score(expected.prompt, layout=layout, top=3, logits=True)
        assert_scores(scores, expected.prompt[1:], expected.logits[:-1])


@pytest.mark.parametrize("held", [1, 10])
def test_scores_behind_a_cache_are_those_of_the_whole_and_leave_it_as_it_was(
    engine: Engine, golden: Expected, held: int
) -> None:
    kv = engine.prefill(golden.prompt[:held], layout=TP4)
    before = kv.norms()
    scores = engine.score(golden.prompt[held:], after=kv, top=2, logits=True)
    assert_scores(scores, golden.prompt[held:], golden.logits[held - 1 : -1])
    np.testing.assert_array_equal(kv.norms(), before)


@pytest.mark.ci
def test_scores_behind_a_session_leave_it_as_it_was(engine: Engine, golden: Expected) -> None:
    with engine.create_session("s", layout=DP2) as session:
        session.push(engine.prefill(golden.prompt, layout=TP4))
        engine.generate_tokens(session, 3)
        held, chosen = session.pull(), session.next_token
        given = [5, 9, 120]
        scores = engine.score(given, after=session)
        logits, _ = dense_pass(NAME, (*held.token_ids, *given))
        assert_scores(scores, given, logits[-4:-1])
        assert scores.logits is None and scores.top_ids.shape == (3, 0)
        assert session.next_token == chosen
        assert_same_kv(session.pull(), held)
        assert engine.generate_tokens(session, 2).token_ids == tuple(golden.greedy[3:5])


def test_scores_of_what_cannot_be_scored_are_refused(engine: Engine, golden: Expected) -> None:
    for tokens, top, message in (
        ([], 0, "tokens is empty"),
        ([5], 0, "tokens must have at least 2 tokens, got 1"),
        ([5, 131], 0, r"tokens\[1\]=131"),
        ([5] * 113, 0, "tokens has 113 tokens; the context holds 112"),
        ([5, 6], 21, r"top must be in \[0, 20\], got 21"),
        ([5, 6], -1, r"got -1"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.score(tokens, layout=TP4, top=top)
    kv = engine.prefill([5] * (CONTEXT_TOKENS - 1), layout=TP4)
    with pytest.raises(InvalidRequestError, match="continuation has 2 tokens"):
        engine.score([5, 6], after=kv)
    with pytest.raises(InvalidRequestError, match="begins at position 3"):
        engine.score([5], after=kv[3:])
    with pytest.raises(InvalidRequestError, match="scored on its mesh"):
        engine.score([5], after=kv, layout=TP4)


@pytest.mark.ci
def test_prompts_computed_together_are_what_each_is_by_itself(
    engine: Engine, golden: Expected
) -> None:
    """Short ones share a chunk of 16, on both ranks; one is longer than a chunk."""
    prompts = [golden.prompt[:length] for length in (3, 7, 24, 1, 2, 16, 5)]
    layout = PrefillLayout(dp=2, tp=2)
    caches = engine.prefill_batch(prompts, layout=layout)
    assert [list(kv.token_ids) for kv in caches] == prompts
    assert {kv.rank for kv in caches} == {0, 1}
    whole = engine.prefill(golden.prompt, layout=TP4)
    for kv in caches:
        assert kv.next_token.token_id == golden.logits[len(kv) - 1].argmax()
        assert_same_kv(kv, whole[: len(kv)], atol=5e-5)
    assert engine.prefill_batch([], layout=layout) == []
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] is empty"):
        engine.prefill_batch([[5], []], layout=layout)


@pytest.mark.ci
def test_more_prompts_than_there_are_pages_for_come_one_after_another(golden: Expected) -> None:
    with open_engine(NAME, sessions_per_rank=1) as engine:
        prompts = [[number] * 60 for number in range(3, 6)]
        caches = engine.prefill_batch(prompts, layout=TP4)
        for kv, prompt in zip(caches, prompts, strict=True):
            assert_same_kv(kv, engine.prefill(prompt, layout=TP4), atol=5e-5)
        (ledger,) = engine.instances[0].ledgers
        assert ledger.free_pages == ledger.total_pages


@pytest.mark.parametrize(
    ("codec", "bound"), first_quick([("int8", 1 / 254), ("int4", 1 / 14), ("fp8", 1 / 16)])
)
def test_what_a_codec_does_is_within_its_bound_and_can_be_looked_at(
    engine: Engine, kv: KVCache, codec: str, bound: float
) -> None:
    """`bound`: of an error, in shares of its vector's largest magnitude."""
    with engine.create_session("s", layout=DP2) as session:
        plain = session.push(kv)
        assert plain.codec == "none" and not kv.distances(session.pull()).any()
        move = session.push(kv, codec=codec)
        assert move.codec == codec and move.bytes_per_pair == move.planned
        assert move.bytes < plain.bytes
        came = session.pull()
        for index in range(kv.layers):
            for name, array in kv.layer(index).components.items():
                values = np.asarray(array)
                error = np.abs(values - np.asarray(came.layer(index).components[name]))
                largest = np.abs(values).max(-1, keepdims=True)
                assert (error <= largest * bound * 1.001).all(), name
        assert (kv.distances(came) > 0).mean() > 0.9
        assert session.next_token == kv.next_token, "chosen before it was packed"
        with pytest.raises(ConfigError, match="codec 'zip' is unknown; choose one of"):
            session.push(kv, codec="zip")
        assert session.token_ids == kv.token_ids


@pytest.mark.ci
def test_a_codec_packs_what_is_on_the_right_device_already_too(engine: Engine, kv: KVCache) -> None:
    with engine.create_session("s", layout=TP4, devices=engine.devices[:4]) as session:
        assert session.push(kv, codec="int8").bytes == 0
        assert (kv.distances(session.pull()) > 0).mean() > 0.9


def test_a_model_that_keeps_state_beside_kv_is_refused() -> None:
    with open_engine("qwen3_next") as engine, pytest.raises(ConfigError, match="keeps state"):
        engine.prefill([5, 6])


def assert_scores(scores: Scores, given: Sequence[int], logits_TV: np.ndarray) -> None:
    """As these logits, each of which predicts one of `given`, say."""
    logits = logits_TV.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    own = logprobs[np.arange(len(given)), list(given)]
    assert scores.token_ids == tuple(given)
    np.testing.assert_allclose(scores.logprobs, own, atol=2e-3)
    assert scores.total == pytest.approx(own.sum(), abs=2e-2)
    assert scores.perplexity == pytest.approx(np.exp(-own.mean()), rel=2e-3)
    ranks = 1 + (logits > logits[np.arange(len(given)), list(given)][:, None]).sum(-1)
    np.testing.assert_array_equal(scores.ranks, ranks)
    top = scores.top_ids.shape[1]
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logits, -1, kind="stable")[:, :top])
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-logprobs, -1)[:, :top], atol=2e-3)
    if scores.logits is not None:
        np.testing.assert_allclose(scores.logits, logits_TV, atol=2e-3)
