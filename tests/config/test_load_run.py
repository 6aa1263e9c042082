"""Run files and overrides: the settings they result in, and what is said of each mistake.

`run_files.txt` has cases with all that follows from them: the changes of the command line with the
values that they result in, or the problems, each with its place and a remedy. A case begins with
`> run` or `> mixture`, a file of this module, then edits of it (`file`: the whole) and settings of
the command line. `.venv/bin/python tests/config/test_load_run.py` writes the file anew: read what
has changed.
"""

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refocused.commands import train
from refocused.config import shipped_files
from refocused.config.load_run import Change, find_config, load_run, read_run, render_run
from refocused.config.outputs import HIDDEN, without_secrets
from refocused.config.setting_help import SECTION_SYNONYMS, SECTIONS, SYNONYMS, settings_in
from refocused.system.errors import ConfigError, ExitCode

GOLDEN = Path(__file__).with_name("run_files.txt")
ODD = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 100, "n_inner": 200, "n_layer": 1}
ODD |= {"n_head": 1, "n_positions": 64}
SMALL_RUN = """\
run:
  steps: 100
model:
  preset: gpt2_tiny
  sequence_length: 64
batch:
  micro_batch_size: 2
  global_batch_size: 8
data:
  source: tokens
optimizer:
  lr: 3e-4
precision: {}
zero:
  # stage: 2
"""
MIXTURE = """\
run: {steps: 100}
model: {preset: gpt2_tiny, sequence_length: 64}
batch: {micro_batch_size: 2, global_batch_size: 8}
data:
  exclude: [draft*]
  validation_fraction: 0.25
  mixture:
    web:
      source: gs://tokens/web
      weight: 0.7
    code: {source: 12, weight: 3e-1, exclude: [], validation_files: [val*], pad_id: 0}
optimizer: {lr: 3e-4}
"""


def written(folder: Path, text: str = SMALL_RUN, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_run(file, overrides)
    assert failure.value.exit_code is ExitCode.WRONG_USE
    return str(failure.value).splitlines()


def value_of(config: Any, key: str) -> Any:
    """Return a setting's value by its dotted name, also of a mixture."""
    names = key.replace("async", "in_background").split(".")
    return functools.reduce(
        lambda part, name: part[name] if isinstance(part, dict) else getattr(part, name),
        names,
        config,
    )


def answered(case: str, folder: Path) -> str:
    """Return a case with a line for each change or problem, without the folder of the files."""
    name, *parts = case.removeprefix("> ").split(" | ")
    text, overrides = {"run": SMALL_RUN, "mixture": MIXTURE}[name], list[str]()
    for part in parts:
        before, arrow, after = part.partition(" => ")
        if before == "file":
            text = json.loads(after)
        elif arrow:
            assert json.loads(before) in text
            text = text.replace(json.loads(before), json.loads(after), 1)
        else:
            overrides.append(part)
    try:
        loaded = load_run(written(folder, text), overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
    else:
        lines = [
            f"  {change.key}: {change.before} -> {change.after}: "
            f"{value_of(loaded.config, change.key)!r}"
            for change in loaded.changes
        ]
    return "\n".join([case, *(line.replace(f"{folder}/", "") for line in lines)])


def transcript(folder: Path) -> str:
    for name, content in (("odd", ODD), ("own", {"zero_optimization": {"stage": 2}})):
        kind = folder / {"odd": "models", "own": "deepspeed"}[name]
        kind.mkdir()
        (kind / f"{name}.json").write_text(json.dumps(content))
    (folder / "runs").mkdir()
    found = [
        answered(case, folder / "runs")
        for case in GOLDEN.read_text().splitlines()
        if case.startswith("> ")
    ]
    text = "\n\n".join(found).replace(f"{folder}/", "")
    return re.sub(r"There are (\w+, )+", "There are ..., ", text) + "\n"


def test_each_case_results_in_what_was_agreed(tmp_path: Path) -> None:
    assert transcript(tmp_path) == GOLDEN.read_text()


def test_a_file_that_is_not_text_and_a_name_that_is_not_allowed_are_reported(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, name="no name.yaml")
    assert problems(file)[0].startswith(f"{file}: run.name = 'no name' (from the file's name): a ")
    file.write_bytes(b"run: \xff\xfe")
    assert problems(file) == [f"{file}: not UTF-8 text (byte 5). Is it a run file?"]


@pytest.mark.slow
def test_what_an_error_quotes_has_a_bounded_length(tmp_path: Path) -> None:
    file = written(tmp_path)
    [problem] = problems(file, f"optimizer.lr={'x' * 100_000}")
    assert len(problem) < 2100
    assert problem.startswith("command line: optimizer.lr = 'xxx")
    assert problem.endswith("xxx': expected a number such as 1000 or 2.5e-4, without quotes")
    lines = problems(file, *(f"optimizer.key_{number}=1" for number in range(5000)))
    assert len(lines) == 201
    assert lines[-1] == "... and 4,800 more lines"


def test_the_file_gives_values_and_its_own_name(tmp_path: Path) -> None:
    loaded = load_run(written(tmp_path))
    assert loaded.config.run.name == "mine"
    assert loaded.config.optimizer.lr == 3e-4
    assert loaded.config.schedule.kind == "cosine"
    assert (loaded.shape.width, loaded.fragment, loaded.changes) == (64, {}, [])
    file = written(tmp_path, SMALL_RUN.replace("gpt2_tiny", "gone"))  # a shape that is not there
    assert read_run(file).model.preset == "gone"


def test_the_vocabulary_is_the_shapes_own_or_a_number(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert load_run(file).shape.vocabulary == 512
    loaded = load_run(file, ["model.vocabulary=5e4", "data.document_id=49999"])
    assert loaded.shape.vocabulary == loaded.shape.settings["vocab_size"] == 50_000
    [problem] = problems(file, "model.vocabulary=600", "data.document_id=600")
    assert "data.document_id = 600: gpt2_tiny has ids up to 599" in problem
    undecided = load_run(file, ["model.vocabulary=auto", "data.document_id=600"])
    assert undecided.shape.vocabulary == 512
    assert undecided.with_vocabulary(700).shape.vocabulary == 700
    with pytest.raises(ConfigError, match=r"data.document_id: .* raise model.vocabulary"):
        undecided.with_vocabulary(600)


def test_the_command_line_wins_and_the_later_of_two(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e-3", "optimizer.lr=2.5e-4", "log.interval=7", "run.steps=1e2"]
    loaded = load_run(written(tmp_path), [*overrides, "run.name=second"], name="third")
    assert loaded.config.optimizer.lr == 2.5e-4
    assert loaded.config.run.name == "third"  # given apart, as by --run
    assert loaded.changes == [  # the steps are those of the file
        Change("optimizer.lr", "3e-4", "2.5e-4"),
        Change("log.interval", "10", "7"),
        Change("run.name", "not set", "third"),
    ]


def test_of_addresses_that_may_be_secret_only_the_host_is_shown(tmp_path: Path) -> None:
    shown = {}
    for text in ("https://u:p@hooks.example/T0?k=1", "curl 'https://hooks.example/T0' -d @-"):
        loaded = load_run(written(tmp_path), [f"log.on_alarm={text}"])
        assert loaded.config.log.on_alarm == text
        [change] = loaded.changes
        rendered = load_run(written(tmp_path, render_run(loaded.config)))
        shown[change.after] = rendered.config.log.on_alarm
    assert list(shown) == ["https://hooks.example/...", "curl 'https://hooks.example/...' -d @-"]
    assert list(shown.values()) == list(shown)


def test_the_command_at_the_end_is_hidden_in_all_that_a_run_writes(tmp_path: Path) -> None:
    command = "curl -H 'Authorization: KEY' https://api.example/stop # run.on_end=x"
    typed = f"run.on_end={json.dumps(command)}"
    loaded = load_run(written(tmp_path), [typed])
    assert loaded.config.run.on_end == command
    assert loaded.changes == [Change("run.on_end", "null", HIDDEN)]
    assert without_secrets(typed) == f"run.on_end={HIDDEN}"
    rendered = render_run(loaded.config)
    assert "KEY" not in rendered + str(loaded.config.model_dump(mode="json"))
    again = load_run(written(tmp_path, rendered), ["run.on_end=true"])
    assert again.changes == [Change("run.on_end", HIDDEN, HIDDEN)]
    refused = ["--config", str(written(tmp_path, rendered))]
    with pytest.raises(ConfigError, match=r"a run does not write its command\. Set it again\."):
        train.load(train.read_arguments(refused))


def test_each_source_has_its_settings_and_the_rest_of_the_section(tmp_path: Path) -> None:
    config = load_run(written(tmp_path, MIXTURE)).config
    data = config.data
    assert {name: one.weight for name, one in data.mixture.items()} == {"web": 0.7, "code": 0.3}
    web, code = data.of_source("web"), data.of_source("code")
    assert (web.source, web.exclude, web.pad_id) == ("gs://tokens/web", ("draft*",), None)
    assert (web.validation_files, web.validation_fraction) == ((), 0.25)
    assert (code.source, code.exclude, code.pad_id) == ("12", (), 0)
    assert (code.validation_files, code.validation_fraction) == (("val*",), 0.0)
    assert not web.mixture
    assert load_run(written(tmp_path, render_run(config))).config == config


def test_every_synonym_leads_to_a_setting_and_hides_none() -> None:
    for synonym, meant in SYNONYMS.items():
        section, _, key = meant.partition(".")
        assert key in settings_in((section,)), synonym
    assert set(SECTION_SYNONYMS.values()) <= set(SECTIONS)
    assert not set(SECTION_SYNONYMS) & set(SECTIONS)


def test_files_are_found_by_name_beside_the_run_or_among_those_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = shipped_files() / "runs" / "demo.yaml"
    assert find_config("runs", "config/runs/demo.yaml") == demo  # from any folder
    assert find_config("runs", "demo") == find_config("runs", "demo.yaml") == demo
    own, mine = tmp_path / "models" / "gpt2_tiny.json", Path("config", "runs", "demo.yaml")
    for file in (own, mine):
        file.parent.mkdir(parents=True)
    own.touch()
    assert find_config("models", own) == own
    beside = tmp_path / "runs" / "mine.yaml"
    assert find_config("models", "gpt2_tiny", beside=beside) == own
    assert find_config("models", "neox_tiny", beside=beside).parent == shipped_files() / "models"
    mine.touch()
    assert find_config("runs", "config/runs/demo.yaml") == mine
    assert find_config("runs", "demo.yml") == find_config("runs", "demo.yaml")
    missing = r"no file .*\.yaml\. Did you mean demo\? There are demo"
    for name in ("elsewhere/demo.yaml", "dem"):
        with pytest.raises(ConfigError, match=missing):
            find_config("runs", name)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(min_value=1e-12, max_value=1e12)


@settings(max_examples=60, deadline=None)
@example(source="a\x85b", name="x", globs=[], lr=1.0, price=None)
@given(
    source=texts.filter(lambda text: not text.startswith("~")),  # loaded, it is a home folder
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    globs=st.lists(texts, max_size=3),
    lr=numbers,
    price=st.none() | numbers,
)
def test_a_rendered_run_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    name: str,
    globs: list[str],
    lr: float,
    price: float | None,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    config = load_run(written(folder)).config
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": name}),
            "data": config.data.model_copy(update={"source": source, "include": tuple(globs)}),
            "optimizer": config.optimizer.model_copy(update={"lr": lr}),
            "cost": config.cost.model_copy(update={"per_hour_usd": price}),
        }
    )
    resolved = folder / "run.yaml"
    resolved.write_text(render_run(config), encoding="utf-8")
    assert load_run(resolved).config == config


HOME_SETTINGS = [
    "run.directory",
    "data.source",
    "data.cache",
    "data.tokenizer",
    "data.bpe_folder",
    "model.preset",
    "model.start_from",
    "zero.nvme_path",
    "zero.fragment",
    "checkpoint.mirror",
    "tracking.openmetrics",
    "run.spot_notice",
]


def test_the_home_folder_is_meant_by_a_tilde_in_every_setting_that_may_be_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = written(tmp_path).read_text()
    for name in HOME_SETTINGS:
        more = ["data.tokenizer=gpt2"] if name == "data.bpe_folder" else []
        config = read_run(written(tmp_path, text), [f"{name}=~/x.prom", *more])
        section, key = name.split(".")
        assert getattr(getattr(config, section), key) == f"{tmp_path}/x.prom", name
    config = read_run(written(tmp_path, MIXTURE), ["data.mixture.web.source=~/x"])
    assert config.data.mixture["web"].source == f"{tmp_path}/x"
    [problem] = problems(written(tmp_path, text), "run.directory=~no-such-user/x")
    assert "run.directory = '~no-such-user/x': '~no-such-user/x': there is no such user" in problem
    assert find_config("runs", "~/mine.yaml") == tmp_path / "mine.yaml"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        GOLDEN.write_text(transcript(Path(place)))
