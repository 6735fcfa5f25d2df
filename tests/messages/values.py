"""Hypothesis strategies for messages, derived from the annotations of their classes."""

import dataclasses
import enum
import math
import types
import typing

import hypothesis.strategies as st
import msgspec

from jdisagg.costs import hardware
from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.hardware import Accelerator
from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.prompt.images import PromptImage
from jdisagg.prompt.logprobs import PromptLogprobs, PromptToken
from jdisagg.request import Request, SamplingParams

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
UNIT = st.floats(0.001, 1.0)


def of_annotation(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Returns a strategy for an annotated type, field by field for dataclasses and structs."""
    known = {
        int: INT64,
        float: FLOATS,
        str: TEXT,
        bool: st.booleans(),
        bytes: st.binary(max_size=24),
        type(None): st.none(),
    }
    special = {
        SamplingParams: SAMPLING,
        Request: REQUESTS,
        Layout: LAYOUTS,
        MeshCard: CARDS,
        Accelerator: HARDWARE,
        CostGeometry: MODELS,
        PromptLogprobs: PROMPTS,
    }
    if kind in known:
        return known[kind]
    if kind in special:
        return special[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"):
        return of_dataclass(typing.cast(type, kind))
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return st.one_of(*map(of_annotation, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        arguments = typing.get_args(kind)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(of_annotation(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(of_annotation, arguments))
    return st.sampled_from(kind)


def of_dataclass(kind: type) -> st.SearchStrategy[typing.Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind,
        **{
            field.name: of_field(field.name, hints[field.name])
            for field in (
                dataclasses.fields(kind)
                if dataclasses.is_dataclass(kind)
                else msgspec.structs.fields(kind)
            )
        },
    )


def of_field(name: str, kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Draws ids and checksums from all 64 bits, unsigned."""
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
HARDWARE = st.sampled_from(
    [
        *hardware.HARDWARE.values(),
        dataclasses.replace(hardware.HARDWARE["h200"], dollars_per_hour=0.0),
    ]
)
MODELS = st.sampled_from(
    [
        *CATALOG.values(),
        dataclasses.replace(CATALOG["tiny-llama"], attention=GroupedAttention(8, 4, 16, 64, 2)),
        dataclasses.replace(CATALOG["tiny-llama"], linear=LinearAttention(3, 4, 8, 16, 16, 4)),
    ]
)
PROMPTS = st.builds(
    PromptLogprobs.of,
    st.just(2),
    st.lists(
        st.builds(
            PromptToken,
            st.floats(-40, 0, width=32),
            IDS,
            st.lists(st.tuples(IDS, st.floats(-40, 0, width=32)), max_size=2).map(tuple),
        ),
        max_size=3,
    ),
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
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    min_tokens=st.integers(0, 8),
    stop=st.lists(TEXT.filter(bool), max_size=2).map(tuple),
    stop_token_ids=st.lists(IDS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 64),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
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
    images=st.lists(st.binary(max_size=6), max_size=1).map(
        lambda found: tuple(PromptImage.of(0, 1, (1, 2, 2), pixels) for pixels in found)
    ),
)
