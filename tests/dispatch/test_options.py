"""What restricts an answer becomes its grammar: tokens that are allowed, words that are not."""

import pytest

from jdisagg.dispatch.options import restricted
from jdisagg.errors import InvalidRequestError
from jdisagg.request import MAX_ALLOWED_TOKENS, Grammar, GrammarKind, SamplingOptions
from tests.grammar.matching import EOS, allowed, begin, ids_of, text, walk


def grammar_of(**options: object) -> Grammar:
    given, name = restricted(None, SamplingOptions(**options), EOS)  # type: ignore[typeddict-item]
    assert name == next(iter(options))
    grammar = given.get("grammar")
    assert grammar is not None
    return grammar


IDS = [300, 70, 71, 72, 9, 300, 1200]


def test_allowed_tokens_are_all_that_come() -> None:
    grammar = grammar_of(allowed_token_ids=IDS)
    assert set(allowed(begin(grammar, ignore_eos=True))) == set(IDS)
    assert set(allowed(begin(grammar, [70, 9], ignore_eos=True))) == set(IDS)


def test_as_many_tokens_as_may_be_allowed_fit_a_grammar() -> None:
    most = range(100_000, 100_000 + 2 * MAX_ALLOWED_TOKENS, 2)
    assert grammar_of(allowed_token_ids=most).text.count(",") == MAX_ALLOWED_TOKENS - 1


def test_an_answer_ends_where_the_token_that_ends_it_is_allowed() -> None:
    without, _ = restricted(None, {"allowed_token_ids": IDS}, EOS)
    assert without.get("ignore_eos")
    options = SamplingOptions(allowed_token_ids=[70, EOS[0]])
    ending, _ = restricted(None, options, EOS)
    assert "ignore_eos" not in ending
    assert set(allowed(begin(grammar_of(**options)))) == {70, *EOS}


@pytest.mark.parametrize(
    "words", [["e"], ["ab", "bc", "a b"], ["a.b", "]", "\\", "/", "\n", "-"], ["é", "Köln", "🐕"]]
)
def test_bad_words_do_not_come_however_their_tokens_are_cut(words: list[str]) -> None:
    grammar = grammar_of(bad_words=words)
    for seed in range(5):
        ids, _ = walk(grammar, seed)
        assert not any(word in text(ids) for word in words)
    for word in words:
        *first, last = ids_of("x" + word)
        assert last not in allowed(begin(grammar, first))
        assert last in allowed(begin(grammar_of(bad_words=["zzz"]), first))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allowed_token_ids": [1], "bad_words": ["a"]}, "cannot restrict one answer together"),
        (
            {"allowed_token_ids": [1], "grammar": Grammar(GrammarKind.JSON_OBJECT)},
            "allowed_token_ids and grammar cannot",
        ),
        ({"bad_words": ["a", ""]}, "non-empty texts, got ''"),
        ({"bad_words": ["a" * 200]}, "bad_words bytes"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
        ({"allowed_token_ids": [1] * 20_000}, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_restricted_is_refused(options: SamplingOptions, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        restricted(None, options, EOS)


def test_nothing_restricts_where_nothing_is_named() -> None:
    options = SamplingOptions(allowed_token_ids=[], bad_words=None, seed=3)
    assert restricted(None, options, EOS) == (options, "")
