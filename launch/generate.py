"""Completes prompts in this process and streams the text to stdout. Progress and timings go to
stderr.

    jdisagg generate --prompt="Once upon a time"
    jdisagg generate --model=DIR --prompts_file=prompts.txt --prefill=tp=2 --decode=dp=2

Without --model, the shipped dense model runs. All prompts run at the same time, and their
completions are printed in the order of the prompts. Decoding is greedy by default. Timings do not
include compilation."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.errors import ConfigError
from jdisagg.node.commands.prompts import PromptRun
from jdisagg.node.deployment import prepare_engine
from jdisagg.node.signals import end_at_once
from jdisagg.request import SamplingOptions, StreamEvent
from launch.console import run
from launch.flags import ENGINE, SAMPLING, define
from launch.model import deployment as deployment_of
from launch.settings import engine_config
from models.hub import served_name

REHEARSAL_TOKENS = 4
flags = define(
    *("prompt", "prompts_file"),
    *SAMPLING,
    *(*ENGINE, "devices"),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    ignore_eos=False,
)


def main() -> None:
    end_at_once()  # a signal also ends compilation
    prompts = _prompts()
    config = replace(engine_config(flags), warm_up=False)  # only a few of the programs are needed
    prepare_engine(config, flags.devices)
    asyncio.run(_generate(config, prompts))


def _prompts() -> list[str]:
    if (flags.prompt is None) == (flags.prompts_file is None):
        raise ConfigError("give either --prompt or --prompts_file")
    if (path := flags.prompts_file) is None:
        return [flags.prompt or ""]
    try:
        prompts = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts_file={path} cannot be read: {error}") from error
    if "" in prompts or not prompts:
        where = f"line {prompts.index('') + 1} is empty" if prompts else "it is empty"
        raise ConfigError(f"--prompts_file={path}: {where}; give one prompt a line")
    return prompts


async def _generate(config: EngineConfig, prompts: list[str]) -> None:
    if config.prefix == PrefixConfig():  # so that the prompt does not reuse the KV of its rehearsal
        config = replace(config, prefix=PrefixConfig(reuse=False, host_gib=0.0))
    two = config.mode is Mode.DISAGGREGATED
    prefill = f"prefill {config.prefill.layout} -> " if two else ""
    meshes = f"{prefill}decode {config.decode.layout}"
    began = time.monotonic()
    _say(f"loading {served_name(config.model.directory)} ({meshes})")
    deployment = deployment_of(config, tell=_say)
    names = ("temperature", "top_k", "top_p", "seed", "ignore_eos")
    options = cast(SamplingOptions, {name: getattr(flags, name) for name in names})
    several = PromptRun(deployment, flags.chat, **options)

    async def show(index: int, events: AsyncIterator[StreamEvent]) -> None:
        label = f"prompt {index + 1}: " if len(prompts) > 1 else ""
        await _print(prompts[index], events, label, f"{config.mode.value} {meshes}")

    await deployment.start()
    try:
        cache = config.compilation_cache
        _say(f"compiling for this prompt{f' (or loading from {cache})' if cache else ''}")
        rehearsal = time.monotonic()
        async for _ in several.stream(max(prompts, key=len), REHEARSAL_TOKENS):
            pass
        now = time.monotonic()
        _say(f"ready after {now - began:.1f} s, {now - rehearsal:.1f} s of them compiling")
        started = time.monotonic()
        await several.all_at_once(prompts, flags.max_tokens, show)
        if len(prompts) > 1:
            _say(f"{len(prompts)} prompts in {time.monotonic() - started:.3f} s")
    finally:
        await deployment.cluster.stop()


async def _print(prompt: str, events: AsyncIterator[StreamEvent], label: str, meshes: str) -> None:
    if sys.stdout.isatty() and not flags.chat:
        print(prompt, end="", flush=True)
    async for event in events:
        print(event.text, end="", flush=True)
        if (usage := event.usage) and (times := event.timings):
            print(flush=True)
            _say(
                f"{label}TTFT {times.ttft_seconds * 1e3:.1f} ms, TPOT"
                f" {times.tpot_seconds * 1e3:.2f} ms, {usage.prompt_tokens} +"
                f" {usage.completion_tokens} tokens, {times.kv_bytes_moved} KV bytes moved,"
                f" {meshes}"
            )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main, flags)
