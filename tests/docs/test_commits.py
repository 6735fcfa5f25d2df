"""The commits that results name can be found in this history."""

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
    ids = {"ab12cd3": "", "fffffff": "", "eeeeeee": ""}
    assert commits.lost(ids, {"fffffff": "Another", "eeeeeee": "Gone"}, past) == ["eeeeeee"]
