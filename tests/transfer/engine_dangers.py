"""What the bare transfer engine does when it is called in ways that jdisagg avoids: one function a
danger, run in a process of its own.

Each prints nothing and returns what was seen as plain data, or ends the process. `python -m
tests.transfer.engine_dangers NAME...` runs some and prints their findings as one line of JSON. They
need two devices."""

import datetime
import gc
import json
import os
import socket
import sys
import threading
import time

from tests import time_scale

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

PENDING = "pending"
SHORT_SECONDS = 0.4  # long enough to call something pending that takes a millisecond otherwise


def server(transports: int = 2, address: str = "127.0.0.1:0") -> transfer.TransferServer:
    return transfer.start_transfer_server(
        jax.local_devices()[0].client, address, ["127.0.0.1:0"] * transports, transfer_size=1 << 20
    )


def aval(size: int = 8, dtype: type = np.float32, device: int = 1) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        (size,), dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[device])
    )


def values(size: int = 8, number: float = 5.0) -> jax.Array:
    return jax.device_put(np.full(size, number, np.float32), jax.devices()[0])


def seen(array: jax.Array, seconds: float = 20.0) -> str | list[float]:
    """'pending', the error, or the values."""
    end = time.monotonic() + seconds
    while not array.is_ready():  # type: ignore[attr-defined]
        if time.monotonic() > end:
            return PENDING
        time.sleep(0.002)
    try:
        return [float(number) for number in np.asarray(array)[:8]]
    except Exception as error:
        return f"error: {error}"


def in_(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)


def resident_megabytes() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def an_unknown_id() -> object:
    sender, receiver = server(), server()
    return seen(receiver.connect(sender.address()).pull(1, [aval()])[0], SHORT_SECONDS)


def a_timeout_with_and_without_a_tick() -> object:
    sender, receiver = server(), server()
    pulled = receiver.connect(sender.address()).pull(1, [aval()], timeout=in_(0.2))[0]
    without = seen(pulled, SHORT_SECONDS)
    sender.await_pull(2, [values()])
    return [without, seen(pulled)]


def another_dtype() -> object:
    sender, receiver = server(), server()
    sender.await_pull(1, [values()])
    return seen(receiver.connect(sender.address()).pull(1, [aval(dtype=np.int32)])[0])


def another_sharding() -> object:
    sender, receiver = server(), server()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows, columns = (
        jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P("x"), jax.P(None, "x"))
    )
    sender.await_pull(1, [jax.device_put(np.arange(4, dtype=np.float32).reshape(2, 2), rows)])
    pulled = receiver.connect(sender.address()).pull(
        1, [jax.ShapeDtypeStruct((2, 2), np.float32, sharding=columns)]
    )[0]
    jax.block_until_ready(pulled)
    return np.asarray(pulled).tolist()


def a_second_pull() -> object:
    sender, receiver = server(), server()
    connection = receiver.connect(sender.address())
    sender.await_pull(1, [values()])
    return [
        seen(connection.pull(1, [aval()])[0]),
        seen(connection.pull(1, [aval()])[0], SHORT_SECONDS),
    ]


def an_empty_leaf() -> object:
    sender, receiver = server(), server()
    sender.await_pull(1, [values(), values(0)])
    whole, empty = receiver.connect(sender.address()).pull(1, [aval(), aval(0)])
    return [seen(whole), PENDING if not empty.is_ready() else "arrived"]


def a_poisoned_connection() -> object:
    sender, receiver = server(), server()
    connection = receiver.connect(sender.address())
    waiting = connection.pull(1, [aval()])[0]
    connection._poison_connection()
    sender.await_pull(2, [values()])
    after = seen(connection.pull(2, [aval()])[0])
    before = seen(waiting)
    del connection
    sender.await_pull(3, [values()])
    return [before, after, seen(receiver.connect(sender.address()).pull(3, [aval()])[0])]


def a_dropped_server() -> object:
    sender, receiver = server(), server()
    connection = receiver.connect(sender.address())
    sender.await_pull(1, [values()])
    first = seen(connection.pull(1, [aval()])[0])
    waiting = connection.pull(2, [aval()])[0]
    del sender
    gc.collect()
    return [
        first,
        seen(waiting, SHORT_SECONDS),
        seen(connection.pull(3, [aval()])[0], SHORT_SECONDS),
    ]


def an_id_used_again() -> object:
    """The request that its owner forgot takes what was meant for the new one."""
    sender, receiver = server(), server()
    connection = receiver.connect(sender.address())
    forgotten = connection.pull(1, [aval()])[0]
    del forgotten
    time.sleep(0.05)
    again = connection.pull(1, [aval()])[0]
    sender.await_pull(1, [values()])
    return seen(again, SHORT_SECONDS)


def an_error_array() -> object:
    sender, receiver = server(), server()
    array = values()
    sender.await_pull(
        1,
        [
            transfer.make_error_array(
                jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), "given up"
            )
        ],
    )
    return seen(receiver.connect(sender.address()).pull(1, [aval()])[0])


def an_error_array_for_a_waiting_pull() -> object:
    sender, receiver = server(), server()
    array = values()
    waiting = receiver.connect(sender.address()).pull(1, [aval()])[0]
    time.sleep(0.05)
    sender.await_pull(
        1,
        [
            transfer.make_error_array(
                jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), "given up"
            )
        ],
    )
    return seen(waiting)


def an_array_deleted_after_posting() -> object:
    sender, receiver = server(), server()
    array = values()
    sender.await_pull(1, [array])
    array.delete()
    return seen(receiver.connect(sender.address()).pull(1, [aval()])[0])


def an_unpulled_posting() -> object:
    """Megabytes resident: before, with the posting (its Python reference is gone), after another
    was posted under its id."""
    sender = server()
    found = [resident_megabytes()]
    sender.await_pull(1, [jax.block_until_ready(values(32 << 20, 1.0))])
    gc.collect()
    found.append(resident_megabytes())
    sender.await_pull(1, [values()])
    gc.collect()
    return [*found, resident_megabytes()]


def no_transports_at_the_receiver() -> object:
    sender, receiver = (
        server(),
        transfer.start_transfer_server(
            jax.local_devices()[0].client, "127.0.0.1:0", transfer_size=1 << 20
        ),
    )
    sender.await_pull(1, [values()])
    return seen(receiver.connect(sender.address()).pull(1, [aval()])[0], SHORT_SECONDS)


def two_servers_at_one_address() -> object:
    first = server()
    second = server(address=first.address())
    return [first.address() == second.address()]


def garbage_that_is_survived() -> object:
    sender, receiver = server(), server()
    host, port = sender.address().rsplit(":", 1)
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 64,
        b"\xff" * 64,
    ):
        with socket.create_connection((host, int(port)), timeout=time_scale.seconds(5)) as plug:
            plug.sendall(garbage)
    time.sleep(0.2)
    sender.await_pull(1, [values()])
    return seen(receiver.connect(sender.address()).pull(1, [aval()])[0])


def a_program_fed_before_arrival() -> object:
    """Whether a later, unrelated program of the same thread runs."""
    sender, receiver = server(), server()
    pulled = receiver.connect(sender.address()).pull(1, [aval()])[0]
    unrelated = jax.device_put(np.ones(8, np.float32), jax.devices()[1])
    add = jax.jit(lambda x: x + 1)
    add(unrelated).block_until_ready()
    done = threading.Event()

    def work() -> None:
        add(pulled)
        add(unrelated).block_until_ready()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    found = "ran" if done.wait(SHORT_SECONDS) else PENDING
    sender.await_pull(1, [values()])
    return [found, done.wait(10.0)]


# These end the process.


def four_zero_bytes() -> object:
    sender = server()
    host, port = sender.address().rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=time_scale.seconds(5)) as plug:
        plug.sendall(bytes(4))
        time.sleep(20.0)  # a busy machine may take seconds to get there
    return "survived"


def fewer_transports_at_the_receiver() -> object:
    sender, receiver = server(4), server(2)
    sender.await_pull(1, [values()])
    return seen(receiver.connect(sender.address()).pull(1, [aval()])[0], 20.0)


def a_deleted_array() -> object:
    sender = server()
    array = jnp.ones(8)
    array.delete()
    try:
        sender.await_pull(1, [array])
    except Exception as error:
        return f"error: {error}"
    return "accepted"


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}), flush=True)
    os._exit(0)
