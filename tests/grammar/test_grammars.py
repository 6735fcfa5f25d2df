"""What a grammar lets through, against Python's own `re` and `json`; and what is refused, how."""

import asyncio
import json
import random
import re
import threading
from datetime import date, datetime

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdisagg.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from jdisagg.grammar import compiler, trial
from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText, validate
from jdisagg.grammar.matcher import mask_words
from jdisagg.grammar.trial import vocabulary_of
from jdisagg.request import Grammar, GrammarKind, SamplingParams
from launch.grammars import grammar_compiler
from tests.grammar.matching import (
    COMPILER,
    EOS,
    LLAMA,
    WORDS,
    allowed,
    begin,
    bits_of,
    ends,
    ids_of,
    text,
    walk,
)
from tests.grammar.wide_schemas import wide_schema
from tests.time_scale import seconds

REGEXES = (r"[a-c]{2,5}", r"(yes|no|maybe)( please)?", r"\d{4}-\d\d-\d\d", r"x?y+z", "äö{1,3}")


def test_a_regex_is_matched_by_the_whole_text() -> None:
    for regex in REGEXES:
        texts = set()
        for seed in range(6):
            ids, ended = walk(Grammar(GrammarKind.REGEX, regex), seed)
            assert not ended or re.fullmatch(regex, text(ids))
            texts.add(text(ids))
        assert len(texts) > 1, "one text is no choice"


AWKWARD = [
    "red",
    "blue and green",
    'with "quotes"',
    "back\\slash",
    "a\nline\tand /x/",
    "naïve 🐕",
    "%x",
    "a\x7fb",
]


def test_a_choice_is_one_of_its_texts_and_each_can_be_reached() -> None:
    grammar = Grammar.of_choices(AWKWARD)
    seen = {text(ids) for ids, ended in (walk(grammar, seed) for seed in range(60)) if ended}
    assert seen == set(AWKWARD)


LARK = """start: "sum: " NUMBER (" + " NUMBER){1,3}
NUMBER: /[1-9][0-9]{0,2}/"""


def test_a_lark_grammar_is_followed() -> None:
    for seed in range(6):
        ids, ended = walk(Grammar(GrammarKind.LARK, LARK), seed)
        assert ended
        assert re.fullmatch(r"sum: [1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3}", text(ids))


FORMATS = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(text: object) -> bool:
    """RFC 3339, section 5.6; the 60th second is one that leaps."""
    if isinstance(text, str):
        day, _, clock = text.upper().partition("T")
        date.fromisoformat(day)
        return is_time(clock)
    return True


@FORMATS.checks("time", raises=ValueError)
def is_time(text: object) -> bool:
    if isinstance(text, str):
        if not re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)", text, re.I):
            return False
        second = re.sub(r"(:\d\d):60", r"\1:59", re.sub(r"\.\d+", "", text.upper()))
        datetime.fromisoformat(f"2026-01-01T{second}")
    return True


@FORMATS.checks("hostname")
def is_hostname(text: object) -> bool:
    label = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
    return not isinstance(text, str) or bool(re.fullmatch(rf"{label}(\.{label})*", text, re.I))


@FORMATS.checks("duration")
def is_duration(text: object) -> bool:
    day = r"(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?"
    return not isinstance(text, str) or bool(re.fullmatch(rf"P(?=.)(\d+W|{day})", text))


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(1000, 1500), marks=pytest.mark.slow)], ids=str
)
def test_a_schema_is_valid_for_what_it_lets_through(seeds: range) -> None:
    """llguidance says of the same ids that they are forced as the mask, which has them alone."""
    faults, ended = [], 0
    for seed in seeds:
        schema = wide_schema(seed)
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        ids, whole = walk(grammar, seed)
        matcher = begin(grammar)
        for token in ids:
            forced = bool(matcher._inner.compute_ff_tokens())
            assert (len(allowed(matcher)) == 1) == forced, (seed, text(ids))
            matcher.consume([token])
        if whole:
            ended += 1
            validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
            found = validator.iter_errors(json.loads(text(ids)))
            faults += [(seed, error.message, text(ids)) for error in found]
    assert not faults
    assert ended > len(seeds) / 8, "hardly any to judge"


def test_any_json_object_begins_with_a_brace_and_parses() -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    assert {text([first])[0] for first in allowed(begin(grammar))} == {"{"}
    assert ends(grammar, '{"a": [1, {"b": null}]}')


def test_a_matcher_is_a_function_of_the_ids_that_were_accepted() -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wide_schema(3)))
    ids, _ = walk(grammar, 5)
    steady = begin(grammar)
    for at, token_id in enumerate(ids):
        assert allowed(steady) == allowed(begin(grammar, ids[:at]))
        steady.consume([token_id])


def test_the_end_waits_for_min_tokens_and_for_ignore_eos_where_the_text_can_go_on() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a*")
    assert set(EOS) & set(allowed(begin(grammar)))
    assert not set(EOS) & set(allowed(begin(grammar, min_tokens=1)))
    assert not set(EOS) & set(allowed(begin(grammar, ignore_eos=True)))
    full = Grammar(GrammarKind.REGEX, "a")
    at_the_end = allowed(begin(full, ids_of("a"), min_tokens=9, ignore_eos=True))
    assert at_the_end and set(at_the_end) <= set(EOS)


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 9}])
def test_a_model_may_know_more_ids_than_its_tokenizer_or_fewer(options: dict[str, object]) -> None:
    """What the tokenizer has no token for never comes; the mask's memory may hold anything."""
    grammar = Grammar(GrammarKind.REGEX, "[ -~]*")
    exact = np.zeros(WORDS, np.uint32)
    begin(grammar, **options).fill(exact)
    for more in (-3, 0, 3):
        mask = np.full(WORDS + more, 0x5A5A5A5A, np.uint32)
        begin(grammar, **options).fill(mask)
        assert mask.tolist() == [*exact.tolist(), *[0] * more][: len(mask)], more


def test_ids_that_do_not_follow_the_grammar_leave_nothing_to_choose() -> None:
    matcher = begin(Grammar(GrammarKind.REGEX, "[0-9]+"), ids_of("dog"))
    assert allowed(matcher) == [] and matcher.error


def test_ids_behind_the_end_are_ignored() -> None:
    matcher = begin(Grammar(GrammarKind.REGEX, "[0-9]+"), [*ids_of("1"), EOS[0], *ids_of("dog")])
    assert not matcher.error


SCHEMAS = {
    "json that ends early": '{"type":',
    "an unknown type": '{"type": "thing"}',
    "a schema that is a number": "3",
    "a reference to nothing": '{"$ref": "#/$defs/x"}',
    "a reference to a file": '{"$ref": "file:///etc/passwd"}',
    "a reference to a host": '{"$ref": "http://localhost/x"}',
    "a reference to itself": '{"$ref": "#"}',
    "what nothing satisfies": '{"type": "string", "minLength": 5, "maxLength": 2}',
    "a deep schema": '{"items":' * 5000 + "{}" + "}" * 5000,
    "a deep constant": '{"const":' + "[" * 60000 + "]" * 60000 + "}",
}
REFUSED = {name: Grammar(GrammarKind.JSON_SCHEMA, schema) for name, schema in SCHEMAS.items()} | {
    "half a regex": Grammar(GrammarKind.REGEX, "(["),
    "a look behind": Grammar(GrammarKind.REGEX, "(?<=a)b"),
    "a deep regex": Grammar(GrammarKind.REGEX, "(" * 30000 + "a" + ")" * 30000),
    "an unknown rule": Grammar(GrammarKind.LARK, "start: x"),
    "rules in a circle": Grammar(GrammarKind.LARK, "start: a\na: b\nb: a"),
}


async def test_what_is_no_grammar_is_refused_with_the_reason() -> None:
    wrong = {}
    for name, grammar in REFUSED.items():
        with pytest.raises(InvalidRequestError) as refused:
            await COMPILER.admit(grammar, seconds(60))
        if not re.match(r"grammar: .* cannot be used: \S", refused.value.message, re.DOTALL):
            wrong[name] = refused.value.message
    assert not wrong


# What only the served model's vocabulary can judge: ids that a byte has none for, special tokens.
OF_THE_MODEL = ("start: <[300-310]>", "start: <[1279]>", 'start: "a" <|end|>', "start: <[^5]>+ <s>")
NOT_OF_THE_MODEL = {"start: <[1280]>": "too large", "start: <|im_end|>": "unknown special token"}


async def test_a_grammar_may_name_every_token_of_the_model_and_no_other() -> None:
    for written in OF_THE_MODEL:
        await COMPILER.admit(Grammar(GrammarKind.LARK, written), seconds(60))
    for written, fault in NOT_OF_THE_MODEL.items():
        with pytest.raises(InvalidRequestError, match=fault):
            await COMPILER.admit(Grammar(GrammarKind.LARK, written), seconds(60))


def _with_bytes(form: str) -> str:
    """A tokenizer of bytes: their letters as in GPT-2 and tiktoken, or tokens such as <0x41> as in
    SentencePiece. 256 to 259 are special or not a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters if form == "byte-level" else [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {name: at for at, name in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=form != "byte-level", fuse_unk=False)
    )
    if form == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["</s>", "<|im_end|>", "<｜tool▁call▁end｜>"])
    return backend.to_str()


@pytest.mark.parametrize("form", ["byte-level", "byte-fallback"])
async def test_every_token_of_a_tokenizer_of_bytes_can_be_asked_for(form: str) -> None:
    read = TokenizerText(_with_bytes(form), (256,), vocabulary=264)
    known = GrammarCompiler(lambda: read)
    tokenizer = trial._Vocabulary(vocabulary_of(known.load())).loaded()
    ids = range(264)
    named = ["<|im_end|>", "<｜tool▁call▁end｜>"]
    written = [f"start: <[{one}]>*" for one in ids] + [f"start: ({one} /[a-z]/)+" for one in named]
    drawn = [sorted(random.Random(seed).sample(ids, 1 + seed)) for seed in range(40)]
    written += [f"start: <[{','.join(map(str, some))}]>*" for some in drawn]
    for lark in written:
        text = llguidance.LLMatcher.grammar_from_lark(lark)
        assert not trial.fault(tokenizer, text), lark
    for one in (written[3], written[-1]):
        await known.admit(Grammar(GrammarKind.LARK, one), seconds(60))


async def test_an_id_without_a_token_comes_only_where_it_is_named() -> None:
    """A model may have more ids than its tokenizer, as padding."""
    text = TokenizerText((LLAMA / "tokenizer.json").read_text(), EOS, vocabulary=1300)
    padded = GrammarCompiler(lambda: text)
    named, words = (
        Grammar(GrammarKind.LARK, "start: <[1290-1299]>"),
        Grammar(GrammarKind.REGEX, ".*"),
    )
    for grammar, expected in ((named, set(range(1290, 1300))), (words, set())):
        await padded.admit(grammar, seconds(60))
        mask = np.zeros(mask_words(1300), np.uint32)
        padded.matcher(grammar, SamplingParams(grammar=grammar), EOS, []).fill(mask)
        assert {one for one in bits_of(mask) if one >= 1280} == expected


def _without_byte_tokens(form: str) -> str:
    """The text of a tokenizer, most of whose bytes are parts of longer tokens only."""
    texts = ["<unk>", "</s>", "▁yes", "▁", *'{}":ayes', *(f"x{at}" for at in range(300))]
    backend = tokenizers.Tokenizer(models.Unigram([(text, -1.0) for text in texts], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace() if form == "metaspace" else decoders.WordPiece()
    backend.add_special_tokens(["</s>"])
    return backend.to_str()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.of_choices(["yes", "xes"]),
        Grammar(GrammarKind.REGEX, "(yes|x1)+"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"properties": {"a": {"const": "x1"}}}'),
        Grammar(GrammarKind.LARK, "start: <[311]> <[0-310]>*"),
        Grammar(GrammarKind.LARK, 'start: </s> " yes"'),
    ],
)
async def test_a_grammar_is_judged_also_where_most_bytes_have_no_token(grammar: Grammar) -> None:
    compilers = GrammarCompiler(lambda: TokenizerText(_without_byte_tokens("metaspace"), (1,)))
    await compilers.admit(grammar, seconds(60))
    mask = np.zeros(mask_words(312), np.uint32)
    compilers.matcher(grammar, SamplingParams(grammar=grammar), (1,), []).fill(mask)
    assert mask.any()


async def test_a_tokenizer_that_grammars_cannot_use_is_said() -> None:
    compilers = GrammarCompiler(lambda: TokenizerText(_without_byte_tokens("other"), (1,)))
    with pytest.raises(InvalidRequestError, match="cannot use the model's tokenizer"):
        await compilers.admit(Grammar(GrammarKind.REGEX, "a"), seconds(60))


def chain(rules: int, middle: str) -> str:
    """Rules of which each asks for the next."""
    some = "\n".join(middle.format(this=f"r{at}", next=f"r{at + 1}") for at in range(rules))
    return f"start: r0\n{some}\nr{rules}: /x/"


# Each brings down or holds up a process that compiles it without bounds.
HOSTILE = {
    "a long chain of rules": (GrammarKind.LARK, chain(5000, '{this}: "a" {next} "b"')),
    "a long chain of references": (
        GrammarKind.JSON_SCHEMA,
        json.dumps(
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(4000)},
                    "4000": {},
                },
            }
        ),
    ),
    "repeated repetitions": (GrammarKind.REGEX, "((a{1000}){1000}){1000}"),
    "many stars": (GrammarKind.REGEX, "a*" * 60000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_brings_down_a_child_process_alone(name: str) -> None:
    kind, written = HOSTILE[name]
    # On a fast machine the compiler's own bounds may refuse one before those of the child process.
    with pytest.raises(InvalidRequestError, match="simplify it|too many expressions"):
        await COMPILER.admit(Grammar(kind, written), seconds(60))
    await COMPILER.admit(Grammar(GrammarKind.REGEX, "still (here|there)"), seconds(60))


async def test_while_grammars_wait_known_ones_are_served_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, begun = asyncio.Event(), 0

    async def slow(text: str, vocabulary: bytes, seconds: float) -> str:
        nonlocal begun
        begun += 1
        await gate.wait()
        return ""

    monkeypatch.setattr(compiler, "validate", slow)
    compilers = grammar_compiler(str(LLAMA))
    known = Grammar(GrammarKind.JSON_OBJECT)
    await compilers.admit(known, seconds(60))

    def ask(count: int) -> asyncio.Task[None]:
        return asyncio.create_task(
            compilers.admit(Grammar(GrammarKind.REGEX, "a" * count), seconds(60))
        )

    tasks = [ask(1 + at) for at in range(compiler.AT_ONCE)]
    while begun < compiler.AT_ONCE:
        await asyncio.sleep(0)
    tasks += [ask(10 + at) for at in range(compiler.MOST_WAITING)]
    tasks.append(ask(1))  # which somebody waits for already
    await asyncio.sleep(0)
    await compilers.admit(known, seconds(60))
    with pytest.raises(OverloadedError, match="64 others are waiting"):
        await compilers.admit(Grammar(GrammarKind.REGEX, "b"), seconds(60))
    assert begun == compiler.AT_ONCE
    gate.set()
    await asyncio.gather(*tasks)
    assert begun == compiler.AT_ONCE + compiler.MOST_WAITING, "each once"
    await compilers.admit(Grammar(GrammarKind.REGEX, "b"), seconds(60))


async def test_a_worker_turns_no_grammar_away_that_a_door_has_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Doors admit a few at a time, and workers may then be asked for all of them at once; what a
    worker cannot do in time has missed its deadline, and nobody is told to try again."""
    gate = threading.Event()
    compilers = grammar_compiler(str(LLAMA))
    find = compilers._find
    monkeypatch.setattr(compilers, "_find", lambda grammar: gate.wait() and find(grammar))
    grammars = [
        Grammar(GrammarKind.REGEX, "a" * (1 + at)) for at in range(compiler.MOST_WAITING + 10)
    ]
    tasks = [asyncio.create_task(compilers.prepare(one, seconds(60))) for one in grammars]
    try:
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError, match="was not compiled within 0.01 s"):
            await compilers.prepare(Grammar(GrammarKind.REGEX, "b"), 0.01)
        assert not any(task.done() for task in tasks)
    finally:
        gate.set()
    await asyncio.gather(*tasks)


async def test_who_no_longer_waits_leaves_no_child_process() -> None:
    with pytest.raises(TimeoutError):
        await validate("start: /x/", vocabulary_of(COMPILER.load()), 0.0)
