"""A configuration in which both meshes differ from the defaults and from each other."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout

TWO = EngineConfig(
    model=ModelConfig("models/some", "bfloat16", 8192),
    prefill=InstanceConfig(
        layout=Layout(tp=4, ep=4),
        page_size=64,
        chunk_tokens=4096,
        min_chunk_tokens=1024,
        pages_per_rank=700,
    ),
    decode=InstanceConfig(
        layout=Layout(dp=4, ep=4),
        page_size=32,
        slots_per_rank=96,
        chunk_tokens=4096,
        growth_tokens=512,
        codec="int8",
        hardware="h100",
    ),
)
