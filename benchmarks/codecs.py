"""How many bytes do the codecs of a hand-off save, and how do they change precision and tokens?

    python -m benchmarks.codecs --prompts=24 --tokens=64 --name=codecs

Measures each model of the repository in each dtype. Bytes: bytes that hand-offs transferred per
prompt token, compared with codec "none". Error: error of the model's own keys and values over
held-out text after packing and unpacking. Tokens: greedy streams of an embedded cluster with the
codec, compared with a cluster without it: the number of equal streams, the number of tokens until
streams diverge, and the difference of log-probability between the two best tokens where they
diverge. `kept_fp8` is not a codec: both sides store KV in fp8 (`--kv_dtype=fp8`)."""

import asyncio
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.measure import save
from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.layout.axes import Layout
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.kv_pages import as_kept, as_read
from jdisagg.request import Request, SamplingParams, TokenLogprobs
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import CODECS, codec, stamp_array
from launch.model import loader
from models.checkpoint import load_model
from models.tokenizer import Tokenizer
from tools.tiny_models.corpus import document

_PROMPTS = flags.DEFINE_integer("prompts", 24, "Prompts for each model, dtype and codec.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "Greedy tokens of each stream.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny"
MODELS = ("llama", "qwen3_moe")
DTYPES = ("float32", "bfloat16")
PROMPT_TOKENS = 96
LOSSY = tuple(name for name in CODECS if name != "none")
KEPT_FP8 = "kept_fp8"


def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns beginnings of documents that no model of the repository was trained on."""
    ids = [
        tuple(tokenizer.encode(document(0, index, held_out=True)))[:PROMPT_TOKENS]
        for index in range(4 * _PROMPTS.value)
    ]
    return [prompt for prompt in ids if len(prompt) == PROMPT_TOKENS][: _PROMPTS.value]


def errors(
    directory: Path, dtype: str, texts: list[tuple[int, ...]]
) -> dict[str, dict[str, float]]:
    """Returns, for each codec, the errors of keys and of values: root mean square relative to the
    root mean square of the values, and the largest error relative to its row's largest value."""
    model = load_model(directory, Layout(), jax.devices()[:1], dtype=dtype).model

    @jax.jit
    def cache(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        found: list[tuple[jax.Array, jax.Array]] = []

        def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: Any, **how: Any) -> jax.Array:
            found.append((k_TKH.swapaxes(0, 1), v_TKH.swapaxes(0, 1)))
            return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)

        model(ids, jnp.arange(ids.shape[0], dtype=jnp.int32), attend)
        return jnp.stack([k for k, _ in found]), jnp.stack([v for _, v in found])

    parts = [cache(jnp.asarray(text, jnp.int32)) for text in texts]
    result: dict[str, dict[str, float]] = {}
    for name in (*LOSSY, KEPT_FP8):
        figures: dict[str, float] = {}
        for side, which in (("keys", 0), ("values", 1)):
            exact = np.stack([np.asarray(part[which], np.float32) for part in parts])
            packed = np.stack(
                [np.asarray(through(name, part[which]), np.float32) for part in parts]
            )
            error = packed - exact
            figures[f"{side}_rms"] = math.sqrt(float(np.mean(error**2)) / float(np.mean(exact**2)))
            figures[f"{side}_largest_over_row_largest"] = float(
                (np.abs(error).max(axis=-1) / np.abs(exact).max(axis=-1)).max()
            )
        result[name] = figures
    return result


def through(name: str, block_CKTH: jax.Array) -> jax.Array:
    if name == KEPT_FP8:
        return as_read(as_kept(block_CKTH, jnp.dtype(jnp.uint8)), block_CKTH.dtype)
    how = codec(name)
    stamp = stamp_array(BlockStamp(valid_tokens=block_CKTH.shape[2]))
    return how.decode(
        how.encode(block_CKTH[None], jnp.asarray(stamp), jnp.int32(0)), block_CKTH.dtype
    )[0]


Streams = list[tuple[list[int], list[TokenLogprobs]]]


async def streams(
    directory: Path, dtype: str, name: str, texts: list[tuple[int, ...]], tokenizer: Tokenizer
) -> tuple[Streams, float]:
    """Returns greedy tokens with log-probabilities, and the bytes transferred per prompt token."""
    common = InstanceConfig(page_size=16, chunk_tokens=128, min_chunk_tokens=128, slots_per_rank=8)
    decode = InstanceConfig(
        page_size=16,
        chunk_tokens=128,
        min_chunk_tokens=128,
        slots_per_rank=8,
        codec="none" if name == KEPT_FP8 else name,
    )
    kept = "fp8" if name == KEPT_FP8 else ""
    model = ModelConfig(str(directory), dtype, 512, kv_dtype=kept)
    config = EngineConfig(model, prefill=common, decode=decode, warm_up=False)
    load = loader(str(directory), dtype, kv_dtype=kept)
    cluster = EmbeddedCluster(config, load, tokenizer, jax.devices())
    await cluster.start()
    moved: list[int] = []

    async def one(number: int, text: tuple[int, ...]) -> tuple[list[int], list[TokenLogprobs]]:
        params = SamplingParams(
            max_tokens=_TOKENS.value, temperature=0.0, ignore_eos=True, logprobs=2
        )
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        async for event in cluster.stream(Request(f"r{number}", text, params)):
            tokens.extend(event.token_ids)
            logprobs.extend(event.logprobs)
            if event.timings:
                moved.append(event.timings.kv_bytes_moved)
        return tokens, logprobs

    try:
        done = await asyncio.gather(*(one(number, text) for number, text in enumerate(texts)))
    finally:
        await cluster.stop()
    return list(done), sum(moved) / sum(len(text) for text in texts)


def parting(expected: Streams, others: Streams) -> dict[str, float | None]:
    """Returns how two sets of streams differ. The first token is sampled by the prefill, so it
    never differs."""
    at: list[int] = []
    margins: list[float] = []
    for (tokens, logprobs), (others_tokens, _) in zip(expected, others, strict=True):
        index = next(
            (
                i
                for i, pair in enumerate(zip(tokens, others_tokens, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if index is not None:
            first, second = logprobs[index].top[:2]
            at.append(index)
            margins.append(first[1] - second[1])
    return {
        "same_streams": 1 - len(at) / len(expected),
        "median_first_difference": statistics.median(at) if at else None,
        "median_margin_there": statistics.median(margins) if margins else None,
        "largest_margin_there": max(margins) if margins else None,
    }


async def run() -> dict[str, object]:
    figures: dict[str, object] = {
        "prompts": _PROMPTS.value,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": _TOKENS.value,
    }
    for model in MODELS:
        directory = TINY / model
        tokenizer = Tokenizer.from_directory(directory)
        texts = prompts(tokenizer)
        for dtype in DTYPES:
            error = errors(directory, dtype, texts)
            expected, whole = await streams(directory, dtype, "none", texts, tokenizer)
            result: dict[str, object] = {"none": {"bytes_per_token": whole}}
            for name in (*LOSSY, KEPT_FP8):
                tokens, moved = await streams(directory, dtype, name, texts, tokenizer)
                bytes_ = {"bytes_per_token": moved, "of_none": moved / whole}
                result[name] = {**bytes_, **error[name], **parting(expected, tokens)}
                print(model, dtype, name, result[name], flush=True)
            figures[f"{model} {dtype}"] = result
    return figures


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    use_compilation_cache("~/.cache/jdisagg/xla")
    figures = asyncio.run(run())
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
