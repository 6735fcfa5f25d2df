"""The research API (docs/research.md).

`open_engine(devices=8)` opens a checkpoint and gives access to KV caches as Python values.
`open_cluster(config)` creates a cluster that serves on the caller's event loop. Layouts may be
given as text such as "tp=2"."""

from dataclasses import replace

from jdisagg.application import load
from jdisagg.config import EngineConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.research.face import (
    DecoderLayout,
    Engine,
    KVCache,
    Layout,
    MeshSizes,
    PrefillLayout,
    Session,
)
from jdisagg.node.deployment import prepare_engine, prepare_runtime

__all__ = [
    "DecoderLayout",
    "Engine",
    "KVCache",
    "Layout",
    "MeshSizes",
    "PrefillLayout",
    "Session",
    "open_cluster",
    "open_engine",
]


def open_engine(
    directory: str | None = None,
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
    """Returns an engine on all devices of this process. Must be called before the first use of JAX.

    Args:
        directory: Checkpoint directory. None means the model that comes with jdisagg.
        devices: Number of virtual devices on CPU.
        dtype: Data type of weights and KV: "float32" or "bfloat16".
        kv_dtype: Data type of the KV cache: "fp8", or "" for the value of `dtype`.
        sessions_per_rank: Number of sequences of full context length for which each dp rank has
            pages.
        context_tokens: Longest sequence, in tokens. None uses the model's own limit.
        compilation_cache: Folder of the persistent cache of compiled programs.
    """
    directory = directory or load("launch.shipped").SHIPPED_MODEL
    prepare_runtime(devices, compilation_cache)
    return Engine(
        load("launch.model").loader(directory, dtype, kv_dtype=kv_dtype),
        load("models.tokenizer").Tokenizer.from_directory(directory),
        sizes=MeshSizes(page_size, chunk_tokens, sessions_per_rank, context_tokens),
        fingerprint=model_fingerprint(str(directory), dtype, kv_dtype=kv_dtype),
    )


def open_cluster(config: EngineConfig) -> EmbeddedCluster:
    """Returns a cluster in this process that runs on the caller's event loop, such as a notebook's.

    Its main methods are `await cluster.start()`, `cluster.stream(request)`,
    `cluster.kept_blocks()` and `await cluster.stop()`.

    Args:
        config: Configuration of the cluster. Without `model.directory`, the cluster serves the
            model that comes with jdisagg.

    Returns:
        The cluster, not yet started. On CPU, this call creates the virtual devices that the layouts
            need. It must then be made before the first use of JAX, unless JAX already has enough
            devices.

    Raises:
        ConfigError: JAX has fewer devices than the layouts need, or the configuration is invalid.
    """
    directory = config.model.directory or load("launch.shipped").SHIPPED_MODEL
    config = replace(config, model=replace(config.model, directory=directory))
    prepare_engine(config)
    return load("launch.model").deployment(config).cluster
