from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands.run_samples import SampleRun
from end_to_end.forked import ForkedRanks
from evaluate.harness import CONTEXT, SCORES, bytes_model
from ranks import ROOT
from safetensors.torch import load_file, save_file

from refocused.commands.evaluate.model import usual_dtype
from refocused.commands.main import run_command

main = functools.partial(run_command, "evaluate")

ON_FILE: dict[str, Any] = json.loads(SCORES.read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder, and task files beside it."""
    folder = tmp_path_factory.mktemp("model")
    network, tokenizer = bytes_model()
    network.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for form, rows in ON_FILE["items"].items():
        if form != "perplexity":
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{form}_test.jsonl").write_text(lines)
    (folder / "story.txt").write_text(ON_FILE["items"]["perplexity"][0]["text"])
    return folder


def command(capture: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(argument) for argument in arguments]) == code
    out, err = capture.readouterr()
    return out if code == 0 else err


def test_all_tasks_of_a_folder_give_the_scores_on_file(model: Path, capsys: Any) -> None:
    tasks = "hellaswag,piqa,lambada,multiple_choice,perplexity"
    arguments = ("--tasks", tasks, "--data", model, "--device", "cpu", "--json")
    told = json.loads(command(capsys, model / "model", *arguments))
    assert (told["context_tokens"], told["dtype"], told["ranks"]) == (CONTEXT, "fp32", 1)
    for form, wanted in ON_FILE["scores"]["bytes"].items():
        found = told["tasks"]["story" if form == "perplexity" else form]
        for name in ("acc", "acc_norm", "byte_perplexity"):
            if name in wanted:
                assert found[name]["value"] == pytest.approx(wanted[name], rel=1e-5)
        assert found["seconds"] > 0
    assert told["tasks"]["hellaswag"]["items"] == 12
    assert told["tasks"]["lambada"]["cut"] > 0  # and hellaswag's contexts all fit
    assert told["tasks"]["hellaswag"]["cut"] == 0


def test_a_person_sees_a_line_a_task(model: Path, capsys: Any) -> None:
    arguments = ("--tasks", "piqa", "--data", model, "--limit", 3, "--device", "cpu")
    first, line = command(capsys, model / "model", *arguments).splitlines()
    assert first.startswith(f"{model}/model: 22,968 parameters")
    assert first.endswith(f"context {CONTEXT}, fp32 on CPU")
    assert line.startswith("piqa       3 items  acc 0.")
    assert " +- 0." in line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "is not from a run here, so that it has no validation set. Name at least one"),
        (("--tasks", " ,"), 2, "--tasks: name at least one"),
        (("--tasks", "piqa"), 2, "name its file, piqa=FILE"),
        (("--tasks", "{}/broken.jsonl"), 1, "broken.jsonl:1: it is no JSON"),
        (("--tasks", "{}/story.txt", "--context", "97"), 1, "reads at most 96 tokens at once"),
        (("--tasks", "{}/story.txt", "--stride", "97"), 1, "--stride 97: a number from 1 to"),
    ],
)
def test_what_cannot_be_is_one_message(
    model: Path, capsys: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (model / "broken.jsonl").write_text("{")
    given = [argument.format(model) for argument in arguments]
    told = command(capsys, model / "model", *given, "--device", "cpu", code=code)
    assert message in told
    assert len(told.splitlines()) == 1


def test_what_is_no_model_is_named(model: Path, sample_run: SampleRun, capsys: Any) -> None:
    tasks = ("--tasks", f"{model}/story.txt", "--device", "cpu")
    assert "There is no checkpoint '7'" in command(capsys, "7", *tasks, code=1)
    assert "checkpoint_step_" in command(capsys, model / "checkpoint_step_3", *tasks, code=1)
    half = model / "half"
    half.mkdir(exist_ok=True)
    (half / "config.json").write_text('{"model_type": "gpt2"}')
    assert "half cannot be loaded by transformers" in command(capsys, half, *tasks, code=1)
    sample_run.save(5)
    (sample_run.checkpoints / "checkpoint_step_5" / "model.json").unlink()
    assert "model.json" in command(capsys, "5", *tasks, code=1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut off", "weights is cut off or damaged"),
        ("lacking", r"weights lack transformer.h.1.mlp.c_fc.weight (1 such tensors)"),
        ("other shape", "have another shape of transformer.wpe.weight (1 such tensors)"),
        ("no tokenizer", "has no tokenizer. Name it: --tokenizer bytes"),
    ],
)
def test_a_damaged_folder_is_not_measured(
    model: Path, tmp_path: Path, capsys: Any, damage: str, message: str
) -> None:
    folder = shutil.copytree(model / "model", tmp_path / "copy")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "lacking":
        del tensors["transformer.h.1.mlp.c_fc.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
    elif damage == "other shape":
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"][1:].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        for path in folder.glob("tokenizer*"):
            path.unlink()
    told = command(capsys, folder, "--tasks", f"{model}/story.txt", "--device", "cpu", code=1)
    assert message in told
    assert len(told.splitlines()) == 1


def test_what_the_configuration_does_not_describe_is_said(
    model: Path, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    folder = shutil.copytree(model / "model", tmp_path / "copy")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.h.7.ln_1.weight"] = tensors["transformer.ln_f.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    command(capsys, folder, "--tasks", f"{model}/story.txt", "--device", "cpu")
    assert "1 tensors are left out that its config.json does not describe" in caplog.text


def test_a_model_of_the_same_shape_without_training_shows_what_chance_is(
    model: Path, capsys: Any
) -> None:
    arguments = (model / "model", "--tasks", f"{model}/story.txt", "--device", "cpu")
    told = json.loads(command(capsys, *arguments, "--untrained", "--json"))
    assert (told["trained"], told["parameters"]) == (False, 22_968)
    chance = told["tasks"]["story"]["perplexity"]["value"]
    assert chance == pytest.approx(257, rel=0.1)  # one of V ids
    assert told["tasks"] != json.loads(command(capsys, *arguments, "--json"))["tasks"]
    assert "untrained: 22,968 parameters" in command(capsys, *arguments, "--untrained")


def test_the_context_is_the_trained_one_and_a_longer_one_is_said(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = shutil.copytree(model / "model", tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"trained_sequence_length": 40}))
    tasks = ("--tasks", f"{model}/story.txt", "--device", "cpu", "--json")
    alike = []
    for source, context in ((folder, ()), (model / "model", ("--context", 40))):
        assert main([str(argument) for argument in (source, *tasks, *context)]) == 0
        out, err = capsys.readouterr()
        alike.append(json.loads(out)["tasks"]["story"]["perplexity"])
        assert err == ""
    assert alike[0] == alike[1]
    assert main([str(folder), *tasks, "--context", "96"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["context_tokens"], told["trained_sequence_length"]) == (96, 40)
    assert f"{folder}: 96 tokens at once, and it was trained on 40" in err
    assert len(err.splitlines()) == 1
    assert main([str(folder), *tasks, "--context", "96", "--untrained"]) == 0
    assert capsys.readouterr().err == ""  # nothing of it is trained


def be_a_rank(arguments: list[str]) -> int:
    return main(arguments)


@pytest.mark.slow
def test_two_ranks_share_the_items_and_one_speaks(model: Path, tmp_path: Path) -> None:
    tasks = "hellaswag,lambada,perplexity"
    arguments = [str(model / "model"), "--tasks", tasks, "--data", str(model), "--json"]
    started = ForkedRanks(2, [*arguments, "--batch", "5"], folder=tmp_path, command=be_a_rank)
    try:
        ended = started.wait(60)
    finally:
        started.kill()
    assert ended.codes == [0, 0], ended.everything
    assert ended.out[1] == ""
    told = json.loads(ended.out[0])
    assert told["ranks"] == 2
    scores = ON_FILE["scores"]["bytes"]
    for task, name in (("hellaswag", "acc"), ("hellaswag", "acc_norm"), ("lambada", "acc")):
        assert told["tasks"][task][name]["value"] == pytest.approx(scores[task][name])
    bits = told["tasks"]["story"]["bits_per_byte"]["value"]
    assert bits == pytest.approx(scores["perplexity"]["bits_per_byte"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_say_a_mistake_once(model: Path, tmp_path: Path) -> None:
    (model / "broken.jsonl").write_text("{")
    arguments = [str(model / "model"), "--tasks", str(model / "broken.jsonl")]
    started = ForkedRanks(2, arguments, folder=tmp_path, command=be_a_rank)
    try:
        ended = started.wait(60)
    finally:
        started.kill()
    assert ended.codes == [1, 1]
    assert "broken.jsonl:1: it is no JSON" in ended.err[0]
    assert "broken.jsonl" not in ended.err[1]


def test_the_script_helps_without_torch() -> None:
    script = "import sys; from refocused.commands.main import run_command\n"
    script += "try: run_command('evaluate', ['--help'])\n"
    script += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: evaluate" in done.stdout


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [("cpu", None, "fp32"), ("cuda:0", (7, 5), "fp16"), ("cuda:0", (9, 0), "bf16")],
)
def test_a_model_computes_in_what_its_device_has(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int] | None, dtype: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert usual_dtype(device) == dtype
