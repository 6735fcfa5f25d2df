"""Offline batch inference: a blocking call that runs prompts on a cluster inside this process.

    with LLM("Qwen/Qwen3-0.6B", prefill="tp=2", decode="dp=2") as llm:
        for output in llm.generate(["Once upon a time", "The dog"], {"max_tokens": 32}):
            print(output.text)

The cluster runs on an event loop in a thread of its own, so that the call works in scripts and in
notebooks. A program is compiled when a prompt first needs it."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from absl import flags as absl
from tqdm import tqdm

from jdisagg.application import load
from jdisagg.chat.messages import ChatPrompt
from jdisagg.config import EngineConfig
from jdisagg.dispatch.prompts import Prompt, TokenPrompt
from jdisagg.errors import ConfigError, JdisaggError, first_error
from jdisagg.node.deployment import Deployment, prepare_engine
from jdisagg.request import SamplingOptions, SamplingParams
from jdisagg.service.client.completion import Collector, Completion

Result = TypeVar("Result")

COMPILE_SECONDS = 1800.0  # a command gets this much more, because it may compile its program first


class LLM:
    """A model on prefill and decode meshes of this process.

    Args:
        model: Checkpoint directory or Hugging Face name. None means the model that comes with
            jdisagg.
        devices: Number of virtual devices on CPU. None uses as many as the layouts need.
        options: Flags of `jdisagg generate` that configure the engine, such as
            `prefill="tp=2"`, `decode="dp=2"`, `mode="chunked"` or `prefix_cache=True`. A sequence
            repeats the flag (`set=["decode.growth_tokens=64"]`).

    Raises:
        ConfigError: An option is unknown or impossible, or JAX was used before with other devices.
        CheckpointError, LayoutError: The model cannot be loaded, or cannot be sharded as the
            layouts state.
    """

    def __init__(
        self, model: str | None = None, *, devices: int | None = None, **options: object
    ) -> None:
        self._closed = False
        config = _config(model, options)
        prepare_engine(config, devices)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self._deployment = self._wait(_started(config))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | list[int] | tuple[int, ...]],
        params: SamplingParams | Mapping[str, object] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Completes prompts together and returns their outputs in the same order.

        Args:
            prompts: Texts, lists of token ids or chats (`ChatPrompt`), or a single text,
                `TokenPrompt` or chat. Messages of chats may have images
                (`jdisagg.chat.images.ChatImage.of`).
            params: Sampling options for all prompts, such as `{"max_tokens": 32, "temperature": 0}`
                (`jdisagg.dispatch.options.SamplingOptions`). Unset options have the model's
                defaults.
            progress: Whether to show a progress bar on stderr.

        Raises:
            InvalidRequestError: A prompt or an option is invalid.
            JdisaggError: A request failed. The other requests are cancelled.
        """
        if self._closed:
            raise ConfigError("this LLM is closed; create another")
        if isinstance(prompts, str | TokenPrompt | ChatPrompt):
            prompts = [prompts]
        several = [
            TokenPrompt(tuple(one)) if isinstance(one, list | tuple) else one for one in prompts
        ]
        if isinstance(params, SamplingParams):
            params = {field.name: getattr(params, field.name) for field in fields(params)}
        options = cast(SamplingOptions, dict(params or {}))
        with tqdm(total=len(several), unit="prompt", disable=not progress) as bar:
            return self._wait(self._all(several, options, bar))

    def close(self) -> None:
        """Stops the cluster and frees its device memory. Idempotent."""
        if not self._closed:
            self._wait(self._deployment.stop())
            self._end()

    async def _all(
        self, prompts: Sequence[Prompt], options: SamplingOptions, bar: tqdm
    ) -> list[Completion]:
        """At most twice as many requests as there are decode slots run at the same time, so that
        the router refuses none."""
        config = self._deployment.config
        slots = config.decode.slots_per_rank * config.decode.layout.dp
        places = asyncio.Semaphore(min(2 * slots, config.limits.max_waiting_requests))
        frontend = self._deployment.frontend

        async def one(prompt: Prompt) -> Completion:
            collector = Collector()
            async with places:
                async for event in frontend.stream(await frontend.build_request(prompt, **options)):
                    collector.add(event)
            bar.update()
            return collector.completion()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        except* JdisaggError as errors:
            raise first_error(errors) from None
        return [task.result() for task in tasks]

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _config(model: str | None, options: Mapping[str, object]) -> EngineConfig:
    flags, settings = load("launch.flags"), load("launch.settings")
    given = flags.define(*flags.ENGINE)
    named = {**({} if model is None else {"model": model}), **options}
    repeated = {
        name: [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        for name, value in named.items()
    }
    texts = [f"--{name}={value}" for name, values in repeated.items() for value in values]
    try:
        given.values(["LLM", *texts])
    except absl.Error as error:
        raise ConfigError(f"LLM: {error}") from error
    config: EngineConfig = settings.engine_config(given)
    seconds = config.limits.step_seconds + COMPILE_SECONDS
    return replace(config, warm_up=False, limits=replace(config.limits, step_seconds=seconds))


async def _started(config: EngineConfig) -> Deployment:
    deployment: Deployment = load("launch.model").deployment(config)
    await deployment.start()
    return deployment
