"""What `transfer_engine.py` assumes of `jax.experimental.transfer`. If JAX changes one of these,
the countermeasure there must be changed or can be removed.

The full list of measured failure modes is in that module's docstring. Only those are tested here
that no test of the channel would show, and the one that docs/security.md names."""

import ctypes
import datetime
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import transfer

from tests import time_scale

pytestmark = pytest.mark.ci

SHORT_SECONDS = 0.4  # a pull takes a millisecond otherwise


def server() -> transfer.TransferServer:
    address = "127.0.0.1:0"
    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, address, [address] * 2, transfer_size=1 << 20)


def values(size: int = 8) -> jax.Array:
    return jax.block_until_ready(jax.device_put(np.full(size, 5, np.float32), jax.devices()[0]))


def seen(array: jax.Array, seconds: float = 20.0) -> str:
    """Returns "pending", the error, or ""."""
    end = time.monotonic() + seconds
    while not array.is_ready():  # type: ignore[attr-defined]
        if time.monotonic() > end:
            return "pending"
        time.sleep(0.002)
    try:
        array.block_until_ready()
        return ""
    except Exception as error:
        return f"error: {error}"


def test_a_timeout_passes_when_the_sender_next_posts_something_and_not_before() -> None:
    """`EngineOutlet.tick` relies on it."""
    sender, receiver = server(), server()
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.2)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    aval = jax.ShapeDtypeStruct((8,), np.float32, sharding=place)
    pulled = receiver.connect(sender.address()).pull(1, [aval], timeout=soon)[0]
    assert seen(pulled, SHORT_SECONDS) == "pending"
    sender.await_pull(2, [values()])
    assert "Pull expired" in seen(pulled)


def test_an_unpulled_posting_holds_its_memory_until_its_id_is_posted_again() -> None:
    """`EngineOutlet.withdraw` relies on it."""

    def megabytes() -> float:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # which keeps freed memory after other tests
        statm = Path("/proc/self/statm").read_text().split()
        return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    sender, before = server(), megabytes()
    sender.await_pull(1, [values(32 << 20)])
    posted = megabytes()
    sender.await_pull(1, [values()])
    assert posted - before > 100
    deadline = time.monotonic() + time_scale.seconds(10)
    while megabytes() - before >= 60 and time.monotonic() < deadline:
        time.sleep(0.05)  # the server frees it in a thread of its own
    assert megabytes() - before < 60


def test_four_zero_bytes_on_the_control_port_abort_the_process() -> None:
    """docs/security.md says so."""
    program = (
        "import jax, socket, time\n"
        "from jax.experimental import transfer\n"
        "here = '127.0.0.1:0'\n"
        "client = jax.local_devices()[0].client\n"
        "sender = transfer.start_transfer_server(client, here, [here] * 2)\n"
        "host, port = sender.address().rsplit(':', 1)\n"
        "plug = socket.create_connection((host, int(port)))\n"
        "plug.sendall(bytes(4))\n"
        "time.sleep(20)\n"  # a busy machine may take seconds to get there
    )
    status = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.DEVNULL,
        timeout=time_scale.seconds(90),
        check=False,
    ).returncode
    assert status == -signal.SIGABRT
