"""One time scale for all tests: `JDISAGG_TEST_TIME_SCALE=4` gives every wait four times its time,
for a machine that is slow or overloaded.

Tests that wait for something real bound it by `seconds(...)`, and give what they start `timeouts()`
where its own waits would end too early. The product itself reads no environment variable."""

import os

from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, Timeouts

TIME_SCALE = float(os.environ.get("JDISAGG_TEST_TIME_SCALE", "1"))


def seconds(value: float) -> float:
    """So long on a quiet machine, and longer by the scale on another."""
    return value * TIME_SCALE


def timeouts(base: Timeouts = DEFAULT_TIMEOUTS) -> Timeouts:
    """`base` with all its waits scaled."""
    return base.scaled(TIME_SCALE)
