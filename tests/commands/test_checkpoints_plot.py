from __future__ import annotations

from pathlib import Path

from commands.run_samples import SampleRun

from refocused.metrics.jsonl import JsonLines


def log(run: SampleRun) -> None:
    """Write the metrics of a run that went back once."""
    file = JsonLines(run.folder / "logs" / "training_metrics.jsonl")
    for step, loss in ((1000, 3.0), (2000, 2.0), (3000, 1.0), (2000, 2.2)):
        file.write({"kind": "step", "step": step, "loss": loss})
    file.write({"kind": "validation", "step": 2000, "validation_loss": 2.4})
    file.close()


def test_the_losses_are_drawn_into_the_runs_folder(sample_run: SampleRun) -> None:
    log(sample_run)
    code, out, err = sample_run.command("plot")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "runs/one/loss.png: 2 steps, 1 validations",
        "  last training   2.2000 at step 2,000",
        "  last validation 2.4000 at step 2,000",
        "  best validation 2.4000 at step 2,000",
    ]
    assert (sample_run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_points_can_be_had_as_json(sample_run: SampleRun) -> None:
    log(sample_run)
    content = sample_run.command_json("plot", "--out", "pictures/one.PNG")
    assert content["file"] == "pictures/one.PNG"
    assert content["training"] == [{"step": 1000, "loss": 3.0}, {"step": 2000, "loss": 2.2}]
    assert content["best"] == {"step": 2000, "loss": 2.4}
    assert Path("pictures/one.PNG").is_file()


def test_a_run_without_metrics_says_where_they_should_be(sample_run: SampleRun) -> None:
    code, _, err = sample_run.command("plot")
    assert code == 1
    assert "runs/one/logs/training_metrics.jsonl cannot be read (No such file" in err
    (sample_run.folder / "logs").mkdir()
    (sample_run.folder / "logs" / "training_metrics.jsonl").touch()
    code, _, err = sample_run.command("plot")
    assert code == 1
    assert "holds no step yet" in err
    assert not (sample_run.folder / "loss.png").exists()


def test_a_picture_of_another_kind_or_nowhere_is_refused(sample_run: SampleRun) -> None:
    log(sample_run)
    code, _, err = sample_run.command("plot", "--out", "loss.pdf")
    assert code == 2
    assert "ends in .png" in err
    Path("file").touch()
    code, _, err = sample_run.command("plot", "--out", "file/loss.png")
    assert code == 1
    assert "file/loss.png cannot be written" in err
