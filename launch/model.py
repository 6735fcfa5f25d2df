"""Lets `jdisagg.node`, which runs servers and workers, load the models of `models/`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from jdisagg.config import LAYER_DRAFTS, EngineConfig, ModelConfig
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.engine.replica import Loaded, LoadModel
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_DTYPES, WEIGHT_BITS
from jdisagg.model_api import Device
from jdisagg.node.deployment import Deployment, ModelSource
from jdisagg.observe.observer import Observer
from jdisagg.ops.quantized_weights import checked_weights
from jdisagg.scheduler.blocks import StageCut
from launch.cost_inputs import find_geometry
from launch.grammars import grammar_compiler
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, load_config, load_model
from models.hub import served_name
from models.peft_folder import check_adapter
from models.relayout import relayout
from models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def loader(
    directory: str, dtype: str, weights: str = "", kv_dtype: str = "", speculate: str = "off"
) -> LoadModel:
    """Returns a function that loads the checkpoint onto given devices each time it is called. With
    `speculate` auto or mtp, the checkpoint's next-token layer is loaded, too, if it has one. Raises
    ConfigError if it has none and `speculate` is mtp."""
    kept, drafts = checked_weights(weights), speculate in LAYER_DRAFTS

    def load(layout: Layout, devices: Sequence[Device], cut: StageCut | None = None) -> Loaded:
        how = {"dtype": dtype, "weights": kept, "kv_dtype": kv_dtype, "next_token": drafts}
        loaded = load_model(directory, layout, devices, **how, cut=cut)
        if speculate == "mtp" and loaded.model.next_token is None:
            raise ConfigError(
                f"speculate=mtp: the checkpoint {directory} has no next-token layer that can be"
                " read; use ngram or auto"
            )
        return loaded

    return load


def as_kept(geometry: CostGeometry, model: ModelConfig) -> CostGeometry:
    """Returns `geometry` with the data types that `model` configures for weight matrices and KV."""
    return replace(
        geometry,
        matrix_bits=WEIGHT_BITS[model.weights] if model.weights else 0,
        kv_dtype=KEPT_DTYPES.get(model.kv_dtype, ""),
    )


def model_source(model: ModelConfig, speculate: str = "off") -> ModelSource:
    """Returns the description of a model and the function that loads it. Raises the errors of
    `load_config`. `speculate` is as in `loader`."""
    directory = model.directory
    family = load_config(directory).family
    name = served_name(directory)
    geometry = as_kept(find_geometry(directory), model)
    load = loader(directory, model.dtype, model.weights, model.kv_dtype, speculate)
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
    source = model_source(replace(config.model, directory=str(directory)), config.decode.speculate)
    source = replace(source, name=config.service.served_model_name or source.name)
    tokenizer = Tokenizer.from_directory(directory)
    return Deployment(config, source, tokenizer, observer, record_to, events, tell)


def _relayout(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel), "it came from `loader`"
    return relayout(loaded, layout, devices)
