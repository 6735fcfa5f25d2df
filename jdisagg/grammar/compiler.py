"""Grammars, compiled for one tokenizer by llguidance, and kept.

Who serves grammars: the door has each tried in a process of its own (`admit`), workers choose
tokens with them; in one process they share this object and its store. `prepare` compiles in a
thread, a few at a time, so that no grammar delays a stream; `matcher` finds it compiled then, and
compiles on the spot where it must (the follower of an instance of several processes, a replay).

llguidance's limits bound what one grammar may cost in memory and for one mask. Its compiler lets go
of the interpreter's lock."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llguidance
import msgspec

from jdisagg.clock import within
from jdisagg.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from jdisagg.grammar.json_blanks import WHITESPACE, says_itself
from jdisagg.grammar.judge import judge
from jdisagg.grammar.matcher import Endings, TokenMatcher, mask_words
from jdisagg.grammar.trial import limits
from jdisagg.request import Grammar, GrammarKind, SamplingParams

AT_ONCE = 2
MOST_WAITING = 64
KEPT = 128
MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """A tokenizer.json and the ids that end a text of its model."""

    json: str
    eos_ids: tuple[int, ...]


class GrammarCompiler:
    """`read`: the tokenizer; called once, when the first grammar comes (or `load` is called). Any
    thread may call all but `prepare`, which is for one event loop."""

    def __init__(self, read: Callable[[], TokenizerText]) -> None:
        self._read = read
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._eos_ids: tuple[int, ...] = ()
        # compiled, or why it is refused
        self._known: OrderedDict[Grammar, llguidance.LLMatcher | str] = OrderedDict()
        self._at_work = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._under_way: dict[Grammar, asyncio.Task[llguidance.LLMatcher | str]] = {}

    def load(self) -> llguidance.LLTokenizer:
        """Reads the tokenizer, if that is not done."""
        with self._reading:
            if self._tokenizer is None:
                text = self._read()
                if not text.eos_ids:
                    raise InvalidRequestError(
                        "grammar: the model names no token that ends a text, so nothing could end"
                        " the answer; leave the grammar out"
                    )
                self._eos_ids = text.eos_ids
                self._tokenizer = llguidance.LLTokenizer(text.json, eos_token=list(text.eos_ids))
            return self._tokenizer

    async def admit(self, grammar: Grammar, seconds: float) -> None:
        """As `prepare`, of a grammar that nobody has looked at: it is tried in a process of its own
        first. Raises OverloadedError where too many wait, or it takes longer than `seconds`."""
        await self._compiled(grammar, seconds, tried=True)

    async def prepare(self, grammar: Grammar, seconds: float) -> None:
        """Returns when the grammar is compiled, of a request that a door has admitted: however many
        wait, it does too, as it does for pages. Raises InvalidRequestError where it is none, or too
        complex, and DeadlineExceededError where it takes longer than `seconds`."""
        await self._compiled(grammar, seconds, tried=False)

    async def _compiled(self, grammar: Grammar, seconds: float, tried: bool) -> None:
        found = self._known.get(grammar)
        if found is None:
            task = self._under_way.get(grammar) or self._begin(grammar, seconds, tried)
            try:
                found = await within(task, seconds)
            except TimeoutError:
                late = f"grammar: the {grammar.kind.value} was not compiled within {seconds:g} s"
                if not tried:
                    raise DeadlineExceededError(f"{late}, the request's") from None
                raise OverloadedError(
                    f"{late}; {self._waiting} others wait; try again later", retry_after_seconds=1.0
                ) from None
        _usable(grammar, found)

    def _begin(
        self, grammar: Grammar, seconds: float, tried: bool
    ) -> "asyncio.Task[llguidance.LLMatcher | str]":
        """The one task for a grammar, whoever waits for it, and whether anybody still does."""
        if tried and self._waiting >= MOST_WAITING:
            raise OverloadedError(
                f"grammar: {self._waiting} others wait to be compiled; try again later",
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
            fault = await _tried(grammar, seconds) if tried else ""
            if fault:
                return self._keep(grammar, _first_line(fault))
            return await asyncio.to_thread(self._find, grammar)
        finally:
            self._at_work.release()

    def matcher(
        self,
        grammar: Grammar,
        sampling: SamplingParams,
        stop_ids: Sequence[int],
        token_ids: Sequence[int],
    ) -> TokenMatcher:
        """A sequence's place after these generated ids. Raises InvalidRequestError for what is no
        grammar."""
        inner = _usable(grammar, self._find(grammar)).deep_copy()
        words = mask_words(self.load().vocab_size)
        matcher = TokenMatcher(inner, words, sampling, Endings(self._eos_ids, tuple(stop_ids)))
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
        """The grammar at its beginning, or what is wrong with it. Its first mask is tried on a
        copy: what breaks the limits there is refused, and not begun."""
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


def _usable(grammar: Grammar, found: llguidance.LLMatcher | str) -> llguidance.LLMatcher:
    if isinstance(found, str):
        raise InvalidRequestError(
            f"grammar: {grammar.kind.value} {grammar.text[:64]!r} cannot be used: {found}"
        )
    return found


async def _tried(grammar: Grammar, seconds: float) -> str:
    """What is wrong with a grammar; empty where nothing is. Raises TimeoutError."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return ""
    try:
        return await judge(_as_llguidance(grammar), seconds)
    except ValueError as error:
        return str(error)


def _as_llguidance(grammar: Grammar) -> str:
    """As llguidance writes grammars down. Raises ValueError."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = grammar.text.strip()
            if text in ("true", "false"):  # schemas, too: of anything, of nothing
                text = "{}" if text == "true" else '{"enum": []}'
            return llguidance.LLMatcher.grammar_from_json_schema(
                text, overrides={} if says_itself(text) else {"whitespace_pattern": WHITESPACE}
            )
        case GrammarKind.JSON_OBJECT:
            return llguidance.LLMatcher.grammar_from_json_schema(
                '{"type": "object"}', overrides={"whitespace_pattern": WHITESPACE}
            )
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = msgspec.json.decode(grammar.text, type=list[str])
            quoted = [msgspec.json.encode(choice).decode() for choice in choices]
            return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:MESSAGE_CHARACTERS]
