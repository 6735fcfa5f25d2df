"""Lets `jdisagg.node`, which runs servers and workers, load the models of `models/`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from jdisagg.config import FROM_FOLDER, EngineConfig, ModelConfig, ServiceConfig
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.engine.fingerprint import check_sums, file_states, model_fingerprint
from jdisagg.engine.limits import drafts_with_layer, loads_drafter, shared_drafts
from jdisagg.engine.replica import Loaded
from jdisagg.errors import ConfigError, InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_DTYPES, WEIGHT_BITS
from jdisagg.model_api import Device, Model
from jdisagg.node.deployment import Deployment, ModelSource
from jdisagg.observe.observer import Observer
from jdisagg.ops.quantized_weights import Weights, checked_weights
from jdisagg.router.decision import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.scheduler.blocks import StageCut
from jdisagg.weights import opened
from launch.cost_inputs import find_geometry
from launch.grammars import grammar_compiler
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, go_on, load_config, load_model
from models.hub import served_name
from models.peft_folder import check_adapter
from models.relayout import relayout
from models.safetensors_files import CheckpointTensors
from models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class CheckpointLoader:
    """Loads the checkpoint `directory` onto given devices, and later new weights of the same model
    from other folders or offers.

    Implements `LoadModel` and `WeightsSource`."""

    def __init__(
        self,
        directory: str,
        dtype: str,
        weights: str,
        kv_dtype: str,
        speculate: str,
        draft: str,
        service: ServiceConfig | None = None,
    ) -> None:
        self._directory, self._dtype, self._kv_dtype = directory, dtype, kv_dtype
        self._draft = draft
        self._service = service
        self._weights: Weights = checked_weights(weights)
        self._speculate = speculate

    def __call__(
        self, layout: Layout, devices: Sequence[Device], cut: StageCut | None = None
    ) -> Loaded:
        return self._load(self._directory, layout, devices, cut=cut)

    def read(
        self,
        folder: str,
        layout: Layout,
        devices: Sequence[Device],
        cut: StageCut | None = None,
        check: Callable[[], None] = go_on,
    ) -> tuple[str, Model]:
        with opened(folder, self._service, check) as offer:
            if offer is None:
                return self._read_files(folder, layout, devices, cut, check)
            content = offer.content()
            model = self._load(self._directory, layout, devices, offer, cut, check).model
            _check_unchanged(folder, content, offer.content(again=True))
            return content, model

    def _read_files(
        self,
        folder: str,
        layout: Layout,
        devices: Sequence[Device],
        cut: StageCut | None,
        check: Callable[[], None],
    ) -> tuple[str, Model]:
        before = file_states(folder)
        check_sums(folder)
        content = model_fingerprint(folder, self._dtype, self._weights, self._kv_dtype)
        model = self._load(folder, layout, devices, None, cut, check).model
        again = model_fingerprint(folder, self._dtype, self._weights, self._kv_dtype)
        _check_unchanged(folder, (before, content), (file_states(folder), again))
        return content, model

    def _load(
        self,
        directory: str,
        layout: Layout,
        devices: Sequence[Device],
        tensors: CheckpointTensors | None = None,
        cut: StageCut | None = None,
        check: Callable[[], None] = go_on,
    ) -> LoadedModel:
        loaded = load_model(
            directory,
            layout,
            devices,
            dtype=self._dtype,
            weights=self._weights,
            kv_dtype=self._kv_dtype,
            draft=self._draft if loads_drafter(self._speculate, layout.pp) else "",
            next_token=drafts_with_layer(self._speculate, devices[0].platform, layout.pp),
            cut=cut,
            tensors=tensors,
            images=True,
            check=check,
        )
        if self._speculate == "mtp" and loaded.model.next_token is None:
            raise ConfigError(
                f"speculate=mtp: the checkpoint {directory} has no next-token layer that can be"
                " read; use ngram or auto"
            )
        drafter = loaded.model.next_token
        if self._speculate in FROM_FOLDER and drafter and drafter.source != self._speculate:
            raise ConfigError(
                f"speculate={self._speculate}: --draft={self._draft} must be a folder of this kind,"
                f" got {drafter.source}; set --speculate={drafter.source} or auto"
            )
        return loaded


def _check_unchanged(folder: str, before: object, after: object) -> None:
    if before != after:
        raise InvalidRequestError(
            f"weights {folder!r}: their content changed while it was read; update again when it is"
            " complete"
        )


def loader(
    directory: str,
    dtype: str,
    weights: str = "",
    kv_dtype: str = "",
    speculate: str = "off",
    draft: str = "",
    service: ServiceConfig | None = None,
) -> CheckpointLoader:
    """Returns a function that loads a checkpoint onto given devices each time it is called.

    Args:
        speculate: Source of drafts. If it is a separate drafter or a next-token layer, the function
            also loads it.

    Raises:
        ConfigError: `speculate` is a separate drafter and `draft` is empty.
    """
    if speculate in FROM_FOLDER and not draft:
        raise ConfigError(f"speculate={speculate}: give the folder of the drafter with --draft")
    return CheckpointLoader(directory, dtype, weights, kv_dtype, speculate, draft, service)


def as_kept(geometry: CostGeometry, model: ModelConfig) -> CostGeometry:
    return replace(
        geometry,
        matrix_bits=WEIGHT_BITS[model.weights] if model.weights else 0,
        kv_dtype=KEPT_DTYPES.get(model.kv_dtype, ""),
    )


def model_source(
    model: ModelConfig, speculate: str = "off", service: ServiceConfig | None = None
) -> ModelSource:
    directory = model.directory
    family = load_config(directory).family
    name = served_name(directory)
    geometry = as_kept(find_geometry(directory), model)
    how = (model.dtype, model.weights, model.kv_dtype)
    load = loader(directory, *how, speculate, model.draft, service)
    grammars = grammar_compiler(directory)
    return ModelSource(
        directory, name, family, geometry, load, _relayout, grammars, check_adapter, load
    )


def deployment(
    config: EngineConfig,
    observer: Observer | None = None,
    events: RouterEvents = NO_ROUTER_EVENTS,
    tell: Callable[[str], None] = _log.info,
) -> Deployment:
    directory = config.model.directory or SHIPPED_MODEL
    speculate = shared_drafts(config, config.decode.speculate)
    model = replace(config.model, directory=str(directory))
    source = model_source(model, speculate, config.service)
    source = replace(source, name=config.service.served_model_name or source.name)
    tokenizer = Tokenizer.from_directory(directory)
    return Deployment(config, source, tokenizer, observer, events, tell)


def _relayout(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel), "it came from `loader`"
    return relayout(loaded, layout, devices)
