"""Commands on disk with real files and real host memory: what went to disk comes back into host
memory bit for bit, what nobody expects any more is dropped, and a disk that hangs holds up no
end."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.executor.saved_blocks import DiskReading, SavedBlocks
from jdisagg.messages.step_commands import (
    SLOW,
    DiskCommand,
    DiskResult,
    FindSaved,
    LoadBlock,
    RemoveSaved,
    SaveBlock,
)
from jdisagg.transfer import block_file, disk_store
from jdisagg.transfer.host_store import HostStore
from tests import time_scale

NAME, SPACE, LONG = b"n" * 32, b"s" * 32, 600.0


class Kept:
    """Host memory, and a disk behind it."""

    def __init__(self, folder: Path, shards: int = 2) -> None:
        self.host = HostStore("test")
        self.saved = SavedBlocks(str(folder), "test", self.host, shards)
        self.found = self.run(FindSaved(0, SPACE, LONG))

    def put(self, offer_id: int, value: float) -> None:
        mesh = jax.make_mesh((1, 2, 1), ("dp", "kv", "rep"), devices=jax.devices()[:2])
        sharding = jax.NamedSharding(mesh, jax.P("dp", None, "kv"))
        block = jnp.arange(2 * 4 * 16 * 2, dtype=jnp.float32).reshape(1, 2, 4, 16, 2) + value
        copy = self.host.put(offer_id, jax.device_put(block, sharding), 0)
        copy.done.result(time_scale.seconds(60))

    def run(self, command: DiskCommand) -> DiskResult:
        return waited(self.saved.issue(command))

    def bytes_of(self, offer_id: int) -> dict[object, bytes]:
        shards = self.host.shards(offer_id)
        assert shards is not None
        return {box: np.asarray(array).tobytes() for box, array in shards.items()}

    def close(self) -> None:
        self.saved.close()
        self.host.close()


def waited(reading: DiskReading) -> DiskResult:
    until = time.monotonic() + time_scale.seconds(60)
    while not reading.is_ready():
        assert time.monotonic() < until
        time.sleep(0.001)
    return reading.result()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(disk_store, "CLOSE_SECONDS", time_scale.seconds(60))  # then it is closed
    one = Kept(tmp_path / "kv")
    yield one
    one.close()


def test_what_went_to_disk_comes_back_into_host_memory_bit_for_bit(
    kept: Kept, tmp_path: Path
) -> None:
    for offer_id in (1, 2):
        kept.put(offer_id, 0.5 * offer_id)
    before = [kept.bytes_of(offer_id) for offer_id in (1, 2)]
    assert len(before[0]) == 2  # a shard each
    saved = kept.run(SaveBlock(1, NAME, 0, (1, 2), (11, 12), LONG))
    assert saved.error == "" and saved.bytes_moved > 2 * 2 * 4 * 16 * 2 * 4
    loaded = kept.run(LoadBlock(2, NAME, 0, (5, 6), LONG))
    assert (loaded.step, loaded.error, loaded.checksums) == (2, "", (11, 12))
    assert [kept.bytes_of(offer_id) for offer_id in (5, 6)] == before
    kept.close()
    again = Kept(tmp_path / "kv")
    try:
        assert again.found.names == (NAME,)
        other = Kept(tmp_path / "kv", shards=4)  # laid out otherwise
        assert other.found == DiskResult(0)
        other.close()
        assert again.run(RemoveSaved(3, (), LONG, everything=True)).error == ""
        assert again.run(LoadBlock(4, NAME, 0, (7, 8), LONG)).error == "gone"
    finally:
        again.close()


def test_what_is_not_in_host_memory_is_not_written_nor_are_other_pieces_loaded(kept: Kept) -> None:
    kept.put(1, 0.0)
    kept.host.expect(2)
    assert kept.run(SaveBlock(1, NAME, 0, (1, 2), (11, 12), LONG)).error == "gone"
    assert kept.run(SaveBlock(1, NAME, 0, (1, 3), (11, 12), LONG)).error == "gone"
    assert kept.run(SaveBlock(1, NAME, 0, (1,), (11,), LONG)).error == ""
    assert kept.run(LoadBlock(2, NAME, 0, (5, 6), LONG)).error == "format"
    assert kept.host.shards(5) is None


def test_a_mesh_without_a_disk_fails_every_command() -> None:
    saved = SavedBlocks("", "test", HostStore("test"), 1)
    assert waited(saved.issue(FindSaved(0, SPACE, LONG))).error == "gone"
    assert waited(saved.issue(LoadBlock(0, NAME, 0, (1,), LONG))).error == "gone"
    saved.close()


def test_what_comes_late_is_dropped_where_nobody_expects_it_and_a_hanging_disk_holds_up_no_end(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.put(1, 0.0)
    assert kept.run(SaveBlock(1, NAME, 0, (1,), (11,), LONG)).error == ""
    hangs, go_on = threading.Event(), threading.Event()
    opened = block_file.read_header

    def hang(*arguments: object) -> object:
        hangs.set()
        go_on.wait(time_scale.seconds(120))
        return opened(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(block_file, "read_header", hang)
    late = kept.saved.issue(LoadBlock(2, NAME, 0, (5,), 0.0))
    waiting = kept.saved.issue(LoadBlock(3, NAME, 0, (6,), LONG))
    assert late.is_ready() and late.result().error == SLOW
    assert hangs.wait(time_scale.seconds(60)) and not waiting.is_ready()
    kept.host.forget(5)
    kept.saved.close()  # waits for no read
    assert waited(waiting).error == SLOW
    go_on.set()
    late.done.result(time_scale.seconds(60))
    assert kept.host.shards(5) is None
