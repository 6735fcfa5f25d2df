"""Sets settings as `--set` does."""

from collections.abc import Iterable

from jdisagg.settings.declared import Config, assignment, changed


def set_by(config: Config, texts: Iterable[str]) -> Config:
    return changed(config, map(assignment, texts))
