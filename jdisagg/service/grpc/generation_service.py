"""The generation service: implements the calls of generation.proto with a `Frontend`.

This module handles gRPC contexts and the wire format only. The interceptor (`service/guard.py`)
handles errors. Every wait for a slow client happens in this module, so that unread events
accumulate only in the bounded buffer of the request path."""

import math
from contextlib import aclosing

import grpc.aio
import msgspec

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import chat_of
from jdisagg.dispatch.weights_control import control_of, positive_seconds
from jdisagg.errors import DeadlineExceededError
from jdisagg.messages.weights import SLEEP_SECONDS, UPDATE_SECONDS
from jdisagg.observe.request_log import RequestLog, RequestRecord
from jdisagg.request import Adapter
from jdisagg.service.bearer import Tokens
from jdisagg.service.calls import read_in_time
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import generation_pb2_grpc, wire, wire_generation
from jdisagg.service.guard import Service

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
        lasting=frozenset(("Resume", "Wake")),  # running requests may wait for them
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
        asked = wire_generation.client_request_from_proto(request)
        built = await self._frontend.build_request(
            asked.prompt,
            request_id=asked.request_id,
            deadline_seconds=_deadline(asked.deadline_seconds, context.time_remaining()),
            tenant=asked.tenant,
            priority=asked.priority,
            resumption=asked.resumption,
            life=asked.life,
            cache_salt=asked.cache_salt,
            model=asked.model,
            **asked.options,
        )
        record.built(built)
        context.set_trailing_metadata(((REQUEST_ID_KEY, built.request_id),))
        request_id = built.request_id  # sent with the first message
        async with (
            read_in_time(built),
            aclosing(self._frontend.stream(built, chat_of(asked.prompt))) as events,
        ):
            async for event in events:
                record.seen(event)
                message = wire_generation.event_to_proto(event)
                message.request_id, request_id = request_id, ""
                await context.write(message)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(
            token_ids=await self._frontend.tokenize(wire_generation.tokenize_from_proto(request))
        )

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
        reply = wire_generation.routing_to_proto(self._frontend.routing())
        reply.workers.extend(map(wire.worker_status_to_proto, await self._frontend.status()))
        return reply

    async def ResetCache(
        self, request: pb.ResetCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResetCacheResponse:
        return pb.ResetCacheResponse(blocks=await self._frontend.reset_cache())

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

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        adapters, model = self._frontend.adapters, self._frontend.model.name
        loaded = await adapters.load(request.name, request.path, model, request.replace)
        return pb.LoadAdapterResponse(adapter=_adapter_to_proto(loaded))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        self._frontend.adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        listed = map(_adapter_to_proto, self._frontend.adapters.listed)
        return pb.ListAdaptersResponse(adapters=listed)

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        report = await control_of(self._frontend.weights).update(
            request.folder,
            request.version,
            wire_generation.update_mode_from_proto(request.mode),
            _seconds(request, UPDATE_SECONDS),
        )
        return pb.UpdateWeightsResponse(**msgspec.structs.asdict(report))

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext
    ) -> pb.SleepResponse:
        seconds, names = _seconds(request, SLEEP_SECONDS), tuple(request.workers)
        control = control_of(self._frontend.weights)
        statuses = await control.sleep(request.level or 1, names, seconds)
        return pb.SleepResponse(workers=map(wire.worker_status_to_proto, statuses))

    async def Wake(
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WakeResponse:
        seconds, names = _seconds(request, UPDATE_SECONDS), tuple(request.workers)
        statuses = await control_of(self._frontend.weights).wake(names, seconds)
        return pb.WakeResponse(workers=map(wire.worker_status_to_proto, statuses))


def _seconds(
    request: pb.UpdateWeightsRequest | pb.SleepRequest | pb.WakeRequest, usual: float
) -> float:
    return (
        positive_seconds(request.deadline_seconds)
        if request.HasField("deadline_seconds")
        else usual
    )


def _adapter_to_proto(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(name=adapter.name, path=adapter.path, digest=adapter.digest)


def _deadline(asked_seconds: float | None, call_seconds: float | None) -> float | None:
    if call_seconds is None or not math.isfinite(call_seconds):
        return asked_seconds
    if call_seconds <= 0:
        raise DeadlineExceededError(
            "the call's deadline had already passed when it arrived; allow more time"
        )
    # This comparison keeps NaN and negative numbers, so that the validation rejects them.
    return call_seconds if asked_seconds is None or asked_seconds > call_seconds else asked_seconds
