"""How near does the cost model come to the runs of vLLM with which BLIS was validated, without
fitting to them?

    python -m benchmarks.blis_runs --name=blis_runs [--records=error_records.csv,...]

`blis_points.py` describes the runs and their prediction. `--records`: files of BLIS's later runs.
Their repository states no licence, so their figures are read from your copy and not stored here;
only the errors are stored."""

import datetime
import json
from pathlib import Path

from absl import app, flags

from benchmarks.blis_points import (
    RESULTS,
    foretold,
    kept_runs,
    markdown,
    page,
    recorded_runs,
    shown,
    tables,
)
from benchmarks.commits import commit

_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
_RECORDS = flags.DEFINE_list("records", [], "BLIS's files error_records.csv.")


def main(argv: list[str]) -> None:
    del argv
    kept = [foretold(run) for run in kept_runs()]
    figures: dict[str, object] = {
        "made": {"date": datetime.date.today().isoformat(), "commit": commit()},
        "kept": tables(kept),
        "runs": {item.run.name: shown(item) for item in kept},
    }
    if _RECORDS.value:
        known = [run for path in _RECORDS.value for run in recorded_runs(Path(path))]
        later = [foretold(run) for run in known]
        figures["records"] = tables(later)
        for item in later:
            print(item.run.name, "{:+.1f} {:+.1f}".format(*item.errors))
    print(markdown(figures))
    if _NAME.value:
        (RESULTS / f"{_NAME.value}.json").write_text(json.dumps(figures, indent=1) + "\n")
        (RESULTS / f"{_NAME.value}.md").write_text(page(figures))


if __name__ == "__main__":
    app.run(main)
