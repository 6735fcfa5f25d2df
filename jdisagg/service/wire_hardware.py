"""Our data <-> the messages of registry.proto that describe what predictions need: an accelerator and a model's sizes.

Knows what `wire` says. Fields bear the same names on both sides, so that a flat message is its dataclass's fields.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from jdisagg.errors import ConfigError, InvalidRequestError
from jdisagg.router.hardware import Accelerator, Efficiency, Link
from jdisagg.router.model_geometry import Attention, CostGeometry, Experts, LatentAttention
from jdisagg.service import registry_pb2 as pb

Made = TypeVar("Made")


def accelerator_to_proto(accelerator: Accelerator) -> pb.Accelerator:
    return pb.Accelerator(
        name=accelerator.name,
        peak_flops=accelerator.peak_flops,
        memory_bytes_per_second=accelerator.memory_bytes_per_second,
        memory_bytes=accelerator.memory_bytes,
        domain_devices=accelerator.domain_devices,
        scale_up=pb.Link(**dataclasses.asdict(accelerator.scale_up)),
        host=pb.Link(**dataclasses.asdict(accelerator.host)),
        scale_out=pb.Link(**dataclasses.asdict(accelerator.scale_out)),
        efficiency=pb.Efficiency(**dataclasses.asdict(accelerator.efficiency)),
        dollars_per_hour=accelerator.dollars_per_hour,
    )


def accelerator_from_proto(message: pb.Accelerator) -> Accelerator:
    """Raises InvalidRequestError where a number cannot be."""
    return _made(
        lambda: Accelerator(
            name=message.name,
            peak_flops=message.peak_flops,
            memory_bytes_per_second=message.memory_bytes_per_second,
            memory_bytes=message.memory_bytes,
            domain_devices=message.domain_devices,
            scale_up=_link(message.scale_up),
            host=_link(message.host),
            scale_out=_link(message.scale_out),
            efficiency=Efficiency(**{spec.name: getattr(message.efficiency, spec.name) for spec in dataclasses.fields(Efficiency)}),
            dollars_per_hour=message.dollars_per_hour if message.HasField("dollars_per_hour") else None,
        ),
        "WorkerCard.hardware",
    )


def geometry_to_proto(geometry: CostGeometry) -> pb.CostGeometry:
    attention = geometry.attention
    latent = isinstance(attention, LatentAttention)
    return pb.CostGeometry(
        name=geometry.name,
        width=geometry.width,
        layers=geometry.layers,
        vocabulary=geometry.vocabulary,
        attention=None if latent else pb.Attention(**dataclasses.asdict(attention)),
        latent=pb.LatentAttention(**dataclasses.asdict(attention)) if latent else None,
        ffn=geometry.ffn,
        gated=geometry.gated,
        tied=geometry.tied,
        experts=pb.Experts(**dataclasses.asdict(geometry.experts)) if geometry.experts is not None else None,
        expert_layers=geometry.expert_layers,
        context_tokens=geometry.context_tokens,
    )


def geometry_from_proto(message: pb.CostGeometry) -> CostGeometry:
    """Raises InvalidRequestError where a number cannot be."""
    experts = message.experts
    return _made(
        lambda: CostGeometry(
            name=message.name,
            width=message.width,
            layers=message.layers,
            vocabulary=message.vocabulary,
            attention=_attention(message),
            ffn=message.ffn,
            gated=message.gated,
            tied=message.tied,
            experts=Experts(experts.count, experts.active, experts.ffn, experts.shared_ffn) if message.HasField("experts") else None,
            expert_layers=message.expert_layers,
            context_tokens=message.context_tokens,
        ),
        "ModelCard.geometry",
    )


def _attention(message: pb.CostGeometry) -> Attention | LatentAttention:
    if message.WhichOneof("kind") == "latent":
        return LatentAttention(**{spec.name: getattr(message.latent, spec.name) for spec in dataclasses.fields(LatentAttention)})
    shape = message.attention
    window = shape.window if shape.HasField("window") else None
    return Attention(shape.query_heads, shape.kv_heads, shape.head_dim, window, shape.windowed_layers)


def _link(message: pb.Link) -> Link:
    return Link(message.name, message.bytes_per_second, message.latency_seconds, message.efficiency)


def _made(make: Callable[[], Made], field: str) -> Made:
    try:
        return make()
    except ConfigError as error:
        raise InvalidRequestError(f"{field} makes no sense: {error}; are both sides of one version?") from None
