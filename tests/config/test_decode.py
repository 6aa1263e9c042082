from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.config.load_run import Change, load_run, read_run, render_run
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
"""


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_run(file, overrides)
    assert failure.value.exit_code is ExitCode.WRONG_USE
    return str(failure.value).splitlines()


def test_the_file_gives_values_and_its_own_name(tmp_path: Path) -> None:
    loaded = load_run(written(tmp_path, SMALL_RUN))
    assert loaded.config.run.name == "mine"
    assert loaded.config.optimizer.lr == 3e-4
    assert loaded.config.schedule.kind == "cosine"
    assert loaded.shape.width == 64
    assert loaded.fragment == {}
    assert loaded.changes == []


def test_the_vocabulary_is_the_shapes_own_or_a_number(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN)
    assert load_run(file).shape.vocabulary == 512
    loaded = load_run(file, ["model.vocabulary=5e4", "data.document_id=49999"])
    assert loaded.shape.vocabulary == loaded.shape.settings["vocab_size"] == 50_000
    [problem] = problems(file, "model.vocabulary=600", "data.document_id=600")
    assert "raise model.vocabulary" in problem
    [problem] = problems(file, "model.vocabulary=many")
    assert problem.startswith("command line: model.vocabulary = 'many': a number is wanted")
    assert load_run(file, ["model.vocabulary=auto", "data.document_id=600"]).shape.vocabulary == 512


def test_the_command_line_wins_and_the_later_of_two(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN)
    loaded = load_run(file, ["optimizer.lr=1e-3", "optimizer.lr=2.5e-4", "log.interval=7"])
    assert loaded.config.optimizer.lr == 2.5e-4
    assert loaded.changes == [
        Change("optimizer.lr", "3e-4", "2.5e-4"),
        Change("log.interval", "10", "7"),
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


def test_an_override_equal_to_the_file_is_no_change(tmp_path: Path) -> None:
    assert load_run(written(tmp_path, SMALL_RUN), ["run.steps=1e2"]).changes == []


def test_keys_take_dashes_and_values_take_lists(tmp_path: Path) -> None:
    overrides = [
        "zero.offload-optimizer=cpu",
        "data.include=[a*, 12]",
        "optimizer.betas=[0.9, 1e-1]",
    ]
    config = load_run(written(tmp_path, SMALL_RUN), overrides).config
    assert config.zero.offload_optimizer == "cpu"
    assert config.data.include == ("a*", "12")
    assert config.optimizer.betas == (0.9, 0.1)


def test_a_name_given_apart_wins_over_all(tmp_path: Path) -> None:
    loaded = load_run(written(tmp_path, SMALL_RUN), ["run.name=second"], name="third")
    assert loaded.config.run.name == "third"


@pytest.mark.parametrize("name", ["1121", "1e5", "2024-13-45", "yes", "0x10", "1.50"])
def test_text_settings_keep_what_was_written(tmp_path: Path, name: str) -> None:
    assert load_run(written(tmp_path, SMALL_RUN), [f"run.name={name}"]).config.run.name == name


def test_a_section_with_every_line_commented_out_keeps_its_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN + "schedule:\n  # warmup_steps: 10\n")
    assert load_run(file).config.schedule.warmup_steps == 0


def test_an_unknown_key_names_its_line_and_what_was_meant(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.replace("  lr:", "  lr: 1\n  learning_rate:"))
    assert problems(file) == [
        f"{file}:13: optimizer.learning_rate is not a setting. Did you mean optimizer.lr?"
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=abc", "optimizer.lr = 'abc': a number is wanted"),
        ("optimizer.lr=true", "optimizer.lr = true: a number is wanted"),
        ("optimizer.lr=null", "optimizer.lr = null: a number is wanted"),
        ("optimizer.lr=0", "optimizer.lr = 0: more than 0 is wanted"),
        ("optimizer.lr=.inf", "optimizer.lr = .inf: a finite number is wanted"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: too few values"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas = [0.9, 1]: less than 1 is wanted"),
        ("run.steps=2.5", "run.steps = 2.5: a whole number is wanted"),
        ("run.steps=true", "run.steps = true: a number is wanted"),
        ("run.steps=0", "run.steps = 0: at least 1 is wanted"),
        ("run.seed=[1]", "run.seed = [1]: a whole number is wanted"),
        ("data.include=a", "data.include = 'a': a list is wanted, such as [a, b]"),
        ("data.source=", "data: source is missing: give it, or a mixture of several sources"),
        ("data.validation_fraction=2", "data.validation_fraction = 2: at most 1 is wanted"),
        ("precision.tf32=maybe", "precision.tf32 = 'maybe': true or false is wanted"),
        (
            "schedule.kind=cosin",
            "schedule.kind = 'cosin': one of cosine, one_cycle, warm_restarts, constant is "
            "wanted. Did you mean cosine?",
        ),
        (
            "run.name=../x",
            "run.name = '../x': a run's name is letters, digits, '.', '_' and '-', at most 100",
        ),
        ("checkpoint.drain_minutes=180", "drain_minutes = 180: at most 100 is wanted"),
        ("batch.accumulation=2", "batch: give either accumulation or windows"),
        (
            "schedule.warmup_steps=100",
            "schedule.warmup_steps = 100: the warmup must end before run.steps = 100.",
        ),
        ("batch.micro=3", "batch.windows = 8: not a multiple of batch.micro = 3"),
        ("model.sequence_length=65", "model.sequence_length = 65: gpt2_tiny goes up to 64."),
        ("evaluation.sample_prompt=Hi", "tokens by data.tokenizer, which is unknown."),
        ("model.preset=gpt2_tini", "model.preset = 'gpt2_tini': no file gpt2_tini.json. Did you"),
        ("zero.fragment=nvm", "zero.fragment = 'nvm': no file nvm.json. Did you mean nvme?"),
        ("zero.fragment=nvme", "offload_optimizer is of use only with zero.offload_optimizer"),
        ("model.lr=1", "model.lr is not a setting. Did you mean optimizer.lr?"),
        ("optimiser.lr=1", "optimiser is not a section. Did you mean optimizer?"),
        ("lr=1", "'lr=1' is not an override. Write section.key=value"),
        ("optimizer.lr", "'optimizer.lr' is not an override."),
        ("data.source=[", "data.source = '[': not YAML"),
    ],
)
def test_a_wrong_override_says_what_was_wanted(tmp_path: Path, override: str, message: str) -> None:
    [problem] = problems(written(tmp_path, SMALL_RUN), override)
    assert message in problem
    assert problem.startswith(("command line: ", str(tmp_path)))


def test_a_wrong_value_in_the_file_names_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.replace("3e-4", "abc"))
    assert problems(file) == [f"{file}:12: optimizer.lr = 'abc': a number is wanted"]


def test_missing_settings_are_named_even_of_a_missing_section(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.partition("batch:")[0])
    assert problems(file) == [
        f"{file}: batch.micro is missing",
        f"{file}: data: source is missing: give it, or a mixture of several sources",
        f"{file}: optimizer.lr is missing",
    ]


def test_settings_that_exclude_each_other_name_their_section(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.replace("windows: 8", "windows: 8\n  accumulation: 2"))
    [problem] = problems(file)
    assert problem.startswith(f"{file}:6: batch: give either accumulation or windows")


def test_a_key_set_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN + "  lr: 1e-4\n")
    assert problems(file) == [f"{file}:13: optimizer.lr is set twice, first on line 12. Keep one."]


def test_a_single_value_in_place_of_a_section(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN + "log: 7\n")
    assert problems(file)[0].startswith(f"{file}:13: log is a section")


def test_all_problems_come_at_once_in_reading_order(tmp_path: Path) -> None:
    text = SMALL_RUN.replace("gpt2_tiny", "gpt2_tinu").replace("micro: 2", "batch_size: 2")
    file = written(tmp_path, text.replace("3e-4", "fast") + "warmup: 3\n")
    assert [line.partition(": ")[0] for line in problems(file, "log.every=2")] == [
        f"{file}:4",  # the preset
        f"{file}:7",  # batch_size
        f"{file}:12",  # lr
        f"{file}:13",  # warmup
        f"{file}",  # batch.micro is missing
        "command line",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: sections are wanted"),
        ("- a\n", ":1: sections are wanted"),
        ("run:\n  steps: [1\nmodel: 2\n", ":3: not YAML"),
        ("run:\n\tsteps: 1\n", ":2: not YAML"),
        ("run:\n  steps: !!python/name:os.system 1\n", ":2: not YAML"),
        ("run:\n  steps: &a [*a]\n", ":2: not YAML"),
        ("run:\n  steps: \x01\n", ": not YAML"),
    ],
)
def test_a_file_that_is_no_run_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    assert f"{file}{message}" in problems(file)[0]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"run: \xff\xfe")
    assert problems(file) == [f"{file}: not UTF-8 text (byte 5). Is it a run file?"]


def test_a_missing_run_names_a_near_one() -> None:
    assert "Did you mean production_8gpu?" in problems(Path("prodution_8gpu"))[0]


def test_what_a_fragment_may_not_hold_names_its_file(tmp_path: Path) -> None:
    fragment = tmp_path / "own.json"
    fragment.write_text('{"zero_optimization": {"stage": 2}}')
    file = written(tmp_path, SMALL_RUN + f"zero:\n  fragment: {fragment}\n")
    assert problems(file) == [
        f"{fragment}: zero_optimization.stage belongs to the run file: set zero.stage there "
        "and leave it out here."
    ]


def test_settings_are_read_without_the_files_they_name(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.replace("gpt2_tiny", "gone"))
    assert read_run(file).model.preset == "gone"
    with pytest.raises(ConfigError, match="at least 1"):
        read_run(file, ["run.steps=0"])


def test_the_odd_line_break_of_unicode_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_run(written(tmp_path, SMALL_RUN), ['data.source="a\\x85b"']).config
    assert config.data.source == "a\x85b"
    assert load_run(written(tmp_path, render_run(config))).config == config


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(min_value=1e-12, max_value=1e12)


@settings(max_examples=60, deadline=None)
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
    config = load_run(written(folder, SMALL_RUN)).config
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


def test_a_folder_of_byte_pairs_needs_the_tokenizer_that_they_are_of(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN)
    assert load_run(file, ["data.bpe_folder=bpe", "data.tokenizer=gpt2"]).config.data.bpe_folder
    [problem] = problems(file, "data.bpe_folder=bpe", "data.tokenizer=bytes")
    assert "bpe_folder holds gpt2's files, and tokenizer is bytes" in problem
