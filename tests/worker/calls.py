"""Calls that tests make themselves."""

from jdisagg.messages.ports import Child, PrefillCall, ReserveCall
from tests.fakes.cluster import toy_request


def reserve_call(
    number: int = 1, attempt: int = 1, children: tuple[Child, ...] = (Child(0),), **sampling: object
) -> ReserveCall:
    return ReserveCall(toy_request(number, **sampling), attempt, children, deadline_seconds=100.0)  # type: ignore[arg-type]


def prefill_call(
    number: int = 1,
    handoff_id: int = 7,
    attempt: int = 1,
    accepted: tuple[int, ...] = (),
    **request: object,
) -> PrefillCall:
    return PrefillCall(
        toy_request(number, **request),  # type: ignore[arg-type]
        attempt,
        (Child(0, accepted),),
        handoff_id,
        "decode0",
        0,
        100.0,
    )  # type: ignore[arg-type]
