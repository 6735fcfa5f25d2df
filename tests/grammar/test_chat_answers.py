"""What a chat's answer may be beside the content that its grammar restricts: reasoning before it,
and calls instead of it."""

import pytest

from jdisagg.grammar.chat_answers import (
    marked_call,
    marker,
    may_think_or_call,
    plain_call,
    with_thought_and_calls,
)
from jdisagg.request import Grammar, GrammarKind
from tests.grammar.matching import TOKENIZER, ends

AGE = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"age": {"type": "integer", "format": "int32"}},'
    ' "required": ["age"], "additionalProperties": false}',
)
WORD = Grammar(GrammarKind.REGEX, "a+/b")
YES = Grammar.of_choices(["yes", "no\n"])
OBJECT = Grammar(GrammarKind.JSON_OBJECT)
# A marker that the tokenizer has as a token, and markers that are text.
USER = TOKENIZER.token_to_id("<|user|>")
TEXTS = marker("<think>", None), marker("</think>", None)
TOKENS = marker("<|system|>", TOKENIZER.token_to_id("<|system|>")), marker("<|user|>", USER)
CALL, PLAIN = marked_call(marker("<tool_call>", None)), plain_call(["f"])

# None: no answer begins like this; else whether one may end here.
CASES: list[tuple[Grammar, tuple[str, str] | None, bool, list[str], str, bool | None]] = [
    (AGE, None, False, [CALL], '{"age": 7}', True),
    (AGE, None, False, [CALL], '{"age": "', None),
    (AGE, None, False, [CALL], "So", None),
    (AGE, None, False, [CALL], "<tool_call>any {", True),
    (AGE, None, False, [], "<tool_call>", None),
    (AGE, None, False, [PLAIN], '{"name": "f", "parameters": {"x": 1}}', True),
    (AGE, None, False, [PLAIN], '{"name": "g', None),
    (AGE, TEXTS, False, [CALL], '{"age": 7}', True),
    (AGE, TEXTS, False, [CALL], "<think>so {", False),
    (AGE, TEXTS, False, [CALL], "<think>so {</think>", False),
    (AGE, TEXTS, False, [CALL], '<think>so {</think>\n\n{"age": 7}', True),
    (AGE, TEXTS, False, [CALL], "<think>so</think>So", None),
    (AGE, TEXTS, False, [CALL], "<think>so</think>\n<tool_call>x", True),
    (AGE, TEXTS, True, [CALL], '{"age": 7}', False),
    (AGE, TEXTS, True, [CALL], 'so</think>{"age": 7}', True),
    (AGE, TOKENS, True, [], '{"age": 7}<|user|>\n{"age": 7}', True),
    (AGE, TOKENS, True, [], "so<|user|>so", None),
    (AGE, TOKENS, False, [], "<|system|>so<|user|>{", False),
    (WORD, TEXTS, False, [CALL], "<think>so</think>aa/b", True),
    (WORD, TEXTS, False, [CALL], "<think>so</think>aab", None),
    (WORD, None, False, [CALL], "\na", None),
    (YES, TEXTS, True, [], "so</think>no\n", True),
    (YES, TEXTS, True, [], "so</think>maybe", None),
    (OBJECT, None, False, [CALL], '{"any": [1]}', True),
    (OBJECT, None, False, [CALL], "[", None),
    (Grammar(GrammarKind.JSON_SCHEMA, "true"), None, False, [CALL], "[]", True),
]


@pytest.mark.parametrize(("grammar", "marks", "begun", "calls", "said", "may_end"), CASES)
def test_a_grammar_leaves_thought_and_calls_free_and_binds_the_content(
    grammar: Grammar,
    marks: tuple[str, str] | None,
    begun: bool,
    calls: list[str],
    said: str,
    may_end: bool | None,
) -> None:
    made = with_thought_and_calls(grammar, marks, begun, calls)
    assert may_think_or_call(made) and not may_think_or_call(grammar)
    assert ends(made, said) == may_end


@pytest.mark.parametrize(
    "grammar", [Grammar(GrammarKind.LARK, "start: /a/"), Grammar(GrammarKind.JSON_SCHEMA, "[1")]
)
def test_a_grammar_that_cannot_be_a_part_stays_as_it_is(grammar: Grammar) -> None:
    assert with_thought_and_calls(grammar, TEXTS, False, [CALL]) == grammar
