"""`final_model/` is that of the last save, locally and in the bucket, or a warning says why not."""

import shutil
from pathlib import Path

import pytest
import transformers
from checkpoints.step_samples import flip_byte
from evaluate.step_saves import PLAIN, step_of

from refocused.evaluate.export import answer_to
from refocused.evaluate.final_model import FinalModelRequest, read_answer


@pytest.fixture
def request_(saved: dict[int, Path], tmp_path: Path) -> FinalModelRequest:
    step = tmp_path / "checkpoints" / "checkpoint_step_2"
    shutil.copytree(step_of(saved[2], PLAIN[2][3]), step)
    (tmp_path / "bucket").mkdir()
    return FinalModelRequest(
        run=tmp_path,
        step=step,
        token="mine",
        bucket=str(tmp_path / "bucket"),
        prefix="sample/final_model",
    )


def test_the_model_is_made_once_per_save(
    request_: FinalModelRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_
    request.folder.mkdir()  # of an earlier end of the run
    (request.folder / "origin.json").write_text('{"step": 1}')
    answer = answer_to(request)
    assert answer == read_answer(request)
    assert answer.status == "uploaded"
    assert answer.text.startswith("step 2, ")
    transformers.AutoModelForCausalLM.from_pretrained(request.folder)
    copied = request.run / "bucket/sample/final_model"
    names = {path.name for path in request.folder.iterdir()}
    assert {path.name for path in copied.iterdir()} == {*names, "COMMITTED"}
    again = "refocused.evaluate.export.export_step"
    monkeypatch.setattr(again, lambda *_, **__: pytest.fail("again"))
    assert answer_to(request) == answer
    assert read_answer(request.model_copy(update={"token": "another"})) is None
    assert not list(request.run.glob(".final_model.[no]*"))


def test_errors_are_returned(request_: FinalModelRequest) -> None:
    request = request_.model_copy(update={"bucket": "az://other"})
    answer = answer_to(request)
    assert answer.status == "made"
    assert "'az://other' is not a bucket" in answer.text
    assert answer_to(request.model_copy(update={"bucket": None})).status == "made"
    shutil.rmtree(request.folder)
    flip_byte(next(request.step.glob("zero/*_rank_1_*")))
    answer = answer_to(request)
    assert answer.status == "failed"
    assert "is corrupt" in answer.text
    assert not request.folder.exists()
