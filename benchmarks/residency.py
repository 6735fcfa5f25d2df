"""How soon does a prompt's KV come back: from pages, host memory and disk, and for a sequence that
was suspended?

    python -m benchmarks.residency --rounds=3 [--aside] [--name=residency]

One embedded cluster over random weights, one device a mesh. The figures are the time to the first
token of a prompt by the tier from which its KV comes, by prompt length: not cached, in the prefill
mesh's pages, in host memory (after other prompts took the pages), and on disk (after host memory
evicted it; the folder is --disk, and what was just written is in the system's file cache). The
decode mesh's cache is cleared each time. The first round only compiles.

--aside measures the time from the resumption of a suspended sequence to its next token, by prompt
length: with its KV in pages, with its KV in host memory (after another prompt took the pages), and
without a cache, where all is prefilled and transferred again; and the time from a preemption to the
next token. Each is compared with the time to the first token of a new prompt of the same length,
too. What caches save conversations is measured by `benchmarks.conversations`."""

import asyncio
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks import plain_loop
from benchmarks.measure import paired, save
from benchmarks.measured_model import NoText, load
from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig, PrefixConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.layout.axes import Layout
from jdisagg.request import Request, SamplingParams

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measured rounds.")
_ASIDE = flags.DEFINE_bool("aside", False, "Sequences that were set aside instead.")
_DISK = flags.DEFINE_string("disk", "", "Folder of the tier on disk; '': a temporary one.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

CONTEXT, ANSWER = 3072, 24
WARM_ROUNDS = 1
LENGTHS = (384, 1024, 2048)


class Contender:
    """A cluster with one device per mesh, with or without a prefix cache."""

    def __init__(
        self,
        reuse: bool,
        host_gib: float = 0.0,
        pages: int = 160,
        disk: str = "",
        append: int | None = None,
    ) -> None:
        """`disk`: folder of the disk tier, which also serves as the model directory."""
        instance = InstanceConfig(
            layout=Layout(),
            slots_per_rank=8,
            growth_tokens=ANSWER,
            min_chunk_tokens=128,
            pages_per_rank=pages,
        )
        config = EngineConfig(
            model=ModelConfig(disk, context_tokens=CONTEXT),
            mode=Mode.DISAGGREGATED,
            prefill=instance,
            decode=instance,
            prefix=PrefixConfig(
                reuse,
                host_gib=host_gib,
                restores="always",
                disk_dir=disk and f"{disk}/kv",
                disk_gib=host_gib if disk else 0.0,
                append_tokens=append,
            ),
            warm_up=False,
        )
        self.cluster = EmbeddedCluster(config, load, NoText(), jax.devices())
        self._count = 0

    async def first_token(self, prompt: tuple[int, ...]) -> float:
        self._count += 1
        params = SamplingParams(max_tokens=1, temperature=0.0)
        began = time.perf_counter()
        first = 0.0
        async for event in self.cluster.stream(Request(f"r{self._count}", prompt, params)):
            if event.token_ids:
                first = time.perf_counter() - began
        return first


async def tiers() -> dict[str, object]:
    """Returns the number of pages for one prompt of full context, and host memory and disk for all
    prompts."""
    disk = tempfile.TemporaryDirectory(dir=_DISK.value or None)
    pages = CONTEXT // InstanceConfig.page_size
    one = Contender(True, 2.0, pages, disk.name)
    prefill, decode = one.cluster._workers
    assert not prefill.role.decodes
    sources, counters = prefill._sources, prefill.counters
    rng = np.random.default_rng(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, plain_loop.VOCABULARY, count).tolist())

    async def ttft(prompt: tuple[int, ...]) -> float:
        decode._kept.clear()
        seconds = await one.first_token(prompt)
        while not sources.quiet:
            await asyncio.sleep(0.01)
        return seconds

    figures: dict[str, object] = {}
    await one.cluster.start()
    try:
        for length in LENGTHS:
            fresh, pages, host, saved = [], [], [], []
            for number in range(WARM_ROUNDS + _ROUNDS.value):
                prompt, restored = words(length), counters["host_tokens_restored"]
                seconds = [await ttft(prompt), await ttft(prompt)]
                assert counters["host_tokens_restored"] == restored
                await ttft(words(CONTEXT - 16))
                seconds.append(await ttft(prompt))
                assert counters["host_tokens_restored"] > restored
                await ttft(words(CONTEXT - 16))
                prefill._host._drop(prefill._host.blocks, prefill._host.blocks.clear(), "room")
                restored = counters["disk_tokens_restored"]
                seconds.append(await ttft(prompt))
                assert counters["disk_tokens_restored"] > restored
                if number >= WARM_ROUNDS:
                    for kept, second in zip((fresh, pages, host, saved), seconds, strict=True):
                        kept.append(second)
            medians = [statistics.median(one) for one in (fresh, pages, host, saved)]
            print(
                f"{length} tokens: ttft {1e3 * medians[0]:.1f} ms fresh, {1e3 * medians[1]:.1f}"
                f" from pages, {1e3 * medians[2]:.1f} from host memory"
                f" ({medians[2] / medians[1]:.2f} x pages, {medians[0] / medians[2]:.2f} x faster"
                f" than fresh), {1e3 * medians[3]:.1f} from disk ({medians[3] / medians[2]:.2f} x"
                f" host memory, {medians[0] / medians[3]:.2f} x faster than fresh)",
                flush=True,
            )
            figures[str(length)] = {
                "host against pages": paired(host, pages),
                "host against fresh": paired(host, fresh),
                "disk against host": paired(saved, host),
                "disk against fresh": paired(saved, fresh),
                "pages against fresh": paired(pages, fresh),
            }
    finally:
        await one.cluster.stop()
        disk.cleanup()
    return figures


async def back(
    one: Contender, prompt: tuple[int, ...], between: tuple[int, ...] = (), preempts: bool = False
) -> float:
    """Returns the seconds from the resumption of a suspended sequence, or from a preemption, until
    its next token. The prompt `between` is computed while the sequence is suspended."""
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
    resumed, waited, tokens, known = 0.0, 0.0, 0, 0
    worker = one.cluster._workers[-1]
    async for event in one.cluster.stream(Request("rests", prompt, params)):
        tokens += len(event.token_ids)
        if resumed and not waited and tokens > known:
            waited = time.perf_counter() - resumed
        if tokens < 4 or resumed:
            continue
        (group,) = worker._state.groups.values()
        known = len(group.children[0].generated)
        if preempts:
            resumed = time.perf_counter()
            worker._end(group, preempted=True)
        else:
            await one.cluster.suspend("rests")
            if between:
                await one.first_token(between)
            while worker._loop._flight or not worker._sources.quiet:
                await asyncio.sleep(0.01)
            known = sum([run.output_tokens for run in one.cluster.path._runs.values()])
            resumed = time.perf_counter()
            one.cluster.resume("rests")
    return waited


async def aside() -> dict[str, object]:
    cached = Contender(True, host_gib=1.0, pages=CONTEXT // InstanceConfig.page_size, append=256)
    plain = Contender(reuse=False)
    rng, figures = np.random.default_rng(0), dict[str, object]()
    counters = cached.cluster._workers[-1].counters

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, plain_loop.VOCABULARY, count).tolist())

    for one in (cached, plain):
        await one.cluster.start()
    try:
        for length in LENGTHS:
            pages, host, anew, preempted, first = [], [], [], [], []
            for number in range(WARM_ROUNDS + _ROUNDS.value):
                restored = counters["host_tokens_restored"]
                seconds = [await back(cached, words(length))]
                assert counters["host_tokens_restored"] == restored
                seconds.append(await back(cached, words(length), words(CONTEXT - 16)))
                assert counters["host_tokens_restored"] > restored
                seconds.append(await back(plain, words(length)))
                seconds.append(await back(cached, words(length), preempts=True))
                seconds.append(await cached.first_token(words(length)))
                if number >= WARM_ROUNDS:
                    measured = (pages, host, anew, preempted, first)
                    for kept, second in zip(measured, seconds, strict=True):
                        kept.append(second)
            for name, times in (("median", statistics.median), ("least", min)):
                took = [1e3 * times(one) for one in (pages, host, preempted, anew, first)]
                print(
                    f"{length} tokens, {name}: goes on after {took[0]:.1f} ms from pages,"
                    f" {took[1]:.1f} from host memory, {took[2]:.1f} after a preemption,"
                    f" {took[3]:.1f} computed anew; a first token after {took[4]:.1f}",
                    flush=True,
                )
            figures[str(length)] = {
                "pages against anew": paired(pages, anew),
                "host against anew": paired(host, anew),
                "pages against a first token": paired(pages, first),
                "host against a first token": paired(host, first),
                "preempted against a first token": paired(preempted, first),
            }
    finally:
        for one in (cached, plain):
            await one.cluster.stop()
    return figures


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    use_compilation_cache("~/.cache/jdisagg/xla")
    figures = asyncio.run(aside() if _ASIDE.value else tiers())
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
