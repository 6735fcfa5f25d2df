"""The engine of a notebook, as its first cells may get it wrong: in a kernel of their own, for the
number of devices is for good."""

import subprocess
import sys
from pathlib import Path

from tests import time_scale
from tests.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
CELLS = """
import sys
from functools import partial

from jdisagg.errors import ConfigError, InvalidRequestError
from launch.notebook import open_engine

opens = partial(open_engine, compilation_cache=sys.argv[1])
engine = opens(devices=2)
assert len(engine.tokenizer.encode("")) == 1, "the tokenizer begins each text with a token"
for cell in (lambda: engine.prefill(""), lambda: opens(devices=4)):
    try:
        cell()
    except (ConfigError, InvalidRequestError) as error:
        print(error)
opens(devices=2).close()
"""


def test_an_empty_text_is_no_prompt_and_another_number_of_devices_needs_another_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELLS, str(PROGRAMS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    empty, devices = done.stdout.splitlines()
    assert empty.startswith("prompt is empty: at least one token is needed")
    assert devices.startswith(
        "devices=4: JAX already runs with 2 in this process; restart the process (a notebook's"
        " kernel), or keep devices=2"
    )
