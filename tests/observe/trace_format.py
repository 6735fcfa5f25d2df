"""The rules of the Trace Event Format that our traces must keep, written from its specification and
not from our code."""

import json
from collections import defaultdict

Json = dict[str, object]


def check(trace: object) -> list[dict]:
    """Raises AssertionError for what a viewer would misread; returns the events that are no
    metadata."""
    trace = json.loads(json.dumps(trace))
    assert isinstance(trace, dict) and isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    shown: list[dict] = []
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(
                event["args"]["name"], str
            )
            if event["name"] == "process_name":
                processes.add(event["pid"])
            else:
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] in ("X", "i"), event
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert isinstance(event["args"], dict) and isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int | float) and event["dur"] >= 0
        else:
            assert event["s"] in ("t", "p", "g") and "dur" not in event
        shown.append(event)
    rows = defaultdict(list)
    for event in shown:
        assert (event["pid"], event["tid"]) in named and event["pid"] in processes, (
            "every row and process has a name"
        )
        if event["ph"] == "X":
            rows[(event["pid"], event["tid"])].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for at, (start, end) in enumerate(spans):
            for other_start, other_end in spans[at + 1 :]:
                apart = end <= other_start or other_end <= start
                inside = (start <= other_start and other_end <= end) or (
                    other_start <= start and end <= other_end
                )
                assert apart or inside, "complete events of one row nest or are apart"
    return shown
