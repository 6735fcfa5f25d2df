"""Fixtures of tests with drafts."""

import pytest

from jdisagg.scheduler import speculation
from jdisagg.scheduler.draft_worth import DraftWorth
from tests.end_to_end.drafts import KnowingDrafter


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> type[KnowingDrafter]:
    """Drafts that are verified in every step, whether or not this saves time."""
    monkeypatch.setattr(speculation, "NgramDrafter", KnowingDrafter)
    monkeypatch.setattr(DraftWorth, "pays", lambda self, gain: True)
    return KnowingDrafter


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts of the mesh itself, verified in every step, whether or not this saves time."""
    monkeypatch.setattr(DraftWorth, "pays", lambda self, gain: True)
