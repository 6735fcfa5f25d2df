"""benchmarks/STATUS.md says what benchmarks/results holds."""

import json
import shutil
from pathlib import Path

from benchmarks import status


def test_the_committed_page_is_what_the_script_writes():
    assert status.PAGE.read_text() == status.page(), "run python -m benchmarks.status"


def test_a_missed_goal_and_a_partly_met_one_are_told_apart(tmp_path: Path):
    shutil.copytree(status.RESULTS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "handoff.json"
    figures = json.loads(file.read_text())
    pairs = [pair for name, pair in figures.items() if name.endswith("64 MB")]
    for pair in pairs:
        pair["pulled ahead"]["of bare"] = 0.5
        pair["inserted ahead"]["of bare"] = 0.5
    pairs[0]["inserted ahead"]["of bare"] = 0.6
    file.write_text(json.dumps(figures))

    page = status.page(tmp_path)

    assert "| 64 MB: pulled | at least 0.9 | 0.5 | no | handoff |" in page
    assert "| 64 MB: inserted, verified | at least 0.6 | 0.5 to 0.6 | 1 of 6 | handoff |" in page
