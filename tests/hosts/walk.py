"""A random walk of conditions over hosts: faults one upon the other under load, each drawn at
random, and all healed now and then, when everything must be whole again.

    python -m tests.hosts.walk --minutes=10 --seed=1 --result=FILE.json

Needs root. Two of each kind of worker and two routers are loaded by clients with deadlines.
Ends with status 1 at the first stream with a wrong token, a stream that hangs, anything that
is not freed, or streams that do not come right again soon after healing."""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.hosts import missing
from tests.hosts.lab import DEADLINE_SECONDS, Lab, Load, lab

ROUND_FAULTS = 6
Strike = Callable[[Lab, random.Random], object]


def _pair(cluster: Lab, draw: random.Random) -> tuple[str, str]:
    source, target = draw.sample([*cluster.names, "client"], 2)
    return source, target


def _link(**conditions: float) -> Strike:
    return lambda cluster, draw: cluster.between(*_pair(cluster, draw), **conditions)


def _cut_off(cluster: Lab, draw: random.Random) -> None:
    cluster.hosts.cut_off(cluster.host(draw.choice(cluster.names)))


def _kill(cluster: Lab, draw: random.Random) -> None:
    name = draw.choice(cluster.names)
    cluster.kill(name)
    time.sleep(draw.uniform(0.0, 2.0))
    cluster.start(name)


def _freeze(cluster: Lab, draw: random.Random) -> None:
    with cluster.frozen(draw.choice(cluster.names)):
        time.sleep(draw.uniform(0.5, 8.0))


STRIKES: dict[str, Strike] = {
    "delay": _link(delay=0.1),
    "jitter": _link(jitter=0.05),
    "loss": _link(loss=0.1),
    "reorder": _link(reorder=0.3),
    "duplicate": _link(duplicate=0.2),
    "narrow": _link(rate=2e6),
    "black hole": _link(largest=1400),
    "reset": _link(reset=0.02),
    "one way lost": _link(drop=True),
    "cut off": _cut_off,
    "kill": _kill,
    "freeze": _freeze,
}


@dataclass
class Walked:
    """What a walk found. `streams` counts streams by how they ended."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    seconds: float = 0.0
    longest_pause_seconds: float = 0.0

    def add(self, load: Load) -> None:
        self.rounds += 1
        self.streams["right"] += len(load.right)
        for one in load.streams:
            self.longest_pause_seconds = max(self.longest_pause_seconds, one.pause_seconds)
            if one.error is not None:
                self.streams[type(one.error).__name__] += 1
            if one.wrong:
                self.streams["wrong"] += 1


def walk(cluster: Lab, seconds: float, seed: int) -> Walked:
    """Walks for at least so many seconds. Raises AssertionError at the first violation."""
    draw, found, began = random.Random(seed), Walked(seed), time.monotonic()
    while time.monotonic() - began < seconds:
        load = Load(cluster.target, 4, DEADLINE_SECONDS)
        for _ in range(ROUND_FAULTS):
            kind = draw.choice(sorted(STRIKES))
            STRIKES[kind](cluster, draw)
            found.faults[kind] += 1
            time.sleep(draw.uniform(0.5, 5.0))
            if draw.random() < 0.3:
                cluster.hosts.heal()
        cluster.hosts.heal()
        cluster.wait_until_up(*cluster.names)
        cluster.check_whole(load, time.monotonic())
        found.add(load)
        print(f"round {found.rounds}: {load.summary()}", flush=True)
    found.seconds = time.monotonic() - began
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path)
    asked = parser.parse_args()
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory() as folder,
        lab(Path(folder), routers=2, prefills=2, decodes=2) as cluster,
    ):
        found = walk(cluster, 60 * asked.minutes, asked.seed)
    text = json.dumps(vars(found), indent=2, sort_keys=True)
    print(text)
    if asked.result:
        asked.result.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
