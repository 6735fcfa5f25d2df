"""Finds the accelerators of this host. Imports neither JAX nor a driver."""

import os
from typing import Literal, NamedTuple

from jdisagg.node.gpus import gpus_of_host
from jdisagg.node.tpus import chips_of_host


class HostAccelerators(NamedTuple):
    """Accelerators that this process may use.

    Attributes:
        kind: "gpu" or "tpu", or "" if there are none.
        devices: Indices or UUIDs of the GPUs, or indices of the TPU chips.
    """

    kind: Literal["", "gpu", "tpu"]
    devices: tuple[int | str, ...]


def accelerators_of_host() -> HostAccelerators:
    if gpus := gpus_of_host(os.environ):
        return HostAccelerators("gpu", gpus)
    chips = chips_of_host(os.environ)
    return HostAccelerators("tpu" if chips else "", chips)
