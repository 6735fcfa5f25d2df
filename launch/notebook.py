"""Opens the research face on a checkpoint directory: `engine = open_engine(devices=8)` in the first
cell of a notebook."""

from jdisagg.config import EngineConfig
from jdisagg.engine.research import Engine
from jdisagg.node.deployment import prepare_runtime
from launch.model import loader
from launch.shipped import SHIPPED_MODEL
from models.tokenizer import Tokenizer


def open_engine(
    directory: str = SHIPPED_MODEL,
    *,
    devices: int = 8,
    dtype: str = "float32",
    page_size: int = 16,
    chunk_tokens: int = 256,
    sessions_per_rank: int = 4,
    context_tokens: int | None = None,
    compilation_cache: str = EngineConfig.compilation_cache,
) -> Engine:
    """An engine on all devices of this process. On CPU, `devices` virtual ones: this must precede
    the first use of JAX."""
    prepare_runtime(devices, compilation_cache)

    return Engine(
        loader(directory, dtype),
        Tokenizer.from_directory(directory),
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        sessions_per_rank=sessions_per_rank,
        context_tokens=context_tokens,
    )
