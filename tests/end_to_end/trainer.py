"""A trainer in a process of its own, which offers weights to workers of other processes, and faults
of this process. `main` is the life of the child, which imports JAX."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests import time_scale

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = time_scale.seconds(60.0)
DEVICES = 4
# How the trainer's arrays lie on its devices: arrays of numpy, rows over two devices and two
# copies, columns over four, and of each some.
SPLITS = ("numpy", "rows", "columns", "mixed")


@dataclass
class Trainer:
    """The parent's side."""

    child: "subprocess.Popen[bytes]"
    connection: Connection

    def ask(self, name: str, *arguments: object) -> Any:
        self.connection.send((name, arguments))
        return self.answer()

    def answer(self) -> Any:
        assert self.connection.poll(WAIT_SECONDS), "the trainer does not answer"
        done, result = self.connection.recv()
        assert done, result
        return result

    def offer(self, folder: Path, split: str, lease_seconds: float = 600.0) -> str:
        """Offers a checkpoint's tensors. Returns the offer's name."""
        return self.ask("offer", str(folder), split, lease_seconds)

    def serve(self, folder: Path, layout: str, dtype: str) -> str:
        """Offers a checkpoint's parameters as a worker of this layout serves them."""
        return self.ask("serve", str(folder), layout, dtype)

    def bytes_read(self) -> int:
        return self.ask("bytes_read")

    def flip(self, count: int) -> None:
        """Flips a bit of each of the next blocks on their way."""
        self.ask("flip", count)

    def flipped(self) -> int:
        return self.ask("flipped")

    def stall_at(self, block: int) -> None:
        """Stops at a block, and sends "stalled"."""
        self.ask("stall_at", block)

    def wait_until_stalled(self) -> None:
        assert self.answer() == "stalled"

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(WAIT_SECONDS)


@contextmanager
def trainer() -> Iterator[Trainer]:
    """Starts a trainer, which ends with this context, or with this process."""
    with trainers(1) as (started,):
        yield started


@contextmanager
def trainers(count: int) -> Iterator[list[Trainer]]:
    """Starts the processes of one trainer, which share its devices."""
    with Listener(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.address[1]}"  # type: ignore[misc]
    started: list[Trainer] = []
    try:
        for number in range(count):
            ours, its = Pipe()
            job = f"{number}, {count}, {coordinator!r}"
            program = f"from tests.end_to_end.trainer import main; main({its.fileno()}, {job})"
            command = [sys.executable, "-c", program]
            with its:
                child = subprocess.Popen(command, cwd=ROOT, pass_fds=(its.fileno(),))
            started.append(Trainer(child, ours))
        assert [one.answer() for one in started] == ["started"] * count
        yield started
    finally:
        for one in started:
            one.child.kill()
            one.child.wait()
            one.connection.close()


def main(pipe: int, number: int, count: int, coordinator: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // count}"
    if count > 1:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, count, number)
    connection = Connection(pipe)
    child = _Child(connection)
    connection.send((True, "started"))
    try:
        while True:
            name, arguments = connection.recv()
            try:
                answer = True, getattr(child, name)(*arguments)
            except Exception as error:
                answer = False, repr(error)
            connection.send(answer)
    except EOFError:
        os._exit(0)


class _Child:
    def __init__(self, connection: Connection) -> None:
        import jax

        from jdisagg.config import ServiceConfig
        from jdisagg.transfer.offered_weights import OfferedWeights
        from jdisagg.transfer.shared_memory import Region

        jax.devices()
        self._connection = connection
        self._service = ServiceConfig(port=0)
        self._offer: OfferedWeights | None = None
        self._to_flip = self._flips = self._blocks = 0
        self._stall = -1
        write, block = Region.write, OfferedWeights.block

        def flipping(region: Region, arrays: Any, offsets: Any) -> None:
            write(region, arrays, offsets)
            if self._to_flip > self._flips:
                self._flips += 1
                middle = offsets[0] + arrays[0].nbytes // 2
                region._map[middle] ^= 1

        def stalling(offered: OfferedWeights, parts: Any) -> Any:
            self._blocks += 1
            if self._blocks == self._stall:
                self._connection.send((True, "stalled"))
                time.sleep(WAIT_SECONDS)
            return block(offered, parts)

        Region.write, OfferedWeights.block = flipping, stalling  # type: ignore[method-assign]

    def offer(self, folder: str, split: str, lease_seconds: float) -> str:
        import jax
        from safetensors.numpy import load_file

        from jdisagg import weights

        mesh = jax.make_mesh((2, 2), ("x", "y"))
        tree: dict[str, Any] = {}
        for number, (name, tensor) in enumerate(load_file(f"{folder}/model.safetensors").items()):
            way = SPLITS[number % 3] if split == "mixed" else split
            spec: list[Any] = [None] * tensor.ndim
            if way == "rows" and tensor.shape[0] % 2 == 0:
                spec[0] = "x"
            if way == "columns" and tensor.shape[-1] % 4 == 0:
                spec[-1] = ("x", "y")
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            tree[name] = tensor
            if way != "numpy":
                tree[name] = jax.make_array_from_callback(
                    tensor.shape, sharding, lambda index, tensor=tensor: tensor[index]
                )
        return self._offered(weights.offer(tree, lease_seconds, self._service))

    def serve(self, folder: str, layout: str, dtype: str) -> str:
        import jax
        from flax import nnx

        from jdisagg.layout.axes import Layout
        from jdisagg.node.weights_offer import serve_offer
        from jdisagg.transfer.offered_weights import OfferedWeights
        from launch.model import loader

        parsed = Layout.parse(layout)
        model = loader(folder, dtype)(parsed, jax.devices()[: parsed.devices]).model
        named = {
            "/".join(map(str, path)): variable.get_value()
            for path, variable in nnx.to_flat_state(nnx.state(model))
        }
        return self._offered(serve_offer(OfferedWeights("", named, 600.0, "c" * 32), self._service))

    def _offered(self, offer: Any) -> str:
        if self._offer is not None:
            self._offer.close()
        self._offer = offer
        self._blocks, self._stall = 0, -1
        return offer.name

    def bytes_read(self) -> int:
        assert self._offer is not None
        return self._offer.bytes_read

    def flip(self, count: int) -> None:
        self._to_flip, self._flips = count, 0

    def flipped(self) -> int:
        return self._flips

    def stall_at(self, block: int) -> None:
        self._blocks, self._stall = 0, block
