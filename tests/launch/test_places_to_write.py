"""What is to be written where nothing can be is refused at the start, by name, before anything is
loaded or listens."""

from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.node.cluster_log import ClusterLog
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from tests.launch.script_ends import not_refused


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
