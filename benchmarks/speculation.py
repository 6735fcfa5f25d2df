"""What do drafts bring, and is a mesh that may verify them anywhere slower than one that does not?

    python -m benchmarks.speculation --rounds=9 --name=speculation

Two embedded clusters in unified mode on one device serve the shipped model: one with
--speculate=off, one with --speculate as given. The same requests go to both in turn, all of a round
at once; the order changes each round. `B` is the number of requests, `T` the temperature. Text that
repeats has a negative frequency penalty; other text is stories. Each figure is the median over
rounds of the time without drafts over the time with: by the clock, and in processor seconds of this
process, which other work on the machine disturbs less. `tokens` are those of a step and sequence.
Streams must be equal. The first rounds compile the programs and try drafts for the first time."""

import asyncio
import statistics
import time
from dataclasses import dataclass

import jax
from absl import app, flags

from benchmarks.measure import save
from benchmarks.measured_model import NoText
from jdisagg.config import SPECULATE, EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.engine.compilation import use_compilation_cache
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.messages.step_commands import DecodeSteps, StepCommand
from jdisagg.request import Request, SamplingParams
from launch.model import loader
from launch.shipped import SHIPPED_MODEL
from models.tokenizer import Tokenizer

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Measured rounds of each case.")
_WARM = flags.DEFINE_integer("warm_rounds", 3, "Rounds before them.")
_TOKENS = flags.DEFINE_integer("tokens", 192, "Tokens of each answer.")
_BATCHES = flags.DEFINE_list("batches", ["1", "4", "8", "32"], "Numbers of requests at once.")
_SPECULATE = flags.DEFINE_enum("speculate", "auto", list(SPECULATE), "What to compare with off.")
_MODEL = flags.DEFINE_string("model", str(SHIPPED_MODEL), "Folder of the checkpoint.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

BEGINNINGS = (
    "Once upon a time",
    "Lily had a",
    "Tom saw a big dog in the park. He",
    "One day, a girl named Sue went to the",
    "There was a little cat named",
    "Tim and his mom went to the",
    "The dog was very",
    "A boy had a red ball. He",
)
REPEATS = "Tom and Sue saw a dog. Tom and Sue saw a cat. "


@dataclass(frozen=True)
class Wave:
    """What one round took on one cluster."""

    seconds: float
    processor: float
    steps: int
    streams: list[list[int]]


class Contender:
    """A cluster with one kind of drafts."""

    def __init__(self, speculate: str, tokenizer: Tokenizer) -> None:
        instance = InstanceConfig(slots_per_rank=32, page_size=128, speculate=speculate)
        config = EngineConfig(
            model=ModelConfig(_MODEL.value, context_tokens=512),
            mode=Mode.UNIFIED,
            prefill=instance,
            decode=instance,
            warm_up=False,
        )
        load = loader(_MODEL.value, "float32", speculate=speculate)
        self.cluster = EmbeddedCluster(config, load, NoText(), jax.devices()[:1])
        self.steps = 0
        self._tokenizer = tokenizer
        assert self.cluster.decode is not None
        executor = self.cluster.decode.executor
        run = executor.run

        def counting(command: StepCommand) -> object:
            self.steps += command.steps if isinstance(command, DecodeSteps) else 0
            return run(command)

        executor.run = counting  # type: ignore[method-assign]

    async def wave(self, number: int, batch: int, temperature: float, repeats: bool) -> Wave:
        """Serves `batch` requests at once."""
        steps, processor, started = self.steps, time.process_time(), time.perf_counter()
        streams = await asyncio.gather(
            *(self._stream(number, index, temperature, repeats) for index in range(batch))
        )
        seconds = time.perf_counter() - started
        return Wave(seconds, time.process_time() - processor, self.steps - steps, streams)

    async def _stream(
        self, number: int, index: int, temperature: float, repeats: bool
    ) -> list[int]:
        text = BEGINNINGS[(number + index) % len(BEGINNINGS)]
        params = SamplingParams(
            max_tokens=_TOKENS.value,
            temperature=temperature,
            seed=1000 * number + index,
            frequency_penalty=-1.5 if repeats else 0.0,
            ignore_eos=True,
        )
        prompt = tuple(self._tokenizer.encode(REPEATS * 2 + text if repeats else text))
        request = Request(f"{number}-{index}-{temperature}-{repeats}", prompt, params)
        tokens: list[int] = []
        async for event in self.cluster.stream(request):
            tokens.extend(event.token_ids)
        return tokens


async def compare(plain: Contender, drafts: Contender) -> dict[str, object]:
    figures: dict[str, object] = {}
    cases = [
        (int(batch), temperature, repeats)
        for repeats in (False, True)
        for temperature in (0.0, 1.0)
        for batch in _BATCHES.value
    ]
    for case in cases:
        without: list[Wave] = []
        having: list[Wave] = []
        for number in range(_WARM.value + _ROUNDS.value):
            turns = [(plain, without), (drafts, having)]
            for contender, waves in turns if number % 2 else turns[::-1]:
                waves.append(await contender.wave(number, *case))
            assert without[-1].streams == having[-1].streams, f"streams differ: {case}"
        without, having = without[_WARM.value :], having[_WARM.value :]
        pairs = list(zip(without, having, strict=True))
        clock = statistics.median(one.seconds / two.seconds for one, two in pairs)
        processor = statistics.median(one.processor / two.processor for one, two in pairs)
        tokens = sum(wave.steps for wave in without) / sum(wave.steps for wave in having)
        batch, temperature, repeats = case
        name = f"B={batch} T={temperature:g} {'repeats' if repeats else 'stories'}"
        figures[name] = {
            "speed": round(clock, 3),
            "processor": round(processor, 3),
            "tokens": round(tokens, 2),
            "rounds": [round(one.seconds / two.seconds, 3) for one, two in pairs],
            "without_ms": round(1e3 * statistics.median(wave.seconds for wave in without), 1),
        }
        print(
            f"{name}: {clock:.2f} as fast, {processor:.2f} by processor seconds,"
            f" {tokens:.2f} tokens",
            flush=True,
        )
    return figures


async def run() -> dict[str, object]:
    tokenizer = Tokenizer.from_directory(_MODEL.value)
    plain, drafts = (Contender(kind, tokenizer) for kind in ("off", _SPECULATE.value))
    await plain.cluster.start()
    await drafts.cluster.start()
    try:
        return {"speculate": _SPECULATE.value, **await compare(plain, drafts)}
    finally:
        await plain.cluster.stop()
        await drafts.cluster.stop()


def main(_: list[str]) -> None:
    use_compilation_cache("~/.cache/jdisagg/xla")
    figures = asyncio.run(run())
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
