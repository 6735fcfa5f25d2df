"""Writes the results of a simulation to a folder: a request table, a report and plots."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.simulator.report import Report, SloLimits
from jdisagg.simulator.run import Result
from jdisagg.simulator.tables import check_table, write_outcomes


class ResultFolder:
    """The folder for the results of a simulation. The constructor creates the folder, so that
    errors appear before the simulation runs.

    Raises:
      ConfigError: The folder cannot be created, or tables of `table_format` cannot be written.
    """

    def __init__(self, path: str, table_format: str) -> None:
        self._folder = Path(path)
        self._table = self._folder / f"requests.{table_format}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out={path} cannot be created ({error}); choose another folder"
            ) from error
        check_table(self._table)

    def write(
        self, result: Result, report: Report, slo: SloLimits | None, flags: Mapping[str, object]
    ) -> None:
        """`flags`: command line flags of the run, stored with the report."""
        figures = {
            "report": report.as_fields(),
            "usage": [dataclasses.asdict(item) for item in result.usage],
            "counters": result.counters,
            "flags": flags,
        }
        (self._folder / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
        write_outcomes(result.outcomes, self._table, slo)

    def draw(self, name: str, result: Result) -> None:
        """Writes plots of the results, titled `name`. Needs matplotlib."""
        from jdisagg.simulator import plots  # imports matplotlib

        runs = {name: result.outcomes}
        plots.save(plots.ttft_distribution(runs), self._folder / "ttft.png")
        plots.save(plots.tbt_distribution(runs), self._folder / "tbt.png")
        plots.save(plots.timelines(result.outcomes), self._folder / "timelines.png")
        plots.save(plots.load(result.outcomes), self._folder / "load.png")


def can_draw(asked: bool) -> bool:
    """Returns whether matplotlib is installed, which plots need. If it is missing, raises
    ConfigError if the user `asked` for plots, and otherwise prints a note to stderr."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    if asked:
        raise ConfigError(
            "--plots needs matplotlib, which is not installed; pip install 'jdisagg[notebooks]' or"
            " leave it out"
        )
    print(
        "no plots: matplotlib is not installed (pip install 'jdisagg[notebooks]')", file=sys.stderr
    )
    return False
