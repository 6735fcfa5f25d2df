"""Opens a checkpoint in a notebook: `engine = open_engine(devices=8)` for the research API, or
`cluster = open_cluster(config)` for a cluster that serves in the notebook's process."""

from dataclasses import replace

from jdisagg.config import EngineConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.research.face import Engine, MeshSizes
from jdisagg.node.deployment import prepare_engine, prepare_runtime
from launch.model import deployment, loader
from launch.shipped import SHIPPED_MODEL
from models.tokenizer import Tokenizer


def open_engine(
    directory: str = SHIPPED_MODEL,
    *,
    devices: int = 8,
    dtype: str = "float32",
    kv_dtype: str = "",
    page_size: int = 16,
    chunk_tokens: int = 256,
    sessions_per_rank: int = 4,
    context_tokens: int | None = None,
    compilation_cache: str = EngineConfig.compilation_cache,
) -> Engine:
    """Returns an engine on all devices of this process. Call it before the first use of JAX.

    Args:
        directory: Checkpoint directory. Default: the shipped model.
        devices: Virtual devices on CPU.
        kv_dtype: Type of the KV cache, "fp8", or "" for `dtype`.
    """
    prepare_runtime(devices, compilation_cache)

    return Engine(
        loader(directory, dtype, kv_dtype=kv_dtype),
        Tokenizer.from_directory(directory),
        sizes=MeshSizes(page_size, chunk_tokens, sessions_per_rank, context_tokens),
        fingerprint=model_fingerprint(directory, dtype, kv_dtype=kv_dtype),
    )


def open_cluster(config: EngineConfig) -> EmbeddedCluster:
    """Returns a cluster in this process that runs on the notebook's own event loop:
    `await cluster.start()`, `cluster.stream(request)`, `cluster.kept_blocks()`,
    `await cluster.stop()`.

    Args:
        config: Configuration; without `model.directory`, of the shipped model.

    Returns:
        The cluster, not started. On CPU it makes as many virtual devices as its layouts need, so
        the call must precede the first use of JAX, or follow a call with as many.

    Raises:
        ConfigError: JAX has fewer devices, or the configuration does not fit.
    """
    directory = config.model.directory or SHIPPED_MODEL
    config = replace(config, model=replace(config.model, directory=directory))
    prepare_engine(config)
    return deployment(config).cluster
