"""The cache of compiled programs, shared by several processes."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache as jax_cache

from jdisagg.executor.program_cache import ProgramCache
from tests.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
# A process that compiles `count` programs and says which it compiled itself. It begins when the
# folder holds a file `go`, so that several begin together.
COMPILES = """
import json, os, sys, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jdisagg.executor.program_cache import use_compilation_cache

folder, count = sys.argv[1], int(sys.argv[2])
use_compilation_cache(folder)
missed = []
jax.monitoring.register_event_listener(
    lambda event, **_: missed.append(event) if event.endswith("cache_misses") else None
)
inputs = jax.device_put(__import__("numpy").ones(8, "float32"))
print("ready", flush=True)
while not os.path.exists(folder + "/go"):
    time.sleep(0.001)
for number in range(count):
    body = lambda x, n=number: jnp.fft.fft(jnp.sin(x + n)).real.sum() * jnp.linalg.norm(x)
    jax.jit(body)(inputs)
print(json.dumps(len(missed)))
"""


# A process that is compiling a program until it is killed.
BEGINS = """
import sys, time
from pathlib import Path
from jdisagg.executor.program_cache import ProgramCache

assert ProgramCache(Path(sys.argv[1])).get("a") is None
print("compiling", flush=True)
time.sleep(600)
"""


def started(program: str, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith("-cache")]


def others(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith("-cache")]


@pytest.mark.ci
def test_processes_that_start_cold_together_compile_each_program_once(tmp_path: Path) -> None:
    processes = [started(COMPILES, str(tmp_path), "12") for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    compiled = [json.loads(process.communicate()[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(compiled) == len(entries(tmp_path)) >= 12
    assert others(tmp_path) == ["go"], "no locks and no halves are left"


def test_jax_keeps_its_programs_in_this_cache() -> None:
    jax.jit(lambda x: x * 3 - 1)(jax.numpy.ones(3, "float32"))
    assert isinstance(jax_cache._cache, ProgramCache)
    assert jax_cache._cache._path == PROGRAMS


def in_a_thread(cache: ProgramCache, key: str) -> "tuple[threading.Thread, list[bytes | None]]":
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(cache.get(key)), daemon=True)
    thread.start()
    return thread, got


def test_who_asks_for_a_program_that_is_being_compiled_waits_for_it(tmp_path: Path) -> None:
    mine, its = ProgramCache(tmp_path), ProgramCache(tmp_path)
    assert mine.get("a") is None
    thread, got = in_a_thread(its, "a")
    assert its.get("b") is None, "another program is nobody's business"
    assert not got
    mine.put("a", b"program")
    thread.join()
    assert got == [b"program"]


def test_a_compiler_that_is_killed_holds_nobody_up(tmp_path: Path) -> None:
    process = started(BEGINS, str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == "compiling\n"
    thread, got = in_a_thread(ProgramCache(tmp_path), "a")
    time.sleep(0.1)
    assert not got
    process.kill()
    process.communicate()
    thread.join()
    assert got == [None], "it compiles the program itself"


@pytest.mark.parametrize("end", ["the next program", "JAX says that it is done", "patience"])
def test_a_compilation_without_an_entry_holds_nobody_up_for_long(tmp_path: Path, end: str) -> None:
    """It failed, or its program cannot be kept."""
    mine = ProgramCache(tmp_path)
    its = ProgramCache(tmp_path, longest_wait=0.1 if end == "patience" else 600)
    assert mine.get("a") is None
    thread, got = in_a_thread(its, "a")
    if end == "the next program":
        assert mine.get("b") is None
    elif end == "JAX says that it is done":
        mine.on_event("/jax/core/compile/backend_compile_duration", 1.0)
    thread.join()
    assert got == [None]


def test_an_entry_appears_whole_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "a-cache").write_bytes(b"prog")
    cache = ProgramCache(tmp_path)
    assert cache.get("a") == b"prog"
    cache.put("a", b"program")
    assert cache.get("a") == b"program" and others(tmp_path) == []


def test_a_folder_that_is_gone_is_no_reason_to_fail_before_something_is_kept(
    tmp_path: Path,
) -> None:
    cache = ProgramCache(tmp_path / "gone")
    assert cache.get("a") is None
    with pytest.raises(FileNotFoundError):  # which JAX turns into a warning
        cache.put("a", b"program")
