"""Fixtures for the tests of training."""

import logging

import pytest


@pytest.fixture
def screen(caplog):
    """Let pytest capture the screen output of a run."""
    caplog.set_level(logging.INFO, logger="refocused")
