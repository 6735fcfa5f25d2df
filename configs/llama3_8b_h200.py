"""Llama-3-8B in bfloat16 on one host with four H200: prefill TP=2, decode DP=2.

    jdisagg serve --config=configs/llama3_8b_h200.py --model=DIR

NOT TESTED on such hardware: the layouts and sizes follow from arithmetic, not from a run. Each
decode rank holds all weights, 16 GB. KV takes 131,072 bytes per token (2 x 32 layers x 8 kv heads x
128 x 2), so the 6,400 pages of 64 tokens below take 54 GB per decode device. In one process KV is
transferred by device_put, peer to peer over NVLink."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=1, tp=2),
        page_size=64,
        pages_per_rank=1024,
        slots_per_rank=16,
        chunk_tokens=8192,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=2, tp=1),
        page_size=64,
        pages_per_rank=6400,
        slots_per_rank=128,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    return EngineConfig(
        model=ModelConfig(dtype="bfloat16", context_tokens=8192), prefill=prefill, decode=decode
    )
