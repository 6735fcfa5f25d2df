"""A simulation's results as files of one folder: one row a request, all figures, pictures."""

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
    """Made before the work. Raises ConfigError where it cannot be, or nothing can be written in
    `table_format`."""

    def __init__(self, path: str, table_format: str) -> None:
        self._folder = Path(path)
        self._table = self._folder / f"requests.{table_format}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out={path} is no folder that can be made ({error}); choose another"
            ) from error
        check_table(self._table)

    def write(
        self, result: Result, report: Report, slo: SloLimits | None, flags: Mapping[str, object]
    ) -> None:
        """`flags`: what the run was asked for, kept beside its figures."""
        figures = {
            "report": report.as_fields(),
            "usage": [dataclasses.asdict(item) for item in result.usage],
            "counters": result.counters,
            "flags": flags,
        }
        (self._folder / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
        write_outcomes(result.outcomes, self._table, slo)

    def draw(self, name: str, result: Result) -> None:
        """Pictures of the run `name`; needs matplotlib."""
        from jdisagg.simulator import plots  # matplotlib is asked for only here

        runs = {name: result.outcomes}
        plots.save(plots.ttft_distribution(runs), self._folder / "ttft.png")
        plots.save(plots.tbt_distribution(runs), self._folder / "tbt.png")
        plots.save(plots.timelines(result.outcomes), self._folder / "timelines.png")
        plots.save(plots.load(result.outcomes), self._folder / "load.png")


def can_draw(asked: bool) -> bool:
    """Whether there is matplotlib. Without it pictures are left out, which stderr says, and refused
    with a ConfigError where they were `asked` for."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    if asked:
        raise ConfigError(
            "--plots needs matplotlib, which is not installed; pip install 'jdisagg[notebooks]' or"
            " leave it out"
        )
    print(
        "no pictures: matplotlib is not installed (pip install 'jdisagg[notebooks]')",
        file=sys.stderr,
    )
    return False
