"""Servers side by side: their start commands, the clients' times, and error reports. No model
server runs here."""

import asyncio
import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import bench_serve, servers, storm
from benchmarks.peers.bench_serve import Load
from benchmarks.peers.servers import KINDS, PEER, Sizes, peer_versions, programs
from jdisagg.errors import ConfigError, UnavailableError
from tests.service.http_doors import http_door

SIZES = Sizes(Path("/models/measured_model"), "float32", (4, 5))


def test_every_server_has_all_cores_and_the_disaggregated_workers_one_each():
    bound = {
        kind: [program.cores for program in programs(kind, SIZES, "python", 8000, 8001)]
        for kind in KINDS
    }
    assert bound == {
        "vLLM": [(4, 5)],
        "unified": [(4, 5)],
        "chunked": [(4, 5)],
        "disaggregated": [(4, 5), (4,), (5,)],
    }
    (peer,) = programs(PEER, SIZES, "python", 8000, 8001)
    assert peer.environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5"


@pytest.mark.parametrize("kind", KINDS)
def test_all_servers_serve_the_same_model_and_ours_have_the_flags_that_they_are_started_with(
    kind: str,
):
    for program in programs(kind, SIZES, "python", 8000, 8001):
        asked = " ".join(program.command)
        assert "/models/measured_model" in asked
        if "launch.router" not in asked:
            assert "--dtype=float32" in asked
            assert ("=32 " in asked or asked.endswith("=32")) and "=2304" in asked, asked
        if kind != PEER:
            page = importlib.import_module(program.command[2])
            flags = {argument[2:].partition("=")[0] for argument in program.command[3:]}
            assert flags <= {*page.flags.names}


def test_a_server_that_still_works_when_it_answers_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servers, "QUIET_SECONDS", 2.0)
    code = "import time\nwhile time.process_time() < 0.6: pass\ntime.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        servers.settle([child], time.monotonic() + 120)
        assert servers.processor_seconds([child]) > 0.5  # of its 0.6; counted in ticks
    finally:
        child.kill()
        child.wait()


def test_two_roles_on_one_core_are_refused():
    with pytest.raises(ConfigError, match="needs two cores"):
        programs("disaggregated", SIZES._replace(cores=(0,)), "python", 8000, 8001)


def test_figures_of_the_client_are_named_and_set_against_the_peer():
    found: dict[str, float] = {name: 2.0 for name in bench_serve.NAMES}
    found |= {"completed": 4, "failed": 0}
    ours = bench_serve.figures(found, 4)
    assert ours["tokens_per_second"] == ours["tbt_p99_ms"] == 2.0
    theirs = bench_serve.medians([{**ours, "tokens_per_second": n} for n in (1.0, 4.0, 9.0)])
    both = bench_serve.against_peer({PEER: theirs, "unified": ours})
    assert both["unified"]["of_peer"] == 0.5
    assert both[PEER]["of_peer"] == 1.0
    assert "of_peer" not in bench_serve.against_peer({"unified": ours})["unified"]


def test_a_run_with_lost_requests_has_no_figures():
    for completed, failed in ((3, 0), (4, 1)):
        found = dict.fromkeys(bench_serve.NAMES, 1.0) | {"completed": completed, "failed": failed}
        with pytest.raises(UnavailableError, match=f"{completed} of 4 requests"):
            bench_serve.figures(found, 4)


def test_the_client_runs_under_the_peers_python_and_its_words_are_told():
    """This Python has no vLLM, and the error reports it."""
    with pytest.raises(UnavailableError, match="No module named 'vllm'"):
        bench_serve.measured(sys.executable, "http://127.0.0.1:1", SIZES, Load("inf"))


def test_a_python_without_the_peer_is_refused_with_the_remedy():
    for python in ("/no/such/python", sys.executable):
        with pytest.raises(ConfigError, match="has no vllm-cpu.*ENV/bin/python"):
            peer_versions(python)


def test_only_gaps_that_end_in_the_time_that_counts_are_counted():
    assert storm.counted_gaps([1.0, 2.0, 4.0, 4.5, 9.0], 2.0, 5.0) == [1.0, 2.0, 0.5]
    assert storm.counted_gaps([], 0.0, 1.0) == []


def test_a_storm_is_set_against_the_idle_time():
    idle = storm.gap_figures([0.010] * 99 + [0.020])
    stormy = storm.gap_figures([0.010] * 50 + [0.040] * 50)
    assert idle["tbt_p50_ms"] == 10.0 and stormy["tbt_p99_ms"] == 40.0
    assert stormy["tbt_max_ms"] == 40.0 and stormy["gaps"] == 100
    ratio = bench_serve.storm_figures({"tbt_p99_ms": 20.0}, stormy)["p99_of_idle"]
    assert ratio == 2.0
    with pytest.raises(ConfigError, match="no stream had two frames"):
        storm.gap_figures([])


async def test_frames_are_timed_as_they_come_over_our_door():
    async with http_door() as door:
        url = f"http://127.0.0.1:{door.port}"

        def read(tokens: int) -> list[float]:
            return list(storm.frames(url, "tiny", [5, 6, 7], tokens))

        door.path.gate.clear()  # the first token alone, until it is set
        begun = asyncio.create_task(asyncio.to_thread(read, 4))
        while not door.path.made_events:
            await asyncio.sleep(0.01)
        door.path.gate.set()
        times = await begun
        assert len(times) == 4
        assert times == sorted(times)


async def test_a_request_that_a_server_refuses_is_told_with_its_words():
    async with http_door() as door:
        url = f"http://127.0.0.1:{door.port}"

        def measure() -> None:
            storm.measured(url, "no-such-model", storm.Storm(1, 4, 8, 0.0, 600.0, 0.0))

        with pytest.raises(UnavailableError, match="requests failed.*no-such-model"):
            await asyncio.to_thread(measure)
