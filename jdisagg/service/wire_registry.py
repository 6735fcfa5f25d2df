"""Our data <-> the messages of registry.proto: a worker's card and its model's. Knows what `wire` says."""

from jdisagg.dispatch.roster import ModelCard, WorkerCard
from jdisagg.errors import InvalidRequestError, LayoutError
from jdisagg.service import registry_pb2 as pb
from jdisagg.service.wire import layout_from_proto, layout_to_proto, role_from_proto, role_to_proto
from jdisagg.service.wire_hardware import accelerator_from_proto, accelerator_to_proto, geometry_from_proto, geometry_to_proto


def worker_card_to_proto(card: WorkerCard) -> pb.WorkerCard:
    return pb.WorkerCard(
        name=card.name,
        boot_id=card.boot_id,
        role=role_to_proto(card.role),
        address=card.address,
        layout=layout_to_proto(card.layout),
        model=_model_to_proto(card.model),
        place=card.place,
        hardware=accelerator_to_proto(card.hardware) if card.hardware is not None else None,
        stages=card.stages,
    )


def worker_card_from_proto(message: pb.WorkerCard) -> WorkerCard:
    try:
        layout = layout_from_proto(message.layout)
    except LayoutError as error:
        raise InvalidRequestError(f"WorkerCard.layout makes no sense: {error}; are both sides of one version?") from None
    return WorkerCard(
        name=message.name,
        boot_id=message.boot_id,
        role=role_from_proto("WorkerCard", message.role),
        address=message.address,
        layout=layout,
        model=_model_from_proto(message.model),
        place=message.place,
        hardware=accelerator_from_proto(message.hardware) if message.HasField("hardware") else None,
        stages=message.stages,
    )


def _model_to_proto(model: ModelCard) -> pb.ModelCard:
    return pb.ModelCard(
        name=model.name,
        family=model.family,
        vocabulary=model.vocabulary,
        context_tokens=model.context_tokens,
        dtype=model.dtype,
        kv_bytes_per_token=model.kv_bytes_per_token,
        fingerprint=model.fingerprint,
        geometry=geometry_to_proto(model.geometry) if model.geometry is not None else None,
    )


def _model_from_proto(message: pb.ModelCard) -> ModelCard:
    return ModelCard(
        name=message.name,
        family=message.family,
        vocabulary=message.vocabulary,
        context_tokens=message.context_tokens,
        dtype=message.dtype,
        kv_bytes_per_token=message.kv_bytes_per_token,
        fingerprint=message.fingerprint,
        geometry=geometry_from_proto(message.geometry) if message.HasField("geometry") else None,
    )
