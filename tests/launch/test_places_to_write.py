"""What is to be written where nothing can be is refused at the start, by name, before anything is
loaded or listens."""

from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.node.cluster_log import ClusterLog
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from tests.launch.script_ends import ends


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A folder that cannot be made."""
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "folder")


def test_a_folder_for_compiled_programs_that_cannot_be_made_is_named(nowhere: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "compilation_cache: folder '.*/file/folder' cannot be used: Not a directory; .* '' to"
            " keep no"
        ),
    ):
        use_compilation_cache(nowhere)
    with pytest.raises(
        ConfigError, match="compilation_cache: folder '~nobody-here/x' cannot be used"
    ):
        use_compilation_cache("~nobody-here/x")


def test_a_folder_for_a_clusters_log_that_cannot_be_made_is_named(nowhere: str) -> None:
    with pytest.raises(
        ConfigError,
        match="--cluster_log_dir: folder '.*/file/folder' cannot be used: Not a directory",
    ):
        ClusterLog(False, nowhere, "title")


def test_a_router_that_could_not_write_down_what_it_should_does_not_listen(nowhere: str) -> None:
    (decisions,) = ends("router", ("--port=0", "--http_port=-1", f"--decision_log={nowhere}"))
    assert (decisions.status, decisions.out) == (EXIT_CONFIG, "")
    assert decisions.err.startswith("error: decision log '") and decisions.err.count("\n") == 1


@pytest.mark.ci
def test_a_worker_whose_programs_cannot_be_kept_or_whom_nobody_would_find_is_not_started_again(
    nowhere: str,
) -> None:
    lines = (
        ("--role=decode", "--router=localhost:1", f"--compilation_cache={nowhere}"),
        ("--role=prefill",),
        ("--role=mixed", "--router=,"),
    )
    said = (
        "compilation_cache: folder '",
        "--router=host:port is required for a prefill worker",
        "--router=host:port is required",
    )
    for end, message in zip(ends("worker", *lines), said, strict=True):
        assert (end.status, end.out) == (EXIT_CONFIG, ""), end.err
        assert end.err.startswith(f"error: {message}") and end.err.count("\n") == 1


def test_training_begins_only_when_its_result_can_be_written(nowhere: str, tmp_path: Path) -> None:
    needed = f"--destination={tmp_path / 'model'}"
    lines = (
        (f"--destination={nowhere}",),
        (needed, f"--keep={nowhere}/state"),
        (needed, f"--keep={tmp_path}"),
        (needed, "stray"),
    )
    said = (
        "--destination: folder '",
        "--keep: folder '",
        f"--keep={tmp_path} is a folder; name a file in it",
        "unexpected argument",
    )
    for end, message in zip(ends("train", *lines, package="tools.tiny_models"), said, strict=True):
        assert (end.status, end.out) == (2 if "unexpected" in message else 1, "")
        assert end.err.startswith(f"error: {message}") and end.err.count("\n") == 1, end
