"""The engine of a notebook, as its first cells may get it wrong: in a kernel of their own, for the
number of devices is for good."""

import pytest

from tests.launch.script_ends import ended
from tests.programs import PROGRAMS

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


@pytest.mark.ci
def test_an_empty_text_is_no_prompt_and_another_number_of_devices_needs_another_kernel() -> None:
    done = ended("-c", CELLS, str(PROGRAMS))
    assert done.status == 0, done.err
    empty, devices = done.out.splitlines()
    assert empty.startswith("prompt is empty: at least one token is needed")
    assert devices.startswith(
        "devices=4: JAX already runs with 2 in this process; restart the process (a notebook's"
        " kernel), or keep devices=2"
    )
