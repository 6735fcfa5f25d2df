"""Conversions of client requests, stream events and model properties to and from generation.proto.

The invariants of `wire` apply. A client's request has a prompt and options, some of which are
unset. The server's `Frontend` builds a `Request` from it. The length of a repeated field is checked
before its entries are read, because an entry costs the server much more time than the sender."""

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from jdisagg.config import Mode
from jdisagg.dispatch.options import bias_pairs
from jdisagg.dispatch.prompts import ModelInfo, Prompt, TokenPrompt
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import InvalidRequestError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import (
    MAX_GRAMMAR_BYTES,
    MAX_N,
    AcceptedChild,
    CachedTokens,
    FinishReason,
    Grammar,
    GrammarKind,
    Resumption,
    SamplingDefaults,
    SamplingOptions,
    SamplingParams,
    StreamEvent,
    Timings,
    ToolCallDelta,
    Usage,
    at_most,
    parameters_of,
)
from jdisagg.service.grpc import common_pb2
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc.wire import (
    all_logprobs_from_proto,
    build,
    flat_from_proto,
    layout_from_proto,
    layout_to_proto,
    logprobs_to_proto,
    plain_from,
    plain_to,
)

# Clients retry a few times a second for a limited time, and therefore never reach this number.
MAX_RESUMPTIONS = 1_000_000
MAX_IDS = 2 << 20  # more than any model's context


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A chat as the JSON body of a request of /v1/chat/completions. The server reads it."""

    text: str


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """Content of a client's `Generate` call.

    `resumption` has the tokens that the client has already received. It is None in the first call.
    `life` is a random number that the client chooses for the stream and sends with each retry."""

    prompt: Prompt | ChatBody
    options: SamplingOptions
    request_id: str = ""
    deadline_seconds: float | None = None
    tenant: str = ""
    priority: int = 0
    resumption: Resumption | None = None
    life: int = 0
    cache_salt: str = ""
    model: str = ""


def client_request_to_proto(request: ClientRequest) -> pb.GenerateRequest:
    """Raises InvalidRequestError if protobuf cannot represent a value."""
    prompt = request.prompt
    return build(
        pb.GenerateRequest,
        text=prompt if isinstance(prompt, str) else None,
        token_ids=(
            build(pb.TokenIds, ids=prompt.token_ids) if isinstance(prompt, TokenPrompt) else None
        ),
        chat_json=prompt.text if isinstance(prompt, ChatBody) else None,
        sampling=options_to_proto(request.options),
        request_id=request.request_id,
        deadline_seconds=request.deadline_seconds,
        tenant=request.tenant,
        priority=request.priority,
        resumption=request.resumption.number if request.resumption is not None else 0,
        accepted=_accepted_to_proto(request.resumption) if request.resumption is not None else None,
        life=request.life,
        cache_salt=request.cache_salt,
        model=request.model,
    )


def client_request_from_proto(
    message: pb.GenerateRequest, of_chat: SamplingOptions | None = None
) -> ClientRequest:
    """`of_chat`: the options in the body of the chat, which those of the message replace."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("prompt is missing: set one of text, token_ids, chat_json")
    prompt: Prompt | ChatBody = message.text
    if kind == "token_ids":
        at_most("token_ids", len(message.token_ids.ids), MAX_IDS)
        prompt = TokenPrompt(tuple(message.token_ids.ids))
    elif kind == "chat_json":
        prompt = ChatBody(message.chat_json)
    options = cast(SamplingOptions, {**(of_chat or {}), **options_from_proto(message.sampling)})
    return ClientRequest(
        prompt=prompt,
        options=options,
        request_id=message.request_id,
        deadline_seconds=message.deadline_seconds if message.HasField("deadline_seconds") else None,
        tenant=message.tenant,
        priority=message.priority,
        resumption=_resumption_from_proto(message, options),
        life=message.life,
        cache_salt=message.cache_salt,
        model=message.model,
    )


def _accepted_to_proto(resumption: Resumption) -> list[pb.AcceptedTokens]:
    return [
        pb.AcceptedTokens(
            child=index,
            token_ids=child.token_ids,
            finish_reason=_finish_to_proto(child.finish_reason),
        )
        for index, child in enumerate(resumption.children)
    ]


def _resumption_from_proto(
    message: pb.GenerateRequest, options: SamplingOptions
) -> Resumption | None:
    number, given = message.resumption, options.get("n")
    count = 1 if given is None else given
    if number == 0 and not message.accepted:
        return None
    if not 1 <= number <= MAX_RESUMPTIONS:
        raise InvalidRequestError(
            f"resumption must be in [1, {MAX_RESUMPTIONS}] for a resumed request, got {number}"
        )
    if not message.request_id or options.get("seed") is None:
        raise InvalidRequestError(
            "a resumed request must name its request_id and its sampling.seed; repeat those of the"
            " first call"
        )
    at_most("accepted", len(message.accepted), MAX_N)
    at_most("accepted token ids", sum(len(entry.token_ids) for entry in message.accepted), MAX_IDS)
    children = {
        entry.child: AcceptedChild(tuple(entry.token_ids), _finish_from_proto(entry.finish_reason))
        for entry in message.accepted
    }
    if len(children) != len(message.accepted) or any(not 0 <= child < count for child in children):
        raise InvalidRequestError(
            f"accepted must name each child at most once, from 0 to {count - 1}; got"
            f" {[entry.child for entry in message.accepted]}"
        )
    if (
        children
        and all(child.finish_reason is not None for child in children.values())
        and len(children) == count
    ):
        raise InvalidRequestError(
            "accepted has the end of every child, so there is nothing to resume"
        )
    return Resumption(
        number, tuple(children.get(index, AcceptedChild()) for index in range(min(count, MAX_N)))
    )


def _finish_to_proto(reason: FinishReason | None) -> pb.FinishReason:
    return _FINISH_TO_PROTO[reason] if reason is not None else pb.FINISH_REASON_UNSPECIFIED


def _finish_from_proto(reason: int) -> FinishReason | None:
    if reason != pb.FINISH_REASON_UNSPECIFIED and reason not in _FINISH_FROM_PROTO:
        raise InvalidRequestError(
            f"accepted.finish_reason must be one of 0 to {max(_FINISH_FROM_PROTO)}, got {reason}"
        )
    return _FINISH_FROM_PROTO.get(reason)


def tokenize_to_proto(prompt: str | ChatBody) -> pb.TokenizeRequest:
    if isinstance(prompt, ChatBody):
        return build(pb.TokenizeRequest, chat_json=prompt.text)
    return build(pb.TokenizeRequest, text=prompt)


def tokenize_from_proto(message: pb.TokenizeRequest) -> str | ChatBody:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("prompt is missing: set one of text, chat_json")
    return message.text if kind == "text" else ChatBody(message.chat_json)


def detokenize_to_proto(
    token_ids: Sequence[int], skip_special_tokens: bool
) -> pb.DetokenizeRequest:
    return build(
        pb.DetokenizeRequest, token_ids=token_ids, keep_special_tokens=not skip_special_tokens
    )


def event_to_proto(event: StreamEvent) -> pb.GenerateResponse:
    message = pb.GenerateResponse(
        child=event.child,
        first_index=event.first_index,
        token_ids=event.token_ids,
        text=event.text,
        request_id=event.request_id,
        reasoning=event.reasoning,
        stop_string=event.stop_string,
        stop_token=event.stop_token,
    )
    if event.tool_calls:
        message.tool_calls.extend(
            pb.ToolCallDelta(
                index=call.index, id=call.id, name=call.name, arguments_json=call.arguments
            )
            for call in event.tool_calls
        )
    if event.logprobs:
        message.logprobs.extend(map(logprobs_to_proto, event.logprobs))
    if event.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(_prompt_to_proto(event.prompt_logprobs))
    if event.finish_reason is not None:
        message.finish_reason = _FINISH_TO_PROTO[event.finish_reason]
    if event.usage is not None:
        message.usage.CopyFrom(_usage_to_proto(event.usage))
    if event.timings is not None:
        message.timings.CopyFrom(pb.Timings(**dataclasses.asdict(event.timings)))
    return message


def _usage_to_proto(usage: Usage) -> pb.Usage:
    tiers = usage.cached_by_tier
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cached_by_tier=None if tiers is None else pb.CachedTokens(**tiers.by_tier()),
        weights=[pb.WeightsTokens(version=one, tokens=count) for one, count in usage.weights],
        created_tokens=usage.created_tokens,
    )


def _usage_from_proto(message: pb.Usage) -> Usage:
    told = message.HasField("cached_by_tier")
    tiers = flat_from_proto(CachedTokens, message.cached_by_tier) if told else None
    weights = tuple([(one.version, one.tokens) for one in message.weights])
    return flat_from_proto(Usage, message, cached_by_tier=tiers, weights=weights)


def event_from_proto(message: pb.GenerateResponse) -> StreamEvent:
    return StreamEvent(
        child=message.child,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=all_logprobs_from_proto(message.logprobs),
        finish_reason=_FINISH_FROM_PROTO.get(message.finish_reason),
        usage=_usage_from_proto(message.usage) if message.HasField("usage") else None,
        timings=flat_from_proto(Timings, message.timings) if message.HasField("timings") else None,
        request_id=message.request_id,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments_json)
            for call in message.tool_calls
        ),
        prompt_logprobs=(
            _prompt_from_proto(message.prompt_logprobs)
            if message.HasField("prompt_logprobs")
            else None
        ),
        stop_string=message.stop_string,
        stop_token=message.stop_token if message.HasField("stop_token") else None,
    )


def _prompt_to_proto(logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        top=logprobs.top,
        logprobs=array("f", logprobs.logprobs),
        ranks=array("i", logprobs.ranks),
        top_ids=array("i", logprobs.top_ids),
        top_logprobs=array("f", logprobs.top_logprobs),
    )


def _prompt_from_proto(message: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        message.top,
        array("f", message.logprobs).tobytes(),
        array("i", message.ranks).tobytes(),
        array("i", message.top_ids).tobytes(),
        array("f", message.top_logprobs).tobytes(),
    )


def model_to_proto(model: ModelInfo) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        name=model.name,
        family=model.family,
        vocabulary=model.vocabulary,
        context_tokens=model.context_tokens,
        dtype=model.dtype,
        mode=_MODE_TO_PROTO[model.mode],
        prefill_layout=(
            layout_to_proto(model.prefill_layout) if model.prefill_layout is not None else None
        ),
        decode_layout=layout_to_proto(model.decode_layout),
        kv_bytes_per_token=model.kv_bytes_per_token,
        version=model.version,
        sampling_defaults=common_pb2.SamplingParams(**model.sampling.given()),
    )


def model_from_proto(message: pb.GetModelResponse) -> ModelInfo:
    if message.mode not in _MODE_FROM_PROTO:
        raise InvalidRequestError(
            f"GetModelResponse.mode must be a known mode, got {message.mode}; run the same version"
            " on both sides"
        )
    return ModelInfo(
        name=message.name,
        family=message.family,
        vocabulary=message.vocabulary,
        context_tokens=message.context_tokens,
        dtype=message.dtype,
        mode=_MODE_FROM_PROTO[message.mode],
        prefill_layout=(
            layout_from_proto(message.prefill_layout)
            if message.HasField("prefill_layout")
            else None
        ),
        decode_layout=layout_from_proto(message.decode_layout),
        kv_bytes_per_token=message.kv_bytes_per_token,
        version=message.version,
        sampling=_defaults_from_proto(message.sampling_defaults),
    )


def _defaults_from_proto(message: common_pb2.SamplingParams) -> SamplingDefaults:
    names = [field.name for field in dataclasses.fields(SamplingDefaults)]
    return SamplingDefaults(
        **{name: getattr(message, name) for name in names if message.HasField(name)}
    )


def status_to_proto(
    workers: Sequence[WorkerStatus], routing: RoutingStatus
) -> pb.GetStatusResponse:
    """Decisions are sent without the ids of their requests, which may be another tenant's."""
    decisions = [dataclasses.replace(one, request_id="") for one in routing.decisions]
    told = dataclasses.asdict(dataclasses.replace(routing, decisions=tuple(decisions)))
    fields = told | {"workers": [plain_from(one) for one in workers]}
    return pb.GetStatusResponse(status_json=msgspec.json.encode(fields).decode())


def status_from_proto(
    message: pb.GetStatusResponse,
) -> tuple[tuple[WorkerStatus, ...], RoutingStatus]:
    fields = msgspec.json.decode(message.status_json or "{}")
    workers = tuple([plain_to(WorkerStatus, one) for one in fields.pop("workers", ())])
    return workers, msgspec.convert(fields, RoutingStatus)


_FINISH_TO_PROTO = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_PROTO: dict[int, FinishReason] = {
    value: reason for reason, value in _FINISH_TO_PROTO.items()
}

_MODE_TO_PROTO = {
    Mode.DISAGGREGATED: pb.SERVING_MODE_DISAGGREGATED,
    Mode.CHUNKED: pb.SERVING_MODE_CHUNKED,
    Mode.UNIFIED: pb.SERVING_MODE_UNIFIED,
}
_MODE_FROM_PROTO: dict[int, Mode] = {value: mode for mode, value in _MODE_TO_PROTO.items()}


# Lists of sampling options, with the largest number of entries of each.
_LISTS = {
    name: rule.most
    for declared in (SamplingParams, SamplingOptions)
    for name, (_, rule) in parameters_of(declared).items()
    if rule.most is not None
}


def options_to_proto(
    options: SamplingOptions, kind: type[common_pb2.SamplingParams] = common_pb2.SamplingParams
) -> common_pb2.SamplingParams:
    """Copies sampling options to the fields of the same names of a new message of class `kind`."""
    message = kind()
    known = kind.DESCRIPTOR.fields_by_name
    if unknown := sorted(set(options) - set(known)):
        raise InvalidRequestError(
            f"unknown sampling option {', '.join(unknown)}; known are {', '.join(known)}"
        )
    for name, value in options.items():
        if value is None:
            continue
        try:
            if name == "logit_bias":
                pairs = bias_pairs(options.get("logit_bias") or ())
                message.logit_bias.extend(
                    common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in pairs
                )
            elif name in _LISTS:
                values = (value,) if isinstance(value, str) and value else value
                getattr(message, name).extend(values or ())
            elif name == "grammar":
                message.grammar.CopyFrom(_grammar_to_proto(options.get("grammar")))
            else:
                setattr(message, name, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"{name}={_short(value)} cannot be sent: {error}; it must be of the type of the"
                " field in common.proto"
            ) from None
    return message


def options_from_proto(message: common_pb2.SamplingParams) -> SamplingOptions:
    for name, most in _LISTS.items():
        at_most(name, len(getattr(message, name)), most)
    options: dict[str, Any] = {}
    for field, value in message.ListFields():
        options[field.name] = tuple(value) if field.name in _LISTS else value
    if message.logit_bias:
        options["logit_bias"] = tuple((entry.token_id, entry.bias) for entry in message.logit_bias)
    if message.HasField("grammar"):
        options["grammar"] = _grammar_from_proto(message.grammar)
    return cast(SamplingOptions, options)


def _grammar_to_proto(grammar: Grammar | None) -> common_pb2.Grammar:
    if not isinstance(grammar, Grammar):
        raise TypeError(f"{type(grammar).__name__} is not a grammar")
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return common_pb2.Grammar(json_object=True)
    if grammar.kind is GrammarKind.CHOICE:
        texts = msgspec.json.decode(grammar.text, type=list[str])
        return common_pb2.Grammar(choice=common_pb2.Choices(texts=texts))
    message = common_pb2.Grammar()
    setattr(message, grammar.kind.value, grammar.text)
    return message


def _grammar_from_proto(message: common_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not message.json_object):
        known = ", ".join(one.value for one in GrammarKind)
        raise InvalidRequestError(f"grammar is empty; set one of {known}, or omit it")
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if kind == "choice":
        at_most("grammar.choice", len(message.choice.texts), MAX_GRAMMAR_BYTES)
        return Grammar.of_choices(tuple(message.choice.texts))
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
