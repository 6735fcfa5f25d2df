"""Changes of a worker's role (prefill or decode) over gRPC: services and clients.

`worker_roles_service` runs on a worker, and a router calls it through `worker_roles`.
`cluster_roles_service` runs on a router, and scripts and autoscalers call it through
`cluster_roles`. Both services require the cluster's token."""

from contextlib import AbstractAsyncContextManager

from jdisagg.messages.roles import ClusterRolesPort, RolePort
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Credentials
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, CallTimeouts


def worker_roles_service(port: RolePort, tokens: tuple[str, ...] = ()) -> Service:
    """The report of a role change is available during a drain too."""
    return rpc.service(RolePort, port, tokens, lasting=("switch_report",))


def worker_roles(
    address: str,
    credentials: Credentials = NO_CREDENTIALS,
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS.call,
) -> AbstractAsyncContextManager[RolePort]:
    return rpc.connected(RolePort, address, credentials, {"switch_report": timeouts.report_seconds})


def cluster_roles_service(port: ClusterRolesPort, tokens: tuple[str, ...] = ()) -> Service:
    return rpc.service(ClusterRolesPort, port, tokens, ("switch", "advice"))


def cluster_roles(
    target: str, credentials: Credentials = NO_CREDENTIALS
) -> AbstractAsyncContextManager[ClusterRolesPort]:
    """Context manager that connects to a router to change the roles of its workers.

    async with cluster_roles("localhost:8700") as roles:
        report = await roles.switch("prefill-1", WorkerRole.DECODE)
    """
    return rpc.connected(ClusterRolesPort, target, credentials)
