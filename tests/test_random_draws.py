import random

import pytest


def test_a_test_prints_the_seed_that_repeats_its_draws(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REFOCUSED_SEED", "7")
    chance: random.Random = request.getfixturevalue("chance")
    assert "REFOCUSED_SEED=7\n" in capsys.readouterr().out
    assert chance.random() == random.Random(7).random()
