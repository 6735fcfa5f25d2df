"""The engine of a notebook, as its first cells may get it wrong: in a kernel of their own, for the number of devices is for good."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CELLS = """
from jdisagg.errors import ConfigError, InvalidRequestError
from launch.notebook import open_engine

engine = open_engine(devices=2, compilation_cache="")
assert len(engine.tokenizer.encode("")) == 1, "the tokenizer begins each text with a token"
for cell in (lambda: engine.prefill(""), lambda: open_engine(devices=4, compilation_cache="")):
    try:
        cell()
    except (ConfigError, InvalidRequestError) as error:
        print(error)
open_engine(devices=2, compilation_cache="").close()
"""


def test_an_empty_text_is_no_prompt_and_another_number_of_devices_needs_another_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", CELLS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    empty, devices = done.stdout.splitlines()
    assert empty.startswith("prompt is empty: at least one token is needed")
    assert devices.startswith("devices=4: JAX runs with 2 in this process, for good; restart it (a notebook's kernel), or keep devices=2")
