"""Fixtures for the tests of training."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def screen(heard: None, caplog: pytest.LogCaptureFixture) -> None:
    """Let pytest see what a run says on the screen."""
    caplog.set_level(logging.INFO, logger="refocused")
