"""What does a grammar cost a decode step?

    python -m benchmarks.grammar --model=measured --rounds=5 [--compact] [--name=grammar]

The embedded cluster in unified mode decodes eight sequences at temperature 1. The figures are mean
seconds per token: eight sequences under a JSON schema, and one under it and seven without, against
eight without. `compact`: a schema without white space, which forces many tokens. `measured`: the
model of `benchmarks/plain_loop.py` (12 layers, 768 wide) with 32,000 artificial tokens. `shipped`:
the tiny model with its tokenizer. Weights and texts are meaningless here. Also measured: host time
to compute one row's mask, processor time per token (which a busy machine changes less), and, for
eight sequences under the schema, the number of decode steps and of tokens that needed no separate
step."""

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import tokenizers
from absl import app, flags
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.measure import paired, save
from benchmarks.measured_model import NoText, load
from benchmarks.plain_loop import VOCABULARY
from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.replica import Loaded
from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from jdisagg.grammar.matcher import mask_words
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import DecodeSteps, StepCommand, StepResult
from jdisagg.request import Grammar, GrammarKind, Request, SamplingParams
from launch.grammars import grammar_compiler
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import load_model

_MODEL = flags.DEFINE_enum("model", "measured", ["measured", "shipped"], "Which model.")
_COMPACT = flags.DEFINE_bool("compact", False, "Answers without blanks.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

BATCH, PROMPT, OUTPUT, END = 8, 64, 64, 0
WARM_ROUNDS = 3  # which compile: a batch shrinks at its end, with runs not always alike
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", "tree"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,9}$"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
# so many of them that no answer ends
PEOPLE = {"type": "array", "items": PERSON, "minItems": 200}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PEOPLE))
# without blanks, and with names that end: much of it is forced
SHORT = PERSON["properties"] | {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}}  # type: ignore[operator]
RECORDS = PEOPLE | {
    "x-guidance": {"whitespace_flexible": False},
    "items": PERSON | {"properties": SHORT},
}
COMPACT = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(RECORDS))


def made_up_tokenizer() -> TokenizerText:
    """Returns a tokenizer with all bytes and random words, half of which begin with a space."""
    draw = np.random.default_rng(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(["<end>", *letters])
    small = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    while len(tokens) < VOCABULARY:
        word = "".join(draw.choice(small, draw.integers(2, 8)))
        tokens["Ġ" * int(draw.integers(2)) + word] = None
    vocabulary = {token: at for at, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return TokenizerText(backend.to_str(), (END,))


def made_up() -> tuple[Loaded, GrammarCompiler]:
    return load(Layout(), jax.devices()[:1]), GrammarCompiler(made_up_tokenizer)


def shipped() -> tuple[Loaded, GrammarCompiler]:
    grammars = grammar_compiler(SHIPPED_MODEL)
    assert grammars is not None
    return load_model(SHIPPED_MODEL, Layout(), jax.devices()[:1], dtype="float32"), grammars


class Measured:
    """The cluster, and batches of requests."""

    def __init__(self, loaded: Loaded, grammars: GrammarCompiler, schema: Grammar) -> None:
        self._schema = schema
        pages = (BATCH + 1) * (PROMPT + OUTPUT) // 16 + 8
        config = EngineConfig(
            model=ModelConfig(dtype="float32", context_tokens=256),
            mode=Mode.UNIFIED,
            decode=InstanceConfig(
                layout=Layout(),
                page_size=16,
                slots_per_rank=BATCH,
                pages_per_rank=pages,
                growth_tokens=OUTPUT,
                chunk_tokens=64,
                min_chunk_tokens=64,
            ),
            warm_up=False,
        )

        self.cluster = EmbeddedCluster(config, lambda *_: loaded, NoText(), jax.devices()[:1])
        self.cluster.constrain(grammars)
        self._vocabulary = loaded.model.vocabulary
        self._count = self.decode_steps = 0
        assert self.cluster.decode is not None
        executor = self.cluster.decode.executor
        issue = executor.run

        def run(command: StepCommand) -> asyncio.Future[StepResult]:
            self.decode_steps += command.steps if isinstance(command, DecodeSteps) else 0
            return issue(command)

        executor.run = run  # type: ignore[method-assign]

    async def step(self, constrained: int, first: int) -> tuple[float, float]:
        """Returns the seconds and the processor seconds per token of a batch of prompts from index
        `first` on. `constrained` of them have the grammar. The processor seconds include a share of
        the prefill."""
        spent = time.process_time()
        streams = await asyncio.gather(
            *(self._stream(first + row, row < constrained) for row in range(BATCH))
        )
        spent = (time.process_time() - spent) / OUTPUT
        # from the second token on: the prefill of others is over
        paces = [(times[-1] - times[1]) / (len(times) - 2) for times in streams]
        return statistics.mean(paces), spent

    @property
    def forced_tokens(self) -> int:
        """Number of tokens so far that needed no separate step."""
        return self.cluster._workers[-1].counters["forced_tokens"]

    async def _stream(self, number: int, constrained: bool) -> list[float]:
        self._count += 1
        draw = np.random.default_rng(number)
        prompt = tuple(draw.integers(3, self._vocabulary, PROMPT).tolist())
        sampling = SamplingParams(
            max_tokens=OUTPUT, seed=number, grammar=self._schema if constrained else None
        )
        request = Request(f"r{self._count}", prompt, sampling, (END,) if constrained else ())
        times: list[float] = []
        async for event in self.cluster.stream(request):
            times.extend([time.perf_counter()] * len(event.token_ids))
        return times


def mask_seconds(grammars: GrammarCompiler, vocabulary: int) -> list[float]:
    """Returns the seconds to compute a mask, along a random sequence of allowed tokens."""
    draw, seconds = np.random.default_rng(0), []
    mask = np.zeros(mask_words(vocabulary), np.uint32)
    matcher = grammars.matcher(SCHEMA, SamplingParams(grammar=SCHEMA), (END,), ())
    for _ in range(200):
        started = time.perf_counter()
        matcher.fill(mask)
        seconds.append(time.perf_counter() - started)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        matcher.consume((int(draw.choice(np.flatnonzero(bits))),))
    return sorted(seconds)


async def run() -> dict[str, object]:
    loaded, grammars = made_up() if _MODEL.value == "measured" else shipped()
    schema = COMPACT if _COMPACT.value else SCHEMA
    measured = Measured(loaded, grammars, schema)
    masks = mask_seconds(grammars, loaded.model.vocabulary)
    figures: dict[str, object] = {
        "model": _MODEL.value,
        "blanks": not _COMPACT.value,
        "vocabulary": loaded.model.vocabulary,
        "mask of a row, ms": {
            "median": 1e3 * statistics.median(masks),
            "99th percentile": 1e3 * masks[-2],
        },
    }
    kinds = {"none": 0, f"1 of {BATCH}": 1, f"{BATCH} of {BATCH}": BATCH}
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    steps: dict[str, list[int]] = {kind: [] for kind in kinds}
    forced: list[float] = []
    await measured.cluster.start()
    try:
        for number in range(-WARM_ROUNDS, _ROUNDS.value):
            for kind, rows in kinds.items():
                before = measured.decode_steps, measured.forced_tokens
                seconds = await measured.step(rows, (number + WARM_ROUNDS) * BATCH)
                if number >= 0:
                    taken[kind].append(seconds)
                    steps[kind].append(measured.decode_steps - before[0])
                    if rows == BATCH:
                        # the first token of each is a prefill's
                        count = measured.forced_tokens - before[1]
                        forced.append(count / (BATCH * (OUTPUT - 1)))
    finally:
        await measured.cluster.stop()
    figures["decode steps of a batch"] = {
        kind: statistics.median(counts) for kind, counts in steps.items()
    }
    figures["tokens without a step of their own"] = statistics.median(forced)
    for at, clock in enumerate(("of the clock", "of a processor")):
        for kind in list(kinds)[1:]:
            figures[f"{kind} with a grammar, against none, seconds {clock} a token"] = paired(
                [each[at] for each in taken[kind]], [each[at] for each in taken["none"]]
            )
    return figures


def main(_: list[str]) -> None:
    figures = asyncio.run(run())
    print(json.dumps(figures, indent=1))
    if _NAME.value:
        print(Path(save(_NAME.value, figures)).name, file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
