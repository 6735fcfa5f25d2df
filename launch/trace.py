"""Merges the timelines that processes wrote into one trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    python -m launch.trace --inputs=DIR --output=trace.json
    python -m launch.trace --inputs=DIR --output=trace.json --request=ID

DIR is what the processes were given as --timelines.
"""

import json
import sys
from pathlib import Path

from absl import app, flags

from jdisagg.errors import JdisaggError
from jdisagg.observe.trace_events import merge, read_timelines
from launch.console import quiet_end, refuse_words

_INPUTS = flags.DEFINE_string("inputs", None, "Folder with *.timeline.json files.", required=True)
_OUTPUT = flags.DEFINE_string("output", "trace.json", "File to write.")
_REQUEST = flags.DEFINE_string("request", None, "Only this request id.")


def main(argv: list[str]) -> None:
    with quiet_end():
        try:
            refuse_words(argv)
            files = read_timelines(_INPUTS.value)
            trace = merge(files, _REQUEST.value)
            Path(_OUTPUT.value).write_text(json.dumps(trace))
        except (JdisaggError, OSError) as error:
            sys.exit(f"error: {error}")
        events = trace["traceEvents"]
        assert isinstance(events, list)
        if not events:
            sys.exit(f"error: no event of request {_REQUEST.value!r} in {_INPUTS.value}; the ring keeps the newest events only")
        print(f"{len(events)} events of {len(files)} processes in {_OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
