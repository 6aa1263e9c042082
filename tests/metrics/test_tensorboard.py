from pathlib import Path
from typing import Any

import torch
from metrics.session_records import HISTOGRAMS, SAMPLE, VALIDATION, step, tracked_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from refocused.metrics.tracker_files import TensorBoardTracker
from refocused.metrics.trackers import Record


def write(folder: Path, *records: Record, at: int = 0) -> None:
    tracker = TensorBoardTracker(tracked_run(folder, at=at))
    assert str(folder / "tensorboard") in tracker.open()
    for record in records:
        tracker.write(record)
    tracker.close(0)


def read(folder: Path) -> Any:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def losses(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_numbers_samples_and_settings_can_be_read_back(tmp_path: Path) -> None:
    before, sources = torch.get_rng_state(), {"web": {"tokens": 5}}
    write(tmp_path, step(1, 3.5), VALIDATION, step(2, 3.25, sources=sources), SAMPLE)
    found = read(tmp_path)
    assert losses(tmp_path) == [(1, 3.5), (2, 3.25)]
    assert losses(tmp_path, "validation/loss") == [(1, 3.0)]
    assert losses(tmp_path, "train/sources/web/tokens") == [(2, 5.0)]
    assert "train/mfu_fraction" not in found.Tags()["scalars"]  # unknown is left out
    (sample,) = found.Tensors("sample/text_summary")
    assert sample.step == 2
    text = sample.tensor_proto.string_val[0].decode()
    assert text == "    def f():\n        return a < b\n"  # a block that Markdown leaves as it is
    start = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = parse_session_start_info_plugin_data(start).hparams
    assert shown["optimizer.lr"].number_value == 3e-4
    assert shown["optimizer.betas"].string_value == "[0.9, 0.95]"
    assert shown["none"].string_value == "None"
    # Else the random numbers of training would depend on its trackers.
    assert torch.equal(torch.get_rng_state(), before)


def test_histograms_can_be_read_back(tmp_path: Path) -> None:
    write(tmp_path, HISTOGRAMS)
    (event,) = read(tmp_path).Histograms("weights/head.weight")
    found = event.histogram_value
    assert event.step == 3
    assert (found.min, found.max, found.num, found.sum, found.sum_squares) == (-1, 1, 4, 0.5, 2)
    assert (list(found.bucket_limit), list(found.bucket)) == ([-0.5, 0, 0.5, 1], [1, 0, 2, 1])


def test_after_a_rewind_every_step_is_there_once(tmp_path: Path) -> None:
    write(tmp_path, *(step(number, 3.0) for number in range(1, 8)))
    validation = {**VALIDATION, "step": 4}
    write(tmp_path, validation, *(step(number, 2.0) for number in range(5, 7)), at=4)
    assert losses(tmp_path) == [*((n, 3.0) for n in range(1, 5)), (5, 2.0), (6, 2.0)]
    assert losses(tmp_path, "validation/loss") == [(4, 3.0)]
    write(tmp_path, step(1, 1.0))  # a start from scratch
    assert losses(tmp_path) == [(1, 1.0)]
