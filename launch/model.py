"""Lets `jdisagg.node`, which runs servers and workers, load the models of `models/`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from jdisagg.config import EngineConfig, ModelConfig
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.engine.replica import Loaded, LoadModel
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_DTYPES, WEIGHT_BITS
from jdisagg.model_api import Device
from jdisagg.node.deployment import Deployment, ModelSource
from jdisagg.observe.observer import Observer
from jdisagg.ops.quantized_weights import checked_weights
from launch.cost_inputs import find_geometry
from launch.grammars import grammar_compiler
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, load_config, load_model
from models.hub import served_name
from models.peft_folder import check_adapter
from models.relayout import relayout
from models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def loader(directory: str, dtype: str, weights: str = "", kv_dtype: str = "") -> LoadModel:
    """Returns a function that loads the checkpoint onto the devices with which it is called."""
    kept = checked_weights(weights)

    def load(layout: Layout, devices: Sequence[Device]) -> Loaded:
        return load_model(directory, layout, devices, dtype=dtype, weights=kept, kv_dtype=kv_dtype)

    return load


def as_kept(geometry: CostGeometry, model: ModelConfig) -> CostGeometry:
    """Returns `geometry` with the data types that `model` configures for weight matrices and KV."""
    return replace(
        geometry,
        matrix_bits=WEIGHT_BITS[model.weights] if model.weights else 0,
        kv_dtype=KEPT_DTYPES.get(model.kv_dtype, ""),
    )


def model_source(model: ModelConfig) -> ModelSource:
    """Returns the description of a model and the function that loads it. Raises the errors of
    `load_config`."""
    directory = model.directory
    family = load_config(directory).family
    name = served_name(directory)
    geometry = as_kept(find_geometry(directory), model)
    load = loader(directory, model.dtype, model.weights, model.kv_dtype)
    grammars = grammar_compiler(directory)
    return ModelSource(directory, name, family, geometry, load, _relayout, grammars, check_adapter)


def deployment(
    config: EngineConfig,
    observer: Observer | None = None,
    record_to: str = "",
    events: RouterEvents = NO_ROUTER_EVENTS,
    tell: Callable[[str], None] = _log.info,
) -> Deployment:
    """Builds a cluster in this process for the configured model, by default the shipped one."""
    directory = config.model.directory or SHIPPED_MODEL
    source = model_source(replace(config.model, directory=str(directory)))
    source = replace(source, name=config.service.served_model_name or source.name)
    tokenizer = Tokenizer.from_directory(directory)
    return Deployment(config, source, tokenizer, observer, record_to, events, tell)


def _relayout(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel), "it came from `loader`"
    return relayout(loaded, layout, devices)
