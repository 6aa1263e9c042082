"""`evaluate MODEL` and `compare`: scores, as text and as JSON."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from evaluate.core_bundle import ANSWERS, TASKS, write_bundle
from evaluate.harness import CONTEXT, MODELS, SCORES
from ranks import ForkedRanks
from safetensors.torch import load_file, save_file

from refocused.commands.evaluate import draw_scores, steps_of_one_run
from refocused.commands.main import run_command
from refocused.evaluate.evaluation import Evaluated
from refocused.evaluate.load_model import usual_dtype
from refocused.evaluate.multiple_choice import Measure

main = functools.partial(run_command, "evaluate")
ON_FILE: dict[str, Any] = json.loads(SCORES.read_text())
PNG = b"\x89PNG"
ITEM = {"ctx": "the cat", "endings": ["sat on", "ran"], "label": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The transformers folders `bytes` and `words`, with task files beside them."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        network, tokenizer = make()
        network.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for form, rows in ON_FILE["items"].items():
        if form != "perplexity":
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{form}_test.jsonl").write_text(lines)
    (folder / "story.txt").write_text(ON_FILE["items"]["perplexity"][0]["text"])
    (folder / "quiz.jsonl").write_text((json.dumps(ITEM) + "\n") * 3)
    write_bundle(folder / "eval_bundle")
    (folder / "broken.jsonl").write_text("{")
    return folder


@pytest.fixture
def copy(models, tmp_path):
    """A copy of a model, to be changed."""
    return Path(shutil.copytree(models / "bytes", tmp_path / "copy"))


def evaluate(capture, *arguments, code=0):
    """Run the command on the CPU; return what it printed, or its message."""
    given = [str(argument) for argument in (*arguments, "--device", "cpu")]
    assert main(given) == code
    out, err = capture.readouterr()
    return out if code == 0 else err


def compare(capture, *arguments):
    return evaluate(capture, "compare", *arguments)


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_all_tasks_of_a_folder_give_the_scores_on_file(models, capsys):
    tasks = "hellaswag,piqa,lambada,multiple_choice,perplexity"
    arguments = ("--tasks", tasks, "--data", models, "--json")
    told = json.loads(evaluate(capsys, models / "bytes", *arguments))
    assert (told["context_tokens"], told["dtype"], told["ranks"]) == (CONTEXT, "fp32", 1)
    for form, wanted in ON_FILE["scores"]["bytes"].items():
        found = told["tasks"]["story" if form == "perplexity" else form]
        for name in {"acc", "acc_norm", "byte_perplexity"} & set(wanted):
            assert found[name]["value"] == pytest.approx(wanted[name], rel=1e-5)
        assert found["seconds"] > 0
    assert told["tasks"]["hellaswag"]["items"] == 12
    assert told["tasks"]["lambada"]["cut"] > 0  # and hellaswag's contexts all fit
    assert told["tasks"]["hellaswag"]["cut"] == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut off", "weights is cut off or damaged"),
        ("missing", r"weights lack transformer.h.1.mlp.c_fc.weight (1 such tensors)"),
        ("other shape", "have another shape of transformer.wpe.weight (1 such tensors)"),
        ("no tokenizer", "has no tokenizer. Name it: --tokenizer bytes"),
    ],
)
def test_a_damaged_folder_is_not_measured(models, copy, capsys, damage, message):
    wpe, file = "transformer.wpe.weight", copy / "model.safetensors"
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing":
        change_weights(copy, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    elif damage == "other shape":
        change_weights(copy, lambda tensors: tensors.update({wpe: tensors[wpe][1:].clone()}))
    else:
        for path in copy.glob("tokenizer*"):
            path.unlink()
    told = evaluate(capsys, copy, "--tasks", f"{models}/story.txt", code=1)
    assert message in told
    assert len(told.splitlines()) == 1


def test_what_the_configuration_does_not_describe_is_reported(models, copy, capsys, caplog):
    name = "transformer.ln_f.weight"
    change_weights(copy, lambda one: one.update({"transformer.h.7.ln_1.weight": one[name].clone()}))
    first, line = evaluate(
        capsys, copy, "--tasks", "piqa", "--data", models, "--limit", 3
    ).splitlines()
    assert "1 tensors are left out that its config.json does not describe" in caplog.text
    assert first == f"{copy}: 22,968 parameters, context {CONTEXT}, fp32 on CPU"
    assert line.startswith("piqa       3 items  acc 0.") and " +- 0." in line


def test_a_model_of_the_same_shape_without_training_shows_what_chance_is(models, capsys):
    arguments = (models / "bytes", "--tasks", f"{models}/story.txt", "--untrained")
    told = json.loads(evaluate(capsys, *arguments, "--json"))
    assert (told["trained"], told["parameters"]) == (False, 22_968)
    chance = told["tasks"]["story"]["perplexity"]["value"]
    assert chance == pytest.approx(257, rel=0.1)  # one of V ids
    assert "untrained: 22,968 parameters" in evaluate(capsys, *arguments)


def test_scores_over_the_steps_of_one_run_are_a_curve(tmp_path):
    rows = {str(step): {"quiz acc": Measure(step / 100, None)} for step in (10, 20)}
    draw_scores(rows, tmp_path / "a" / "curve.png", steps={"10": 10, "20": 20})
    assert (tmp_path / "a" / "curve.png").read_bytes().startswith(PNG)
    one, other, later = (
        Evaluated({"run": run, "step": step}, [])
        for run, step in (("one", 10), ("other", 20), ("one", 30))
    )
    assert steps_of_one_run({"a": one, "b": later}) == {"a": 10, "b": 30}
    assert steps_of_one_run({"a": one, "b": other}) == {}
    assert steps_of_one_run({"a": one, "b": Evaluated({}, [])}) == {}


def test_core_prints_its_mean_and_a_line_for_each_task(models, capsys):
    on_file = json.loads(ANSWERS.read_text())["bytes"]
    tasks = ("--tasks", "core", "--data", models)
    measured = json.loads(evaluate(capsys, models / "bytes", *tasks, "--json"))["tasks"]["core"]
    assert measured["items"] == 5 * 24
    shares = {label: answers.count("1") / 24 for label, answers in on_file.items()}
    for label, share in shares.items():
        assert measured[label]["value"] == pytest.approx(share)
    chances = {label: baseline / 100 for label, *_, baseline in TASKS}
    centred = [(share - chances[label]) / (1 - chances[label]) for label, share in shares.items()]
    assert measured["CORE"]["value"] == pytest.approx(sum(centred) / 5)
    _, line, *below = evaluate(capsys, models / "bytes", *tasks).splitlines()
    assert line.startswith(f"core     120 items  CORE {sum(centred) / 5:.4f} +- 0.")
    assert [text.split()[:2] for text in below] == [[k, f"{v:.4f}"] for k, v in shares.items()]
    told = compare(capsys, models / "bytes", *tasks).splitlines()
    assert told[0].split("  ")[-1].strip() == "core CORE" and len(told) == 2


def on_two_ranks(folder, *arguments):
    given = [str(argument) for argument in arguments]
    started = ForkedRanks(2, given, folder=folder, command=main)
    try:
        return started.wait(60)
    finally:
        started.kill()


@pytest.mark.slow
def test_two_ranks_share_the_items_of_a_comparison_and_one_prints(models, tmp_path):
    given = (
        "compare",
        models / "bytes",
        models / "words",
        "--data",
        models,
        "--batch",
        5,
        "--json",
    )
    options = ("--picture", tmp_path / "both.png", "--local_rank=0", "--device", "cpu")
    ended = on_two_ranks(tmp_path, *given, "--tasks", "hellaswag,lambada,perplexity", *options)
    assert ended.codes == [0, 0], ended.everything
    assert ended.out[1] == ""
    for found, scores in zip(
        json.loads(ended.out[0])["models"], ON_FILE["scores"].values(), strict=True
    ):
        tasks = found["tasks"]
        for task, name in (("hellaswag", "acc"), ("hellaswag", "acc_norm"), ("lambada", "acc")):
            assert tasks[task][name]["value"] == pytest.approx(scores[task][name])
        bits = tasks["story"]["bits_per_byte"]["value"]
        assert bits == pytest.approx(scores["perplexity"]["bits_per_byte"], rel=1e-5)
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_two_ranks_report_a_mistake_once(models, tmp_path):
    ended = on_two_ranks(
        tmp_path, "compare", models / "bytes", "--tasks", "piqa", "--device", "cpu"
    )
    assert ended.codes == [2, 2], ended.everything
    message = "name its file, piqa=FILE"
    assert message in ended.err[0]
    assert ended.out == ["", ""] and message not in ended.err[1]


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [("cpu", None, "fp32"), ("cuda:0", (7, 5), "fp16"), ("cuda:0", (9, 0), "bf16")],
)
def test_a_model_computes_in_what_its_device_has(monkeypatch, device, capability, dtype):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert usual_dtype(device) == dtype
