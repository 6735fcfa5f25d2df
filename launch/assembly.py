"""From a configuration to an embedded cluster with its front: what the launch scripts share."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import logging as absl_logging
from tqdm import tqdm

from jdisagg.config import EngineConfig, Mode
from jdisagg.dispatch.frontend import Frontend, ModelInfo
from jdisagg.engine.compilation import use_compilation_cache
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.engine.host_memory import keep_freed_memory
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.observe.observer import Observer
from jdisagg.router.cluster_state import Description
from jdisagg.router.speeds import Kind
from launch.cost_inputs import find_accelerator, find_geometry
from launch.recording import embedded_recorder
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, load_config, load_model
from models.tokenizer import Tokenizer


def prepare_runtime(cpu_devices: int, compilation_cache: str) -> None:
    """Settings that must precede the first use of a device. On CPU: so many virtual devices. Raises ConfigError where it comes too late."""
    if cpu_devices < 1:
        raise ConfigError(f"devices must be at least 1, got {cpu_devices}")
    # absl lets INFO through: which plugins are not installed, what Orbax is about to read.
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:
        before = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]  # made when JAX is imported
        keep = f", or keep devices={before}" if before > 0 else ", and come here before anything else uses JAX"
        raise ConfigError(
            f"devices={cpu_devices}: JAX runs with {len(jax.devices())} in this process, for good; restart it (a notebook's kernel){keep}"
        ) from error
    keep_freed_memory()
    use_compilation_cache(compilation_cache)


def descriptions(config: EngineConfig, directory: str) -> dict[str, Description]:
    """What the router of an embedded cluster should know of its two workers: one process, and how fast, where the recipe says on what."""
    geometry = find_geometry(directory)
    known: dict[str, Description] = {}
    for name, instance in ((PREFILL, config.prefill), (DECODE, config.decode)):
        hardware = find_accelerator(instance.hardware) if instance.hardware else None
        kind = Kind(geometry, instance.layout, hardware, dtype=config.model.dtype) if hardware else None
        known[name] = Description("here/here/here/here", kind)
    return known


class Deployment:
    """An embedded cluster, its tokenizer and its front. `record_to`: a folder for its recordings, where not empty."""

    def __init__(self, config: EngineConfig, observer: Observer | None = None, record_to: str = "") -> None:
        directory = config.model.directory or SHIPPED_MODEL
        model_config = load_config(directory)
        self.config = config
        self.tokenizer = Tokenizer.from_directory(directory)

        def load(layout: Layout, devices: Sequence[Device]) -> LoadedModel:
            return load_model(directory, layout, devices, dtype=config.model.dtype)

        record = embedded_recorder(record_to, directory, config.model.dtype)
        known = descriptions(config, directory)
        self.cluster = EmbeddedCluster(config, load, self.tokenizer, jax.devices(), observer, record, known)
        info = ModelInfo(
            name=Path(directory).resolve().name,
            family=model_config.family,
            vocabulary=self.cluster.model.vocabulary,
            context_tokens=self.cluster.context_tokens,
            dtype=config.model.dtype,
            mode=config.mode,
            prefill_layout=config.prefill.layout if config.mode is Mode.DISAGGREGATED else None,
            decode_layout=config.decode.layout,
            kv_bytes_per_token=self.cluster.kv_spec.bytes_per_token,
        )
        self.frontend = Frontend(self.cluster.observed_path, self.tokenizer, info, config.limits)
        self.frontend.routing = self.cluster.path.routing

    async def start(self) -> None:
        """Warms up, with a progress bar on stderr where it takes long, and starts the workers."""
        with tqdm(desc="compiling", unit="program", delay=2, file=sys.stderr, leave=False) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            await self.cluster.start(progress)
