from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from refocused.metrics.tensorboard import TensorBoardTracker
from refocused.metrics.trackers import Record

HISTOGRAMS: Record = {
    "kind": "histograms",
    "step": 3,
    "weights": {
        "head.weight": {
            "low": -1.0,
            "high": 1.0,
            "counts": (1, 0, 2, 1),
            "total": 0.5,
            "squares": 2.0,
        }
    },
    "gradients": {},
}


def tell(folder: Path, *records: Record, step: int = 0, **settings: object) -> None:
    tracker = TensorBoardTracker(folder, step=step, settings=settings)
    assert str(folder) in tracker.open()
    for record in records:
        tracker.write(record)
    tracker.close(0)


def step(number: int, loss: float) -> Record:
    return {"kind": "step", "step": number, "loss": loss, "mfu_fraction": None}


def read(folder: Path) -> Any:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def losses(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_a_record_is_one_event_whatever_it_holds(tmp_path: Path) -> None:
    numbers = {"loss": 3.0, "tokens_per_second": 7.0, "sources": {"web": {"tokens": 5}}}
    tell(tmp_path, {"kind": "step", "step": 4, **numbers})
    (file,) = tmp_path.glob("events*")
    events = [event for event in EventFileLoader(str(file)).Load() if event.step == 4]
    tags = [[value.tag for value in event.summary.value] for event in events]
    assert tags == [["train/loss", "train/tokens_per_second", "train/sources/web/tokens"]]


def test_what_is_told_can_be_read_back(tmp_path: Path) -> None:
    tell(
        tmp_path,
        step(1, 3.5),
        step(2, 3.25),
        {"kind": "validation", "step": 2, "validation_loss": 3.0, "perplexity": 20.0},
        {"kind": "sample", "step": 2, "sample": "def f():\n    return <1>"},
    )
    found = read(tmp_path)
    assert losses(tmp_path) == [(1, 3.5), (2, 3.25)]
    assert losses(tmp_path, "validation/loss") == [(2, 3.0)]
    assert "train/mfu_fraction" not in found.Tags()["scalars"]  # unknown is left out
    (sample,) = found.Tensors("sample/text_summary")
    assert sample.step == 2
    text = sample.tensor_proto.string_val[0].decode()
    assert text == "    def f():\n        return <1>\n"  # a block that Markdown leaves as it is


def test_histograms_can_be_read_back(tmp_path: Path) -> None:
    tell(tmp_path, HISTOGRAMS)
    (event,) = read(tmp_path).Histograms("weights/head.weight")
    told = event.histogram_value
    assert event.step == 3
    assert (told.min, told.max, told.num, told.sum, told.sum_squares) == (-1.0, 1.0, 4, 0.5, 2.0)
    assert dict(zip(told.bucket_limit, told.bucket, strict=True)) == {
        -0.5: 1,
        0.0: 0,
        0.5: 2,
        1.0: 1,
    }


def test_after_a_rewind_every_step_is_there_once(tmp_path: Path) -> None:
    tell(tmp_path, *(step(number, 3.0) for number in range(1, 8)))
    validation = {"kind": "validation", "step": 4, "validation_loss": 3.0}
    tell(tmp_path, validation, *(step(number, 2.0) for number in range(5, 7)), step=4)
    assert losses(tmp_path) == [*((n, 3.0) for n in range(1, 5)), (5, 2.0), (6, 2.0)]
    assert losses(tmp_path, "validation/loss") == [(4, 3.0)]


def test_a_start_from_scratch_leaves_nothing_of_the_way_before(tmp_path: Path) -> None:
    tell(tmp_path, step(1, 3.0), step(2, 3.0))
    tell(tmp_path, step(1, 2.0))
    assert losses(tmp_path) == [(1, 2.0)]


def test_settings_become_hyper_parameters(tmp_path: Path) -> None:
    tell(tmp_path, optimizer={"lr": 3e-4, "betas": [0.9, 0.95]}, run={"name": "tiny"}, mirror=None)
    found = read(tmp_path).summary_metadata["_hparams_/session_start_info"]
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    told = parse_session_start_info_plugin_data(found.plugin_data.content).hparams
    assert told["optimizer.lr"].number_value == 3e-4
    assert told["optimizer.betas"].string_value == "[0.9, 0.95]"
    assert told["run.name"].string_value == "tiny"
    assert told["mirror"].string_value == "None"


def test_training_draws_the_same_random_numbers_with_it(tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tell(tmp_path, step(1, 3.0))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoardTracker(tmp_path, step=0, settings={}).open()
