"""What is to be written where nothing can be is refused at the start, by name, before anything is
loaded or listens."""

from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.node.cluster_log import ClusterLog
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from tests.launch.script_ends import not_refused

FULL = Path("/dev/full")  # a file on a full disk


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A folder that cannot be made."""
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "folder")


def test_a_folder_for_compiled_programs_that_cannot_be_made_is_named(nowhere: str) -> None:
    for folder, said in (
        (nowhere, ".*/file/folder' cannot be used: Not a directory; .* '' to keep no"),
        ("~nobody-here/x", "~nobody-here/x' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=f"compilation_cache: folder '{said}"):
            use_compilation_cache(folder)


def test_a_folder_for_a_clusters_log_that_cannot_be_made_is_named(nowhere: str) -> None:
    with pytest.raises(
        ConfigError,
        match="--cluster_log_dir: folder '.*/file/folder' cannot be used: Not a directory",
    ):
        ClusterLog(False, nowhere, "title")


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full")
def test_a_clusters_log_goes_on_when_the_disk_of_its_files_is_full_and_again_has_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefill-0.log"
    file.symlink_to(FULL)
    log = ClusterLog(False, str(tmp_path), "title")
    for line in ("one", "two"):
        log.write("prefill-0", line)
    log.write("decode-0", "three")
    file.unlink()
    log.write("prefill-0", "four")
    log.close()
    lines = [line.partition(" | ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [*lines[:1], *lines[2:]] == ["one", "two", "three", "four"]
    assert lines[1].startswith("lines of log files are lost: prefill-0.log: [Errno 28] No space")
    assert "three" in (tmp_path / "decode-0.log").read_text() and "four" in file.read_text()


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full")
def test_a_decision_log_on_a_full_disk_ends_without_an_error() -> None:
    with DecisionLog(str(FULL)) as log:
        log.answered({}, 0.0, {})  # type: ignore[arg-type]
        assert log.failed


def test_a_router_that_could_not_write_down_what_it_should_does_not_listen(nowhere: str) -> None:
    flags = ("--port=0", "--http_port=-1", f"--decision_log={nowhere}")
    assert not_refused("router", [(flags, "decision log '")], EXIT_CONFIG) == []


@pytest.mark.ci
def test_a_worker_whose_programs_cannot_be_kept_or_whom_nobody_would_find_is_not_started_again(
    nowhere: str,
) -> None:
    kept = f"--compilation_cache={nowhere}"
    missing = "--router=host:port is required"
    rows = (
        (("--role=decode", "--router=localhost:1", kept), "compilation_cache: folder '"),
        (("--role=prefill",), f"{missing} for a prefill worker"),
        (("--role=mixed", "--router=,"), missing),
    )
    assert not_refused("worker", rows, EXIT_CONFIG) == []


def test_training_begins_only_when_its_result_can_be_written(nowhere: str, tmp_path: Path) -> None:
    needed = f"--destination={tmp_path / 'model'}"
    rows = (
        ((f"--destination={nowhere}",), "--destination: folder '"),
        ((needed, f"--keep={nowhere}/state"), "--keep: folder '"),
        ((needed, f"--keep={tmp_path}"), f"--keep={tmp_path} is a folder; name a file in it"),
        ((needed, "stray"), "unexpected argument"),
    )
    found = not_refused(
        "train", rows, lambda said: 2 if "unexpected" in said else 1, package="tools.tiny_models"
    )
    assert found == []
