"""Our data <-> the messages of roles.proto. Knows what `wire` says."""

from dataclasses import fields

from jdisagg.dispatch.ports import WorkerRole
from jdisagg.dispatch.roles import AdviceReport, SwitchCall, SwitchReport, SwitchState
from jdisagg.errors import InvalidRequestError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.service import common_pb2
from jdisagg.service import roles_pb2 as pb
from jdisagg.service.wire import layout_from_proto, layout_to_proto, role_from_proto, role_to_proto

_STATE_TO_PROTO = {
    SwitchState.NONE: pb.SWITCH_STATE_NONE,
    SwitchState.DRAINING: pb.SWITCH_STATE_DRAINING,
    SwitchState.DONE: pb.SWITCH_STATE_DONE,
    SwitchState.FAILED: pb.SWITCH_STATE_FAILED,
}
_STATE_FROM_PROTO: dict[int, SwitchState] = {value: state for state, value in _STATE_TO_PROTO.items()}
_ADVICE = tuple(field.name for field in fields(AdviceReport))


def switch_call_to_proto(call: SwitchCall) -> pb.SwitchRoleCall:
    return pb.SwitchRoleCall(switch_id=call.switch_id, role=role_to_proto(call.role), layout=layout_to_proto(call.layout))


def switch_call_from_proto(message: pb.SwitchRoleCall) -> SwitchCall:
    role = role_from_proto("SwitchRoleCall", message.role)
    return SwitchCall(message.switch_id, role, _layout("SwitchRoleCall", message.layout))


def switch_report_to_proto(report: SwitchReport) -> pb.SwitchReport:
    return pb.SwitchReport(
        worker=report.worker,
        boot_id=report.boot_id,
        role=role_to_proto(report.role),
        layout=layout_to_proto(report.layout),
        state=_STATE_TO_PROTO[report.state],
        switch_id=report.switch_id,
        reason=report.reason,
        drain_seconds=report.drain_seconds,
        build_seconds=report.build_seconds,
        warm_up_seconds=report.warm_up_seconds,
        total_seconds=report.total_seconds,
    )


def switch_report_from_proto(message: pb.SwitchReport) -> SwitchReport:
    if message.state not in _STATE_FROM_PROTO:
        raise InvalidRequestError(f"SwitchReport.state must be a known state, got {message.state}; are both sides of one version?")
    return SwitchReport(
        worker=message.worker,
        boot_id=message.boot_id,
        role=role_from_proto("SwitchReport", message.role),
        layout=_layout("SwitchReport", message.layout),
        state=_STATE_FROM_PROTO[message.state],
        switch_id=message.switch_id,
        reason=message.reason,
        drain_seconds=message.drain_seconds,
        build_seconds=message.build_seconds,
        warm_up_seconds=message.warm_up_seconds,
        total_seconds=message.total_seconds,
    )


def switch_worker_to_proto(worker: str, role: WorkerRole, layout: Layout | None, deadline_seconds: float) -> pb.SwitchWorkerCall:
    shown = layout_to_proto(layout) if layout is not None else None
    return pb.SwitchWorkerCall(worker=worker, role=role_to_proto(role), layout=shown, deadline_seconds=deadline_seconds)


def switch_worker_from_proto(message: pb.SwitchWorkerCall) -> tuple[str, WorkerRole, Layout | None, float]:
    """Worker, role, layout (None: the usual one), and how long it may take."""
    layout = _layout("SwitchWorkerCall", message.layout) if message.HasField("layout") else None
    if not 0 < message.deadline_seconds < float("inf"):
        raise InvalidRequestError(f"SwitchWorkerCall.deadline_seconds must be positive and finite, got {message.deadline_seconds}")
    return message.worker, role_from_proto("SwitchWorkerCall", message.role), layout, message.deadline_seconds


def advice_to_proto(advice: AdviceReport) -> pb.Advice:
    message = pb.Advice()
    for name in _ADVICE:
        setattr(message, name, getattr(advice, name))
    return message


def advice_from_proto(message: pb.Advice) -> AdviceReport:
    return AdviceReport(*(getattr(message, name) for name in _ADVICE))


def _layout(name: str, message: common_pb2.Layout) -> Layout:
    try:
        return layout_from_proto(message)
    except LayoutError as error:
        raise InvalidRequestError(f"{name}.layout makes no sense: {error}; are both sides of one version?") from None
