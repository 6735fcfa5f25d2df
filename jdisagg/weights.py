"""Weights that a trainer offers to a cluster, as named arrays.

    with jdisagg.weights.offer(tensors) as offered:  # a cluster in the same process
        await cluster.weights.update(offered.name, version="step-100")

    with jdisagg.weights.offer(tensors, service=ServiceConfig(host="10.0.0.7", port=0)) as offered:
        admin.update_weights(offered.name, version="step-100")  # jdisagg.client.Administration

`tensors` has the names and shapes of the served checkpoint, with arrays in any sharding on any
devices of this process. Workers read only the parts that their shards need. `layout.reshard_plan`
plans from which device of the trainer each part is read, so that a byte is copied once for each
distinct shard that needs it. If the trainer has several processes, each process makes an offer. The
update then lists the names of all offers, separated by commas."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jdisagg.config import ServiceConfig
from jdisagg.errors import InvalidRequestError
from jdisagg.messages.weights import OFFER_PREFIX
from jdisagg.node.weights_offer import serve_offer
from jdisagg.node.weights_reader import RemoteWeights
from jdisagg.transfer.offered_weights import LEASE_SECONDS, OfferedWeights

_numbers = itertools.count(1)
_offers: dict[str, OfferedWeights] = {}


def offer(
    tree: Mapping[str, Any],
    lease_seconds: float = LEASE_SECONDS,
    service: ServiceConfig | None = None,
) -> OfferedWeights:
    """Offers arrays to workers, as new weights of the served model.

    Args:
        tree: Arrays of JAX or numpy by the names of the checkpoint's tensors. Names in nested
            mappings are joined with dots.
        lease_seconds: Seconds after which workers may no longer read the arrays.
        service: Address at which workers of other processes read, with the cluster's TLS files and
            `cluster_token_file`. None offers to workers of this process only.

    Returns:
        The offer, with the name that an update needs. Closing it ends the offer.

    Raises:
        InvalidRequestError: There are no arrays. Or an array has a part on devices of another
            process, and `service` is None.
        ConfigError: The address cannot be bound.
    """
    tensors = dict(_flat(tree))
    if not tensors:
        raise InvalidRequestError("weights: an offer needs arrays by name, and got none")
    for name, tensor in tensors.items():
        if service is None and not getattr(tensor, "is_fully_addressable", True):
            raise InvalidRequestError(
                f"weights: devices of other processes hold parts of {name!r}; offer in every"
                " process of the trainer with `service`, or update from a checkpoint's folder"
            )
    offered = OfferedWeights(f"{OFFER_PREFIX}{next(_numbers)}", tensors, lease_seconds)
    if service is not None:
        serve_offer(offered, service)
    _offers[offered.name] = offered
    offered.when_closed(lambda: _offers.pop(offered.name, None))
    return offered


@contextlib.contextmanager
def opened(
    name: str, service: ServiceConfig | None = None, check: Callable[[], None] | None = None
) -> "Iterator[OfferedWeights | RemoteWeights | None]":
    """Context manager that opens the source of a weights update.

    Yields the offer with the given name, or None if the name is a folder.

    Args:
        check: Function that is called while the worker waits for bytes of another process. It
            raises an error to stop the reading.

    Raises:
        InvalidRequestError: The offer is unknown, closed, or its lease has ended.
        UnavailableError: The offering process does not answer.
    """
    if not name.startswith(OFFER_PREFIX):
        yield None
    elif (found := _offers.get(name)) is not None:
        yield found
    elif "/" not in name:
        raise InvalidRequestError(
            f"weights {name!r}: this process has no such offer; a trainer in another process"
            " offers with `service`"
        )
    else:
        with contextlib.closing(RemoteWeights(name, service or ServiceConfig(), check)) as remote:
            yield remote


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        found += _flat(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return found
