"""Fixtures of tests with drafts, and tiers that wait for programs and disks."""

import pytest

from jdisagg.scheduler import speculation
from jdisagg.scheduler.draft_worth import DraftWorth
from jdisagg.worker import disk_tier, host_tier
from tests import time_scale
from tests.end_to_end.drafts import KnowingDrafter


@pytest.fixture(autouse=True)
def patient_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first copy may wait for the compilation of its program, and a busy disk is slow: tiers
    count neither as a failure."""
    monkeypatch.setattr(host_tier, "COPY_SECONDS", time_scale.seconds(120))
    for wait in ("FILE_SECONDS", "START_SECONDS"):
        monkeypatch.setattr(disk_tier, wait, time_scale.seconds(120))


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
