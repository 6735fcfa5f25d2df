"""The commits that results name can be found in this history."""

import json
from pathlib import Path

import pytest

from benchmarks import commits


@pytest.fixture
def past() -> dict[str, str]:
    found = commits.history()
    if found is None:
        pytest.skip("no git history, or a shallow clone: there is nothing to find commits in")
    if commits.table()["after"] not in found.values():
        pytest.skip("this history was cut or joined: it lacks the commit of the table itself")
    return found


def test_every_commit_that_results_name_is_in_the_history_by_its_id_or_its_subject(
    past: dict[str, str],
) -> None:
    ids = commits.recorded()
    missing = commits.lost(ids, commits.table(), past)
    assert not missing, {name: ids[name] for name in missing}


def test_an_id_that_no_history_has_is_lost_and_one_whose_subject_is_there_is_not() -> None:
    past = {"ab12cd34ef": "One idea", "0123456789": "Another"}
    ids = dict.fromkeys(("ab12cd3", "fffffff", "eeeeeee"), "")
    assert commits.lost(ids, {"fffffff": "Another", "eeeeeee": "Gone"}, past) == ["eeeeeee"]


def test_ids_are_read_wherever_a_record_says_commit(tmp_path: Path) -> None:
    record = {
        "machine": {"commit": "abcdef1", "commit_then": "1111111"},
        "runs": [{"commit": "abcdef2 where a line names no other"}, {"commit": "unknown"}],
    }
    (tmp_path / "one.json").write_text(json.dumps(record))
    (tmp_path / commits.TABLE).write_text(json.dumps({"commit": "abcdef9"}))
    assert commits.recorded(tmp_path) == {"abcdef1": ["one.json"], "abcdef2": ["one.json"]}
