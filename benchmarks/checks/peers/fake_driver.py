"""A driver that speaks the protocol of `benchmarks.peers.link` and knows no model: the n-th token
of a prompt is its first id plus n, and comes n seconds after the question, by a
clock of its own. `misbehave` in the
question to start says what goes wrong at the next one."""

import json
import os
import sys
import time


def main():
    misbehave = ""
    print("what is printed goes elsewhere", file=sys.stderr, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "start":
            misbehave = question.get("misbehave", "")
            answer = {"versions": {"fake": "1.0"}, "path": os.environ.get("PYTHONPATH", "")}
        elif question["do"] == "stop":
            answer = {}
        elif misbehave == "ends":
            sys.exit("no memory left for the model")
        elif misbehave == "hangs":
            time.sleep(3600)
            answer = {}
        elif misbehave:
            answer = {"error": misbehave}
        else:
            count = question["tokens"]
            while time.process_time() < 0.05:
                pass
            answer = {
                "seconds": float(count),
                "tokens": [[p[0] + at for at in range(count)] for p in question["prompts"]],
                "times": [[at + 1.0 for at in range(count)] for _ in question["prompts"]],
            }
        print(json.dumps(answer), flush=True)
        if question["do"] == "stop":
            break


if __name__ == "__main__":
    main()
