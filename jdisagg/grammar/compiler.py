"""Compiles grammars for one tokenizer with llguidance, and caches them.

The API server validates each grammar in a separate process (`admit`). Workers use the compiled
grammar to mask tokens. In a follower of a multi-process instance, `prepare` is not called, and
`matcher` compiles the grammar itself.

llguidance's limits bound the memory of a grammar and the time to compute a mask."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llguidance
import msgspec

from jdisagg.clock import within
from jdisagg.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from jdisagg.grammar.json_blanks import WHITESPACE, says_itself
from jdisagg.grammar.matcher import Endings, TokenMatcher, mask_words
from jdisagg.grammar.schema_forms import for_llguidance, reason_of
from jdisagg.grammar.structural_tags import quoted
from jdisagg.grammar.thought import ThoughtTracker
from jdisagg.grammar.trial import MEMORY_BYTES, PROCESSOR_SECONDS, limits, vocabulary_of
from jdisagg.request import Grammar, GrammarKind, SamplingParams

AT_ONCE = 2
MOST_WAITING = 64
KEPT = 128
MESSAGE_CHARACTERS = 300
TRIAL = str(Path(__file__).with_name("trial.py"))


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """A tokenizer, with end tokens and vocabulary size from the model's configuration.
    `vocabulary`: number of token ids of the model, which may exceed that of the tokenizer. 0 uses
    the tokenizer's."""

    json: str
    eos_ids: tuple[int, ...]
    vocabulary: int = 0


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches them. Call `prepare` and `admit` on one event
    loop only. All other methods may be called from any thread. `read`: function that returns the
    tokenizer. It is called once, by `load` or when the first grammar is compiled."""

    def __init__(self, read: Callable[[], TokenizerText]) -> None:
        self._read = read
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._eos_ids: tuple[int, ...] = ()
        self._tried_with = b""  # the vocabulary for `trial.py`
        # each value is the compiled grammar, or a description of its error
        self._known: OrderedDict[Grammar, llguidance.LLMatcher | str] = OrderedDict()
        self._at_work = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._under_way: dict[Grammar, asyncio.Task[llguidance.LLMatcher | str]] = {}

    def load(self) -> llguidance.LLTokenizer:
        """The first call reads the tokenizer. Raises InvalidRequestError if the model has no EOS
        token, or if llguidance cannot read the tokenizer."""
        with self._reading:
            if self._tokenizer is None:
                text = self._read()
                if not text.eos_ids:
                    raise InvalidRequestError(
                        "grammar: the model has no end-of-text token, so nothing could end the"
                        " answer; omit the grammar"
                    )
                self._eos_ids = text.eos_ids
                self._tokenizer = _loaded(text)
            return self._tokenizer

    def _trial_vocabulary(self) -> bytes:
        self._tried_with = self._tried_with or vocabulary_of(self.load())
        return self._tried_with

    async def admit(self, grammar: Grammar, seconds: float) -> None:
        """Validates an untrusted grammar in a separate process and compiles it. Raises
        InvalidRequestError if the grammar is invalid or too complex. Raises OverloadedError if too
        many other grammars wait to be compiled, or validation and compilation take longer than
        `seconds`."""
        await self._compiled(grammar, seconds, tried=True)

    async def prepare(self, grammar: Grammar, seconds: float) -> None:
        """Waits until the grammar of an admitted request is compiled. The number of waiting
        grammars is not limited here, because admission limits the number of requests. Raises
        InvalidRequestError if the grammar is invalid or too complex. Raises DeadlineExceededError
        if compilation takes longer than `seconds`."""
        await self._compiled(grammar, seconds, tried=False)

    async def _compiled(self, grammar: Grammar, seconds: float, tried: bool) -> None:
        grammar = _text_alone(grammar)
        found = self._known.get(grammar)
        if found is None:
            task = self._under_way.get(grammar) or self._begin(grammar, seconds, tried)
            try:
                found = await within(task, seconds)
            except TimeoutError:
                late = f"grammar: the {grammar.kind.value} was not compiled within {seconds:g} s"
                if not tried:
                    raise DeadlineExceededError(f"{late}, the request's deadline") from None
                raise OverloadedError(
                    f"{late}; {self._waiting} others are waiting; try again later",
                    retry_after_seconds=1.0,
                ) from None
        _usable(grammar, found)

    def _begin(
        self, grammar: Grammar, seconds: float, tried: bool
    ) -> "asyncio.Task[llguidance.LLMatcher | str]":
        if tried and self._waiting >= MOST_WAITING:
            raise OverloadedError(
                f"grammar: {self._waiting} others are waiting to be compiled; try again later",
                retry_after_seconds=1.0,
            )
        self._waiting += 1
        task = asyncio.ensure_future(self._work(grammar, seconds, tried))
        self._under_way[grammar] = task
        task.add_done_callback(lambda _: self._under_way.pop(grammar))
        return task

    async def _work(
        self, grammar: Grammar, seconds: float, tried: bool
    ) -> llguidance.LLMatcher | str:
        try:
            await self._at_work.acquire()
        finally:
            self._waiting -= 1
        try:
            fault = await self._tried(grammar, seconds) if tried else ""
            if fault:
                return self._keep(grammar, _first_line(fault))
            return await asyncio.to_thread(self._find, grammar)
        finally:
            self._at_work.release()

    async def _tried(self, grammar: Grammar, seconds: float) -> str:
        if grammar.kind is GrammarKind.JSON_OBJECT:
            return ""
        try:
            text = await asyncio.to_thread(_as_llguidance, grammar)
        except ValueError as error:
            return str(error)
        vocabulary = self._tried_with or await asyncio.to_thread(self._trial_vocabulary)
        return await validate(text, vocabulary, seconds)

    def matcher(
        self,
        grammar: Grammar,
        sampling: SamplingParams,
        stop_ids: Sequence[int],
        token_ids: Sequence[int],
    ) -> TokenMatcher:
        """Returns the grammar state of a sequence that has generated `token_ids`. Raises
        InvalidRequestError for an invalid grammar."""
        tokenizer = self.load()
        inner, thought = None, None
        if not grammar.free:
            inner = _usable(grammar, self._find(_text_alone(grammar))).deep_copy()
        if grammar.thought is not None:
            thought = ThoughtTracker(grammar.thought, lambda one: tokenizer.decode_bytes([one]))
        words, endings = mask_words(tokenizer.vocab_size), Endings(self._eos_ids, tuple(stop_ids))
        matcher = TokenMatcher(inner, words, sampling, endings, thought)
        matcher.consume(token_ids)
        return matcher

    def _find(self, grammar: Grammar) -> llguidance.LLMatcher | str:
        with self._lock:
            if (found := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                return found
        return self._keep(grammar, self._compile(grammar))

    def _keep(
        self, grammar: Grammar, found: llguidance.LLMatcher | str
    ) -> llguidance.LLMatcher | str:
        with self._lock:
            self._known[grammar] = found
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher | str:
        """To detect a grammar that exceeds the limits, computes the first mask on a copy of the
        state."""
        tokenizer = self.load()
        try:
            text = _as_llguidance(grammar)
        except ValueError as error:
            return _first_line(str(error))
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
        tried = matcher if matcher.is_error() else matcher.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()
        return _first_line(tried.get_error() or "no reason") if tried.is_error() else matcher


def _text_alone(grammar: Grammar) -> Grammar:
    return dataclasses.replace(grammar, thought=None) if grammar.thought else grammar


def _usable(grammar: Grammar, found: llguidance.LLMatcher | str) -> llguidance.LLMatcher:
    if isinstance(found, str):
        raise InvalidRequestError(
            f"grammar: {grammar.kind.value} {grammar.text[:64]!r} cannot be used: {found}"
        )
    return found


def _loaded(text: TokenizerText) -> llguidance.LLTokenizer:
    ends, written = list(text.eos_ids), _readable(text.json)
    if text.vocabulary:
        with contextlib.suppress(ValueError):  # the tokenizer has more tokens than the model
            return llguidance.LLTokenizer(written, n_vocab=text.vocabulary, eos_token=ends)
    try:
        return llguidance.LLTokenizer(written, eos_token=ends)
    except ValueError as error:
        raise InvalidRequestError(
            "grammar: structured output cannot use the model's tokenizer"
            f" ({_first_line(str(error))}); omit the grammar"
        ) from None


def _readable(written: str) -> str:
    """`Metaspace` also drops a space at the beginning of a text. This does not matter here, because
    a grammar restricts the bytes of tokens."""
    fields = json.loads(written)
    decoder = fields.get("decoder")
    if decoder is None or decoder["type"] != "Metaspace":
        return written
    space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    steps = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return json.dumps({**fields, "decoder": {"type": "Sequence", "decoders": steps}})


async def validate(text: str, vocabulary: bytes, seconds: float) -> str:
    """Validates a grammar by compiling it in a child process (`trial.py`), because a hostile
    grammar may crash the process that compiles it. Returns a description of the error, or "" for a
    valid grammar. Raises TimeoutError if there is no result within `seconds`. The machine is then
    overloaded, because the child's limit of processor time is smaller."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", TRIAL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(seconds):
            said, _ = await process.communicate(vocabulary + text.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return said.decode("utf-8", "replace")
    if process.returncode == -signal.SIGPROF:
        return f"compiling it takes more than {PROCESSOR_SECONDS:g} s of a processor; simplify it"
    return (
        f"compiling it takes more than {MEMORY_BYTES >> 20} MiB, or it is nested too deeply;"
        " simplify it"
    )


def _as_llguidance(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = grammar.text.strip()
            if text in ("true", "false"):  # schemas that accept anything or nothing
                text = "{}" if text == "true" else '{"enum": []}'
            made = for_llguidance(text)
            if says_itself(text):
                return llguidance.LLMatcher.grammar_from_json_schema(
                    made, overrides={"coerce_one_of": True}
                )
            return llguidance.LLMatcher.grammar_from_json_schema(
                made, overrides={"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
            )
        case GrammarKind.JSON_OBJECT:
            return llguidance.LLMatcher.grammar_from_json_schema(
                '{"type": "object"}', overrides={"whitespace_pattern": WHITESPACE}
            )
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = msgspec.json.decode(grammar.text, type=list[str])
            return llguidance.LLMatcher.grammar_from_lark(
                f"start: {' | '.join(map(quoted, choices))}"
            )
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)


def _first_line(text: str) -> str:
    return reason_of(text)[:MESSAGE_CHARACTERS]
