"""Repeats a router's logged decisions with the code of this checkout, and compares the results with
the log.

    jdisagg replay_decisions --log=decisions.jsonl

A router with --decision_log writes each decision and its inputs. If the repeated decision differs,
both are printed. Exit status 0: no decision differs. Exit status 1: some differ. Needs no JAX and
no cluster."""

from jdisagg.errors import ConfigError
from jdisagg.observe.decision_log import read_records
from jdisagg.router.decision_record import answer_of, replay
from launch.console import run
from launch.flags import define

flags = define("log", "show", required=("log",))


def main() -> int:
    same = different = 0
    for record in read_records(flags.log):
        recorded, again = answer_of(record), replay(record)
        if recorded == again:
            same += 1
            continue
        different += 1
        if different <= flags.show:
            print(f"recorded: {recorded}\nnow:      {again}")
    if not same + different:
        raise ConfigError(
            f"decision log {flags.log!r} holds no decision; give one that --decision_log"
            " wrote while requests came"
        )
    print(f"{same} of {same + different} decisions are the same")
    return 1 if different else 0


if __name__ == "__main__":
    run(main, flags)
