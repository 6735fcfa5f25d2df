"""Changing roles over gRPC: the services, and both ports' other ends.

`worker_roles_service` stands on a worker, `worker_roles` is how a router reaches it;
`cluster_roles_service` stands on a router, `cluster_roles` is for scripts and autoscalers. Both
services are for the cluster's own people: they ask for the cluster's token."""

from contextlib import AbstractAsyncContextManager

from jdisagg.messages.roles import ClusterRolesPort, RolePort
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Credentials
from jdisagg.timeouts import DEFAULT_TIMEOUTS, CallTimeouts


def worker_roles_service(port: RolePort, tokens: tuple[str, ...] = ()) -> Service:
    """Its report can be had while a drain refuses everything else."""
    return rpc.service(RolePort, port, tokens, lasting=("switch_report",))


def worker_roles(
    address: str,
    credentials: Credentials = NO_CREDENTIALS,
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS.call,
) -> AbstractAsyncContextManager[RolePort]:
    """The role of the worker at an address."""
    return rpc.connected(RolePort, address, credentials, {"switch_report": timeouts.report_seconds})


def cluster_roles_service(port: ClusterRolesPort, tokens: tuple[str, ...] = ()) -> Service:
    return rpc.service(ClusterRolesPort, port, tokens, ("switch", "advice"))


def cluster_roles(
    target: str, credentials: Credentials = NO_CREDENTIALS
) -> AbstractAsyncContextManager[ClusterRolesPort]:
    """The roles of a router's workers.

    async with cluster_roles("localhost:8700") as roles:
        report = await roles.switch("prefill-1", WorkerRole.DECODE)
    """
    return rpc.connected(ClusterRolesPort, target, credentials)
