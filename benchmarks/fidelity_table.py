"""Formats the results of `benchmarks.fidelity` as a table.

    python -m benchmarks.fidelity_table --name=fidelity

The handwritten `results/fidelity.md` explains the figures."""

import json
from collections.abc import Sequence

from absl import app, flags

from benchmarks.measure import RESULTS

_NAME = flags.DEFINE_string("name", "fidelity", "Name of the results file.")

COLUMNS = (
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "tpot_mean_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "tpot_p99_ms",
)


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str]) -> None:
    del argv
    found = json.loads((RESULTS / f"{_NAME.value}.json").read_text())
    print(
        row(
            (
                "run",
                "",
                "attainment",
                *(name.removesuffix("_ms").replace("_", " ") for name in COLUMNS),
            )
        )
    )
    print("|---" * (3 + len(COLUMNS)) + "|")
    for name, figures in found["runs"].items():
        for which in ("measured", "predicted"):
            values = figures[which]
            title = f"{name} ({'held out' if figures['held_out'] else 'fitted'})"
            cells = [f"{values[column]:.1f}" for column in COLUMNS]
            print(
                row(
                    (
                        title if which == "measured" else "",
                        which,
                        f"{values['attainment_percent']:.1f} %",
                        *cells,
                    )
                )
            )
        for which, title in (
            ("errors", "error"),
            ("constant_predictor_errors", "constant's error"),
        ):
            values = figures[which]
            print(
                row(
                    (
                        "",
                        title,
                        f"{values['attainment_points']:+.1f} points",
                        *(f"{values[column]:+.1f} %" for column in COLUMNS),
                    )
                )
            )
    print()
    for engine, rmse in found["attainment_rmse_points"].items():
        print(
            f"Attainment RMSE, {engine}* ({rmse['runs']} held-out runs): {rmse['ours']} points;"
            f" constant {rmse['constant_predictor']}."
        )


if __name__ == "__main__":
    app.run(main)
