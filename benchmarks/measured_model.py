"""The measured model (`plain_loop.MEASURED_MODEL`) with random weights, for benchmarks of embedded
clusters of one device a mesh."""

from collections.abc import Sequence

import jax

from benchmarks import plain_loop
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.ops.parameters import layout_mesh
from models.catalog import read_config
from models.checkpoint import LoadedModel
from models.decoder import init_model
from models.hf_config import HfConfig


class NoText:
    """Detokenizer that returns no text, for runs that use tokens only."""

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        return ""


_LOADED: dict[Device, LoadedModel] = {}


def load(layout: Layout, devices: Sequence[Device]) -> LoadedModel:
    """Returns the model on the first of `devices`. Builds it once per device."""
    device = devices[0]
    if device not in _LOADED:
        with jax.default_device(device):
            hf = HfConfig(plain_loop.MEASURED_MODEL, "the measured model")
            model = init_model(read_config(hf), jax.random.key(0))
        mesh = layout_mesh(layout, plain_loop.KV_HEADS, [device])
        _LOADED[device] = LoadedModel(model, mesh, layout)
    return _LOADED[device]
