"""Programs of a mesh: which forms of chunks are compiled, and what compiling leaves to other
threads."""

import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.limits import mesh_limits
from jdisagg.executor.prefill_program import ChunkArrays, chunk_forms
from jdisagg.executor.programs import RANK, TURN_SECONDS, Programs
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
    limits = mesh_limits(*how, append_tokens=append_tokens).computed
    used = set()
    for width, start, samples, rows in itertools.product(
        limits.chunk_buckets, (0, 16, 512), ((), (SAMPLE,)), (1, 2)
    ):
        parts = tuple(
            PrefillRow(0, 0, 16 * row, (1,) * 16, start * (row == 0), (0,) * 64, samples)
            for row in range(rows)
        )
        chunk = PrefillChunk(1, width, parts)
        form = ChunkArrays.build(chunk, limits, platform=platform).form
        assert form in chunk_forms(limits, width, platform)
        assert form.samples or not samples, "its samples are needed"
        assert form.past or not start, "its past is needed"
        used.add((width, form))
    every = [
        (width, form)
        for width in limits.chunk_buckets
        for form in chunk_forms(limits, width, platform)
    ]
    assert append_tokens == 0 or platform == "gpu" or used == {*every}, "no form without a chunk"


def test_compiler_options_that_this_xla_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("xla_no_such_option", True), ("xla_cpu_enable_fast_math", False)
    traits = dataclasses.replace(traits_of("cpu"), compiler_options=options)
    monkeypatch.setitem(platforms._TRAITS, "cpu", traits)
    programs = Programs(jax.make_mesh((1, 1), ("dp", "kv")))
    argument = np.ones((1, 1), np.float32)
    assert programs.compile(lambda x: x + 1, (argument,), (RANK,), RANK)(argument) == 2
    assert programs.compiler_options == {"xla_cpu_enable_fast_math": False}


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
