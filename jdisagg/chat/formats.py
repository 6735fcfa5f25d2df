"""The formats in which models generate tool calls and reasoning, and their parsers.

A format is selected by name, or detected from the chat template by the markers of tool calls and
reasoning that the template contains. The name of a format is that of vLLM's flag value, if vLLM
supports the format."""

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from jdisagg.chat.answer import AnswerDelta, AnswerParser
from jdisagg.chat.harmony import CHANNEL, END, MESSAGE, START, HarmonyParser
from jdisagg.chat.harmony import MARKS as HARMONY_MARKS
from jdisagg.chat.json_calls import HermesParser, JsonToolParser, LlamaParser, MistralParser
from jdisagg.chat.marked_calls import DeepSeekParser, KimiParser
from jdisagg.chat.python_calls import GemmaParser, PythonParser
from jdisagg.chat.reasoning import Marks, ReasoningParser
from jdisagg.chat.tagged_calls import (
    DeepSeekTaggedParser,
    GlmParser,
    MiniMaxParser,
    QwenCoderParser,
    Schemas,
)
from jdisagg.chat.tool_parsers import ToolParser
from jdisagg.errors import ConfigError

AUTO, NONE = "auto", "none"


def _with(parser: type[ToolParser], **marks: object) -> type[ToolParser]:
    return type(parser.__name__, (parser,), marks)


_ToolCallsParser = _with(JsonToolParser, CALL="<tool_calls>", END="</tool_calls>")
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "apertus": _with(JsonToolParser, CALL="<|tools_prefix|>", END="<|tools_suffix|>", KEYED=True),
    "cohere_command3": _with(
        JsonToolParser,
        CALL="<|START_ACTION|>",
        END="<|END_ACTION|>",
        DROPPED=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "deepseek_v3": DeepSeekParser,
    "deepseek_v32": DeepSeekTaggedParser,
    "ernie45": _with(HermesParser, DROPPED=("<response>", "</response>")),
    "gemma4": GemmaParser,
    "glm45": GlmParser,
    "granite": _with(JsonToolParser, CALL="<|tool_call|>", OTHERS=("<tool_call>",)),
    "hermes": HermesParser,
    "hunyuan_a13b": _ToolCallsParser,
    "hy_v3": _with(
        GlmParser, SECTION="<tool_calls>", SECTION_END="</tool_calls>", NAME_END="<tool_sep>"
    ),
    "kimi_k2": KimiParser,
    "lfm2": _with(PythonParser, CALL="<|tool_call_start|>", END="<|tool_call_end|>"),
    "llama3_json": LlamaParser,
    "minimax": _ToolCallsParser,
    "minimax_m2": MiniMaxParser,
    "mistral": MistralParser,
    "nemotron_json": _with(JsonToolParser, CALL="<TOOLCALL>", END="</TOOLCALL>"),
    "olmo3": _with(PythonParser, CALL="<function_calls>", END="</function_calls>"),
    "phi4_mini_json": _with(
        JsonToolParser, CALL="<|tool_call|>", END="<|/tool_call|>", OTHERS=("functools[",)
    ),
    "qwen3_coder": QwenCoderParser,
    "seed_oss": _with(QwenCoderParser, SECTION="<seed:tool_call>", SECTION_END="</seed:tool_call>"),
}
# gpt-oss's parser separates both calls and reasoning. Either of these names selects it.
HARMONY, HARMONY_REASONING = "openai", "openai_gptoss"
# What precedes the next part of an answer of gpt-oss, and the header of the content.
NEXT_PART, FINAL = f"{START}assistant", f"{CHANNEL}final{MESSAGE}"
TOOL_FORMS = (*TOOL_PARSERS, HARMONY)
_NO_TOOL: Schemas = {"": {}}  # for a parser that only drops markers around content
_THINK = Marks("<think>", "</think>")
REASONING: dict[str, Marks] = {
    "deepseek_r1": _THINK,
    "glm45": _THINK,
    "qwen3": _THINK,
    "cohere_command3": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Marks("<|channel>thought", "<channel|>"),
    "kimi": Marks("◁think▷", "◁/think▷"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    HARMONY_REASONING: HARMONY_MARKS,
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}
# Markers in chat templates, with the format of each. The first entry whose marker occurs in the
# template is selected. Markers that are part of other markers are therefore last.
_TOOL_SIGNS = (
    (CHANNEL, HARMONY),
    ("]<]minimax[>[", None),  # MiniMax M3: arguments within tags of their own names
    ("Write 'Action:'", None),  # Command R
    ("<｜tool▁call", "deepseek_v3"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|tools_prefix|>", "apertus"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call>", "gemma4"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<tool_sep>", "hy_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|/tool_call|>", "phi4_mini_json"),
    ("functools[", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "hunyuan_a13b"),
    ("<response>", "ernie45"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
_REASONING_SIGNS = (
    (CHANNEL, HARMONY_REASONING),
    *((REASONING[name].end, name) for name in ("seed_oss", "kimi", "mistral", "gemma4")),
    *((REASONING[name].end, name) for name in ("cohere_command3", "qwen3")),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats in which a model generates tool calls and reasoning.

    Attributes:
        tools: One of `TOOL_FORMS`, or None if the model generates no tool calls.
        reasoning: A key of `REASONING`, or None if the model generates no reasoning.
        shows_tools: Whether the chat template puts descriptions of tools into the prompt.
        blanks: Line breaks that the chat template writes before and after the marker that ends
            reasoning.
    """

    tools: str | None = None
    reasoning: str | None = None
    shows_tools: bool = False
    blanks: tuple[str, str] = ("", "")

    @classmethod
    def of(
        cls, template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> "AnswerFormat":
        """Returns the formats for a chat template.

        Args:
            tool_parser: Name of the format of tool calls. "auto" detects it, and "none" disables
                parsing.

        Raises:
            ConfigError: A name is unknown.
        """
        template = template or ""
        shows_tools = "tools" in template
        tools = _chosen("service.tool_parser", tool_parser, TOOL_FORMS)
        if tool_parser == AUTO and shows_tools:
            tools = next((name for sign, name in _TOOL_SIGNS if sign in template), None)
        reasoning = _chosen("service.reasoning_parser", reasoning_parser, REASONING)
        if reasoning_parser == AUTO:
            reasoning = next((name for sign, name in _REASONING_SIGNS if sign in template), None)
        blanks = _blanks(REASONING[reasoning].end, template) if reasoning else ("", "")
        return cls(tools, reasoning, shows_tools, blanks)

    @property
    def marks(self) -> Marks | None:
        if self.in_headers:
            return HARMONY_MARKS
        return None if self.reasoning is None else REASONING[self.reasoning]

    @property
    def call_mark(self) -> str:
        """The marker with which tool calls begin. "" if the model generates no calls, or if they
        begin in a header (gpt-oss)."""
        parser = TOOL_PARSERS.get(self.tools or "")
        return "" if parser is None else parser.SECTION or parser.CALL

    @property
    def plain_calls(self) -> bool:
        return self.tools == "llama3_json"

    @property
    def in_headers(self) -> bool:
        """Whether headers separate reasoning, content and calls (gpt-oss)."""
        return self.tools == HARMONY or self.reasoning == HARMONY_REASONING

    def closings(self, tools: Schemas) -> tuple[str, ...]:
        """Returns the texts that end reasoning, and begin what follows it. The second text, if any,
        is for reasoning that begins again after the first."""
        if self.in_headers:
            last = f"{END}{NEXT_PART}{FINAL}"
            return (f"{END}{NEXT_PART}", last) if tools else (last,)
        before, after = self.blanks
        return () if self.marks is None else (f"{before}{self.marks.end}{after}",)

    def takes_apart(self, tools: Schemas) -> bool:
        return self.marks is not None or bool(self.tools and tools)

    def parser(self, tools: Schemas, *, thinking: bool) -> AnswerParser | None:
        """Returns a parser for one answer, or None if the whole answer is content. `thinking`:
        whether the prompt ends within reasoning."""
        if self.in_headers:
            return HarmonyParser(tools if self.tools == HARMONY else (), thinking=thinking)
        kind = TOOL_PARSERS.get(self.tools or "")
        used = kind is not None and (tools or kind.DROPPED)
        make = functools.partial(kind, tools or _NO_TOOL) if kind and used else None
        if self.marks is None:
            return make() if make is not None else None
        reasoning = ReasoningParser(self.marks, begun=thinking)
        return reasoning if make is None else _ReasoningAndCalls(reasoning, make)


class _ReasoningAndCalls:
    def __init__(self, reasoning: ReasoningParser, make: Callable[[], ToolParser]) -> None:
        self._reasoning = reasoning
        self._within: ToolParser | None = make()  # finds calls within the reasoning
        self._calls = make()
        self._called = False  # whether a call ended the reasoning

    @property
    def reasons(self) -> bool:
        return self._reasoning.reasons and not self._called

    @property
    def undecided(self) -> bool:
        return self._reasoning.undecided

    def push(self, text: str) -> AnswerDelta:
        thought = self._reasoning.push(text)
        ended = not (self._reasoning.reasons or self._reasoning.undecided)
        return self._taken(thought, ended)

    def finish(self) -> AnswerDelta:
        found = self._taken(self._reasoning.finish(), True)
        last = self._calls.finish()
        return AnswerDelta(
            found.content + last.content, found.reasoning, (*found.calls, *last.calls)
        )

    def _taken(self, thought: AnswerDelta, ended: bool) -> AnswerDelta:
        if self._called:
            return self._calls.push(thought.reasoning + thought.content)
        within, reasoning = self._within, thought.reasoning
        if within is not None:
            found = within.push(reasoning)
            if (before := within.words_before_call) is not None:
                self._called, self._within, self._calls = True, None, within
                more = within.push(thought.content)
                words = found.content[before:] + more.content
                return AnswerDelta(words, found.content[:before], (*found.calls, *more.calls))
            reasoning = found.content
            if ended:
                reasoning += within.finish().content
                self._within = None
        said = self._calls.push(thought.content)
        return AnswerDelta(said.content, reasoning, said.calls)


def _blanks(end: str, template: str) -> tuple[str, str]:
    """The template's line breaks are characters, or escapes within a string."""
    found = re.findall(rf"((?:\\n|\n)*){re.escape(end)}((?:\\n|\n)*)", template)
    after = max([after.replace("\\n", "\n") for _, after in found], key=len, default="")
    return "\n" if any(before for before, _ in found) else "", after


def _chosen(field: str, name: str, known: Collection[str]) -> str | None:
    if name in (AUTO, NONE):
        return None
    if name not in known:
        raise ConfigError(f"{field} must be auto, none or one of {', '.join(known)}, got {name!r}")
    return name
