"""The flag by which a router writes its decisions down, and what it comes to."""

import contextlib

from absl import flags

from jdisagg.observe.decision_log import DecisionLog

_LOG = flags.DEFINE_string(
    "decision_log", "", "File for every decision of the router, to be replayed; see launch.replay_decisions. '' is off."
)


def open_decision_log() -> contextlib.AbstractContextManager[DecisionLog | None]:
    """The log, where one is asked for. Open it before anything is loaded or listens, and close it when nothing decides any more. Raises
    ConfigError when the file cannot be opened."""
    return DecisionLog(_LOG.value) if _LOG.value else contextlib.nullcontext()
