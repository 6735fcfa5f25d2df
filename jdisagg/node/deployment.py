"""Builds an embedded cluster (all meshes in one process) with tokenizer and frontend from a
configuration. Used to serve, or to generate text, in one process."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from absl import logging as absl_logging

from jdisagg.chat.formats import AnswerFormat
from jdisagg.config import EngineConfig, InstanceConfig, Mode
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.costs.speeds import Kind
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import ChatTokenizer, ModelInfo
from jdisagg.dispatch.served_adapters import CheckAdapter, ServedAdapters
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster, devices_of
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.host_settings import keep_freed_memory
from jdisagg.engine.kernel_check import AUTO, choose_kernels
from jdisagg.engine.memory_plan import (
    check_host_cache,
    describe_cache,
    device_memory,
    fit_engine,
    host_room,
    host_sharers,
)
from jdisagg.engine.prefix_defaults import engine_defaults, fit_with_defaults
from jdisagg.engine.replica import Loaded, LoadModel
from jdisagg.errors import ConfigError
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.executor.weight_swaps import WeightsSource
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.node.accelerators import accelerators_of_host
from jdisagg.node.gpus import DEVICE_FRACTION, set_memory_fraction
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.node.warm_up import progress_bar
from jdisagg.observe.observer import Observer
from jdisagg.router.cluster_state import Description
from jdisagg.router.decision import NO_ROUTER_EVENTS, RouterEvents

_log = logging.getLogger(__name__)

# Function that reshards a model to another layout. It donates the arrays of the given `Loaded`, so
# that this must not be used afterwards.
Relayout = Callable[[Loaded, Layout, Sequence[Device]], Loaded]


@dataclass(frozen=True)
class ModelSource:
    """A model checkpoint and the functions that load it.

    Attributes:
        grammars: Grammar compiler for the checkpoint's tokenizer. None if there is no tokenizer.
        weights: Reader of new weights of the model, for updates.
    """

    directory: str
    name: str
    family: str
    geometry: CostGeometry
    load: LoadModel
    relayout: Relayout | None = None
    grammars: GrammarCompiler | None = None
    check_adapter: CheckAdapter | None = None
    weights: WeightsSource | None = None


def prepare_runtime(
    cpu_devices: int,
    compilation_cache: str,
    memory_fraction: float | None = None,
    kernels: str = AUTO,
) -> None:
    """Applies the JAX settings that must be made before the first use of a device.

    Args:
        memory_fraction: Fraction of a GPU's memory that XLA may use. None selects 0.9.
        kernels: Hand-written kernels to use, as in `EngineConfig.kernels`. They are checked in a
            child process, before this process opens a device.

    Raises:
        ConfigError: A device has already been used, or `cpu_devices` is below 1.
    """
    if cpu_devices < 1:
        raise ConfigError(f"devices must be at least 1, got {cpu_devices}")
    set_memory_fraction(memory_fraction or DEVICE_FRACTION)
    # By default absl logs at INFO: missing plugins, files that Orbax reads.
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:
        # JAX creates this attribute at import, so that type stubs lack it.
        before = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        keep = (
            f", or keep devices={before}"
            if before > 0
            else ", and come here before anything else uses JAX"
        )
        raise ConfigError(
            f"devices={cpu_devices}: JAX already runs with {len(jax.devices())} in this process;"
            f" restart the process (a notebook's kernel){keep}"
        ) from error
    keep_freed_memory()
    choose_kernels(kernels, accelerator=accelerators_of_host().kind, folder=compilation_cache)
    use_compilation_cache(compilation_cache)


def prepare_engine(config: EngineConfig, cpu_devices: int | None = None) -> None:
    """If `cpu_devices` is None, it is the number of devices that the layouts need."""
    prepare_runtime(
        cpu_devices or devices_of(config),
        config.compilation_cache,
        memory_fraction(config),
        config.kernels,
    )


def memory_fraction(config: EngineConfig) -> float | None:
    """Returns the fraction of device memory that this process may use: the largest
    `memory_fraction` of its meshes. Returns None if none is configured."""
    given = [side.memory_fraction for side in (config.prefill, config.decode)]
    return max((part for part in given if part is not None), default=None)


def _descriptions(config: EngineConfig, geometry: CostGeometry) -> dict[str, Description]:
    known: dict[str, Description] = {}
    for name, instance in ((PREFILL, config.prefill), (DECODE, config.decode)):
        hardware = find_accelerator(instance.hardware) if instance.hardware else None
        kind = Kind(geometry, instance.layout, hardware, dtype=config.model.dtype)
        known[name] = Description("here/here/here/here", kind)
    return known


class Deployment:
    """An embedded cluster with tokenizer and frontend. `tell`: function that reports the planned
    memory use. Called before allocation, with one line of text for each mesh. Raises ConfigError if
    a mesh needs more memory than its devices have."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSource,
        tokenizer: ChatTokenizer,
        observer: Observer | None = None,
        events: RouterEvents = NO_ROUTER_EVENTS,
        tell: Callable[[str], None] = _log.info,
    ) -> None:
        devices = jax.devices()
        host, given = (devices[0], memory_fraction(config)), config.prefix
        config = engine_defaults(config, host_room(*host))
        memory = device_memory(devices[: devices_of(config)], memory_fraction(config))
        check_host_cache(config.prefix, *host, host_sharers(config))
        config, plans = fit_with_defaults(
            config, given, lambda whole: fit_engine(whole, model.geometry, memory)
        )
        for plan in plans:
            tell(plan.summary)
        self.config = config
        self.tokenizer = tokenizer
        self.cluster = EmbeddedCluster(
            replace(config, model=replace(config.model, directory=str(model.directory))),
            model.load,
            tokenizer,
            devices,
            observer,
            events,
        )
        self.cluster.constrain(model.grammars)
        self.cluster.read_weights_with(model.weights)
        self.cluster.describe(_descriptions(config, model.geometry))
        self.frontend = Frontend(
            self.cluster.observed_path,
            self.tokenizer,
            self._model_info(model),
            config.limits,
            self.cluster.path.routing,
            model.grammars,
            AnswerFormat.of(
                tokenizer.chat_template, config.service.tool_parser, config.service.reasoning_parser
            ),
        )
        self.cluster.path.read_images_with(self.frontend.prompts.images.pixels)
        self.frontend.adapters = ServedAdapters(model.check_adapter, self.cluster.path.status)
        self.frontend.adapters.name_all(config.service.lora_modules)
        self.frontend.weights = self.cluster.weights

    def _model_info(self, model: ModelSource) -> ModelInfo:
        config, kept = self.config, self.config.model
        return ModelInfo(
            name=model.name,
            family=model.family,
            vocabulary=self.cluster.model.vocabulary,
            context_tokens=self.cluster.context_tokens,
            dtype=kept.dtype,
            mode=config.mode,
            prefill_layout=config.prefill.layout if config.mode is Mode.DISAGGREGATED else None,
            decode_layout=config.decode.layout,
            kv_bytes_per_token=self.cluster.kv_spec.bytes_per_token,
            version=model_fingerprint(
                model.directory, kept.dtype, kept.weights, kept.kv_dtype, kept.draft
            ),
            sampling=self.tokenizer.sampling_defaults,
        )

    async def start(self) -> None:
        """Compiles the programs (warm-up) and then starts the workers. Shows a progress bar on
        stderr if warm-up takes long."""
        began = time.monotonic()
        with progress_bar("compiling") as progress:
            await self.cluster.start(progress)
        _log.info(
            "%d programs are compiled or loaded after %.0f s; %s",
            *(self.cluster.compilations, time.monotonic() - began, self.about()[1]),
        )

    def about(self) -> tuple[str, ...]:
        config, two = self.config, self.config.mode is Mode.DISAGGREGATED
        meshes = f"decode ({config.decode.layout})"
        if two:
            meshes = f"prefill ({config.prefill.layout}) and {meshes}"
        given = sorted({side.hardware for side in self._sides if side.hardware})
        known = all(replica.times for replica in self.cluster.replicas)
        prices = f"given ({', '.join(given)})" if given else "measured" if known else "assumed"
        return (
            f"{meshes}; context {self.cluster.context_tokens:,} tokens",
            f"{describe_cache(config.prefix)}; prices: {prices}",
        )

    @property
    def _sides(self) -> tuple[InstanceConfig, ...]:
        two = self.config.mode is Mode.DISAGGREGATED
        return (self.config.prefill, self.config.decode) if two else (self.config.decode,)

    async def stop(self) -> None:
        """Ends running requests, stops the workers and frees the memory of the meshes."""
        await self.cluster.stop()
