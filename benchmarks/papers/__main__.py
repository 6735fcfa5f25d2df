"""Simulates the claims of Splitwise, and explains why the results differ.

    python -m benchmarks.papers splitwise            # --small: a tenth of the requests, no files
    python -m benchmarks.papers splitwise_steps      # with the paper's own step times
    python -m benchmarks.papers splitwise --page     # the page alone, from the results kept

Hardware, models, workload and fleets are as close to the paper's as they are published. Beside the
comparison itself, some runs change one property at a time. Results: `results/papers_NAME.json`.
Page: `results/papers_NAME.md`, made from `words/NAME.md` (written by hand from the figures) and the
tables. Takes a few minutes of processor time."""

import os

from absl import app, flags

from benchmarks.measure import machine, save
from benchmarks.papers import splitwise, splitwise_steps
from benchmarks.papers.runs import RESULTS, page, read, words

STUDIES = {"splitwise": splitwise, "splitwise_steps": splitwise_steps}
_SMALL = flags.DEFINE_bool("small", False, "A tenth of the requests; nothing is written.")
_PAGE = flags.DEFINE_bool("page", False, "Write the page again from the results that are kept.")


def main(arguments: list[str]) -> None:
    names = [name for name in arguments[1:] if name in STUDIES]
    if len(names) != 1 or len(arguments) != 2:
        raise app.UsageError(f"name one study of {', '.join(STUDIES)}")
    (name,) = names
    if not _PAGE.value:
        where = machine()
        tables, runs = STUDIES[name].tables(_SMALL.value)
        seconds = round(sum(os.times()[:4]))
        print(*(line for table in tables for line in (table["title"], *table["rows"])), sep="\n")
        if _SMALL.value:
            return
        told = {"study": name, "runs": runs, "cpu_seconds": seconds, "tables": tables}
        save(f"papers_{name}", {"machine": where, **told})
    (RESULTS / f"papers_{name}.md").write_text(page(read(name), words(name)))


if __name__ == "__main__":
    app.run(main)
