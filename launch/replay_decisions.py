"""Decides again what a router decided, from its log: `python -m launch.replay_decisions --log=decisions.jsonl`

A router that runs with --decision_log writes down what each decision was made of. Here each is made again, with the code of this
checkout, and where the answer differs both are shown. Ends with 0 when none does, else with 1. Needs no JAX and no cluster.
"""

import sys

from absl import app, flags

from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.observe.decision_log import read_records
from jdisagg.router.decision_record import answer_of, replay
from launch.console import refuse_words

_FILE = flags.DEFINE_string("log", None, "The decision log.", required=True)
_MOST = flags.DEFINE_integer("show", 10, "At most so many differences are shown.", lower_bound=0)


def main(argv: list[str]) -> int:
    same = different = 0
    try:
        refuse_words(argv)
        for record in read_records(_FILE.value):
            recorded, again = answer_of(record), replay(record)
            if recorded == again:
                same += 1
                continue
            different += 1
            if different <= _MOST.value:
                print(f"recorded: {recorded}\nnow:      {again}")
        if not same + different:
            raise ConfigError(f"decision log {_FILE.value!r} holds no decision; give one that --decision_log wrote while requests came")
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")
    print(f"{same} of {same + different} decisions are the same")
    return 1 if different else 0


if __name__ == "__main__":
    app.run(main)
