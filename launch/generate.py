"""Streams completions from an embedded cluster to stdout; timings go to stderr.

    python -m launch.generate --prompt="Once upon a time"
    python -m launch.generate --model=DIR --prompts_file=prompts.txt --prefill=dp=1,tp=2 --decode=dp=2,tp=2 --devices=8

Without --model it runs the shipped dense model. On CPU, --devices makes virtual devices. With several prompts all run at once
and are printed in order.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from absl import app, flags

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.dispatch.frontend import ChatMessage, ChatPrompt
from jdisagg.errors import JdisaggError, first_error
from jdisagg.layout.axes import Layout
from jdisagg.request import StreamEvent
from launch.assembly import Deployment, prepare_runtime
from launch.console import quiet_end, refuse_words

_MODEL = flags.DEFINE_string("model", "", "Checkpoint directory (Hugging Face or Orbax form). Default: the shipped model.")
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", None, "A file with one prompt a line.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Tokens to generate at most. Default: 256, or what room is left.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "1 is off.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on after an end-of-text token.")
_CHAT = flags.DEFINE_bool("chat", False, "Send each prompt as a user's message through the model's chat template.")
_MODE = flags.DEFINE_enum("mode", "disaggregated", [mode.value for mode in Mode], "Two meshes, or one.")
_DEVICES = flags.DEFINE_integer("devices", 8, "Virtual devices on CPU.")
_PREFILL = flags.DEFINE_string("prefill", "dp=1,tp=2,ep=1", "Layout of the prefill mesh (not used in the one-mesh modes).")
_DECODE = flags.DEFINE_string("decode", "dp=2,tp=1,ep=1", "Layout of the decode mesh, or of the one mesh.")
_PREFILL_CHUNK = flags.DEFINE_integer("prefill_chunk", 64, "Tokens of a prefill chunk, a multiple of 16.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 128, "Tokens of a KV page.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Sequences that decode at once, per dp rank.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights and KV.")
_CACHE = flags.DEFINE_string("compilation_cache", EngineConfig.compilation_cache, "Folder for compiled programs; '' switches it off.")
_RECORD = flags.DEFINE_string("record", "", "Folder for recordings of every mesh's commands, for launch.replay; they hold the prompts.")


def main(argv: list[str]) -> None:
    try:
        refuse_words(argv)
        config, prompts = _configuration(), _prompts()
        prepare_runtime(_DEVICES.value, config.compilation_cache)
        with quiet_end():
            asyncio.run(_generate(config, prompts))
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")


def _configuration() -> EngineConfig:
    def instance(layout: str) -> InstanceConfig:
        return InstanceConfig(
            layout=Layout.parse(layout),
            page_size=_PAGE_SIZE.value,
            slots_per_rank=_SLOTS.value,
            chunk_tokens=_PREFILL_CHUNK.value,
            min_chunk_tokens=min(64, _PREFILL_CHUNK.value),
        )

    # One prompt uses a few programs of the many: they are compiled as they are needed.
    return EngineConfig(
        model=ModelConfig(_MODEL.value, _DTYPE.value),
        mode=Mode(_MODE.value),
        prefill=instance(_PREFILL.value),
        decode=instance(_DECODE.value),
        warm_up=False,
        compilation_cache=_CACHE.value,
    )


def _prompts() -> list[str]:
    if (_PROMPT.value is None) == (_PROMPTS_FILE.value is None):
        raise app.UsageError("give either --prompt or --prompts_file")
    path = _PROMPTS_FILE.value
    if path is None:
        return [_PROMPT.value or ""]
    try:
        prompts = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise app.UsageError(f"--prompts_file={path} cannot be read: {error}") from error
    if not all(prompts) or not prompts:
        where = f"line {prompts.index('') + 1} is empty" if prompts else "it is empty"
        raise app.UsageError(f"--prompts_file={path}: {where}; give one prompt a line")
    return prompts


async def _generate(config: EngineConfig, prompts: list[str]) -> None:
    deployment = Deployment(config, record_to=_RECORD.value)
    await deployment.start()
    try:
        started = time.monotonic()
        queues = [asyncio.Queue[StreamEvent | None]() for _ in prompts]
        async with asyncio.TaskGroup() as tasks:
            for prompt, queue in zip(prompts, queues, strict=True):
                tasks.create_task(_stream(deployment, prompt, queue))
            for number, queue in enumerate(queues):
                await _print(config, _drain(queue), f"prompt {number + 1}: " if len(prompts) > 1 else "")
        if len(prompts) > 1:
            print(f"{len(prompts)} prompts in {time.monotonic() - started:.3f} s", file=sys.stderr)
    except* (JdisaggError, BrokenPipeError) as group:
        raise first_error(group) from None
    finally:
        await deployment.cluster.stop()


async def _stream(deployment: Deployment, prompt: str, queue: asyncio.Queue[StreamEvent | None]) -> None:
    request = await deployment.frontend.build_request(
        ChatPrompt((ChatMessage("user", prompt),)) if _CHAT.value else prompt,
        max_tokens=_MAX_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
        ignore_eos=_IGNORE_EOS.value,
    )
    async for event in deployment.frontend.stream(request):
        queue.put_nowait(event)
    queue.put_nowait(None)


async def _drain(queue: asyncio.Queue[StreamEvent | None]) -> AsyncIterator[StreamEvent]:
    while (event := await queue.get()) is not None:
        yield event


async def _print(config: EngineConfig, events: AsyncIterator[StreamEvent], label: str) -> None:
    async for event in events:
        print(event.text, end="", flush=True)
        if event.usage and event.timings:
            one_mesh = config.mode is not Mode.DISAGGREGATED
            layouts = f"{config.decode.layout}" if one_mesh else f"prefill {config.prefill.layout} -> decode {config.decode.layout}"
            times, usage = event.timings, event.usage
            summary = (
                f"{label}TTFT {times.ttft_seconds * 1e3:.1f} ms, TPOT {times.tpot_seconds * 1e3:.2f} ms, "
                f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {times.kv_bytes_moved} KV bytes moved, "
                f"{config.mode.value} {layouts}"
            )
            print(flush=True)
            print(summary, file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
