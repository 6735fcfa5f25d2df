"""A sampling parameter is declared once: a declaration with one parameter more reaches HTTP, gRPC's
messages and the API's description, and few files know a parameter's name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from jdisagg.dispatch import options
from jdisagg.errors import InvalidRequestError
from jdisagg.request import Rule, SamplingOptions, SamplingParams, parameters_of
from jdisagg.service.grpc import common_pb2
from jdisagg.service.grpc.wire_generation import options_from_proto, options_to_proto
from jdisagg.service.http import requests
from jdisagg.service.http.bodies import sampling_form
from jdisagg.service.http.openapi import schema_of
from tests.service.http_doors import USUAL, http_door

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class More(SamplingParams):
    sparkle: Annotated[float, Rule("how much the answer glitters", 0.0, 2.0)] = 1.0


async def test_another_parameter_arrives_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "SamplingParams", More)
    monkeypatch.setattr(requests, "Sampling", sampling_form(More, SamplingOptions))
    async with http_door() as door:
        for path, usual in USUAL.items():
            answer = await door.served(path, usual | {"sparkle": "1.5"})
            sampling: Any = door.path.requests[-1].sampling
            assert sampling.sparkle == 1.5 and "jdisagg-ignored-fields" not in answer.headers
        for value, words in (("a lot", "a number"), (3, "must be in [0.0, 2.0], got 3.0")):
            wrong = await door.ask("/v1/completions", {"prompt": "a", "sparkle": value})
            assert (wrong.status, wrong.error["param"]) == (400, "sparkle")
            assert words in wrong.error["message"]


def test_another_parameter_arrives_over_grpc() -> None:
    described = descriptor_pb2.FileDescriptorProto()
    common_pb2.DESCRIPTOR.CopyToProto(described)
    (sampling,) = [one for one in described.message_type if one.name == "SamplingParams"]
    sampling.oneof_decl.add(name="_sparkle")
    sampling.field.add(
        name="sparkle",
        number=1000,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        proto3_optional=True,
        oneof_index=len(sampling.oneof_decl) - 1,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)
    name = common_pb2.SamplingParams.DESCRIPTOR.full_name
    kind: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    asked: Any = {"sparkle": 0.0, "top_k": 0, "stop": ["a"], "seed": None}
    sent = kind.FromString(options_to_proto(asked, kind).SerializeToString())
    assert options_from_proto(sent) == {"sparkle": 0.0, "top_k": 0, "stop": ("a",)}
    with pytest.raises(InvalidRequestError, match="unknown sampling option sparkle"):
        options_to_proto(asked)


def test_another_parameter_is_described() -> None:
    shown: Any = schema_of((sampling_form(More),))["properties"]
    number, absent = shown["sparkle"]["anyOf"]
    assert absent == {"type": "null"} and number == {
        "type": "number",
        "minimum": 0.0,
        "maximum": 2.0,
        "description": "how much the answer glitters",
    }


def test_the_types_and_the_message_have_the_declared_parameters() -> None:
    declared = {*parameters_of(SamplingParams), *parameters_of(SamplingOptions)}
    assert set(parameters_of(SamplingParams)) == set(SamplingParams.__dataclass_fields__)
    assert set(SamplingOptions.__annotations__) == declared
    assert set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == declared


def test_the_page_lists_the_files_that_know_a_parameter() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    (row,) = re.findall(r"^\| a sampling parameter \|(.*)\|$", page, re.MULTILINE)
    named = {f"jdisagg/{name}" for name in re.findall(r"`(\w+(?:/\w+)*\.(?:py|proto))`", row)}
    knows = {
        str(path.relative_to(ROOT))
        for top in ("jdisagg", "models", "launch")
        for ending in ("*.py", "*.proto")
        for path in (ROOT / top).rglob(ending)
        if "_pb2" not in path.name and re.search(r"\bmin_p\b", path.read_text())
    }
    assert knows <= named and len(knows) <= 5
    assert all((ROOT / name).is_file() for name in named)
