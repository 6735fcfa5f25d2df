"""Programs of a mesh: which forms of chunks are compiled, and what compiling leaves to other
threads."""

import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.limits import mesh_limits
from jdisagg.executor.prefill_program import ChunkArrays, chunk_forms
from jdisagg.executor.programs import RANK, TURN_SECONDS, Programs
from jdisagg.executor.weights import LayerCalls, Part
from jdisagg.layout import platforms
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.layout.platforms import traits_of
from jdisagg.messages.step_commands import PrefillChunk, PrefillRow, SampleSpec
from jdisagg.request import SamplingParams

SPEC = KVSpec.attention(2, 2, 16, "float32", (None, None))
SAMPLE = SampleSpec(0, SamplingParams())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("append_tokens", [0, 256])
def test_the_form_of_every_chunk_is_compiled(platform: str, append_tokens: int) -> None:
    config = InstanceConfig(page_size=16, chunk_tokens=256, min_chunk_tokens=128)
    how = (config, Mode.DISAGGREGATED, SPEC, 1024, None, platform)
    limits = mesh_limits(*how, append_tokens=append_tokens).computed_by(False)
    used = set()
    for width, start, samples, rows in itertools.product(
        limits.chunk_buckets, (0, 16, 512), ((), (SAMPLE,)), (1, 2)
    ):
        parts = tuple(
            PrefillRow(0, 0, 16 * row, (1,) * 16, start * (row == 0), (0,) * 64, samples)
            for row in range(rows)
        )
        chunk = PrefillChunk(1, width, parts)
        used.add(ChunkArrays.build(chunk, limits, platform=platform).form)
    assert used == set(chunk_forms(limits, platform))
    assert len(used) == (2 if platform == "cpu" and not append_tokens else 1)


@pytest.mark.parametrize(("unrolled", "expected"), [(False, "aba"), (True, "aaba")])
def test_layers_of_one_structure_and_form_are_traced_once(unrolled: bool, expected: str) -> None:
    """The last of four layers has another form. All read an array of the program around them."""
    leaves = [np.full(2, factor, np.float32) for factor in (2, 3, 5, 7)]
    parts = [
        Part((leaf,), (RANK,), kind, None)  # type: ignore[arg-type]
        for leaf, kind in zip(leaves, "aaba", strict=True)
    ]
    traced: list[object] = []

    def program(x: jax.Array, shift: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        def compute(part: Part, ends: bool, leaf: jax.Array, x: jax.Array) -> jax.Array:
            traced.append(part.graphdef)
            return x * leaf + (0 if ends else shift)

        calls = LayerCalls(compute, unrolled)
        for number, (part, leaf) in enumerate(zip(parts, leaves, strict=True)):
            x = calls(part, number == 3, leaf, x)
        return x

    x, shift = np.ones(2, np.float32), np.full(2, 10, np.float32)
    found = jax.jit(program)(x, shift, leaves)
    assert np.array_equal(found, np.full(2, (((1 * 2 + 10) * 3 + 10) * 5 + 10) * 7, np.float32))
    assert "".join(map(str, traced)) == expected


def test_compiler_options_that_this_xla_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("xla_no_such_option", True), ("xla_cpu_enable_fast_math", False)
    traits = dataclasses.replace(traits_of("cpu"), compiler_options=options)
    monkeypatch.setitem(platforms._TRAITS, "cpu", traits)
    programs = Programs(jax.make_mesh((1, 1), ("dp", "kv")))
    argument = np.ones((1, 1), np.float32)
    assert programs.compile(lambda x: x + 1, (argument,), (RANK,), RANK)(argument) == 2
    assert programs.compiler_options == {"xla_cpu_enable_fast_math": False}


def test_only_programs_without_narrow_numbers_get_the_options_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    float32 = ("xla_cpu_enable_fast_math", False), ("xla_no_such_option", True)
    traits = dataclasses.replace(
        traits_of("cpu"), compiler_options=(("xla_dump_to", ""),), float32_options=float32
    )
    monkeypatch.setitem(platforms._TRAITS, "cpu", traits)
    programs = Programs(jax.make_mesh((1, 1), ("dp", "kv")))
    tokens, wide, narrow = (np.ones((1, 1), kind) for kind in ("int32", "float32", "bfloat16"))
    every = {"xla_dump_to": "", **dict(float32)}
    assert programs.options_of((tokens, {"weights": wide})) == every
    assert programs.options_of((tokens, wide, narrow)) == {"xla_dump_to": ""}
    assert programs.compile(lambda x: x + 1, (wide,), (RANK,), RANK)(wide) == 2
    del every["xla_no_such_option"]
    assert programs.options_of(wide) == every, "an option that this XLA lacks is left out"


def test_a_slow_compilation_is_logged_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jdisagg.executor.programs.SLOW_SECONDS", 0.01)
    programs = Programs(jax.make_mesh((1, 1), ("dp", "kv")))

    def build() -> Callable[[], None]:
        until = time.monotonic() + 10.0
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        return lambda: None

    with caplog.at_level("INFO"):
        programs.get(("decode", 8), build)
    under_way, done = (record.getMessage() for record in caplog.records)
    assert under_way == "compiling program decode 8 for 0 s"
    assert done.startswith("program decode 8 compiled in ")


def test_other_threads_get_the_interpreter_soon_while_a_program_is_built() -> None:
    usual = sys.getswitchinterval()
    programs, seen = Programs(jax.make_mesh((1, 1), ("dp", "kv"))), []

    def build(inner: bool):
        if inner:
            programs.get("inner", lambda: build(False))
        seen.append(sys.getswitchinterval())
        return lambda: None

    programs.get("outer", lambda: build(True))
    assert seen == [pytest.approx(TURN_SECONDS)] * 2 and programs.compilations == 2
    with pytest.raises(ValueError, match="no program"):
        programs.get("broken", lambda: (_ for _ in ()).throw(ValueError("no program")))
    assert sys.getswitchinterval() == usual


def test_threads_that_need_one_program_compile_it_once_and_others_meanwhile() -> None:
    programs = Programs(jax.make_mesh((1, 1), ("dp", "kv")))
    both, built = threading.Barrier(2), []

    def build(key: str) -> Callable[[], str]:
        built.append(key)
        both.wait(10.0)  # only if both programs are built at once
        return lambda: key

    with ThreadPoolExecutor(6) as threads:
        keys = ["a", "b"] * 3
        found = list(threads.map(lambda key: programs.get(key, lambda: build(key))(), keys))
    assert found == keys and sorted(built) == ["a", "b"] and programs.compilations == 2
