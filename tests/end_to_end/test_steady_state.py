"""Rule 12: after warm-up nothing is compiled, whatever the mix of requests; and nothing but tokens
is read back."""

import os
from dataclasses import replace

import jax
import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.messages.step_commands import DecodeSteps
from jdisagg.request import Grammar, GrammarKind
from tests.end_to_end.clusters import Running, running
from tests.lanes import first_ci
from tests.shapes import DECODE, PREFILL, config

REGEX = Grammar(GrammarKind.REGEX, "[0-9]{30}")
FORCED = Grammar(GrammarKind.REGEX, "[0-9] one two three four five six [0-9]{9}")
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts what JAX itself reports, beside our own count."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: object) -> None:
        self.count += event == COMPILE_EVENT


def test_the_count_sees_a_compilation():
    with Compilations() as seen:
        jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((7, 3), "float32")).compile()
    assert seen.count == 1


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    first_ci(
        [
            (Mode.DISAGGREGATED, PREFILL, DECODE),
            (Mode.CHUNKED, PREFILL, ""),
            (Mode.DISAGGREGATED, "pp=2", "pp=2"),
        ]
    ),
)
async def test_nothing_is_compiled_after_warm_up(mode, prefill, decode, monkeypatch):
    if "dp" not in decode:  # three programs at a time, as on six cores
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    meshes = config(mode, prefill, decode, warm_up=True)
    # blocks of 16 and 32 tokens carry all layers, of 64 half of them
    one = "pp" not in decode
    few = replace(meshes.prefill, block_bytes=64 << 10) if one else meshes.prefill
    prefix = PrefixConfig(True, 16, host_gib=0.1, restores="always")
    source = "mtp" if mode is Mode.DISAGGREGATED and one else "ngram"
    drafts = replace(meshes.decode, speculate=source)
    engine = replace(meshes, prefill=few, decode=drafts, prefix=prefix)
    async with running(engine) as run:
        before = run.cluster.compilations
        requests = [
            run.request("a dog", "a", max_tokens=40, ignore_eos=True),
            run.request(
                "a cat and a dog " * 20, "b", max_tokens=9, temperature=0.7, top_p=0.9, seed=3
            ),
            run.request(
                "one " * 100,
                "c",
                max_tokens=30,
                presence_penalty=0.5,
                repetition_penalty=1.1,
                logprobs=2,
                n=2,
                ignore_eos=True,
            ),
            run.request(
                "the",
                "d",
                max_tokens=60,
                min_tokens=9,
                logit_bias=((9, 2.0),),
                temperature=1.0,
                seed=1,
            ),
            *(
                run.request("a", f"g{index}", max_tokens=20, seed=2, grammar=REGEX, logprobs=wanted)
                for index, wanted in enumerate((None, 3))
            ),
            *(
                run.request("a", f"f{index}", max_tokens=30, seed=index, grammar=FORCED)
                for index in range(3)
            ),
            *(
                run.request("run " * (3 * index + 1), f"e{index}", max_tokens=50, ignore_eos=True)
                for index in range(12)
            ),
        ]
        with Compilations() as seen:
            await run.complete_all(requests)
            await rest_and_go_on(run)
        counters = run.cluster._workers[-1].counters
        assert counters["forced_tokens"] > 0 and counters["drafted_tokens"] > 0
        steps = [one for one in run.recording.decode if isinstance(one, DecodeSteps)]
        assert (mode is Mode.CHUNKED) == any(one.chunk is not None for one in steps)
        assert seen.count == 0
        assert run.cluster.compilations == before


async def rest_and_go_on(run: Running) -> None:
    """A sequence leaves its blocks in the cache and finds them there."""
    tokens, rested = 0, False
    asked = run.request("a dog and a cat " * 20, "rests", max_tokens=30, ignore_eos=True)
    async for event in run.cluster.stream(asked):
        tokens += len(event.token_ids)
        if tokens >= 5 and not rested:
            rested = True
            await run.cluster.suspend("rests")
            run.cluster.resume("rests")
    assert rested and tokens == 30


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode"), first_ci([(PREFILL, DECODE), ("pp=2,tp=2", "pp=2")])
)
async def test_the_host_reads_tokens_and_nothing_else(prefill: str, decode: str) -> None:
    """Tokens are read back in one place (`executor/results.py`), which says that it is meant; any
    other way this guard forbids (on CPU, where host and device share memory, the guard sees less
    than on a GPU)."""
    jax.config.update("jax_transfer_guard_device_to_host", "disallow")
    try:
        async with running(config(prefill=prefill, decode=decode)) as run:
            done = await run.complete(
                run.request("Once upon a time", max_tokens=20, ignore_eos=True)
            )
            assert len(done.tokens[0]) == 20
    finally:
        jax.config.update("jax_transfer_guard_device_to_host", "allow")
