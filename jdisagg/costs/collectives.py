"""Estimates how long collectives take, and how long it takes to send tokens to the devices of their
experts and back."""

import math

from jdisagg.costs.hardware import Accelerator, Link
from jdisagg.costs.kernels import Kernels
from jdisagg.costs.model_geometry import Experts
from jdisagg.layout.axes import Layout

# Number of devices of a host. A token is sent once to each host, even if several hosts share one
# scale-up domain.
MOST_HOST_DEVICES = 8
# Fraction of a scale-up link that the exchange of large batches achieves: DeepEP's 153 of the 200
# GB/s of an H800.
SCALE_UP_EXCHANGE = 0.75


def link_among(accelerator: Accelerator, devices: int) -> Link:
    within = devices <= accelerator.domain_devices
    return accelerator.scale_up if within else accelerator.scale_out


def collective_seconds(
    accelerator: Accelerator,
    kernels: Kernels,
    sent_bytes: float,
    devices: int,
    among: int,
    message_bytes: float = 0.0,
) -> float:
    """Returns the seconds of a collective.

    Args:
    message_bytes: Size of the whole message. Large messages achieve another bandwidth.
    """
    if devices <= 1:
        return 0.0
    reached, path = accelerator.efficiency, link_among(accelerator, among)
    large = message_bytes >= reached.large_bytes
    part = reached.large_bandwidth if large else reached.collective_bandwidth
    hops = 1 if kernels.direct and path is accelerator.scale_up else math.log2(devices)
    return reached.collective_seconds * hops + sent_bytes / (path.bytes_per_second * part)


def all_reduce_seconds(
    accelerator: Accelerator, kernels: Kernels, size_bytes: float, devices: int
) -> float:
    sent = 2 * (devices - 1) / devices * size_bytes
    return collective_seconds(accelerator, kernels, sent, devices, devices, size_bytes)


def exchange_seconds(
    accelerator: Accelerator,
    kernels: Kernels,
    layout: Layout,
    experts: Experts,
    tokens: float,
    everyone: float,
    token_bytes: tuple[float, float],
) -> float:
    """Returns the seconds in which one layer sends tokens to their experts and the results back.

    With the exchange "gather", all tokens are gathered on every device. With "all_to_all", a device
    sends its share of the rank's tokens. If a rank has at most `direct_tokens` tokens, a token is
    sent separately to each of its experts on other devices (DeepEP's decode kernels). If it has
    more, one copy of a token is sent to each host that has some of its experts, and the host
    distributes the copy over its scale-up link at the same time (DeepEP's prefill kernels). A group
    limit of the router (`Experts.groups_of_token`) limits the number of these hosts."""
    out_bytes, back_bytes = token_bytes
    if kernels.exchange == "gather":
        # Bytes that each device sends in a ring all-gather.
        sent = (layout.dp - 1) / layout.dp * everyone * back_bytes
        one = collective_seconds(accelerator, kernels, sent, layout.dp, layout.stage_devices)
        return 2 * one
    path = link_among(accelerator, layout.stage_devices)
    copies = float(min(experts.active, layout.ep - 1))
    part = accelerator.efficiency.collective_bandwidth
    large = tokens > kernels.direct_tokens > 0
    if path is accelerator.scale_up:
        if large:
            copies = layout.ep * (1 - (1 - 1 / layout.ep) ** experts.active) * (1 - 1 / layout.ep)
            part = SCALE_UP_EXCHANGE
    else:
        per_host = min(accelerator.domain_devices, MOST_HOST_DEVICES)
        hosts = math.ceil(layout.stage_devices / per_host)
        if large:
            copies = hosts * (1 - (1 - 1 / hosts) ** experts.active)
            if experts.groups_of_token:
                copies = min(copies, experts.groups_of_token)
        copies *= 1 - 1 / hosts  # the rest stays on the host's own scale-up link
        part = kernels.exchange_bandwidth or part
    sent = tokens / layout.tp * copies * (out_bytes + back_bytes)
    hops = 1 if kernels.direct and path is accelerator.scale_up else math.log2(layout.ep)
    latency = accelerator.efficiency.collective_seconds * hops
    return 2 * latency + sent / (path.bytes_per_second * part)
