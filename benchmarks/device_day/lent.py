"""Can two processes on one GPU read each other's arrays by CUDA memory handles, how fast, and what
does the reader see if the exporting process is killed?

    python -m benchmarks.device_day.lent --megabytes=1024 [--allocator=platform]

This process reads and a child process exports; each has its share of the device's memory. Prints
one line of JSON. On a CPU the tests' imitation of the driver is used, so that the script runs
everywhere."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Client, Listener

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.errors import JdisaggError
from jdisagg.messages.kv_plane import OnDevice, Posted
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.cuda_driver import CudaDriver, Driver
from jdisagg.transfer.device_memory import DeviceInlet, DeviceLeaf, LentMemory

ROUNDS = 8
SECONDS = 60.0


def driver() -> Driver:
    if jax.default_backend() == "gpu":
        return CudaDriver()
    from tests.transfer.cuda_stand_in import StandIn

    return StandIn()


def values(count: int) -> jax.Array:
    """Returns values that float32 represents exactly and that differ between neighbours."""
    return jax.jit(lambda: jnp.arange(count, dtype=jnp.float32) % 65521)()


def lend(port: int, count: int) -> None:
    """Main function of the child: reports where its array is, or why it cannot be exported, and
    keeps it."""
    parent = Client(("127.0.0.1", port))
    try:
        memory = LentMemory(driver())
        memory.check(jax.devices()[:1])
        array = jax.block_until_ready(values(count))
        allocation, offset = memory.lend(array)
        parent.send(OnDevice((allocation,), (0,), (offset,)))
    except JdisaggError as error:
        return parent.send(error.message)
    parent.recv()
    del array


def settled(leaf: DeviceLeaf) -> DeviceLeaf:
    end = time.monotonic() + SECONDS
    while not leaf.is_ready():
        if time.monotonic() > end:
            raise TimeoutError("a copy hangs")
    return leaf


def read(lies: OnDevice, count: int, child: subprocess.Popen[bytes]) -> dict[str, object]:
    memory = LentMemory(driver())
    inlet = DeviceInlet(memory)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((count,), jnp.float32, sharding=place)

    def begun() -> DeviceLeaf:
        return inlet.pull(AnnouncedArrays(Posted(1, 1, "", 1, (), lies), [aval]))[0]

    wanted = values(count)
    began = time.perf_counter()
    first = settled(begun()).array()
    opened = time.perf_counter() - began
    equal = bool(jnp.array_equal(first, wanted))
    rates = []
    del first
    for _ in range(ROUNDS):
        began = time.perf_counter()
        settled(begun()).array()
        rates.append(4 * count / (time.perf_counter() - began) / 1e9)
    child.send_signal(signal.SIGSTOP)  # a lender that hangs harms no reader
    stopped = bool(jnp.array_equal(settled(begun()).array(), wanted))
    under_way = begun()
    under_way.is_ready()  # the copy is begun
    child.kill()
    child.wait()
    killed = settled(under_way).error
    after = settled(begun()).error
    inlet.close(in_flight=True)
    memory.close()
    return {
        "equal": equal,
        "equal while the lender is stopped": stopped,
        "first ms": round(1e3 * opened, 2),
        "GB/s": float(np.median(rates)),
        "copy under way at the lender's death": killed or "arrived",
        "copy begun after it": after or "arrived",
        "the reader still computes": bool(jnp.array_equal(values(count), wanted)),
        "kept": memory.kept(),
    }


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1024.0)
    parser.add_argument("--allocator", help="XLA_PYTHON_CLIENT_ALLOCATOR of the lender.")
    given = parser.parse_args()
    count = int(given.megabytes * 2**20 / 4)
    environment = dict(os.environ)
    if given.allocator:
        environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = given.allocator
    with Listener(("127.0.0.1", 0)) as listener:
        port = listener.address[1]  # type: ignore[misc]
        program = f"from benchmarks.device_day.lent import lend; lend({port}, {count})"
        child = subprocess.Popen([sys.executable, "-c", program], env=environment)
        try:
            connection = listener.accept()
            lies = connection.recv()
            figures = read(lies, count, child) if isinstance(lies, OnDevice) else {"not lent": lies}
            print(json.dumps(figures))
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
