"""Run files and command lines: what they give, and how everything wrong in them is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refocused.config.load_run import (
    REPOSITORY_CONFIG,
    Change,
    find_config,
    load_run,
    read_run,
    render_run,
)
from refocused.config.suggestions import SECTION_SYNONYMS, SECTIONS, SYNONYMS, settings_in
from refocused.system.errors import ConfigError, ExitCode

SMALL_RUN = """\
run:
  steps: 100
model:
  preset: gpt2_tiny
  sequence_length: 64
batch:
  micro: 2
  windows: 8
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
batch: {micro: 2, windows: 8}
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


MASKED = "data.source=a; data.mask_documents=on"
CYCLES = "schedule.kind=warm_restarts; schedule.warmup_steps=3"
NVME = "zero.offload_optimizer=nvme"


def written(folder: Path, text: str = SMALL_RUN, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_run(file, overrides)
    assert failure.value.exit_code is ExitCode.WRONG_USE
    return str(failure.value).splitlines()


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
    assert "data.document_id = 600: gpt2_tiny knows ids up to 599" in problem
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


@pytest.mark.parametrize(("steps", "warmup"), [("41", 40), ("40", 4), ("5", 0)])
def test_a_shorter_run_shortens_the_files_warmup(tmp_path: Path, steps: str, warmup: int) -> None:
    file = written(tmp_path, SMALL_RUN + "schedule:\n  warmup_steps: 40\n")
    loaded = load_run(file, [f"run.steps={steps}"])
    assert loaded.config.schedule.warmup_steps == warmup
    shown = Change("schedule.warmup_steps", "40", f"{warmup} (1/10 of run.steps={steps})")
    assert (shown in loaded.changes) == (warmup != 40)
    if warmup != 40:  # what is typed, or contradicts itself in the file, is meant
        [problem] = problems(file, f"run.steps={steps}", "schedule.warmup_steps=40")
        assert f"the warmup must end before run.steps = {steps}" in problem
        contradiction = file.read_text().replace("steps: 100", f"steps: {steps}", 1)
        [problem] = problems(written(tmp_path, contradiction), "optimizer.lr=1")
        assert "schedule.warmup_steps = 40: the warmup must end" in problem


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.steps=1e6", 10**6),
        ("run.steps='12'", 12),
        ("run.steps=0x10", 16),
        ("optimizer.lr='3e-4'", 3e-4),
        ("precision.tf32=off", False),
        ("checkpoint.keep_remote=all", "all"),
        ("tracking.wandb=my-team/demo_1.5", "my-team/demo_1.5"),
        ("data.bpe_folder=null", None),
        ("zero.offload-optimizer=cpu", "cpu"),
        ("optimizer.betas=[0.9, 1e-1]", (0.9, 0.1)),
        ("data.include=[a*, 12]", ("a*", "12")),
        *((f"run.name={name}", name) for name in ("1121", "1e5", "2024-12-05", "yes")),
    ],
)
def test_settings_take_the_usual_ways_to_write_them(
    tmp_path: Path, override: str, value: object
) -> None:
    config = load_run(written(tmp_path), [override]).config
    section, _, key = override.partition("=")[0].replace("-", "_").partition(".")
    found = getattr(getattr(config, section), key)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.lr=abc", "optimizer.lr = 'abc': a number is wanted"),
        ("optimizer.lr=true", "optimizer.lr = true: a number is wanted"),
        ("optimizer.lr=null", "optimizer.lr = null: a number is wanted"),
        ("optimizer.lr=0", "optimizer.lr = 0: more than 0 is wanted"),
        ("optimizer.lr=.inf", "optimizer.lr = .inf: a finite number is wanted"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: too few values"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas = [0.9, 1]: less than 1 is wanted"),
        ("run.steps=2.5", "run.steps = 2.5: a whole number is wanted"),
        ("run.steps=0", "run.steps = 0: at least 1 is wanted"),
        ("model.vocabulary=many", "'many': a whole number of at least 1 is wanted, or auto"),
        ("data.include=a", "data.include = 'a': a list is wanted, such as [a, b]"),
        ("data.source=", "data: source is missing: give it, or a mixture of several sources"),
        ("data.validation_fraction=2", "data.validation_fraction = 2: at most 1 is wanted"),
        ("precision.tf32=maybe", "precision.tf32 = 'maybe': true or false is wanted"),
        ("zero.stage=4", "zero.stage = 4: one of 0, 1, 2, 3, auto is wanted"),
        ("schedule.kind=cosin", "warm_restarts, constant is wanted. Did you mean cosine?"),
        ("run.name=../x", "= '../x': a run's name is letters, digits, '.', '_' and '-', at"),
        ("evaluation.tasks=[a.json]", "a task is NAME=FILE.jsonl, as hellaswag="),
        ("log.sample_seconds=0.1", "0, or at least 0.5 is wanted"),
        ("cost.budget_usd=100", "cost: budget_usd needs per_hour_usd"),
        ("cost.credit_usd=100", "cost: credit_usd needs per_hour_usd"),
        ("tracking.histogram_interval=9", "tracking: histogram_interval needs wandb or tensorboar"),
        ("tracking.openmetrics=node/run.txt", "a file that ends in .prom is wanted"),
        *(
            (f"tracking.wandb={project}", "PROJECT or ENTITY/PROJECT is wanted")
            for project in ("''", "a/b/c", "a b")
        ),
        ("batch.accumulation=2", "batch: give either accumulation or windows"),
        ("batch.windows=null; batch.accumulation=4; batch.micro=auto", "micro: auto needs windows"),
        ("precision.fp8=rowwise; precision.dtype=fp32", "precision: fp8: rowwise needs dtype:"),
        ("zero.stage=2; zero.offload_parameters=cpu", "zero: offload_parameters needs stage: 3"),
        (NVME, "zero: an offload to nvme needs nvme_path"),
        ("data.source=a; data.bpe_folder=b; data.tokenizer=bytes", "data: bpe_folder holds gpt2's"),
        (MASKED, "data: mask_documents needs document_id"),
        (f"{MASKED}; data.document_id=3; data.separator_id=4", "separated by separator_id = 4"),
        # settings of different sections
        ("schedule.warmup_steps=100", "= 100: the warmup must end before run.steps = 100."),
        (
            f"{CYCLES}; schedule.cycle_steps=3",
            "a cycle must be longer than schedule.warmup_steps = 3",
        ),
        ("batch.micro=3", "batch.windows = 8: not a multiple of batch.micro = 3"),
        (f"checkpoint.async=true; {NVME}; zero.nvme_path=/x", "nvme keeps states on the drive"),
        ("evaluation.tasks=[a.jsonl]", "tokens by data.tokenizer, which is unknown."),
        # settings and the files that they name
        ("model.sequence_length=65", "model.sequence_length = 65: gpt2_tiny goes up to 64."),
        ("model.preset=gpt2_tini", "model.preset = 'gpt2_tini': no file gpt2_tini.json. Did you"),
        ("zero.fragment=nvm", "zero.fragment = 'nvm': no file nvm.json. Did you mean nvme?"),
        ("zero.fragment=nvme", "offload_optimizer is of use only with zero.offload_optimizer"),
        # names
        ("model.lr=1", "model.lr is not a setting. Did you mean optimizer.lr?"),
        ("optimizer.lr.a=3", "optimizer.lr.a is not a setting. optimizer.lr takes a value of its"),
        ("optimizer.eps=1; optimizer.eps.a=3", "optimizer.eps.a is not a setting. optimizer.eps"),
        ("optimizer.weight_deacy=1", "Did you mean optimizer.weight_decay?"),
        ("optimizer.warmup_steps=1", "Did you mean schedule.warmup_steps?"),
        ("run.interval=1", "mean checkpoint.interval or evaluation.interval or log.interval?"),
        ("log.zzz=1", "log.zzz is not a setting. log has interval, sample_seconds."),
        ("optimiser.lr=1", "optimiser is not a section. Did you mean optimizer?"),
        ("training.x=1", "training is not a section. Did you mean run?"),
        ("lr=1", "'lr=1' is not an override. Write section.key=value"),
        ("data.source=[", "data.source = '[': not YAML"),
        # of the mixture
        ("data.mixture.web.wieght=1", "is not a setting. Did you mean data.mixture.web.weight?"),
        ("data.mixture.wbe.weight=1", "data.mixture.wbe.source is missing. Did you mean web?"),
        ("data.mixture.web=3", "data.mixture.web = 3: a group of settings is wanted"),
        ("data.mixture.web.weight.a=3", "data.mixture.web.weight takes a value of its own."),
    ],
)
def test_a_wrong_override_says_what_was_wanted(
    tmp_path: Path, overrides: str, message: str
) -> None:
    text = MIXTURE if "data.mixture" in overrides else SMALL_RUN
    [problem] = problems(written(tmp_path, text), *overrides.split("; "))
    assert message in problem
    assert problem.startswith(("command line: ", str(tmp_path)))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("  lr:", "  learning_rate: 1\n  lr:", ":12: optimizer.learning_rate is not a setting. Di"),
        ("3e-4", "{a: 3}", ":12: optimizer.lr = {a: 3}: a number is wanted"),
        ("windows: 8", "windows: 8\n  accumulation: 2", ":6: batch: give either accumulation or"),
        ("3e-4", "3e-4\n  lr: 1", ":13: optimizer.lr is set twice, first on line 12. Keep one."),
        ("run:", "log: 7\nrun:", ":1: log is a section: write its settings below it"),
        ("run:", "zzz:\nrun:", ":1: zzz is not a section. There are run, model, batch"),
        ("run:", "max_steps: 3\nrun:", ":1: max_steps is not a section. Did you mean run.steps?"),
        (
            "run:",
            "log.interval: 3\nrun:",
            ":1: log.interval is not a section. Write interval below",
        ),
        # no run at all
        (SMALL_RUN, "", ":1: sections are wanted"),
        (SMALL_RUN, "run:\n  steps: [1\nmodel: 2\n", ":3: not YAML"),
        (SMALL_RUN, "run:\n  steps: !!python/name:os.system 1\n", ":2: not YAML"),
        (SMALL_RUN, "run:\n  steps: &a [*a]\n", ":2: not YAML"),
        (SMALL_RUN, "run:\n  steps: \x01\n", ": not YAML"),
        # in a mixture
        (
            "weight: 0.7",
            "fetch_gb: 1",
            ":10: data.mixture.web.fetch_gb is not a setting. data.mixtu",
        ),
        ("weight: 0.7", "weight: -1", ":10: data.mixture.web.weight = -1: more than 0 is wanted"),
        ("source: gs://tokens/web", "pad_id: 1", ":8: data.mixture.web.source is missing"),
        ("[draft*]", "[{a: 1}]", ":5: data.exclude = [{a: 1}]: text is wanted"),
        ("[val*]", "val", ":11: data.mixture.code.validation_files = 'val': a list is wanted"),
        ("web:", "we b:", ":8: data.mixture.we b: a source's name is letters, digits and '_'"),
        ("  mixture:", "  source: x\n  mixture:", ":4: data: source and mixture are both set"),
        ("  mixture:", "  prepare: python_stdlib\n  mixture:", ":4: data: prepare fills"),
        ("web:", "web: &a\n      x: *a", ":8: not YAML: an alias stands for what contains it."),
        ("  exclude:", "  validation_files: [v]\n  exclude:", ":4: data: validation_files and val"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_line(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    text = SMALL_RUN if before in SMALL_RUN else MIXTURE
    file = written(tmp_path, text.replace(before, after, 1))
    assert [problem for problem in problems(file) if problem.startswith(f"{file}{message}")]


def test_all_problems_come_at_once_in_reading_order(tmp_path: Path) -> None:
    text = SMALL_RUN.replace("gpt2_tiny", "gpt2_tinu").replace("micro: 2", "batch_size: 2")
    text = text.replace("precision: {}", "warmup: 3")
    file = written(tmp_path, text.replace("3e-4", "fast"))
    assert [line.partition(": ")[0] for line in problems(file, "log.every=2")] == [
        f"{file}:4",  # the preset
        f"{file}:7",  # batch_size
        f"{file}:12",  # lr
        f"{file}:13",  # warmup
        f"{file}",  # batch.micro is missing
        "command line",
    ]


def test_a_misspelt_name_hides_no_problem_of_settings_that_must_fit(tmp_path: Path) -> None:
    text = SMALL_RUN.replace("windows: 8", "windows: 9\n  acumulation: 1")
    file = written(tmp_path, text.replace("length: 64", "length: 65"))
    assert [line.partition(": ")[2].partition(":")[0] for line in problems(file)] == [
        "model.sequence_length = 65",
        "batch.windows = 9",
        "batch.acumulation is not a setting. Did you mean batch.accumulation?",
    ]


def test_missing_settings_are_named_even_of_a_missing_section(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.partition("batch:")[0])
    assert problems(file) == [
        f"{file}: batch.micro is missing",
        f"{file}: data: source is missing: give it, or a mixture of several sources",
        f"{file}: optimizer.lr is missing",
    ]
    file.write_bytes(b"run: \xff\xfe")
    assert problems(file) == [f"{file}: not UTF-8 text (byte 5). Is it a run file?"]
    file = written(tmp_path, name="no name.yaml")
    assert problems(file)[0].startswith(f"{file}: run.name = 'no name' (from the file's name): a ")


def test_what_a_fragment_may_not_hold_names_its_file(tmp_path: Path) -> None:
    fragment = tmp_path / "own.json"
    fragment.write_text('{"zero_optimization": {"stage": 2}}')
    file = written(tmp_path, SMALL_RUN.replace("# stage: 2", f"fragment: {fragment}"))
    assert problems(file) == [
        f"{fragment}: zero_optimization.stage belongs to the run file: set zero.stage there "
        "and leave it out here."
    ]


@pytest.mark.parametrize(
    ("preset", "overrides", "messages"),
    [
        ("ten_tiny", "data.mask_documents=on; data.document_id=0", ["(ten) has no att"]),
        ("ten_tiny", "precision.fp8=tensorwise", ["is made for gpt2 and gpt_neox"]),
        (
            "odd",
            "precision.fp8=tensorwise",
            ["is 100 wide", "is 200 wide", "sequence_length is 60"],
        ),
    ],
)
def test_what_a_shape_does_not_allow_is_said(
    tmp_path: Path, preset: str, overrides: str, messages: list[str]
) -> None:
    for name in ("models", "runs"):
        (tmp_path / name).mkdir()
    shape = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 100, "n_inner": 200, "n_layer": 1}
    odd = json.dumps({**shape, "n_head": 1, "n_positions": 64})
    (tmp_path / "models" / "odd.json").write_text(odd)
    text = SMALL_RUN.replace("gpt2_tiny", preset).replace("length: 64", "length: 60")
    found = problems(written(tmp_path / "runs", text), *overrides.split("; "))
    for problem, message in zip(found, messages, strict=True):
        assert message in problem


def test_settings_at_their_limit_fit(tmp_path: Path) -> None:
    overrides = ["schedule.warmup_steps=99", "data.document_id=511", "precision.fp8=rowwise"]
    overrides += ["data.mask_documents=true", "data.tokenizer=gpt2", "data.bpe_folder=bpe"]
    load_run(written(tmp_path), [*overrides, "evaluation.tasks=[hellaswag=a.jsonl]"])
    [problem] = problems(written(tmp_path), "evaluation.tasks=[a.jsonl]", "data.tokenizer=gpt2")
    assert "the files of gpt2. Name their folder by data.bpe_folder" in problem


# Mixtures


def test_each_source_has_its_settings_and_the_rest_of_the_section(tmp_path: Path) -> None:
    file = written(tmp_path, MIXTURE)
    config = load_run(file).config
    data = config.data
    assert {name: one.weight for name, one in data.mixture.items()} == {"web": 0.7, "code": 0.3}
    web, code = data.of_source("web"), data.of_source("code")
    assert (web.source, web.exclude, web.pad_id) == ("gs://tokens/web", ("draft*",), None)
    assert (web.validation_files, web.validation_fraction) == ((), 0.25)
    assert (code.source, code.exclude, code.pad_id) == ("12", (), 0)
    assert (code.validation_files, code.validation_fraction) == (("val*",), 0.0)
    assert not web.mixture
    assert load_run(written(tmp_path, render_run(config))).config == config


def test_a_part_of_a_mixture_or_all_of_it_is_overridden(tmp_path: Path) -> None:
    file = written(tmp_path, MIXTURE)
    loaded = load_run(file, ["data.mixture.web.weight=5e-1"])
    assert loaded.config.data.mixture["web"].weight == 0.5
    assert loaded.config.data.mixture["web"].source == "gs://tokens/web"
    assert loaded.changes == [Change("data.mixture.web.weight", "0.7", "5e-1")]
    whole = "data.mixture={only: {source: x, weight: 1}}"
    loaded = load_run(file, ["data.mixture.web.weight=2", whole])
    assert list(loaded.config.data.mixture) == ["only"]
    assert [change.key for change in loaded.changes] == ["data.mixture"]
    data = load_run(file, ["data.mixture={}", "data.source=x"]).config.data
    assert (data.source, data.mixture) == ("x", {})


# Names


def test_every_synonym_leads_to_a_setting_and_hides_none() -> None:
    for synonym, meant in SYNONYMS.items():
        section, _, key = meant.partition(".")
        assert key in settings_in((section,)), synonym
    assert set(SECTION_SYNONYMS.values()) <= set(SECTIONS)
    assert not set(SECTION_SYNONYMS) & set(SECTIONS)


def test_files_are_found_by_name_beside_the_run_or_in_the_repository(tmp_path: Path) -> None:
    demo = REPOSITORY_CONFIG / "runs" / "demo.yaml"
    assert find_config("runs", "demo") == find_config("runs", "demo.yaml") == demo
    own = tmp_path / "models" / "gpt2_tiny.json"
    own.parent.mkdir()
    own.touch()
    assert find_config("models", own) == own
    beside = tmp_path / "runs" / "mine.yaml"
    assert find_config("models", "gpt2_tiny", beside=beside) == own
    assert find_config("models", "neox_tiny", beside=beside).parent == REPOSITORY_CONFIG / "models"
    for name in ("elsewhere/demo.yaml", "dem"):
        with pytest.raises(
            ConfigError, match=r"no file .*\.yaml\. Did you mean demo\? There are demo"
        ):
            find_config("runs", name)


# Runs that are written


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(min_value=1e-12, max_value=1e12)


@settings(max_examples=60, deadline=None)
@example(source="a\x85b", name="x", globs=[], lr=1.0, price=None)
@given(
    source=texts,
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
