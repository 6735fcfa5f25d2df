"""What do drafts bring, and is a mesh that may verify them anywhere slower than one that does not?

    python -m benchmarks.speculation --pairs=400 --name=speculation

One embedded cluster in unified mode on one device serves the shipped model, or that of `--model`.
The planner of its decode steps has drafts for a block of steps, and none for another, in random
order. So both kinds have the same process, programs, streams and time of day. `B` is the number of
requests, `T` the temperature. Text that repeats has a negative frequency penalty; other text is
stories. Each figure is a trimmed mean over pairs of blocks of the time of a token without drafts
over the time with, and the range of 90 % of its resamples: in processor seconds of this process,
which other work on the machine disturbs less, and by the clock. `policy` is the part of processor
time that decisions and predictions take themselves. `tokens` are those of a step and sequence. Each
wave of requests is served twice, with the blocks exchanged; its streams must come equal, and
`equal` is their number.

Further waves, of all beginnings of stories, have drafts in every step, whether or not they save
time, and must have the streams of waves without drafts. Of them are `accepted`, the part of the
drafts that the model accepted, `by_depth`, the part of the steps with a first, second, ... draft
that accepted it, and `drafting`, the tokens of a step and sequence.

For a hybrid with recurrent state, `--model` is a folder that `tools.tiny_models.train` wrote with
`--family=hybrid`, and `tools.tiny_models.train_next_token` after it."""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
from absl import app, flags

from benchmarks.measure import save
from benchmarks.measured_model import NoText
from jdisagg.config import (
    SPECULATE,
    EngineConfig,
    InstanceConfig,
    LimitsConfig,
    Mode,
    ModelConfig,
    PrefixConfig,
)
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.messages.step_commands import DecodeResult, DecodeSteps
from jdisagg.request import Request, SamplingParams
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.draft_worth import DraftWorth
from jdisagg.scheduler.sequences import Sequence
from jdisagg.scheduler.speculation import Planned
from launch.model import loader
from launch.shipped import SHIPPED_MODEL
from models.tokenizer import Tokenizer

_PAIRS = flags.DEFINE_integer("pairs", 400, "Measured pairs of blocks of each case.")
_WARM = flags.DEFINE_integer("warm_waves", 1, "Waves of requests before them.")
_STEPS = flags.DEFINE_integer("steps", 20, "Decode steps of a block.")
_TOKENS = flags.DEFINE_integer("tokens", 400, "Tokens of each answer.")
_BATCHES = flags.DEFINE_list("batches", ["1", "4", "8", "32"], "Numbers of requests at once.")
_TEMPERATURES = flags.DEFINE_list("temperatures", ["0", "1"], "Temperatures.")
_TEXTS = flags.DEFINE_list("texts", ["stories", "repeats"], "Kinds of text.")
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


MODES = ("off", "on")
# Steps of a block that are not measured, because results of the block before are still read.
IN_FLIGHT = 2
RESAMPLES = 400
TRIMMED = 0.1  # of the pairs at each end


@dataclass(frozen=True)
class Case:
    """What is served at once."""

    batch: int
    temperature: float
    repeats: bool

    @property
    def name(self) -> str:
        text = "repeats" if self.repeats else "stories"
        return f"B={self.batch} T={self.temperature:g} {text}"


@dataclass(frozen=True)
class Edge:
    """What had passed when a step was planned: processor seconds and the clock, generated tokens of
    the running sequences, and processor seconds of the policy of drafts."""

    processor: float
    clock: float
    tokens: int
    policy: float


@dataclass(frozen=True)
class Block:
    """Cost of a block of steps."""

    processor: float
    clock: float
    tokens: int
    policy: float
    steps: int

    @staticmethod
    def between(first: Edge, last: Edge, steps: int) -> "Block":
        return Block(
            last.processor - first.processor,
            last.clock - first.clock,
            last.tokens - first.tokens,
            last.policy - first.policy,
            steps,
        )


class Switch:
    """Switches the drafts of a planner of decode steps on and off, and measures blocks of steps in
    which `batch` sequences run.

    Attributes:
        pairs: Blocks without and with drafts.
        verified: Planned and accepted drafts of each sequence of each step.
    """

    def __init__(self, batches: DecodeBatches) -> None:
        self._batches, self._drafts = batches, batches.speculation
        assert self._drafts is not None, "this cluster verifies no drafts"
        self._policy = 0.0
        for name in ("plan", "kind", "took", "rests"):
            setattr(self._drafts, name, self._timed(getattr(self._drafts, name)))
        self._verify, self._drafts.verified = self._drafts.verified, self._verified  # type: ignore[method-assign]
        self._next, self._apply = batches.next_step, batches.apply
        batches.next_step, batches.apply = self._plan, self._applied  # type: ignore[method-assign]
        self.begin(0, [False])

    def begin(self, batch: int, orders: list[bool], drafts: bool = True) -> None:
        """Begins a wave. `orders`: for each pair of blocks, whether drafts come first. Without
        orders, all steps have `drafts`, or none."""
        self._batch, self._orders, self._always = batch, orders, drafts
        self.pairs: list[tuple[Block, Block]] = []
        self.verified: list[tuple[int, int]] = []
        self._step, self._edge, self._half = 0, self._now(), dict[str, Block]()

    def _verified(self, child: Sequence, planned: Planned, accepted: int) -> None:
        self.verified.append((planned.drafts.count, max(0, accepted)))
        self._verify(child, planned, accepted)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object) -> object:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self._policy += time.thread_time() - began

        return timed

    def _now(self) -> Edge:
        tokens = sum(len(child.generated) for rank in self._running for child in rank)
        return Edge(time.process_time(), time.perf_counter(), tokens, self._policy)

    @property
    def _running(self) -> list[list[Sequence]]:
        return self._batches._state.running

    def _plan(self, step: int, quiet: bool, drafts: bool = True) -> DecodeSteps | None:
        on = self._always and not self._orders
        if self._orders and sum(map(len, self._running)) == self._batch:
            block, into = divmod(self._step, _STEPS.value)
            if not into and block:
                self._end_block(self._mode(block - 1))
            if into == IN_FLIGHT:
                self._edge = self._now()
            self._step += 1
            on = self._mode(block) == "on"
        self._batches.speculation = self._drafts if on else None
        return self._next(step, quiet, drafts)

    def _mode(self, block: int) -> str:
        first_on = self._orders[block // 2 % len(self._orders)]
        return MODES[first_on != block % 2]

    def _end_block(self, mode: str) -> None:
        block = Block.between(self._edge, self._now(), _STEPS.value - IN_FLIGHT)
        self._half[mode] = block
        if len(self._half) == len(MODES):
            self.pairs.append((self._half["off"], self._half["on"]))
            self._half = {}

    def _applied(self, result: DecodeResult, seconds: float = 0.0) -> object:
        self._batches.speculation = self._drafts  # steps in flight may have drafts
        return self._apply(result, seconds)


class Served:
    """A cluster whose drafts are switched."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        instance = InstanceConfig(slots_per_rank=32, page_size=128, speculate=_SPECULATE.value)
        config = EngineConfig(
            model=ModelConfig(_MODEL.value, context_tokens=512),
            mode=Mode.UNIFIED,
            prefill=instance,
            decode=instance,
            prefix=PrefixConfig(reuse=False),  # the second time, prompts must have the same bits
            warm_up=False,
            limits=LimitsConfig(step_seconds=900.0),  # programs compile within steps
        )
        load = loader(_MODEL.value, "float32", speculate=_SPECULATE.value)
        self.cluster = EmbeddedCluster(config, load, NoText(), jax.devices()[:1])
        (self._worker,) = self.cluster._workers
        self.switch = Switch(self._worker._scheduler.batches)
        self._tokenizer = tokenizer

    async def accepted(self, case: Case) -> dict[str, object]:
        """Serves waves with drafts in every step."""
        verified, stepped = list[tuple[int, int]](), 0
        for number in range(0, len(BEGINNINGS), case.batch):
            plain = await self.wave(number, case, [], drafts=False)
            with mock.patch.object(DraftWorth, "pays", lambda _, gain: True):
                assert await self.wave(number, case, []) == plain, f"wave {number} differs"
            verified += self.switch.verified
            stepped += sum(len(tokens) - 1 for tokens in plain)  # but the first token
        drafted, accepted = (sum(each[at] for each in verified) for at in (0, 1))
        most = max((count for count, _ in verified), default=0)
        by_depth = [
            [came >= depth for count, came in verified if count >= depth]
            for depth in range(1, most + 1)
        ]
        return {
            "accepted": round(accepted / drafted, 3) if drafted else None,
            "by_depth": [round(statistics.fmean(each), 3) for each in by_depth],
            "drafting": round(stepped / (stepped - accepted), 2),
        }

    async def wave(
        self, number: int, case: Case, orders: list[bool], drafts: bool = True
    ) -> list[list[int]]:
        """Serves a wave of requests at once. Returns their tokens."""
        self.switch.begin(case.batch, orders, drafts)
        return await asyncio.gather(
            *(self._stream(number, index, case) for index in range(case.batch))
        )

    async def _stream(self, number: int, index: int, case: Case) -> list[int]:
        text = BEGINNINGS[(number + index) % len(BEGINNINGS)]
        params = SamplingParams(
            max_tokens=_TOKENS.value,
            temperature=case.temperature,
            seed=1000 * number + index,
            frequency_penalty=-1.5 if case.repeats else 0.0,
            ignore_eos=True,
        )
        prompt = tuple(self._tokenizer.encode(REPEATS * 2 + text if case.repeats else text))
        request = Request(f"{number}-{index}-{time.monotonic_ns()}", prompt, params)
        tokens: list[int] = []
        async for event in self.cluster.stream(request):
            tokens.extend(event.token_ids)
        return tokens


async def measure(served: Served, case: Case) -> dict[str, object]:
    """Measures pairs of blocks of one case, after waves whose pairs do not count."""
    rng, pairs, number = random.Random(7), list[tuple[Block, Block]](), 0
    while len(pairs) < _PAIRS.value:
        orders = [rng.random() < 0.5 for _ in range(_TOKENS.value)]
        streams: list[list[list[int]]] = []
        for order in (orders, [not one for one in orders]):
            streams.append(await served.wave(number, case, order))
            pairs += served.switch.pairs if number >= _WARM.value else []
        assert streams[0] == streams[1], f"streams of wave {number} differ"
        number += 1
    off, on = zip(*pairs, strict=True)
    tokens = sum(block.tokens for block in on) / sum(block.tokens for block in off)
    steps = sum(block.steps for block in on) / sum(block.steps for block in off)
    return {
        "processor": interval([_ratio(pair, "processor") for pair in pairs]),
        "clock": interval([_ratio(pair, "clock") for pair in pairs]),
        "policy": round(_sum(on, "policy") / _sum(on, "processor"), 4),
        "tokens": round(tokens / steps, 2),
        **await served.accepted(case),
        "token_us": round(1e6 * _sum(off, "processor") / _sum(off, "tokens")),
        "pairs": len(pairs),
        "equal": number * case.batch,
    }


def _sum(blocks: Iterable[Block], name: str) -> float:
    return sum(getattr(block, name) for block in blocks)


def _ratio(pair: tuple[Block, Block], name: str) -> float:
    """Returns the logarithm of the cost of a token without drafts over the cost with."""
    off, on = (getattr(block, name) / block.tokens for block in pair)
    return math.log(off / on)


def interval(values: list[float]) -> list[float]:
    """Returns the trimmed mean of ratios, given as logarithms, and its 5th and 95th percentile over
    resamples of the pairs."""
    rng = random.Random(1)
    means = sorted(_trimmed(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = means[RESAMPLES // 20], means[-1 - RESAMPLES // 20]
    return [round(math.exp(one), 3) for one in (_trimmed(values), low, high)]


def _trimmed(values: list[float]) -> float:
    cut = int(TRIMMED * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


async def run() -> dict[str, object]:
    served = Served(Tokenizer.from_directory(_MODEL.value))
    cases = [
        Case(int(batch), float(temperature), text == "repeats")
        for text in _TEXTS.value
        for temperature in _TEMPERATURES.value
        for batch in _BATCHES.value
    ]
    figures: dict[str, object] = {"speculate": _SPECULATE.value}
    await served.cluster.start()
    try:
        for case in cases:
            figures[case.name] = figure = await measure(served, case)
            print(case.name, figure, flush=True)
        return figures
    finally:
        await served.cluster.stop()


def main(_: list[str]) -> None:
    use_compilation_cache("~/.cache/jdisagg/xla")
    figures = asyncio.run(run())
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
