"""`speedrun`: its stages, what a second command changes, and what it says to mistakes."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from data.text_samples import random_texts, write_jsonl
from evaluate.test_origin import hub as hub

from refocused.commands import launch, main
from refocused.commands.main import run_command
from refocused.commands.speedrun.command import GPU_SEQUENCE
from refocused.evaluate.continuations import Continuation, Scored
from refocused.evaluate.core import measures_of
from refocused.evaluate.multiple_choice import TaskResult
from refocused.metrics.jsonl import JsonLines
from refocused.monitor.sampler import gpu_reader
from refocused.system.errors import ExitCode
from refocused.system.hardware import FreeMemory

STAGES = ["tokenizer", "shards", "training"]
SHORT = ["--data", "texts.jsonl", "--vocabulary", "300"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts, and training that only writes what a finished run leaves."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("texts.jsonl"), random_texts(60))
    real = main.run_command

    def run(name, given):
        if name != "launch":
            return real(name, given)
        return trained(given)

    monkeypatch.setattr(main, "run_command", run)
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [])
    return tmp_path


def trained(given, **state):
    from refocused.config.load_run import load_run

    run = load_run(given[1], given[2:]).config.run
    path = Path(run.directory, run.name)
    (path / "final_model").mkdir(parents=True)
    (path / "final_model/config.json").write_text("{}")
    end = {"status": "finished", "step": run.steps, "tokens": run.tokens, "cost_usd": None, **state}
    (path / "state.json").write_text(json.dumps(end))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the supervisor replaces it
    return ExitCode.OK


def carried_out(capsys, *given, code=ExitCode.OK):
    """Run the command; return the stages that it carried out, and what it printed."""
    assert run_command("speedrun", [*SHORT, *given]) == code
    out, err = capsys.readouterr()
    return re.findall(r"^== (\w+): (?!.* is there$)", out, re.M), out + err


def test_a_second_command_changes_only_what_depends_on_it(folder, capsys):
    handler = signal.getsignal(signal.SIGINT)
    assert carried_out(capsys)[0] == STAGES
    assert signal.getsignal(signal.SIGINT) is handler  # Ctrl+C still stops the stages after it
    stages, text = carried_out(capsys)
    assert stages == [] and text.count("is there") == 3 and text.count("was there") == 3
    before = {path: path.stat().st_mtime_ns for path in Path("data").rglob("*") if path.is_file()}
    for more in (
        ["--depth", "1"],
        ["--depth", "1", "optimizer.lr=0.02"],
        ["run.seed=7"],
        ["run.steps=3"],
        ["run.tokens=90000"],
        ["run.name=mine"],
    ):
        assert carried_out(capsys, *more)[0] == ["training"], more
    for more in (
        ["run.tokens=90000"],
        ["log.interval=7"],
        ["cost.per_hour_usd=2"],
        ["zero.stage=1"],
    ):
        assert carried_out(capsys, *more)[0] == [], more
    assert carried_out(capsys, "--vocabulary", "290")[0] == STAGES
    with Path("texts.jsonl").open("a") as file:
        file.write('{"text": "One more text."}\n')
    assert carried_out(capsys)[0] == STAGES
    runs = {path.name for path in Path("runs").iterdir()}
    assert len(runs) == 9 and "mine" in runs
    unchanged = [path for path in before if path.suffix not in (".yaml",)]
    assert {path: before[path] for path in unchanged if "/d2-" not in str(path)} == {
        path: path.stat().st_mtime_ns for path in unchanged if "/d2-" not in str(path)
    }


def test_a_damaged_result_is_made_again(folder, capsys):
    carried_out(capsys)
    (tokenizer,) = Path("data/speedrun").glob("tokenizer-*.json")
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:100])
    assert carried_out(capsys)[0] == ["tokenizer"]
    assert tokenizer.read_bytes() == whole
    (model,) = Path("runs").rglob("config.json")
    model.unlink()
    model.parent.rmdir()
    assert carried_out(capsys)[0] == ["training"]
    (shard,) = Path("data/speedrun").rglob("tokens_train_000000.npy")
    shard.write_bytes(b"")
    _, text = carried_out(capsys, code=ExitCode.FAILED)  # nothing is removed that might be rescued
    assert "tokens_train_000000.npy is missing or damaged" in text
    assert "hint: Stopped in stage shards (finished: tokenizer)." in text


def test_an_unfinished_run_is_continued(folder, capsys):
    carried_out(capsys)
    (state,) = Path("runs").rglob("state.json")
    for wrong in ({"status": "stopped"}, {"step": 7}):
        finished = json.loads(state.read_text())
        state.write_text(json.dumps(finished | wrong))
        shutil.rmtree(state.parent / "final_model")
        assert carried_out(capsys)[0] == ["training"]


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_says_what_will_be_continued(folder, capsys, monkeypatch, stage):
    verb = {"tokenizer": "train-tokenizer", "shards": "tokenize", "training": "--config"}[stage]
    inner = main.run_command

    def interrupted(name, given):
        return ExitCode.INTERRUPTED if verb == given[0] else inner(name, given)

    monkeypatch.setattr(main, "run_command", interrupted)
    _, text = carried_out(capsys, "--out", "mine", code=ExitCode.INTERRUPTED)
    done = ", ".join(STAGES[: STAGES.index(stage)]) or "nothing"
    hint = f"hint: Stopped in stage {stage} (finished: {done}). The same command continues: "
    assert hint in text
    command = text.split(hint)[1].strip()
    assert command.endswith("speedrun.sh --data texts.jsonl --vocabulary 300 --out mine")


def test_the_end_shows_scores_dollars_and_where_all_is(folder, capsys, monkeypatch):
    def scored(given):
        code = trained(given, cost_usd=1.5)
        (run,) = Path("runs").iterdir()
        log = JsonLines(run / "logs/training_metrics.jsonl")
        measures = measures_of(
            {"all": (0.2, [(None, [Continuation([1, 2], 1)])])}, [Scored(0, True)]
        )
        record = TaskResult("core", 1, 0, measures).as_record()
        log.write({"kind": "tasks", "step": 1, "tasks": {"core": record}})
        log.close()
        return code

    inner = main.run_command
    monkeypatch.setattr(
        main,
        "run_command",
        lambda name, given: (scored if name == "launch" else inner)(
            *([given] if name == "launch" else [name, given])
        ),
    )
    _, text = carried_out(capsys, "cost.per_hour_usd=36000")
    end = text[text.index("\nfinished in ") :]
    assert re.search(r"dollars    \$[\d.,]+ for this command; \$1\.50 for all sessions", end)
    assert "CORE       1.0000 (GPT-2: 0.2565)" in end
    assert re.search(r"page       file:///\S+/runs/d2-\w{6}/summary\.html", end)
    assert re.search(r"model      runs/d2-\w{6}/final_model", end)
    assert [line.split()[0] for line in end.splitlines()[2:5]] == STAGES
    Path("mine.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"], "label": 0}\n')
    stages, text = carried_out(capsys, "evaluation.tasks=[mine.jsonl]")
    assert stages == [] and re.search(
        r"^  scores     not yet measured: \S*evaluate\S* runs/d2-\w{6} --tasks mine\.jsonl$",
        text,
        re.M,
    )


def test_a_dry_run_writes_nothing(folder, capsys):
    before = sorted(folder.rglob("*"))
    _, text = carried_out(
        capsys, "--dry-run", "--depth", "4", "optimizer.lr=0.5", "run.on_end=curl SECRET"
    )
    assert sorted(folder.rglob("*")) == before
    assert re.search(r"optimizer\.lr +0\.5 +command line", text)
    assert re.search(r"run\.steps +\d+ +12 x 3\.2 M parameters of matrices and head$", text, re.M)
    assert text.count("\n== ") == 3 and "SECRET" not in text


def test_without_data_the_text_is_of_the_installed_packages(folder, capsys):
    assert run_command("speedrun", ["--dry-run"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert re.search(r"== text: \S+ docstrings data/speedrun/docstrings-\w{6}\.jsonl", out)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--data", "none"], "none: there is no such file or folder. Correct the path."),
        (["--data", "empty"], r"empty: no text files \(.*\) are there\. Correct the path"),
        (["--data", "hub:me/none"], "hub:me/none: 404 .*Check the name, HF_TOKEN and the conn"),
        (["--data", "hub:me/pictures"], r"hub:me/pictures: no text files \(.*\) are there\."),
        (["--data", "ftp://x/y"], "ftp://x/y: give a path, gs://bucket/NAME, or hub:DATASET."),
        (["--depth", "40"], "run.device=auto found no GPU on this machine, and 2 ranks would"),
        (["--depth", "40", "run.device=cpu"], "--depth 40: .* GB .*"),
        (["--budget", "40"], "--budget needs GPUs of a known kind, .* has none. Name the size: "),
        (["optimizer.lrr=1"], r"optimizer\.lrr is not a setting\. Did you mean optimizer\.lr\?"),
        (["batch.global_batch_size=3", "batch.micro_batch_size=2"], "batch.global_batch_size"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    folder, capsys, monkeypatch, hub, given, message
):
    from refocused.system import hardware

    hub["me/pictures"] = {"1.png": b"x"}
    monkeypatch.setattr(hardware, "memory_now", lambda: FreeMemory(8 * 10**9, 8 * 10**9, 0))
    Path("empty").mkdir()
    before = sorted(folder.rglob("*"))
    code = run_command("speedrun", given)
    err = capsys.readouterr().err
    assert code != ExitCode.OK and re.search(f"^error: .*{message}", err), err
    assert "Traceback" not in err and err.count("error:") == 1
    assert sorted(folder.rglob("*")) == before


def test_unknown_options_are_refused(capsys):
    for given, message in (
        (["--dept", "3", "--deepth", "2"], "unrecognized arguments: --deepth"),
        (["--depth", "3", "--budget", "2"], "--budget: not allowed with argument --depth"),
        (["--depth", "0"], "expected a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_command("speedrun", given)
        assert ended.value.code == ExitCode.WRONG_USE
        assert message in capsys.readouterr().err


def test_texts_that_are_all_empty_are_reported(folder, capsys):
    write_jsonl(Path("texts.jsonl"), ["", ""])
    _, text = carried_out(capsys, code=ExitCode.FAILED)
    assert "There is no text in the files: every document is empty." in text
    assert "Stopped in stage" in text


@pytest.fixture
def eight_gpus(folder, monkeypatch):
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [(9, 0)] * 8)
    monkeypatch.setattr(gpu_reader, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * 8)


def test_a_budget_chooses_the_largest_depth_that_it_pays_for(eight_gpus, capsys):
    depths = []
    for budget in ("20", "100"):
        given = ["--budget", budget, "--dry-run", "cost.per_hour_usd=24"]
        assert run_command("speedrun", [*SHORT[:2], *given]) == ExitCode.OK
        out = capsys.readouterr().out
        chosen = re.search(r"^  depth +(\d+) +[\d.]+ h, \$([\d.]+) on 8 x H100 SXM", out, re.M)
        assert chosen is not None
        depth, usd = chosen.groups()
        depths.append(int(depth))
        assert float(usd) <= float(budget)
        assert f"--best-fit {GPU_SEQUENCE}" in out and "--vocabulary 32768" in out
    assert depths == sorted(set(depths))
    code = run_command("speedrun", [*SHORT[:2], "--budget", "0.01", "--dry-run"])
    assert code == ExitCode.WRONG_USE
    assert "--budget 0.01: depth 2 is estimated at $" in capsys.readouterr().err


def test_a_depth_that_does_not_fit_the_gpus_is_refused(eight_gpus, capsys):
    given = ["--depth", "90", "zero.stage=1", "--dry-run"]
    assert run_command("speedrun", [*SHORT[:2], *given]) == ExitCode.WRONG_USE
    err = capsys.readouterr().err
    assert re.search(r"error: Nothing fits: .* a step needs .* of a GPU's ", err), err
