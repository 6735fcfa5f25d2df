"""Whatever crosses the public door arrives equal: requests, events, the model, the status; and
every error, wherever it crosses.

Strategies are derived from the classes' own annotations, so a field that is added and forgotten in
`wire` fails here."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings

from jdisagg import errors
from jdisagg.dispatch import prompts
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import InvalidRequestError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.messages.spans import WireStatus
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import StreamEvent, TokenLogprobs
from jdisagg.service.grpc import common_pb2, generation_pb2, wire, wire_generation
from tests.messages.values import FLOATS, INT64, TEXT, of_annotation
from tests.service.doors import STATUS

ROUND_TRIPS = [
    (TokenLogprobs, common_pb2.TokenLogprobs, wire, "logprobs"),
    (Layout, common_pb2.Layout, wire, "layout"),
    (StreamEvent, generation_pb2.GenerateResponse, wire_generation, "event"),
    (prompts.ModelInfo, generation_pb2.GetModelResponse, wire_generation, "model"),
]


@pytest.mark.parametrize(("kind", "message", "module", "name"), ROUND_TRIPS)
def test_what_crosses_the_wire_arrives_equal(kind, message, module, name) -> None:
    to_proto, from_proto = (getattr(module, f"{name}_{way}_proto") for way in ("to", "from"))

    @settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
    @given(of_annotation(kind))
    def check(value) -> None:
        assert from_proto(message.FromString(to_proto(value).SerializeToString())) == value

    check()


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(of_annotation(tuple[WorkerStatus, ...]), of_annotation(RoutingStatus))
def test_a_status_arrives_equal_but_for_the_ids_of_requests(workers, routing) -> None:
    assume(not re.search(r"\b(inf|nan)\b", repr((workers, routing))))  # JSON has neither
    data = wire_generation.status_to_proto(workers, routing).SerializeToString()
    message = generation_pb2.GetStatusResponse.FromString(data)
    decisions = [replace(item, request_id="") for item in routing.decisions]
    sent = replace(routing, decisions=tuple(decisions))
    assert wire_generation.status_from_proto(message) == (workers, sent)


def test_a_status_of_another_version_is_read_as_far_as_it_goes() -> None:
    worker = wire.plain_from(STATUS) | {"of_a_later_version": [1]}
    assert wire.plain_to(WorkerStatus, worker) == STATUS
    del worker["name"]
    with pytest.raises(InvalidRequestError, match="'name'.* run the same version"):
        wire.plain_to(WorkerStatus, worker)


OPTIONS = {
    "max_tokens": INT64,
    "temperature": FLOATS,
    "seed": INT64,
    "ignore_eos": st.booleans(),
    "logprobs": INT64,
    "stop": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    "stop_token_ids": st.lists(INT64, min_size=1, max_size=3).map(tuple),
    "allowed_token_ids": st.lists(INT64, min_size=1, max_size=3).map(tuple),
    "bad_words": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    "logit_bias": st.lists(st.tuples(INT64, FLOATS), min_size=1, max_size=3).map(tuple),
}


@settings(max_examples=50)
@given(
    st.builds(
        wire_generation.ClientRequest,
        prompt=st.one_of(
            TEXT,
            st.builds(prompts.TokenPrompt, st.lists(INT64, max_size=4).map(tuple)),
            st.builds(wire_generation.ChatBody, TEXT),
        ),
        options=st.fixed_dictionaries({}, optional=OPTIONS),
        request_id=TEXT,
        deadline_seconds=st.none() | FLOATS,
        tenant=TEXT,
        priority=INT64,
    )
)
def test_a_clients_request_keeps_what_was_set_and_only_that(
    request: wire_generation.ClientRequest,
) -> None:
    data = wire_generation.client_request_to_proto(request).SerializeToString()
    assert (
        wire_generation.client_request_from_proto(generation_pb2.GenerateRequest.FromString(data))
        == request
    )


ERROR_TYPES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, JdisaggError)
]


def test_an_error_keeps_its_type_message_and_retry_hint() -> None:
    for kind in ERROR_TYPES:
        for hint in (None, 0.25):
            status = wire.error_to_status(kind("naïve: 7 exceeds 5", retry_after_seconds=hint))
            back = wire.error_from_status(status)
            assert (type(back), back.message) == (kind, "naïve: 7 exceeds 5")
            assert (back.retry_after_seconds, status.code) == (hint, kind.status)


def test_a_long_error_message_is_cut_at_a_character() -> None:
    status = wire.error_to_status(InvalidRequestError("é" * 5000))
    assert len(status.details.encode()) <= wire.MAX_DETAILS_BYTES + 4
    assert status.details.startswith("é" * 900)


def test_a_status_of_grpcs_own_becomes_the_error_of_its_code() -> None:
    for code, kind in (
        ("UNAVAILABLE", errors.UnavailableError),
        ("CANCELLED", errors.CancelledError),
        ("UNIMPLEMENTED", JdisaggError),
    ):
        back = wire.error_from_status(WireStatus(code, "connection reset"))
        assert type(back) is kind and "connection reset" in back.message


EMPTY = [
    (wire_generation.client_request_from_proto, generation_pb2.GenerateRequest(), "prompt is miss"),
    (wire_generation.tokenize_from_proto, generation_pb2.TokenizeRequest(), "prompt is missing"),
    (wire_generation.model_from_proto, generation_pb2.GetModelResponse(), "GetModelResponse.mode"),
]


def test_a_message_that_lacks_what_it_must_have_is_refused_by_field() -> None:
    for decode, message, field in EMPTY:
        with pytest.raises(InvalidRequestError, match=field):
            decode(message)


def with_sampling(**fields) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(**fields))


def resumed(children: int, n: int) -> generation_pb2.GenerateRequest:
    accepted = [generation_pb2.AcceptedTokens(child=child) for child in range(children)]
    sampling = common_pb2.SamplingParams(seed=1, n=n)
    return generation_pb2.GenerateRequest(
        text="a", request_id="r", sampling=sampling, resumption=1, accepted=accepted
    )


def test_what_repeats_too_often_is_refused_before_it_is_read() -> None:
    ids = generation_pb2.TokenIds(ids=[0] * (2**21 + 1))
    for message, words in (
        (with_sampling(logit_bias=[common_pb2.LogitBias()] * 513), "logit_bias .* 512, got 513"),
        (with_sampling(stop=[""] * 17), "stop may hold at most 16, got 17"),
        (with_sampling(stop_token_ids=[0] * 65), "stop_token_ids may hold at most 64, got 65"),
        (resumed(children=65, n=2**40), "accepted may hold at most 64, got 65"),
        (generation_pb2.GenerateRequest(token_ids=ids), "token_ids may hold at most 2097152"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            wire_generation.client_request_from_proto(message)


def test_as_much_as_may_repeat_is_read() -> None:
    assert (
        wire_generation.client_request_from_proto(resumed(children=64, n=64)).resumption is not None
    )


def test_an_option_that_cannot_be_sent_is_refused_by_name() -> None:
    for field, value in (
        ("max_tokens", 2**64),
        ("temperature", "hot"),
        ("stop", (5,)),
        ("stop", ("\ud800",)),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", (3, 1.0)),
        ("stop_token_ids", 7),
        ("beam", 4),
    ):
        request = wire_generation.ClientRequest("hi", {field: value})
        with pytest.raises(InvalidRequestError, match=field):
            wire_generation.client_request_to_proto(request)
