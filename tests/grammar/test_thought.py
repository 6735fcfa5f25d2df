"""After the budget of its reasoning an answer must end it. A token of the toy model is a character,
so that the oracle is the text itself."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from jdisagg.grammar.chat_answers import marker, with_thought_and_calls
from jdisagg.grammar.matcher import TokenMatcher, mask_words
from jdisagg.request import Grammar, GrammarKind, SamplingParams
from tests.chat.reasoning_forms import FORMS, ReasoningForm
from tests.fakes.toy_grammars import END, FIRST, GRAMMARS, VOCABULARY, toy_text
from tests.grammar.matching import bits_of

ALL = set(range(VOCABULARY))
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
budgets = pytest.mark.parametrize("budget", [0, 1, 17])


def ids(text: str) -> list[int]:
    return [ord(letter) - FIRST for letter in text]


def begin(grammar: Grammar, written: str = "", **options: object) -> TokenMatcher:
    sampling = SamplingParams(grammar=grammar, **options)  # type: ignore[arg-type]
    return GRAMMARS.matcher(grammar, sampling, (END,), ids(written))


def allowed(matcher: TokenMatcher) -> set[int]:
    mask = np.zeros(mask_words(VOCABULARY), np.uint32)
    matcher.fill(mask)
    return set(bits_of(mask)) & ALL


def answer(grammar: Grammar, script: str) -> str:
    """What a model writes that wants to write `script`, and goes on with it after what it had to
    write."""
    matcher, found, left = begin(grammar), "", ids(script)
    while left:
        may = allowed(matcher)
        token = left.pop(0) if len(may) > 1 else may.pop()
        matcher.consume([token])
        found += toy_text((token,))
    return found


def closing(form: ReasoningForm) -> str:
    return form.closing.replace("\n", "")


@forms
@budgets
def test_reasoning_ends_after_its_budget_and_the_answer_follows(
    form: ReasoningForm, budget: int
) -> None:
    marks = form.format.marks
    assert marks is not None
    thought, before = "x" * 40, "" if form.begun else marks.begin
    wanted = before + "x" * budget + closing(form) + "x" * (40 - budget)
    assert answer(form.limited(budget), before + thought) == wanted


@forms
def test_reasoning_that_ends_before_its_budget_is_left_alone(form: ReasoningForm) -> None:
    marks = form.format.marks
    assert marks is not None
    script = ("" if form.begun else marks.begin) + "x" * 16 + form.natural + "y" * 40
    matcher = begin(form.limited(17 + len(form.natural)))
    for token in ids(script):
        assert allowed(matcher) == ALL
        matcher.consume([token])


@forms
def test_an_answer_without_reasoning_is_left_alone(form: ReasoningForm) -> None:
    said = "words, and <think> or so <|channel|>final<|message|>"
    matcher = begin(form.limited(0, begun=False))
    for token in ids(said):
        assert allowed(matcher) == ALL
        matcher.consume([token])


def test_parts_of_reasoning_share_a_budget_and_tools_may_follow_the_first() -> None:
    form = FORMS["harmony"]
    thought = form.thought(5)
    first = tuple(ids("<|end|><|start|>assistant"))
    closings = (first, *thought.closings)
    grammar = Grammar.of_any_text(dataclasses.replace(thought, closings=closings))
    mark = thought.begin
    script = mark + "abc<|end|><|start|>assistant" + mark + "de" + mark + "fgh"
    spent = answer(grammar, mark + "abcdefg" + mark + "hij")
    assert spent == f"{mark}abcde{toy_text(first)}fg{mark}{closing(form)}hij"
    cut = answer(grammar, script)
    assert cut.startswith(mark + "abc<|" + toy_text(first)), "an end that is not whole is reasoning"


@forms
@budgets
def test_the_state_follows_from_the_tokens_alone_and_forced_tokens_are_what_masks_allow(
    form: ReasoningForm, budget: int
) -> None:
    grammar, draw = form.limited(budget, begun=True), random.Random(budget)
    for length in range(60):
        written = begin(grammar)
        text = "".join(draw.choice("abc</think>") for _ in range(budget)) if budget else ""
        step, told = begin(grammar), ""
        for _ in range(length):
            may = allowed(step)
            token = ids(text[len(told)])[0] if len(may) > 1 and len(told) < len(text) else min(may)
            told += toy_text((token,))
            step.consume([token])
        rebuilt = begin(grammar, told)
        assert allowed(rebuilt) == allowed(step) == allowed(step.copy())
        written.consume(ids(told))
        run = written.forced(100, VOCABULARY)
        for token in run:
            assert allowed(step) == {token}
            step.consume([token])
        assert len(allowed(step)) > 1


def test_least_tokens_and_stop_ids_hold_as_without_a_budget() -> None:
    grammar = FORMS["deepseek"].limited(3)
    assert allowed(begin(grammar, "a", min_tokens=5)) == ALL - {END}
    assert allowed(begin(grammar, "a", ignore_eos=True)) == ALL
    assert allowed(begin(grammar, "abc</think>", min_tokens=5)) == ALL


CHECKS: list[tuple[str, Callable[[], Grammar]]] = [
    ("content", lambda: Grammar(GrammarKind.REGEX, "[0-9]+z")),
    ("object", lambda: Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [{"a": 1}]}')),
]


@pytest.mark.parametrize(("name", "make"), CHECKS, ids=[name for name, _ in CHECKS])
@pytest.mark.parametrize("budget", [0, 1, 17])
def test_the_content_after_limited_reasoning_follows_its_grammar(
    name: str, make: Callable[[], Grammar], budget: int
) -> None:
    form = FORMS["deepseek"]
    marks = marker("<think>", None), marker("</think>", None)
    grammar = with_thought_and_calls(make(), marks, True, [])
    limited = dataclasses.replace(grammar, thought=form.thought(budget))
    matcher, draw, found = begin(limited), random.Random(1), ""
    while len(found) < 200:
        token = draw.choice(sorted(allowed(matcher)))
        if token == END:
            break
        matcher.consume([token])
        found += toy_text((token,))
    thought, content = found[:budget], found[budget + len("</think>") :]
    assert found.startswith(thought + "</think>") and matcher.error == ""
    if name == "content":
        assert content.rstrip("z").isdigit()
    else:
        assert content.replace(" ", "") == '{"a":1}'
