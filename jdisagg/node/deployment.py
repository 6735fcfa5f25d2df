"""An embedded cluster with its tokenizer and its front, from a configuration: what one process
serves or generates with."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from absl import logging as absl_logging

from jdisagg.chat.formats import AnswerFormat
from jdisagg.config import EngineConfig, Mode
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.costs.speeds import Kind
from jdisagg.dispatch.frontend import ChatTokenizer, Frontend, ModelInfo
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.engine.compilation import use_compilation_cache
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster, devices_of
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.host_settings import keep_freed_memory
from jdisagg.engine.memory_plan import (
    check_host_cache,
    describe_tiers,
    device_memory,
    fit_engine,
    host_sharers,
)
from jdisagg.engine.replica import Loaded, LoadModel
from jdisagg.errors import ConfigError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device
from jdisagg.node.gpus import DEVICE_FRACTION, set_memory_fraction
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.node.recording import embedded_recorder
from jdisagg.node.warm_up import WarmedBefore, progress_bar
from jdisagg.observe.observer import Observer
from jdisagg.router.cluster_state import Description

_log = logging.getLogger(__name__)

# Takes a model's arrays over: the given `Loaded` is of no use afterwards.
Relayout = Callable[[Loaded, Layout, Sequence[Device]], Loaded]


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, as the entry points find it: what it is called, how its weights get onto a
    mesh (`load`), how they are laid out anew there (`relayout`), and what compiles grammars for its
    tokenizer (None: it has none)."""

    directory: str
    name: str
    family: str
    geometry: CostGeometry
    load: LoadModel
    relayout: Relayout
    grammars: GrammarCompiler | None = None


def prepare_runtime(
    cpu_devices: int, compilation_cache: str, memory_fraction: float | None = None
) -> None:
    """Settings that must precede the first use of a device. On CPU: so many virtual devices; on a
    GPU: what part of its memory XLA takes (None: 0.9). Raises ConfigError where it comes too
    late."""
    if cpu_devices < 1:
        raise ConfigError(f"devices must be at least 1, got {cpu_devices}")
    set_memory_fraction(memory_fraction or DEVICE_FRACTION)
    # absl lets INFO through: which plugins are not installed, what Orbax is about to read.
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:
        # Made when JAX is imported, so that no stub has it.
        before = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        keep = (
            f", or keep devices={before}"
            if before > 0
            else ", and come here before anything else uses JAX"
        )
        raise ConfigError(
            f"devices={cpu_devices}: JAX runs with {len(jax.devices())} in this process, for good;"
            f" restart it (a notebook's kernel){keep}"
        ) from error
    keep_freed_memory()
    use_compilation_cache(compilation_cache)


def prepare_engine(config: EngineConfig, cpu_devices: int | None = None) -> None:
    """`prepare_runtime` for an embedded cluster; `cpu_devices` None: as many as its layouts
    need."""
    prepare_runtime(
        cpu_devices or devices_of(config), config.compilation_cache, memory_fraction(config)
    )


def memory_fraction(config: EngineConfig) -> float | None:
    """What part of its devices' memory the process may take: the larger of its meshes'."""
    given = [side.memory_fraction for side in (config.prefill, config.decode)]
    return max((part for part in given if part is not None), default=None)


def _descriptions(config: EngineConfig, geometry: CostGeometry) -> dict[str, Description]:
    """What the router of an embedded cluster should know of its two workers: one process, and how
    fast, where the recipe says on what."""
    known: dict[str, Description] = {}
    for name, instance in ((PREFILL, config.prefill), (DECODE, config.decode)):
        hardware = find_accelerator(instance.hardware) if instance.hardware else None
        kind = (
            Kind(geometry, instance.layout, hardware, dtype=config.model.dtype)
            if hardware
            else None
        )
        known[name] = Description("here/here/here/here", kind)
    return known


class Deployment:
    """An embedded cluster, its tokenizer and its front. `record_to`: a folder for its recordings,
    where not empty. `tell` gets a line for each mesh, of what it will take of its devices' memory,
    before anything is allocated. Raises ConfigError where that is more than there is."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSource,
        tokenizer: ChatTokenizer,
        observer: Observer | None = None,
        record_to: str = "",
        events: RouterEvents = NO_ROUTER_EVENTS,
        tell: Callable[[str], None] = _log.info,
    ) -> None:
        devices = jax.devices()
        memory = device_memory(devices[: devices_of(config)], memory_fraction(config))
        check_host_cache(config.prefix, devices[0], memory_fraction(config), host_sharers(config))
        config, plans = fit_engine(config, model.geometry, memory)
        for plan in plans:
            tell(str(plan))
        if config.prefix.host_bytes:
            if host_sharers(config) > 1:
                tell(f"prefill: {describe_tiers(config.prefix, WorkerRole.PREFILL)}")
            tell(f"decode: {describe_tiers(config.prefix, WorkerRole.DECODE)}")
        self.config = config
        self.tokenizer = tokenizer
        record = embedded_recorder(record_to, replace(config.model, directory=model.directory))
        self.cluster = EmbeddedCluster(
            replace(config, model=replace(config.model, directory=str(model.directory))),
            model.load,
            tokenizer,
            devices,
            observer,
            record,
            events,
        )
        self.cluster.constrain(model.grammars)
        self.cluster.describe(_descriptions(config, model.geometry))
        info = ModelInfo(
            name=model.name,
            family=model.family,
            vocabulary=self.cluster.model.vocabulary,
            context_tokens=self.cluster.context_tokens,
            dtype=config.model.dtype,
            mode=config.mode,
            prefill_layout=config.prefill.layout if config.mode is Mode.DISAGGREGATED else None,
            decode_layout=config.decode.layout,
            kv_bytes_per_token=self.cluster.kv_spec.bytes_per_token,
            version=model_fingerprint(
                model.directory, config.model.dtype, config.model.weights, config.model.kv_dtype
            ),
            sampling=tokenizer.sampling_defaults,
        )
        self.frontend = Frontend(
            self.cluster.observed_path,
            self.tokenizer,
            info,
            config.limits,
            self.cluster.path.routing,
            model.grammars,
            AnswerFormat.of(
                tokenizer.chat_template, config.service.tool_parser, config.service.reasoning_parser
            ),
        )
        self._loading: asyncio.Task[None] | None = None

    async def start(self, *, at_once: bool = False) -> None:
        """Warms up, with a progress bar on stderr where it takes long, and starts the workers.
        `at_once`: where one like this was warm on this machine before, the workers start first, and
        its programs are loaded from the compilation cache while they have nothing to do."""
        warmed = None
        if at_once and self.config.warm_up:
            warmed = WarmedBefore(self.config, None, self.frontend.model.version)
            if warmed.found():
                await self.cluster.start_workers()
                self._loading = asyncio.create_task(self._load())
                return
        with progress_bar("compiling") as progress:
            await self.cluster.start(progress)
        if warmed:
            warmed.note()

    async def stop(self) -> None:
        """Ends what runs and frees the meshes."""
        if self._loading:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self.cluster.stop()

    async def _load(self) -> None:
        """What fails here fails for a request, too, and is answered there."""
        try:
            await self.cluster.warm_up(beside=True)
        except Exception as error:
            _log.warning("programs could not be loaded beforehand: %s", error)
