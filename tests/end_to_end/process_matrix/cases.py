"""The cases of the matrix and what one run of a case gives, for both processes and the reference.
Imports no JAX."""

import itertools
from dataclasses import dataclass, field

import numpy as np

from jdisagg.config import EngineConfig, InstanceConfig, LimitsConfig, Mode, ModelConfig
from jdisagg.layout.axes import Layout
from tests import time_scale
from tests.end_to_end.pairwise import pairwise
from tests.shapes import LLAMA

PREFILLS = ("tp=1", "tp=2", "tp=4")
DECODES = ("tp=1", "tp=2", "dp=2,tp=2", "dp=4")
PAGES = (8, 16)
DTYPES = ("float32", "bfloat16")
CODECS = ("none", "int8")

CONTEXT_TOKENS, CHUNK_TOKENS, NEW_TOKENS = 128, 32, 14
# Each half has the same devices in its process and in the reference, because programs are compiled
# for devices.
PREFILL_DEVICES, DECODE_DEVICES = slice(0, 4), slice(4, 8)
ANSWER_SECONDS = time_scale.seconds(120.0)
# Each layer group of a whole float32 chunk is a block of its own; of all else both groups are one.
BLOCK_BYTES = 32 << 10
# The first prompt has several chunks, the last of which is neither full nor a multiple of a page.
# The second is part of one chunk.
PROMPTS = (
    (
        "Once upon a time there was a little girl named Lily who lived in a small house near the"
        " forest. One day she went to the park with her mother and saw a big red ball under the"
        " tree. She was very happy and wanted to play with it. Her mother said that they could take"
        " the ball home. Lily"
    ),
    "There was a dog named",
)


@dataclass(frozen=True)
class Case:
    prefill: str
    decode: str
    prefill_page: int
    decode_page: int
    dtype: str
    codec: str

    def __str__(self) -> str:
        layouts = f"{self.prefill}_page{self.prefill_page}-{self.decode}_page{self.decode_page}"
        return f"{layouts}-{self.dtype}-{self.codec}".replace("=", "").replace(",", "")

    def engine(self) -> EngineConfig:
        """The configuration in one process; its halves are those of the two workers."""
        return EngineConfig(
            model=ModelConfig(str(LLAMA), self.dtype, CONTEXT_TOKENS),
            mode=Mode.DISAGGREGATED,
            prefill=_instance(self.prefill, self.prefill_page, "none"),
            decode=_instance(self.decode, self.decode_page, self.codec),
            # A pull may wait for programs to be compiled.
            limits=LimitsConfig(pull_seconds=ANSWER_SECONDS / 2),
            warm_up=False,
        )


def _instance(layout: str, page: int, codec: str) -> InstanceConfig:
    """A slot for each prompt, and few sizes of chunks and batches, so that programs are few."""
    parsed = Layout.parse(layout)
    return InstanceConfig(
        layout=parsed,
        page_size=page,
        slots_per_rank=1 if parsed.dp > 1 else len(PROMPTS),
        chunk_tokens=CHUNK_TOKENS,
        min_chunk_tokens=CHUNK_TOKENS,
        layer_groups=2,
        block_bytes=BLOCK_BYTES,
        growth_tokens=16,
        codec=codec,
    )


@dataclass
class Seen:
    """What a mesh held and did.

    Attributes:
        kv: KV in its pages by prompt length: [components of all layers, heads, positions, head
            size].
        chunks: Prefilled chunks.
        inserts: Inserted blocks.
    """

    kv: dict[int, np.ndarray] = field(default_factory=dict)
    chunks: int = 0
    inserts: int = 0


@dataclass
class Streams:
    """Greedy tokens of each prompt, run alone and all at once."""

    alone: list[list[int]]
    together: list[list[int]]


CHOICES = (PREFILLS, DECODES, PAGES, PAGES, DTYPES, CODECS)
ALL = tuple(itertools.starmap(Case, itertools.product(*CHOICES)))
PAIRWISE = tuple(itertools.starmap(Case, pairwise(*CHOICES)))
