"""Blocks as files, over real folders: what was written comes back bit for bit, in this process or
in a later one, and whatever happens to a file or to its disk is a miss with a word of why."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from jdisagg.transfer import block_file, disk_store
from jdisagg.transfer.block_file import SavedArray, read_block, write_block
from jdisagg.transfer.disk_store import DiskOutcome, directory_secret
from tests import time_scale
from tests.transfer.disks import OTHER_SPACE, SPACE, SUMS, Disk, block, equal, name

Opened = Callable[..., Disk]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setattr(disk_store, "CLOSE_SECONDS", time_scale.seconds(60))  # then it is closed
    disks: list[Disk] = []

    def open_(space: bytes = SPACE) -> Disk:
        disks.append(Disk(tmp_path / "kv", space))
        return disks[-1]

    yield open_
    for one in disks:
        one.close()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "kv").rglob("*.kv"))


def test_what_was_written_comes_back_bit_for_bit_here_and_in_a_later_store(
    opened: Opened, tmp_path: Path
) -> None:
    disk = opened()
    assert disk.found == DiskOutcome()
    assert disk.write(1).error == disk.write(2).error == ""
    for _ in range(2):
        came = disk.read(1)
        assert came.error == "" and came.checksums == SUMS and equal(came.arrays, block(1))
        disk.close()
        disk = opened()
        assert sorted(disk.found.names) == [name(1), name(2)] and not disk.found.skipped
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))


def test_blocks_are_found_in_the_order_of_their_last_use_and_a_chains_end_before_its_beginning(
    opened: Opened,
) -> None:
    disk = opened()
    for number in range(4):
        disk.write(number, index=1000 * number)
    disk.read(3)  # as a first block
    disk.close()
    assert opened().found.names == (name(2), name(1), name(0), name(3))


def test_a_block_is_as_old_as_it_was_written_long_ago_however_lately_it_was_used(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(disk_store, "time", SimpleNamespace(time=lambda: now))
    disk = opened()
    for number in range(3):
        disk.write(number)
        now += 100.0
    disk.read(0)
    disk.close()
    now += 1000.0
    disk = opened()
    ages = dict(zip(disk.found.names, disk.found.ages, strict=True))
    assert ages == {name(0): 1300.0, name(1): 1200.0, name(2): 1100.0}
    disk.close()
    now = 1e9 + 150.0  # the clock was set back
    assert sorted(opened().found.ages) == [0.0, 50.0, 150.0]


def test_a_namespace_finds_nothing_of_another_and_touches_none_of_it(
    opened: Opened, tmp_path: Path
) -> None:
    disk = opened()
    disk.write(1)
    other = opened(OTHER_SPACE)
    assert other.found == DiskOutcome() and other.read(1).error == "gone"
    assert other.remove_all().error == ""
    assert disk.read(1).error == ""
    # a file of the one in the folder of the other is skipped, and left
    (path,) = files(tmp_path)
    other.write(2)
    (ours,) = [one for one in files(tmp_path) if one != path]
    copied = ours.with_name(path.name)
    copied.write_bytes(path.read_bytes())
    assert other.read(1).error == "foreign"
    other.close()
    other = opened(OTHER_SPACE)
    assert other.found.names == (name(2),) and other.found.skipped == (("foreign", 1),)
    assert copied.exists()


@pytest.mark.parametrize("part", ["front", "header", "digest", "payload", "end", "cut"])
def test_a_file_that_is_spoiled_is_a_miss(part: str, opened: Opened, tmp_path: Path) -> None:
    disk = opened()
    disk.write(1)
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    payload = sum(one.array.nbytes for one in block(1))
    first = len(content) - payload
    at = {"front": 3, "header": 40, "digest": first - 1, "payload": first}.get(part, -1)
    content[at] ^= 0x10
    path.write_bytes(content[:500] if part == "cut" else content)
    came = disk.read(1)
    assert came.error in ("format", "spoiled", "truncated") and not came.arrays
    disk.close()
    found = opened().found
    if part in ("payload", "end"):  # which is looked at when it is read
        assert found.names == (name(1),)
    else:
        assert not found.names and sum(count for _, count in found.skipped) == 1
        assert (part == "cut") == (found.skipped == (("truncated", 1),))
        assert not path.exists()


def test_every_truncation_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "one.kv"
    write_block(path, SPACE, name(1), block(1), SUMS)
    whole = path.read_bytes()
    for length in [*range(0, 700, 29), *range(700, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(block_file.SpoiledFileError) as caught:
            read_block(path, SPACE, name(1))
        assert caught.value.cause == "truncated"
    path.write_bytes(whole + b"x")
    with pytest.raises(block_file.SpoiledFileError):
        read_block(path, SPACE, name(1))


def test_what_is_no_block_of_ours_is_a_miss_and_left_for_whoever_reads_it(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = opened()
    disk.write(1)
    (path,) = files(tmp_path)
    renamed = path.rename(path.with_name(name(2).hex() + ".kv"))
    assert disk.read(2).error == "foreign" and disk.read(1).error == "gone"
    renamed.rename(path)
    with monkeypatch.context() as patched:
        patched.setattr(block_file, "VERSION", 2)
        assert disk.read(1).error == "version"
        disk.close()
        other = opened()
        assert other.found.skipped == (("version", 1),)
        other.close()
    folder = path.parent
    (folder / ("ab" * 32 + ".kv")).mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / ("cd" * 32 + ".kv")).write_bytes(b"no block at all, but long enough" * 9)
    found = opened().found
    assert found.names == (name(1),)
    assert dict(found.skipped) == {"failed": 1, "format": 1}
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_that_vanishes_is_a_disk_that_is_gone(opened: Opened, tmp_path: Path) -> None:
    disk = opened()
    disk.write(1)
    (tmp_path / "kv").rename(tmp_path / "away")
    assert disk.read(1).error == disk.write(2).error == "gone"
    assert disk.remove(1).error == disk.remove_all().error == ""  # nothing is there
    assert not (tmp_path / "kv").exists()
    (tmp_path / "away").rename(tmp_path / "kv")
    assert disk.read(1).error == disk.write(2).error == ""


def test_a_file_in_place_of_the_folder_is_no_disk(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("in the way")
    for folder in (tmp_path / "kv", tmp_path / "kv" / "kv"):
        disk = Disk(folder)
        assert disk.found.error == "gone"
        assert disk.write(1).error == disk.read(1).error == "gone"
        disk.close()
    one, other = (directory_secret(str(tmp_path / "kv")) for _ in range(2))
    assert len(one) == 32 and one != other, "each process has its own"


def test_a_disk_that_takes_or_forgets_nothing_says_so_and_goes_on_when_it_is_well(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = opened()
    disk.write(1)
    for number, word in ((errno.ENOSPC, "full"), (errno.EROFS, "read_only"), (errno.EIO, "failed")):
        refuse = Mock(side_effect=OSError(number, os.strerror(number)))
        with monkeypatch.context() as patched:
            patched.setattr(block_file.os, "replace", refuse)
            assert disk.write(2).error == word and refuse.called
            assert not list(files(tmp_path)[0].parent.glob("*.unfinished"))
            patched.setattr(Path, "unlink", refuse)
            assert disk.remove_all().error == word and len(files(tmp_path)) == 1
    assert disk.read(1).error == disk.write(2).error == disk.read(2).error == ""
    assert disk.remove_all().error == "" and not files(tmp_path)


def test_two_workers_of_a_directory_have_a_folder_each_and_one_empties_those_who_are_gone(
    opened: Opened, tmp_path: Path
) -> None:
    first, second = opened(), opened()
    first.write(1)
    second.write(1)
    second.write(2)
    assert len({path.parent for path in files(tmp_path)}) == 2
    assert first.remove_all().error == ""  # the second lives
    assert [path.stem for path in files(tmp_path)] == [name(1).hex(), name(2).hex()]
    second.close()
    assert first.remove_all().error == "" and not files(tmp_path)


def test_a_slow_disk_holds_up_reads_no_more_than_itself(opened: Opened) -> None:
    """Writes wait for the disk; reads go on, and so does whoever closes."""
    disk, stuck, go_on = opened(), threading.Event(), threading.Event()
    disk.write(1)

    def slow() -> tuple[SavedArray, ...]:
        stuck.set()
        go_on.wait(time_scale.seconds(60))
        return block(2)

    writing = disk.store.write(name(2), 0, slow, SUMS)
    assert stuck.wait(time_scale.seconds(30))
    assert disk.read(1).error == "" and not writing.done()
    waiting = disk.store.remove([name(1)])
    go_on.set()
    disk.close()
    assert writing.result(time_scale.seconds(30)).error == ""
    assert waiting.result(time_scale.seconds(30)).error in ("", "gone")
    assert disk.read(1).error == disk.write(3).error == "gone"  # closed


CHILD = """
import os, sys, threading
from pathlib import Path
from tests.transfer.disks import Disk
from jdisagg.transfer import block_file
disk = Disk(Path(sys.argv[1]))
disk.write(1)
def never(*_):
    print("writing", flush=True)
    threading.Event().wait()
block_file.os.replace = never
disk.write(2)
"""


def test_kill_9_in_the_midst_of_a_write_leaves_what_was_written_before(
    opened: Opened, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "kv")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        folder = files(tmp_path)[0].parent
        assert len(list(folder.glob("*.unfinished"))) == 1
        assert opened().write(3).error == ""  # in a folder of its own, while the child lives
        assert len(list(folder.glob("*.kv"))) == 1
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    disk = opened()
    assert disk.found.names == (name(1),) and disk.found.skipped == (("unfinished", 1),)
    assert equal(disk.read(1).arrays, block(1))
    assert not list(folder.glob("*.unfinished"))


def test_the_secret_beside_the_blocks_is_the_same_in_each_process_and_nobody_elses_to_read(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "kv")
    secret = directory_secret(folder)
    path = tmp_path / "kv" / disk_store.SECRET
    assert len(secret) == 32 and directory_secret(folder) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in (tmp_path / "kv").iterdir()] == [disk_store.SECRET]
    path.write_bytes(b"short")
    assert len(directory_secret(folder)) == 32
    assert directory_secret(folder) == directory_secret(folder) != secret
