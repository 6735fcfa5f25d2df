"""An executor with random weights on one device, driven by explicit commands, for the rows of
decode, prefill and hand-off."""

import asyncio
import time
from dataclasses import dataclass, replace

import jax
import msgspec
import numpy as np
from flax import nnx

from benchmarks.device_programs import MODELS
from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.replica import build_executor
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    DecodeResult,
    DecodeSteps,
    PrefillChunk,
    PrefillRow,
    SampleSpec,
    SlotAdmit,
)
from jdisagg.ops.parameters import layout_mesh
from jdisagg.request import SamplingParams
from jdisagg.transfer.in_process import InProcessChannel
from models.catalog import read_config
from models.checkpoint import LoadedModel
from models.decoder import init_model
from models.hf_config import HfConfig

PAGE = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of an engine: `model` of `gpu_programs.MODELS`, with the given number of layers.
    `small`: dimensions for a CPU."""

    model: str = "llama-3-8b"
    layers: int = 32
    batch: int = 32
    context: int = 2048
    chunk: int = 2048
    small: bool = False

    def fields(self) -> dict[str, object]:
        fields: dict[str, object] = {**MODELS[self.model], "num_hidden_layers": self.layers}
        if not self.small:
            return fields
        fields |= SMALL
        experts: dict[str, object] = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        }
        return fields | experts if "num_experts" in fields else fields


class Engine:
    """Runs prefill, hand-off and decode on the first device. `options`: XLA options of all
    programs."""

    def __init__(self, sizes: Sizes, options: dict[str, str | bool] | None = None) -> None:
        self.sizes = sizes
        self.config = read_config(HfConfig(sizes.fields(), sizes.model))
        dtype = "float32" if sizes.small else "bfloat16"
        platform = jax.default_backend()
        model = init_model(self.config, jax.random.key(0), dtype=dtype, platform=platform)
        mesh = layout_mesh(Layout(), self.config.kv_heads, jax.devices()[:1])
        instance = InstanceConfig(
            page_size=PAGE,
            pages_per_rank=sizes.batch * self.columns,
            slots_per_rank=sizes.batch,
            chunk_tokens=sizes.chunk,
            min_chunk_tokens=min(512, sizes.chunk),
        )
        self.executor: MeshExecutor = build_executor(
            "gpu-day",
            instance,
            Mode.DISAGGREGATED,
            LoadedModel(model, mesh, Layout()),
            MeshRole(prefill=True, decode=True, emit=True, extracts=True),
            InProcessChannel(MonotonicClock()),
            sizes.context,
            None,
        )
        self.executor.programs.compiler_options |= options or {}
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        self._rng = np.random.default_rng(0)

    @property
    def columns(self) -> int:
        """Number of pages of a sequence that fills its context."""
        return -(-self.sizes.context // PAGE)

    def pages(self, row: int) -> tuple[int, ...]:
        """Returns the pages of the sequence in slot `row`."""
        return tuple(range(row * self.columns, (row + 1) * self.columns))

    def prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, self.config.vocabulary, tokens).tolist())

    def admits(self, batch: int, position: int, sampling: SamplingParams) -> tuple[SlotAdmit, ...]:
        """Returns commands that admit `batch` sequences, each with `position` tokens of (zero)
        KV."""
        return tuple(
            SlotAdmit(
                row, 0, row, 7 + row, position, self.sizes.context, self.pages(row),
                SampleSpec(0, replace(sampling, seed=row)),
            )
            for row in range(batch)
        )  # fmt: skip

    def chunk(self, lengths: tuple[int, ...], past: int = 0) -> PrefillChunk:
        """Returns a chunk of packed prompts of these lengths. `past`: number of tokens in pages
        before the first prompt."""
        rows, offset = [], 0
        for row, tokens in enumerate(lengths):
            start = past if row == 0 else 0
            pages = self.pages(row)[: -(-(start + tokens) // PAGE)]
            sample = (SampleSpec(0, GREEDY),)
            rows.append(PrefillRow(row, 0, offset, self.prompt(tokens), start, pages, sample))
            offset += tokens
        return PrefillChunk(1, sum(lengths), tuple(rows))

    def decode(
        self, batch: int, steps: int, dispatches: int, sampling: SamplingParams = GREEDY
    ) -> tuple[list[tuple[int, ...]], float, float]:
        """Returns the tokens of each row, the seconds per step, and the host's seconds to issue a
        step. Issues all commands before it reads the first result, as the step policy does if no
        other work waits."""
        return asyncio.run(self._decode(batch, steps, dispatches, sampling))

    async def _decode(
        self, batch: int, steps: int, dispatches: int, sampling: SamplingParams
    ) -> tuple[list[tuple[int, ...]], float, float]:
        slots, position = (tuple(range(batch)),), self.sizes.context - steps * (2 * dispatches + 1)
        command = DecodeSteps(1, steps, slots)
        admits = self.admits(batch, position - 1, sampling)
        results = [await self.executor.run(msgspec.structs.replace(command, admits=admits))]
        started = time.perf_counter()
        results += await asyncio.gather(*[self.executor.run(command) for _ in range(dispatches)])
        device_seconds = time.perf_counter() - started
        host_seconds: list[float] = []

        def issue() -> None:
            started = time.perf_counter()
            for _ in range(dispatches):
                self.executor._issue(command)
            host_seconds.append(time.perf_counter() - started)

        await self.executor.on_dispatch_thread(issue)
        tokens: list[tuple[int, ...]] = [() for _ in range(batch)]
        for result in results:
            assert isinstance(result, DecodeResult)
            tokens = [old + new for old, new in zip(tokens, result.tokens[0], strict=True)]
        count = steps * dispatches
        return tokens, device_seconds / count, host_seconds[0] / count

    def prefill(self, chunk: PrefillChunk, count: int) -> float:
        """Returns the seconds of a chunk, measured over `count` chunks that are issued one after
        the other."""

        async def run() -> float:
            await self.executor.run(chunk)  # compiles
            started = time.perf_counter()
            await asyncio.gather(*[self.executor.run(chunk) for _ in range(count)])
            return (time.perf_counter() - started) / count

        return asyncio.run(run())

    def close(self) -> None:
        self.executor.close()
