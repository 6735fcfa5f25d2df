"""Merges the timelines that several processes recorded into one trace for Perfetto
(https://ui.perfetto.dev).

    jdisagg trace --inputs=DIR --output=trace.json
    jdisagg trace --inputs=DIR --output=trace.json --request=ID

DIR is the folder that was given to the processes as --timelines."""

from pathlib import Path

import msgspec

from jdisagg.errors import ConfigError
from jdisagg.observe.trace_events import merge, read_timelines, slowest
from launch.console import run
from launch.flags import define

flags = define("inputs", "output", "request", "slowest", required=("inputs",), output="trace.json")


def main() -> None:
    files = read_timelines(flags.inputs)
    requests = None if flags.request is None else (flags.request,)
    if flags.slowest and requests is None:
        requests = slowest(files, flags.slowest)
    trace = merge(files, requests)
    try:
        Path(flags.output).write_bytes(msgspec.json.encode(trace))
    except OSError as error:
        raise ConfigError(f"--output={flags.output} cannot be written: {error}") from error
    if not trace.traceEvents:
        wanted = "any request" if flags.request is None else f"request {flags.request!r}"
        raise ConfigError(
            f"no event of {wanted} in {flags.inputs}; the ring keeps the newest events only"
        )
    print(f"{len(trace.traceEvents)} events of {len(files)} processes in {flags.output}")


if __name__ == "__main__":
    run(main, flags)
