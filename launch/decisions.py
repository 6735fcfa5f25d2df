"""The flag by which a router writes its decisions down, and what it comes to."""

import contextlib
from collections.abc import Iterator

from absl import flags

from jdisagg.dispatch.placing import Placing
from jdisagg.observe.decision_log import DecisionLog

_LOG = flags.DEFINE_string(
    "decision_log", "", "File for every decision of the router, to be replayed; see launch.replay_decisions. '' is off."
)


@contextlib.contextmanager
def logging_decisions(placing: Placing) -> Iterator[None]:
    """Writes them down meanwhile, where that is asked for. Raises ConfigError when the file cannot be opened."""
    if not _LOG.value:
        yield
        return
    with DecisionLog(_LOG.value) as log:
        placing.on_answer = log.write
        try:
            yield
        finally:
            placing.on_answer = None
