"""Checkpoints of `models/`, as the processes of `jdisagg.node` take them."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jdisagg.config import EngineConfig
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.engine.instance import Loaded, LoadModel
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.node.deployment import Deployment, ModelSource
from jdisagg.observe.observer import Observer
from launch.cost_inputs import find_geometry
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, load_config, load_model
from models.relayout import relayout
from models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def loader(directory: str, dtype: str) -> LoadModel:
    """Reads the checkpoint at each call."""

    def load(layout: Layout, devices: Sequence[Device]) -> Loaded:
        return load_model(directory, layout, devices, dtype=dtype)

    return load


def model_source(directory: str, dtype: str) -> ModelSource:
    """Raises what `load_config` raises for a directory that holds no model."""
    family = load_config(directory).family
    name = Path(directory).resolve().name
    return ModelSource(
        directory, name, family, find_geometry(directory), loader(directory, dtype), _relayout
    )


def deployment(
    config: EngineConfig,
    observer: Observer | None = None,
    record_to: str = "",
    events: RouterEvents = NO_ROUTER_EVENTS,
    tell: Callable[[str], None] = _log.info,
) -> Deployment:
    """An embedded cluster of the configuration's model, or of the shipped one. `tell`: as
    `Deployment`'s."""
    directory = config.model.directory or SHIPPED_MODEL
    source = model_source(directory, config.model.dtype)
    tokenizer = Tokenizer.from_directory(directory)
    return Deployment(config, source, tokenizer, observer, record_to, events, tell)


def _relayout(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel), "it came from `loader`"
    return relayout(loaded, layout, devices)
