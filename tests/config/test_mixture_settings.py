from __future__ import annotations

from pathlib import Path

import pytest

from refocused.commands.arguments import split_overrides
from refocused.config.load_run import Change, load_run, render_run
from refocused.system.errors import ConfigError

RUN = """\
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


def written(folder: Path, text: str = RUN) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_run(file, overrides)
    return str(failure.value).replace(f"{file}:", "").splitlines()


def test_each_source_has_its_settings_and_the_rest_of_the_section(tmp_path: Path) -> None:
    data = load_run(written(tmp_path)).config.data
    assert {name: one.weight for name, one in data.mixture.items()} == {"web": 0.7, "code": 0.3}
    web, code = data.of_source("web"), data.of_source("code")
    assert (web.source, web.exclude, web.pad_id) == ("gs://tokens/web", ("draft*",), None)
    assert (web.validation_files, web.validation_fraction) == ((), 0.25)
    assert (code.source, code.exclude, code.pad_id) == ("12", (), 0)
    assert (code.validation_files, code.validation_fraction) == (("val*",), 0.0)
    assert not web.mixture


def test_a_rendered_mixture_reads_back_equal(tmp_path: Path) -> None:
    config = load_run(written(tmp_path)).config
    assert load_run(written(tmp_path, render_run(config))).config == config


def test_one_setting_of_one_source_is_changed(tmp_path: Path) -> None:
    overrides = split_overrides(["data.mixture.web.weight=5e-1"])
    loaded = load_run(written(tmp_path), overrides)
    assert loaded.config.data.mixture["web"].weight == 0.5
    assert loaded.config.data.mixture["web"].source == "gs://tokens/web"
    assert loaded.changes == [Change("data.mixture.web.weight", "0.7", "5e-1")]


def test_a_mixture_given_whole_replaces_the_one_of_the_file_and_earlier_parts(
    tmp_path: Path,
) -> None:
    loaded = load_run(
        written(tmp_path),
        ["data.mixture.web.weight=2", "data.mixture={only: {source: x, weight: 1}}"],
    )
    assert list(loaded.config.data.mixture) == ["only"]
    assert [change.key for change in loaded.changes] == ["data.mixture"]


def test_a_single_source_may_take_the_place_of_a_mixture(tmp_path: Path) -> None:
    data = load_run(written(tmp_path), ["data.mixture={}", "data.source=x"]).config.data
    assert (data.source, data.mixture) == ("x", {})


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "weight: 0.7",
            "weigth: 0.7",
            "10: data.mixture.web.weigth is not a setting. Did you mean data.mixture.web.weight?",
        ),
        (
            "weight: 0.7",
            "weight: 1\n      fetch_threads: 2",
            "11: data.mixture.web.fetch_threads is not a setting. data.mixture.web has source, "
            "weight, include, exclude, validation_files, dtype, pad_id.",
        ),
        ("weight: 0.7", "weight: -1", "10: data.mixture.web.weight = -1: more than 0 is wanted"),
        ("      weight: 0.7\n", "", "8: data.mixture.web.weight is missing"),
        (
            "weight: 0.7",
            "weight: 1\n      weight: 2",
            "11: data.mixture.web.weight is set twice, first on line 10. Keep one.",
        ),
        ("[val*]", "val", "11: data.mixture.code.validation_files = 'val': a list is wanted"),
        ("web:", "we b:", "8: data.mixture.we b: a source's name is letters, digits and '_'"),
        ("  mixture:", "  source: x\n  mixture:", "4: data: source and mixture are both set"),
        ("  mixture:", "  prepare: python_stdlib\n  mixture:", "4: data: prepare fills"),
        ("web:", "web: &a\n      x: *a", "8: not YAML: an alias stands for what contains it."),
    ],
)
def test_what_is_wrong_inside_a_mixture_is_said_with_its_line(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    file = written(tmp_path, RUN.replace(before, after, 1))
    assert any(problem.startswith(message) for problem in problems(file))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.mixture.web.weight=x", "data.mixture.web.weight = 'x': a number is wanted"),
        (
            "data.mixture.web.wieght=1",
            "data.mixture.web.wieght is not a setting. Did you mean data.mixture.web.weight?",
        ),
        ("data.mixture.wbe.weight=1", "data.mixture.wbe.source is missing. Did you mean web?"),
        ("data.mixture=3", "data.mixture = 3: a group of settings is wanted"),
        ("data.mixture.web=3", "data.mixture.web = 3: a group of settings is wanted"),
        ("data.mixtur.web.weight=3", "data.mixtur is not a setting. Did you mean data.mixture?"),
        ("data.mixture.web.weight.a=3", "data.mixture.web.weight takes a value of its own."),
        ("optimizer.lr.a=3", "optimizer.lr takes a value of its own."),
    ],
)
def test_a_wrong_override_inside_a_mixture_is_one_problem(
    tmp_path: Path, override: str, message: str
) -> None:
    [problem] = problems(written(tmp_path), override)
    assert problem.startswith("command line: ")
    assert problem.endswith(message)


def test_a_mixture_with_every_line_commented_out_is_none(tmp_path: Path) -> None:
    text = RUN.partition("    web:")[0] + RUN[RUN.index("optimizer") :]
    [problem] = problems(written(tmp_path, text))
    assert "data: source is missing" in problem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.mask_documents=true"], "mask_documents needs document_id"),
        (
            ["data.mask_documents=true", "data.document_id=3", "data.separator_id=4"],
            "by document_id = 3, but rows are separated by separator_id = 4",
        ),
    ],
)
def test_masking_needs_one_id_that_precedes_documents(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    [problem] = problems(written(tmp_path), *overrides)
    assert message in problem
