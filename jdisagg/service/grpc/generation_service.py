"""The generation service: implements the calls of generation.proto with a `Frontend`.

This module handles gRPC contexts and the wire format only. The interceptor (`service/guard.py`)
handles errors. Every wait for a slow client happens in this module, so that unread events
accumulate only in the bounded buffer of the request path."""

import math
from contextlib import aclosing
from dataclasses import replace

import grpc.aio

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import Prompt, chat_of
from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.observe.request_log import RequestLog, RequestRecord
from jdisagg.service.bearer import Tokens
from jdisagg.service.calls import read_in_time
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import generation_pb2_grpc, wire_generation
from jdisagg.service.grpc.wire_generation import ChatBody, ClientRequest
from jdisagg.service.guard import Service
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.fields import Fields
from jdisagg.service.http.generation import IGNORED, read_request
from jdisagg.service.http.grammar import named_as_sent
from jdisagg.service.http.hints import SentHints
from jdisagg.service.http.requests import Asked, chat_from, ignored_header

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
REQUEST_ID_KEY = "jdisagg-request-id"


def generation_service(
    frontend: Frontend, tokens: Tokens = (), log: RequestLog | None = None
) -> Service:
    servicer = GenerationServicer(frontend, log or RequestLog())
    return Service(
        SERVICE_NAME,
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            servicer, server
        ),
        tokens,
        lasting=frozenset(("Resume",)),  # running requests may wait for it
    )


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Implements the generation service.

    All methods are coroutines, and `Generate` writes its events to the gRPC context. If `Generate`
    were an async generator, a cancelled call would stop its request only when the garbage collector
    closes the generator."""

    def __init__(self, frontend: Frontend, log: RequestLog) -> None:
        self._frontend = frontend
        self._log = log

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        with self._log.request(request.request_id, request.tenant) as record:
            await self._generate(request, context, record)

    async def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, record: RequestRecord
    ) -> None:
        asked, prompt, fields, sent = await self._read(request)
        record.tenant = asked.tenant
        with named_as_sent(fields):
            built = await self._frontend.build_request(
                prompt,
                request_id=asked.request_id,
                deadline_seconds=_deadline(asked.deadline_seconds, context.time_remaining()),
                tenant=asked.tenant,
                priority=asked.priority,
                resumption=asked.resumption,
                life=asked.life,
                cache_salt=asked.cache_salt,
                model=asked.model,
                hints=sent.hints,
                retained_part=sent.retained_part,
                **asked.options,
            )
        record.built(built)
        metadata = [(REQUEST_ID_KEY, built.request_id)]
        if ignored := ignored_header(fields):
            metadata.append((IGNORED.decode(), ignored.decode()))
        context.set_trailing_metadata(metadata)
        request_id = built.request_id  # sent with the first message
        async with (
            read_in_time(built),
            aclosing(self._frontend.stream(built, chat_of(prompt))) as events,
        ):
            async for event in events:
                record.seen(event)
                message = wire_generation.event_to_proto(event)
                message.request_id, request_id = request_id, ""
                await context.write(message)

    async def _read(
        self, request: pb.GenerateRequest
    ) -> tuple[ClientRequest, Prompt, Fields, SentHints]:
        if request.WhichOneof("prompt") != "chat_json":
            asked = wire_generation.client_request_from_proto(request)
            assert not isinstance(asked.prompt, ChatBody)
            return asked, asked.prompt, Fields({}), SentHints()
        fields = Fields.of(request.chat_json.encode())
        body = await read_request(fields, chat_from, self._frontend)
        return _of_body(request, body), body.prompts[0], fields, body.hints

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        prompt = wire_generation.tokenize_from_proto(request)
        if isinstance(prompt, ChatBody):
            prompt = chat_prompt(Fields.of(prompt.text.encode()))
        return pb.TokenizeResponse(token_ids=await self._frontend.tokenize(prompt))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        text = await self._frontend.detokenize(
            request.token_ids, skip_special_tokens=not request.keep_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        return wire_generation.model_to_proto(self._frontend.model)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusResponse:
        workers = await self._frontend.status()
        return wire_generation.status_to_proto(workers, self._frontend.routing())

    async def Suspend(
        self, request: pb.SuspendRequest, context: grpc.aio.ServicerContext
    ) -> pb.SuspendResponse:
        await self._frontend.suspend(request.request_id, request.tenant)
        return pb.SuspendResponse()

    async def Resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeResponse:
        self._frontend.resume(request.request_id, request.tenant)
        return pb.ResumeResponse()


def _of_body(request: pb.GenerateRequest, body: Asked) -> ClientRequest:
    """The fields of the request replace those of the chat's body."""
    if body.resumed is not None:
        raise InvalidRequestError(
            "resumption is a field of the request over gRPC; leave it out of the chat's body"
        )
    asked, sent = wire_generation.client_request_from_proto(request, body.options), body.sent
    seconds = asked.deadline_seconds
    return replace(
        asked,
        request_id=asked.request_id or sent.name,
        deadline_seconds=sent.deadline_seconds if seconds is None else seconds,
        tenant=asked.tenant or sent.tenant,
        priority=asked.priority or sent.priority,
        cache_salt=asked.cache_salt or sent.salt,
        model=asked.model or sent.model,
    )


def _deadline(asked_seconds: float | None, call_seconds: float | None) -> float | None:
    if call_seconds is None or not math.isfinite(call_seconds):
        return asked_seconds
    if call_seconds <= 0:
        raise DeadlineExceededError(
            "the call's deadline had already passed when it arrived; allow more time"
        )
    # This comparison keeps NaN and negative numbers, so that the validation rejects them.
    return call_seconds if asked_seconds is None or asked_seconds > call_seconds else asked_seconds
