"""Runs over several sources and within documents: reports and exact resumes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import metrics, train, write_tokens
from tiny import losses, tiny_run

pytestmark = pytest.mark.slow
RUN = Path("runs") / "tiny"
WEIGHTS = {"web": 0.75, "code": 0.25}
MIXTURE = """\
data:
  cache: cache
  validation_fraction: 0.1
  disk_limit_gb: 3.2e-5  # blocks of one shard
  mixture:
    web: {source: web, weight: 0.75}
    code: {source: code, weight: 0.25, include: [shard_*]}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """The tiny run over two sources, one with an excluded file."""
    file = tiny_run(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("data:")) + MIXTURE)
    write_tokens(tmp_path / "web", shards=6, tokens=3000, vocabulary=512)
    write_tokens(tmp_path / "code", shards=2, tokens=1500, vocabulary=512, seed=1)
    np.save(tmp_path / "code" / "other.npy", np.full(5000, 511, np.uint16))
    return tmp_path


def start(folder: Path, *settings: str, ranks: int = 2, code: int = 0) -> Any:
    # A constant rate, so that the planned end does not affect the steps.
    always = ["checkpoint.mirror=null", "schedule.kind=constant", "schedule.warmup_steps=0"]
    return train(folder, "--config", "tiny.yaml", *always, *settings, ranks=ranks, code=code)


def told(folder: Path, kind: str = "step") -> dict[int, Any]:
    records = metrics(folder / RUN, kind)
    return {step: record["sources"] for step, record in records.items()}


def position(folder: Path, step: int) -> dict[str, Any]:
    file = folder / RUN / "checkpoints" / f"checkpoint_step_{step}" / "trainer.json"
    found: dict[str, Any] = json.loads(file.read_text())["position"]
    return found


def test_a_mixture_is_trained_by_weight_and_reported_by_source(mixed: Path) -> None:
    ended = start(mixed)
    assert "source   code: 25.00% of the sequences (256 in 1,024; asked for 25.00%)" in ended.out[0]
    assert "source   web: 75.00% of the sequences" in ended.out[0]
    sources = told(mixed)
    for step in range(1, 21):
        tokens = {name: own["tokens"] for name, own in sources[step].items()}
        assert sum(tokens.values()) == step * 8 * 32
        for name, weight in WEIGHTS.items():
            assert abs(tokens[name] - weight * step * 8 * 32) < 2 * 32
    consumed = position(mixed, 20)["sources"]
    assert consumed == {name: own["tokens"] // 32 for name, own in sources[20].items()}
    sequences = {"code": 82, "web": 502}  # nine tenths of 92 and 558, rounded down
    for name, own in sources[20].items():
        assert own["epoch"] == consumed[name] / sequences[name]
    for step, record in metrics(mixed / RUN, "validation").items():
        by_source = told(mixed, "validation")[step]
        assert set(by_source) == {"code", "web"}
        # 8 sequences: 2 and 6.
        both = [by_source[name]["validation_loss"] for name in ("code", "web")]
        assert record["validation_loss"] == pytest.approx((2 * both[0] + 6 * both[1]) / 8)


def test_a_mixture_resumes_exactly_and_with_other_weights_if_allowed(mixed: Path) -> None:
    # The stage begins within step 12. It is set after 7 steps, before it begins.
    late = "data.stages={late: {from_tokens: 2900, weights: {web: 0, code: 1}}}"
    start(mixed, "run.directory=whole", "run.steps=16", late)
    start(mixed, "run.steps=16", "checkpoint.interval=7", "--max-steps", "7")

    refused = start(mixed, "run.steps=16", "data.mixture.web.weight=0.25", code=1)
    assert (
        "was saved with data.mixture code 256, web 768 of 1024 sequences; this run has code 512, "
        "web 512 of 1024 sequences" in refused.everything
    )
    assert "--allow-change data.mixture" in refused.everything

    begun = start(mixed, "run.steps=16", late, "--max-steps", "12")
    assert "differs  data.stages {} -> " in begun.everything.replace('"', "")
    assert "stage    late begins in step 12 (sequence 91): code 100.00%, web 0.00%" in begun.out[0]
    start(mixed, "run.steps=16", late)
    assert losses(mixed / RUN) == losses(mixed / "whole" / "tiny")
    assert position(mixed, 16)["sources"] == {"code": 22 + 37, "web": 69}

    # With other weights each source continues at its position.
    weights = "data.mixture.web.weight=0.25"
    changed = start(mixed, weights, "--allow-change", "data.mixture", "--max-steps", "20")
    assert "data.mixture changes from code 256, web 768" in changed.everything
    assert position(mixed, 20)["sources"] == {"code": 59 + 16, "web": 69 + 16}
    # What would be the next two steps is skipped.
    assert metrics(mixed / RUN)[20]["stream_sequences"] == 160
    skip = 'data.skip=["stream[160:176]"]'
    start(mixed, weights, skip, "--max-steps", "22")
    assert metrics(mixed / RUN)[22]["stream_sequences"] == position(mixed, 22)["sequences"] == 192


def test_a_run_within_documents_resumes_only_within_documents(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    masked = ["data.mask_documents=true", "data.document_id=14"]
    plain = start(tmp_path, "run.directory=plain", "--max-steps", "2", ranks=1)
    ended = start(tmp_path, *masked, "--max-steps", "2", ranks=1)
    assert "mask     attention and loss stay within documents" in ended.out[0]
    assert "mask " not in plain.out[0]
    assert losses(tmp_path / RUN) != losses(tmp_path / "plain" / "tiny")
    refused = start(tmp_path, "--max-steps", "3", ranks=1, code=1)
    assert "documents masked by id 14; this run has" in refused.everything
    start(tmp_path, *masked, "--max-steps", "3", ranks=1)
