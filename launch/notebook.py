"""Opens the research face on a checkpoint directory: `engine = open_engine(devices=8)` in the first cell of a notebook."""

from collections.abc import Sequence

from jdisagg.config import EngineConfig
from jdisagg.engine.research import Engine
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from launch.assembly import SHIPPED_MODEL, prepare_runtime
from models.checkpoint import LoadedModel, load_model
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
    """An engine on all devices of this process. On CPU, `devices` virtual ones: this must precede the first use of JAX."""
    prepare_runtime(devices, compilation_cache)

    def load(layout: Layout, on: Sequence[Device]) -> LoadedModel:
        return load_model(directory, layout, on, dtype=dtype)

    return Engine(
        load,
        Tokenizer.from_directory(directory),
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        sessions_per_rank=sessions_per_rank,
        context_tokens=context_tokens,
    )
