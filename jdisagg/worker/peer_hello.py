"""What two workers must agree on before KV moves between them: built from a mesh's limits, compared by field.

Page size and layout may differ; the protocol, the model, the KV spec with its dtype and the layer groups may not.
"""

from dataclasses import fields
from itertools import groupby

from jdisagg.dispatch.ports import PeerHello
from jdisagg.errors import IncompatiblePeerError
from jdisagg.layout.kv_spec import KVLayer
from jdisagg.scheduler.commands import MeshLimits

PROTOCOL = 1


def hello_of(worker: str, model_fingerprint: str, limits: MeshLimits) -> PeerHello:
    layers = ", ".join(f"{len(list(same))} x {_words(layer)}" for layer, same in groupby(limits.kv_spec.layers))
    return PeerHello(PROTOCOL, worker, model_fingerprint, layers, limits.kv_spec.dtype, limits.layer_groups)


def check_hello(ours: PeerHello, theirs: PeerHello) -> None:
    """Raises IncompatiblePeerError naming the first field that differs and both values."""
    for field in fields(PeerHello):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name != "worker" and mine != other:
            raise IncompatiblePeerError(
                f"{field.name} is {mine!r} on {ours.worker!r} and {other!r} on {theirs.worker!r}: these workers cannot hand over KV; "
                "serve the same model with the same settings on both"
            )


def _words(layer: KVLayer) -> str:
    parts = " ".join(f"{part.name}[{part.heads},{part.width}]" for part in layer.components)
    return f"({parts})" if layer.window is None else f"({parts} window {layer.window})"
