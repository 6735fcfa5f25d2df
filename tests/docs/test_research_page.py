"""The code of docs/research.md runs, block after block, on the model that comes with the
repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import time_scale
from tests.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
AFTER = """
assert [block.token_ids for block in (beginning.join(rest),)] == [kv.token_ids]
assert 0 < error.mean() < 1 and (quiet.distances(kv).sum(axis=(2, 3)) > 0).sum() == 1
assert scores.logits.shape == (len(scores), scores.logits.shape[1])
"""


@pytest.mark.ci
def test_the_code_of_the_page_on_research_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / "docs" / "research.md").read_text())
    code = "".join(blocks).replace(
        "open_engine(devices=8)", f"open_engine(devices=8, compilation_cache={str(PROGRAMS)!r})"
    )
    code = code.replace("devices=8) as", f"devices=8, compilation_cache={str(PROGRAMS)!r}) as")
    assert len(blocks) == 5 and str(PROGRAMS) in code
    done = subprocess.run(
        [sys.executable, "-c", code + AFTER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
