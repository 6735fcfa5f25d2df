"""Real workers of a kind that were given other autotune results do not move float32 sequences."""

from pathlib import Path

import msgspec
import pytest

from jdisagg.assembly import Worker
from jdisagg.clock import MonotonicClock
from jdisagg.errors import ConfigError, IncompatiblePeerError
from jdisagg.messages.ports import HandoffSource, PeerHello
from jdisagg.node.peer_ports import PeerPorts
from jdisagg.node.worker import WorkerRuntime
from jdisagg.service.internal.connection import Credentials
from jdisagg.settings.timeouts import CallTimeouts
from tests.launch.role_lives import DECODE, PREFILL, worker

pytestmark = pytest.mark.ci


async def test_what_a_worker_says_of_its_results_decides_whom_it_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / name for name in "ab"}
    for name, path in files.items():
        path.write_text(name)
    built: list[Worker] = []
    build = WorkerRuntime._worker
    monkeypatch.setattr(
        WorkerRuntime, "_worker", lambda *args: built.append(build(*args)) or built[-1]
    )
    hellos: list[PeerHello] = []
    ports = PeerPorts(Credentials(), MonotonicClock(), CallTimeouts())
    for role, name in ((DECODE, "a"), (PREFILL, "b"), (DECODE, "b")):
        async with worker(role=role, layout="tp=1", autotune_results=str(files[name])) as running:
            hellos.append(built[-1]._hello)
            if len(hellos) < 3:
                continue
            (kind, _, digest), (_, _, other) = (
                hello.tuning.rpartition(":") for hello in (hellos[2], hellos[0])
            )
            assert hellos[0].tuning == f"{kind}:{other}" and digest != other
            assert not hellos[1].tuning.startswith(f"{kind}:"), "other programs"
            peer = ports.find(HandoffSource("w", 1, running.address))
            both = f"results are {digest} on 'w' and {other} on 'w'.*limits.tuned_apart"
            with pytest.raises(IncompatiblePeerError, match=both):
                await peer.hello(hellos[0])
            assert await peer.hello(msgspec.structs.replace(hellos[0], tuning=hellos[2].tuning))
    await ports.close()


async def test_results_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="autotune_results=.*cannot be read"):
        async with worker(autotune_results=str(tmp_path / "nowhere")):
            pass
