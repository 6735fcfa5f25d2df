"""Whatever crosses the wire arrives equal: every port argument and reply, every step command and result, every error.

Strategies are derived from the dataclasses' own annotations, so a field that is added and forgotten in `wire` fails here.
"""

import dataclasses
import math
import types
import typing

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from jdisagg import errors
from jdisagg.dispatch import frontend, ports
from jdisagg.dispatch.roster import WorkerCard
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import InvalidRequestError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.request import Request, SamplingParams, StreamEvent, TokenLogprobs
from jdisagg.router import hardware, model_geometry
from jdisagg.router.hardware import Accelerator
from jdisagg.router.model_geometry import Attention, CostGeometry
from jdisagg.scheduler import commands
from jdisagg.service import (
    common_pb2,
    generation_pb2,
    kv_plane_pb2,
    registry_pb2,
    wire,
    wire_commands,
    wire_generation,
    wire_hardware,
    wire_kv,
    wire_registry,
    wire_workers,
    workers_pb2,
)
from jdisagg.transfer.kv_messages import KvMessage

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
UNIT = st.floats(0.001, 1.0)


def of_annotation(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of an annotated type, made of the strategies above and of dataclasses field by field."""
    known = {int: INT64, float: FLOATS, str: TEXT, bool: st.booleans(), type(None): st.none()}
    special = {SamplingParams: SAMPLING, Request: REQUESTS, Layout: LAYOUTS, MeshCard: CARDS, Accelerator: HARDWARE, CostGeometry: MODELS}
    if kind in known:
        return known[kind]
    if kind in special:
        return special[kind]
    if dataclasses.is_dataclass(kind):
        return of_dataclass(typing.cast(type, kind))
    if isinstance(kind, types.UnionType):
        return st.one_of(*map(of_annotation, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        arguments = typing.get_args(kind)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(of_annotation(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(of_annotation, arguments))
    return st.sampled_from(kind)


def of_dataclass(kind: type) -> st.SearchStrategy[typing.Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: of_field(field.name, hints[field.name]) for field in dataclasses.fields(kind)})


def of_field(name: str, kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Names and checksums are drawn from all 64 bits, unsigned."""
    if "token" not in name and name.endswith(("_id", "_ids", "checksum", "checksum_key")):
        if kind is int:
            return UINT64
        if kind == tuple[int, ...] and name == "offer_ids":
            return st.lists(UINT64, max_size=3).map(tuple)
    return of_annotation(kind)


IDS = st.integers(0, 2**31 - 1)
LAYOUTS = st.builds(Layout, dp=st.integers(1, 8), tp=st.integers(1, 8), ep=st.just(1))
ENDS = st.builds(KvEnd, control=TEXT, boot_id=UINT64)
CARDS = st.tuples(*3 * [st.integers(0, 2)]).flatmap(
    lambda shape: st.builds(
        MeshCard,
        shape=st.just(shape),
        devices=st.lists(IDS, min_size=math.prod(shape), max_size=math.prod(shape)).map(tuple),
        processes=st.lists(IDS, min_size=math.prod(shape), max_size=math.prod(shape)).map(tuple),
        ends=st.lists(ENDS, max_size=2).map(tuple),
        transports=IDS,
    )
)
HARDWARE = st.sampled_from([*hardware.HARDWARE.values(), dataclasses.replace(hardware.HARDWARE["h200"], dollars_per_hour=0.0)])
MODELS = st.sampled_from(
    [*model_geometry.CATALOG.values(), dataclasses.replace(model_geometry.CATALOG["tiny-llama"], attention=Attention(8, 4, 16, 64, 2))]
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_k=IDS,
    top_p=UNIT,
    min_p=UNIT,
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3).map(lambda biases: tuple(biases.items())),
    min_tokens=st.integers(0, 8),
    stop=st.lists(TEXT.filter(bool), max_size=2).map(tuple),
    stop_token_ids=st.lists(IDS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 64),
)
REQUESTS = st.builds(
    Request,
    request_id=TEXT,
    prompt_token_ids=st.lists(IDS, min_size=1, max_size=4).map(tuple),
    sampling=SAMPLING,
    stop_ids=st.lists(IDS, max_size=2).map(tuple),
    deadline_seconds=st.none() | st.floats(0.001, 1e9),
    tenant=TEXT,
    priority=INT64,
)

ROUND_TRIPS = [
    (SamplingParams, common_pb2.SamplingParams, wire.sampling_to_proto, wire.sampling_from_proto),
    (TokenLogprobs, common_pb2.TokenLogprobs, wire.logprobs_to_proto, wire.logprobs_from_proto),
    (Layout, common_pb2.Layout, wire.layout_to_proto, wire.layout_from_proto),
    (ports.WorkerStatus, common_pb2.WorkerStatus, wire.worker_status_to_proto, wire.worker_status_from_proto),
    (Request, workers_pb2.Request, wire_workers.request_to_proto, wire_workers.request_from_proto),
    (ports.ReserveCall, workers_pb2.ReserveCall, wire_workers.reserve_call_to_proto, wire_workers.reserve_call_from_proto),
    (ports.Reservation, workers_pb2.Reservation, wire_workers.reservation_to_proto, wire_workers.reservation_from_proto),
    (ports.GenerateCall, workers_pb2.GenerateCall, wire_workers.generate_call_to_proto, wire_workers.generate_call_from_proto),
    (ports.Span, workers_pb2.Span, wire_workers.span_to_proto, wire_workers.span_from_proto),
    (ports.PrefillCall, workers_pb2.PrefillCall, wire_workers.prefill_call_to_proto, wire_workers.prefill_call_from_proto),
    (ports.PrefillReply, workers_pb2.PrefillReply, wire_workers.prefill_reply_to_proto, wire_workers.prefill_reply_from_proto),
    (ports.PeerHello, workers_pb2.PeerHello, wire_workers.hello_to_proto, wire_workers.hello_from_proto),
    (ports.Offer, workers_pb2.OfferOrEnd, wire_workers.offer_to_proto, wire_workers.offer_from_proto),
    (ports.HandoffEnd, workers_pb2.OfferOrEnd, wire_workers.offer_to_proto, wire_workers.offer_from_proto),
    (ports.OfferChecksum, workers_pb2.OfferOrEnd, wire_workers.offer_to_proto, wire_workers.offer_from_proto),
    (WorkerCard, registry_pb2.WorkerCard, wire_registry.worker_card_to_proto, wire_registry.worker_card_from_proto),
    *((kind, kv_plane_pb2.KvMessage, wire_kv.kv_message_to_proto, wire_kv.kv_message_from_proto) for kind in typing.get_args(KvMessage)),
    (StreamEvent, generation_pb2.GenerateResponse, wire_generation.event_to_proto, wire_generation.event_from_proto),
    (RoutingStatus, generation_pb2.GetStatusResponse, wire_generation.routing_to_proto, wire_generation.routing_from_proto),
    (frontend.ModelInfo, generation_pb2.GetModelResponse, wire_generation.model_to_proto, wire_generation.model_from_proto),
]


@pytest.mark.parametrize(("kind", "message", "to_proto", "from_proto"), ROUND_TRIPS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_crosses_the_wire_arrives_equal(kind, message, to_proto, from_proto) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(of_annotation(kind))
    def check(value) -> None:
        assert from_proto(wire.parse(message, to_proto(value).SerializeToString())) == value

    check()


@pytest.mark.parametrize("kind", typing.get_args(commands.StepCommand), ids=lambda kind: kind.__name__)
def test_a_step_command_arrives_equal(kind) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(of_dataclass(kind))
    def check(command) -> None:
        assert wire_commands.command_from_bytes(wire_commands.command_to_bytes(command)) == command

    check()


@pytest.mark.parametrize("kind", typing.get_args(commands.StepResult), ids=lambda kind: kind.__name__)
def test_a_step_result_arrives_equal(kind) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(of_dataclass(kind))
    def check(result) -> None:
        assert wire_commands.result_from_bytes(wire_commands.result_to_bytes(result)) == result

    check()


OPTIONS = {
    "max_tokens": INT64,
    "temperature": FLOATS,
    "seed": INT64,
    "ignore_eos": st.booleans(),
    "logprobs": INT64,
    "stop": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    "stop_token_ids": st.lists(INT64, min_size=1, max_size=3).map(tuple),
    "logit_bias": st.lists(st.tuples(INT64, FLOATS), min_size=1, max_size=3).map(tuple),
}


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        wire_generation.ClientRequest,
        prompt=st.one_of(
            TEXT,
            st.builds(frontend.TokenPrompt, st.lists(INT64, max_size=4).map(tuple)),
            st.builds(frontend.ChatPrompt, st.lists(st.builds(frontend.ChatMessage, TEXT, TEXT), max_size=3).map(tuple)),
        ),
        options=st.fixed_dictionaries({}, optional=OPTIONS),
        request_id=TEXT,
        deadline_seconds=st.none() | FLOATS,
        tenant=TEXT,
        priority=INT64,
    )
)
def test_a_clients_request_keeps_what_was_set_and_only_that(request: wire_generation.ClientRequest) -> None:
    data = wire_generation.client_request_to_proto(request).SerializeToString()
    assert wire_generation.client_request_from_proto(wire.parse(generation_pb2.GenerateRequest, data)) == request


ERROR_TYPES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, JdisaggError)]


@pytest.mark.parametrize("kind", ERROR_TYPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("retry_after_seconds", [None, 0.25])
def test_an_error_keeps_its_type_message_and_retry_hint(kind, retry_after_seconds) -> None:
    status = wire.error_to_status(kind("naïve: 7 exceeds 5", retry_after_seconds=retry_after_seconds))
    back = wire.error_from_status(status)
    assert (type(back), back.message, back.retry_after_seconds, status.code) == (
        kind,
        "naïve: 7 exceeds 5",
        retry_after_seconds,
        kind.status,
    )


def test_a_long_error_message_is_cut_at_a_character() -> None:
    status = wire.error_to_status(InvalidRequestError("é" * 5000))
    assert len(status.details.encode()) <= wire.MAX_DETAILS_BYTES + 4
    assert status.details.startswith("é" * 900)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("UNAVAILABLE", errors.UnavailableError), ("CANCELLED", errors.CancelledError), ("UNIMPLEMENTED", JdisaggError)],
)
def test_a_status_of_grpcs_own_becomes_the_error_of_its_code(code, kind) -> None:
    back = wire.error_from_status(wire.WireStatus(code, "connection reset"))
    assert type(back) is kind
    assert "connection reset" in back.message


@pytest.mark.parametrize(
    "data",
    [
        generation_pb2.GenerateRequest(text="ab").SerializeToString().replace(b"ab", b"\xff\xfe"),
        b"\x0a\xff\xff\xff\xff\x0f",
    ],
    ids=["invalid UTF-8", "truncated"],
)
def test_malformed_bytes_are_an_invalid_request(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a valid jdisagg.v1.GenerateRequest"):
        wire.parse(generation_pb2.GenerateRequest, data)


@pytest.mark.parametrize(
    ("decode", "message", "field"),
    [
        (wire.worker_status_from_proto, common_pb2.WorkerStatus(), "WorkerStatus.role"),
        (wire_workers.offer_from_proto, workers_pb2.OfferOrEnd(), "OfferOrEnd.kind"),
        (wire_workers.prefill_call_from_proto, workers_pb2.PrefillCall(), "max_tokens"),
        (wire_generation.client_request_from_proto, generation_pb2.GenerateRequest(), "prompt is missing"),
        (wire_generation.tokenize_from_proto, generation_pb2.TokenizeRequest(), "prompt is missing"),
        (wire_generation.model_from_proto, generation_pb2.GetModelResponse(), "GetModelResponse.mode"),
        (wire_hardware.accelerator_from_proto, registry_pb2.Accelerator(), "WorkerCard.hardware"),
        (wire_hardware.geometry_from_proto, registry_pb2.CostGeometry(), "ModelCard.geometry"),
    ],
)
def test_a_message_that_lacks_what_it_must_have_is_refused_by_field(decode, message, field) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        decode(message)


def with_sampling(**fields) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(**fields))


def resumed(children: int, n: int) -> generation_pb2.GenerateRequest:
    accepted = [generation_pb2.AcceptedTokens(child=child) for child in range(children)]
    sampling = common_pb2.SamplingParams(seed=1, n=n)
    return generation_pb2.GenerateRequest(text="a", request_id="r", sampling=sampling, resumption=1, accepted=accepted)


def chat(messages: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(chat=generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage()] * messages))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (with_sampling(logit_bias=[common_pb2.LogitBias()] * 513), "logit_bias may hold at most 512, got 513"),
        (with_sampling(stop=[""] * 17), "stop may hold at most 16, got 17"),
        (with_sampling(stop_token_ids=[0] * 65), "stop_token_ids may hold at most 64, got 65"),
        (resumed(children=65, n=2**40), "accepted may hold at most 64, got 65"),
        (generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[0] * (2**21 + 1))), "token_ids may hold at most 2097152"),
        (chat(16_385), "messages may hold at most 16384, got 16385"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_repeats_too_often_is_refused_before_it_is_read(message, words) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        wire_generation.client_request_from_proto(message)


def test_as_much_as_may_repeat_is_read() -> None:
    assert wire_generation.client_request_from_proto(resumed(children=64, n=64)).resumption is not None
    assert wire_generation.client_request_from_proto(chat(16_384)).prompt is not None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 2**64}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": (5,)}, "stop"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"logit_bias": (3, 1.0)}, "logit_bias"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"beam": 4}, "beam"),
    ],
)
def test_an_option_that_cannot_be_sent_is_refused_by_name(options, field) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        wire_generation.client_request_to_proto(wire_generation.ClientRequest("hi", options))
