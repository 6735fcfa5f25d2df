"""Programs that an earlier executor compiled are found without tracing, and only where they are
what tracing would give."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as jax_cache

from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.executor.program_store import SUFFIX, program_store
from jdisagg.executor.programs import RANK, Programs
from jdisagg.ops import optional_kernels
from jdisagg.ops.optional_kernels import PAGED_ATTENTION
from models import feed_forward
from tests.end_to_end.clusters import LLAMA
from tests.executor.test_prefill_rows import GREEDY, part, prefiller, prompt, run
from tests.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
Body = Callable[[jax.Array], jax.Array]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of compiled programs, for this test only."""
    jax_cache.reset_cache()
    use_compilation_cache(str(tmp_path))
    yield tmp_path
    jax_cache.reset_cache()
    use_compilation_cache(str(PROGRAMS))


def traced(body: Body) -> Body:
    """Makes a function of this test count as one of a traced module."""
    body.__module__ = feed_forward.__name__
    return body


@traced
def gate(x: jax.Array) -> jax.Array:
    return feed_forward.gated(x, x, "silu")


def computed(
    body: Body = gate,
    *,
    made_of: object = "model",
    ranks: int = 1,
    key: str = "gate",
    options: dict[str, str | bool] | None = None,
) -> tuple[float, bool]:
    """Compiles a program of new `Programs` and runs it. Returns its result, and whether it was
    found."""
    programs = Programs(jax.make_mesh((ranks, 1), ("dp", "kv")))
    programs.store = program_store(programs.mesh, made_of)
    programs.compiler_options = options or {}
    arguments = (np.full((ranks, 1), 2.0, np.float32),)
    build = partial(programs.compile, body, arguments, (RANK,), RANK)
    result = programs.get((key, 1), build)(*arguments)
    assert programs.compilations == 1
    return float(np.asarray(result)[0, 0]), programs.found == 1


def stored(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}-cache"))


def test_a_program_is_found_only_by_what_it_is_made_of(folder: Path) -> None:
    expected = pytest.approx(4 * float(jax.nn.sigmoid(2.0)))
    assert computed() == (expected, False)
    others = (
        {"made_of": "another model"},
        {"ranks": 2},
        {"key": "another"},
        {"options": {"xla_cpu_enable_fast_math": True}},
        {"body": traced(lambda x: x)},
    )
    for number, other in enumerate(others):
        assert len(stored(folder)) == 1 + number
        assert not computed(**other)[1]
        assert computed(**other)[1] and computed() == (expected, True)


def test_code_from_elsewhere_is_traced_and_not_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = computed()
    monkeypatch.setattr(feed_forward, "gated", lambda gate, up, activation: gate * up)
    for _ in range(2):
        assert computed() == (4.0, False) and original != 4.0
    monkeypatch.undo()
    assert computed() == (original, True)


def test_a_replaced_constant_is_part_of_what_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of one value is not used for the other, and the reverse."""
    monkeypatch.setattr(feed_forward, "SCALE_OF_A_TEST", 2.0, raising=False)
    body = traced(lambda x: x * feed_forward.SCALE_OF_A_TEST)  # type: ignore[attr-defined]
    assert computed(body) == (4.0, False) and computed(body) == (4.0, True)
    monkeypatch.setattr(feed_forward, "SCALE_OF_A_TEST", 3.0)
    assert computed(body) == (6.0, False) and computed(body) == (6.0, True)


def test_a_function_of_another_module_is_traced(folder: Path) -> None:
    """Two notebooks may give different functions one name."""
    for scale in (2.0, 3.0):
        assert computed(lambda x, scale=scale: x * scale) == (2 * scale, False)
    assert not stored(folder)


def test_settings_of_jax_and_switched_off_kernels_are_part_of_the_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed()
    with monkeypatch.context() as changed:
        changed.setattr(optional_kernels, "_off", {PAGED_ATTENTION})
        assert not computed()[1]
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=false")
        assert not computed()[1]
    jax.config.update("jax_debug_nans", True)
    try:
        assert not computed()[1]
    finally:
        jax.config.update("jax_debug_nans", False)
    assert computed()[1]


@pytest.mark.parametrize("kind", ["program", "code", "executable"])
@pytest.mark.parametrize("fault", ["gone", "cut short", "garbage", "not readable"])
def test_a_damaged_entry_is_compiled_again(folder: Path, kind: str, fault: str) -> None:
    expected, _ = computed()
    programs, codes = stored(folder), list(folder.glob("*-code-cache"))
    files = {"program": programs, "code": codes}
    files["executable"] = [path for path in folder.glob("jit*-cache") if path not in codes]
    assert len(programs) == len(codes) == 1 and files["executable"]
    for path in files[kind]:
        if fault == "not readable":
            path.unlink()
            path.mkdir()
        elif fault == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-40] if fault == "cut short" else b"no entry")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, about its own entries
        assert computed() == (expected, False)
        again = computed()
    assert again == (expected, fault != "not readable")


@pytest.mark.parametrize("setting", ["jax_compilation_cache_dir", "jax_enable_compilation_cache"])
def test_without_jaxs_cache_nothing_is_stored(folder: Path, setting: str) -> None:
    before = getattr(jax.config, setting)
    jax.config.update(setting, None if setting.endswith("dir") else False)
    try:
        jax_cache.reset_cache()
        assert not computed()[1] and not computed()[1] and not list(folder.iterdir())
    finally:
        jax.config.update(setting, before)


@pytest.mark.parametrize(
    "needs", ["a Python function", "values of a device", "values within a function"]
)
def test_a_program_that_needs_more_than_its_arguments_is_not_stored(
    folder: Path, needs: str
) -> None:
    constant = jnp.arange(2000.0)

    @traced
    def body(x: jax.Array) -> jax.Array:
        if needs == "values of a device":
            return x + constant[7]
        if needs == "values within a function":
            return jax.jit(lambda x: x + constant[7])(x)
        return jax.pure_callback(lambda x: x + 7, x, x)

    assert computed(body) == (9.0, False) and computed(body) == (9.0, False)
    assert not stored(folder)


def test_programs_of_something_without_a_digest_have_no_store() -> None:
    mesh = jax.make_mesh((1, 1), ("dp", "kv"))
    assert program_store(mesh, "model") is not None
    assert program_store(mesh, lambda: "a model of a notebook") is None


def prefilled() -> tuple[str, int, int]:
    """Prefills a prompt on a new executor. Returns the sampled token with its log-probabilities,
    the number of programs, and how many of them were found."""
    executor = prefiller(LLAMA, "dp=2,tp=2")
    try:
        tokens = run(executor, part(0, 0, 0, prompt(3, 40), 0, 40, GREEDY))
        return repr(tokens[0, 0]), executor.programs.compilations, executor.programs.found
    finally:
        executor.close()


STARTS = """
import json, sys
import tests.conftest
from jdisagg.executor.program_cache import use_compilation_cache
from tests.executor.test_program_store import prefilled
use_compilation_cache(sys.argv[1])
print(json.dumps(prefilled()))
"""


@pytest.mark.ci
def test_the_next_process_finds_every_program_and_computes_the_same(tmp_path: Path) -> None:
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", STARTS, str(tmp_path)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
        )
        for _ in range(2)
    )
    token, count, found = first
    assert found == 0 and count > 5
    assert second == [token, count, count]
