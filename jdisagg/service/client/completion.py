"""Collects the events of a stream into a whole answer. Imports neither JAX nor the router."""

from dataclasses import dataclass, field, replace

from jdisagg.chat.messages import ToolCall
from jdisagg.errors import JdisaggError
from jdisagg.prompt.experts import ChosenExperts
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import FinishReason, StreamEvent, Timings, TokenLogprobs, Usage


@dataclass(slots=True)
class Choice:
    """One of the n answers of a request. If the server parses chat answers, `text` has the content
    only. The reasoning and the tool calls are then in `reasoning` and `tool_calls`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def routed_experts(self) -> ChosenExperts | None:
        """The experts of prompt and answer, without the last token, or None if not requested."""
        return ChosenExperts.joined(one.experts for one in self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete result of a request.

    Attributes:
        usage, timings: Token counts and timings that the server reported, or None.
    """

    choices: tuple[Choice, ...]
    usage: Usage | None
    timings: Timings | None
    request_id: str = ""
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


class Collector:
    """Raises JdisaggError if a token is missing or duplicated."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._usage: Usage | None = None
        self._timings: Timings | None = None
        self._request_id = ""
        self._prompt_logprobs: PromptLogprobs | None = None

    def add(self, event: StreamEvent) -> None:
        choice = self._choices.setdefault(event.child, Choice())
        if event.token_ids and event.first_index != len(choice.token_ids):
            raise JdisaggError(
                f"stream of child {event.child}: received token {event.first_index}, expected"
                f" {len(choice.token_ids)}"
            )
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.finish_reason = event.finish_reason or choice.finish_reason
        choice.reasoning += event.reasoning
        for call in event.tool_calls:
            if call.name:
                choice.tool_calls.append(ToolCall(call.name, call.arguments, call.id))
            else:
                known = choice.tool_calls[call.index]
                arguments = known.arguments + call.arguments
                choice.tool_calls[call.index] = replace(known, arguments=arguments)
        self._usage, self._timings = event.usage or self._usage, event.timings or self._timings
        self._request_id = event.request_id or self._request_id
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs

    def completion(self) -> Completion:
        if not self._choices:
            raise JdisaggError("the stream ended without an event; see the server's log")
        return Completion(
            tuple(self._choices[child] for child in sorted(self._choices)),
            self._usage,
            self._timings,
            self._request_id,
            self._prompt_logprobs,
        )
