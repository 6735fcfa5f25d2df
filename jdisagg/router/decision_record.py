"""Converts a placement decision to JSON and back: the query, the snapshot of the relevant workers,
and the answer.

    record = record_of(state, query, now, policy, answer)  # dicts, lists, numbers, texts
    assert replay(record) == answer_of(record)

`replay` restores the snapshot from a record and decides again with the current code. A record
contains only the workers on which the decision depends (`placement.witnesses`). It contains lengths
and worker names, but neither token ids nor the names of tenants.

Raises ConfigError for malformed records."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from jdisagg.costs.hardware import Link, accelerator_from_fields
from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.measured import StepTimes
from jdisagg.costs.model_geometry import CostGeometry, Experts, GroupedAttention, LatentAttention
from jdisagg.costs.speeds import Kind
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState, Description
from jdisagg.router.corrections import Corrections
from jdisagg.router.decision import (
    CostTerms,
    Decision,
    Deferred,
    PlacementOutcome,
    PlacementPolicy,
    PlacementQuery,
    Refusal,
)
from jdisagg.router.placement import decide, witnesses

VERSION = 1
Record = dict[str, Any]

_ANSWERS: dict[str, type[Decision] | type[Deferred] | type[Refusal]] = {
    "decision": Decision,
    "hold": Deferred,
    "refusal": Refusal,
}
_ENDLESS = ("tpot_slo_seconds", "limit_seconds")  # JSON has no infinity: null


def record_of(
    state: ClusterState,
    query: PlacementQuery,
    now: float,
    policy: PlacementPolicy,
    answer: PlacementOutcome,
) -> Record:
    """Builds the record of a decision. Must be called before the snapshot changes."""
    mattered = witnesses(state, query, now, policy)
    names = [name for name in state if name in mattered]
    kinds: list[Kind] = []
    workers = []
    for name in names:
        description = state.description(name)
        if description.kind not in kinds:
            kinds.append(description.kind)
        kind = kinds.index(description.kind)
        workers.append(
            {"name": name, "place": description.place, "kind": kind, "numbers": state.numbers(name)}
        )
    cached, coming, loads, yielding = (
        {name: of_worker[name] for name in names if name in of_worker}
        for of_worker in (query.cached, query.coming, query.loads, query.yielding)
    )
    few = dataclasses.replace(  # type: ignore[arg-type]
        query, cached=cached, coming=coming, loads=loads, yielding=yielding
    )
    asked = dataclasses.asdict(few) | {
        "avoid": sorted(query.avoid & mattered),
        "broken": sorted(pair for pair in query.broken if mattered.issuperset(pair)),
    }
    told = next(kind for kind, known in _ANSWERS.items() if isinstance(answer, known))
    return {
        "version": VERSION,
        "now": now,
        "ask": _without_infinities(asked),
        "rules": _without_infinities(dataclasses.asdict(policy)),
        "kinds": [_kind_as_fields(kind) for kind in kinds],
        "workers": workers,
        "links": [
            [*ends, *terms] for ends, terms in state.measured_links.items() if mattered >= {*ends}
        ],
        "answer": {"kind_of_answer": told} | dataclasses.asdict(answer),
    }


def answer_of(record: Mapping[str, Any]) -> PlacementOutcome:
    """Returns the recorded answer."""
    with _Reading():
        fields = dict(record["answer"])
        kind = _ANSWERS[fields.pop("kind_of_answer")]
        if "terms" in fields:
            fields["terms"] = CostTerms(**fields["terms"])
        return kind(**fields)


def replay(record: Mapping[str, Any]) -> PlacementOutcome:
    """Decides again on the snapshot in a record. Raises the errors of `placement.decide`."""
    with _Reading():
        if record["version"] != VERSION:
            raise ConfigError(
                f"the record has version {record['version']!r}, but version {VERSION} is required;"
                " record it again"
            )
        kinds = [_kind(fields) for fields in record["kinds"]]
        state = ClusterState()
        for worker in record["workers"]:
            kind = kinds[worker["kind"]]
            state.restore(worker["name"], Description(worker["place"], kind), worker["numbers"])
        links = record.get("links", ())  # absent in older records
        state.restore_links({(ours, theirs): (*terms,) for ours, theirs, *terms in links})
        asked = _with_infinities(record["ask"])
        parts = {"work": Work(**asked["work"]), "avoid": frozenset(asked["avoid"])}
        if "corrections" in asked:  # absent in older records
            corrections = {way: tuple(pair) for way, pair in asked["corrections"].items()}
            parts["corrections"] = Corrections(**corrections)
        pairs = asked.get("broken", ())  # absent in older records
        parts["broken"] = frozenset((prefill, decode) for prefill, decode in pairs)
        query = PlacementQuery(**asked | parts)
        ruled = _with_infinities(record["rules"])
        far = Link(**ruled.pop("far"))
        policy = PlacementPolicy(far=far, **ruled)
        now = float(record["now"])
    return decide(state, query, now, policy)


def _kind_as_fields(kind: Kind) -> Record:
    fields = dataclasses.asdict(kind)
    shape = kind.geometry
    fields["geometry"]["attention"] = msgspec.structs.asdict(shape.attention)
    fields["geometry"]["linear"] = shape.linear and msgspec.structs.asdict(shape.linear)
    fields["times"] = kind.times and msgspec.to_builtins(kind.times)
    return fields


def _kind(fields: Mapping[str, Any]) -> Kind:
    shape = dict(fields["geometry"])
    attention = LatentAttention if "kv_rank" in shape["attention"] else GroupedAttention
    shape["attention"] = attention(**shape["attention"])
    shape["experts"] = Experts(**shape["experts"]) if shape["experts"] else None
    linear = shape.get("linear")  # absent in older records
    shape["linear"] = LinearAttention(**linear) if linear else None
    described, times = fields["hardware"], fields.get("times")
    return Kind(
        CostGeometry(**shape),
        # older records have `stages` instead of the layout's `pp`
        Layout(**{"pp": fields.get("stages", 1), **fields["layout"]}),
        accelerator_from_fields(described, "the record's hardware") if described else None,
        fields["dtype"],
        msgspec.convert(times, StepTimes) if times else None,
    )


def _without_infinities(fields: Record) -> Record:
    return {
        name: None if name in _ENDLESS and math.isinf(value) else value
        for name, value in fields.items()
    }


def _with_infinities(fields: Mapping[str, Any]) -> Record:
    return {
        name: math.inf if name in _ENDLESS and value is None else value
        for name, value in fields.items()
    }


class _Reading:
    """Context manager that converts any error while a record is read to a ConfigError."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, JdisaggError) or not isinstance(
            error, KeyError | TypeError | ValueError | AttributeError | IndexError
        ):
            return
        raise ConfigError(
            f"not a record of a decision ({type(error).__name__}: {error}); pass a line of a"
            " decision log"
        ) from error
