"""Coroutine tests of this folder run in virtual time."""

from tests.fakes.virtual_time import pytest_collectstart as pytest_collectstart
