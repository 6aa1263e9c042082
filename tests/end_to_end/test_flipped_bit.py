"""A bit flips in a run that looks for it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ForkedRanks, metrics
from tiny import tiny_run

FLIPPED_AFTER = 6  # steps, and before the save of that step


def flip_and_train(arguments: list[str]) -> int:
    """Train as the command does, and flip a bit of a weight on rank 1."""
    from refocused.commands.train import main
    from refocused.engine.engine import Engine

    update = Engine.update

    def flipping(engine: Engine, *given: Any, **rates: Any) -> object:
        outcome = update(engine, *given, **rates)
        if engine.steps_made == FLIPPED_AFTER and os.environ["RANK"] == "1":
            weight = next(engine._engine.module.parameters())
            weight.ds_tensor.data.view(torch.uint8).view(-1)[1234] ^= 8
        return outcome

    Engine.update = flipping  # type: ignore[assignment]
    return main(arguments)


@pytest.mark.slow
def test_a_run_stops_before_it_saves_or_updates_a_flipped_state(tmp_path: Path) -> None:
    settings = ["--config", str(tiny_run(tmp_path)), "run.replay_every=4", "checkpoint.interval=3"]
    settings += ["checkpoint.mirror=null", "evaluation.interval=0"]
    ended = ForkedRanks(2, settings, folder=tmp_path, command=flip_and_train).wait(120)
    assert ended.codes == [1, 1], ended.everything
    assert "Traceback" not in ended.everything and ended.err[1] == ""
    text = "Silent corruption: weights or optimizer state changed after the update of step 6 on"
    assert ended.err[0].count(f"{text} rank 1 (CPU of host ") == 1
    assert "start the same command again to resume from the last checkpoint." in ended.err[0]
    assert sorted(metrics(tmp_path / "runs" / "tiny")) == [*range(1, 7)]
    found = [
        path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").glob("checkpoint_step_*")
    ]
    assert found == ["checkpoint_step_3"]
