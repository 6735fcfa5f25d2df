"""What two workers must agree on before KV moves between them: built from a mesh's limits, compared by field.

Page size and layout may differ; the protocol, the model, the KV spec with its dtype, how it is cut into blocks and the transfer engine's
parallel connections may not. Who a worker is (name, boot id, key, mesh) is told, not compared.
"""

from itertools import groupby

from jdisagg.dispatch.ports import PeerHello
from jdisagg.errors import IncompatiblePeerError
from jdisagg.layout.kv_spec import KVLayer
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.scheduler.commands import MeshLimits

PROTOCOL = 3
_COMPARED = ("protocol", "model_fingerprint", "kv_layers", "kv_dtype", "layer_groups", "block_bytes")


def hello_of(worker: str, model_fingerprint: str, limits: MeshLimits, card: MeshCard, boot_id: int, checksum_key: int) -> PeerHello:
    layers = ", ".join(f"{len(list(same))} x {_words(layer)}" for layer, same in groupby(limits.kv_spec.layers))
    told = (limits.kv_spec.dtype, limits.layer_groups, boot_id, checksum_key, card, limits.block_bytes)
    return PeerHello(PROTOCOL, worker, model_fingerprint, layers, *told)


def check_hello(ours: PeerHello, theirs: PeerHello) -> None:
    """Raises IncompatiblePeerError naming the first field that differs and both values."""
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in _COMPARED]
    if ours.mesh is not None and theirs.mesh is not None:
        pairs.append(("transports", ours.mesh.transports, theirs.mesh.transports))
    for name, mine, other in pairs:
        if mine != other:
            raise IncompatiblePeerError(
                f"{name} is {mine!r} on {ours.worker!r} and {other!r} on {theirs.worker!r}: these workers cannot hand over KV; "
                "serve the same model with the same settings on both"
            )


def peer_name(hello: PeerHello) -> str:
    """What commands call a peer: never the same for two starts of a worker."""
    return f"{hello.worker}#{hello.boot_id:x}"


def _words(layer: KVLayer) -> str:
    parts = " ".join(f"{part.name}[{part.heads},{part.width}]" for part in layer.components)
    return f"({parts})" if layer.window is None else f"({parts} window {layer.window})"
