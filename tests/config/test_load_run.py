"""Run files and overrides: the settings they result in."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from run_texts import MIXTURE, SMALL_RUN, problems, written

from refocused.config import shipped_files
from refocused.config.load_run import Change, find_config, load_run, read_run, render_run
from refocused.config.setting_help import SECTION_SYNONYMS, SECTIONS, SYNONYMS, settings_in
from refocused.system.errors import ConfigError


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


@pytest.mark.parametrize(
    ("steps", "warmup"), [("41", 40), ("40", 4), ("4e1", 4), ("0x28", 4), ("5", 0)]
)
def test_a_shorter_run_shortens_the_files_warmup(tmp_path: Path, steps: str, warmup: int) -> None:
    file = written(tmp_path, SMALL_RUN + "schedule:\n  warmup_steps: 40\n")
    loaded = load_run(file, [f"run.steps={steps}"])
    assert loaded.config.schedule.warmup_steps == warmup
    shown = Change("schedule.warmup_steps", "40", f"{warmup} (1/10 of run.steps={steps})")
    assert (shown in loaded.changes) == (warmup != 40)
    if warmup != 40:  # what is typed, or contradicts itself in the file, is meant
        [problem] = problems(file, f"run.steps={steps}", "schedule.warmup_steps=40")
        assert f"the warmup must end before run.steps = {loaded.config.run.steps}" in problem
        contradiction = file.read_text().replace("steps: 100", f"steps: {steps}", 1)
        [problem] = problems(written(tmp_path, contradiction), "optimizer.lr=1")
        assert "schedule.warmup_steps = 40: the warmup must end" in problem


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.steps=1e6", 10**6),
        ("run.steps=0x10", 16),
        ("run.steps=0o17", 15),
        ("run.steps=0500", 500),
        ("run.steps=+1000.0", 1000),
        ("optimizer.lr=.5e3", 500.0),
        ("precision.tf32=False", False),
        ("zero.stage=1e0", 1),
        ("model.compile=on", "on"),
        ("evaluation.sample_prompt='# Title'", "# Title"),
        ('evaluation.sample_prompt="Q: [why] don\'t\\n"', "Q: [why] don't\n"),
        ("evaluation.sample_prompt=a#b=c:d", "a#b=c:d"),
        ("evaluation.sample_prompt=yes", "yes"),
        ("evaluation.sample_prompt=~", None),
        ("evaluation.sample_prompt=", None),
        ("checkpoint.keep_remote=all", "all"),
        ("tracking.wandb=my-team/demo_1.5", "my-team/demo_1.5"),
        ("data.bpe_folder=null", None),
        ("zero.offload-optimizer=cpu", "cpu"),
        ("optimizer.betas=[0.9, 1e-1]", (0.9, 0.1)),
        ("data.include=[a*, 12]", ("a*", "12")),
        *((f"run.name={name}", name) for name in ("1121", "1e5", "2024-12-05", "yes", "1_000")),
    ],
)
def test_settings_take_the_usual_ways_to_write_them(
    tmp_path: Path, override: str, value: object
) -> None:
    config = load_run(written(tmp_path), ["data.tokenizer=bytes", override]).config
    section, _, key = override.partition("=")[0].replace("-", "_").partition(".")
    found = getattr(getattr(config, section), key)
    assert (found, type(found)) == (value, type(value))


def test_settings_at_their_limit_fit(tmp_path: Path) -> None:
    overrides = ["schedule.warmup_steps=99", "data.document_id=511", "precision.fp8=rowwise"]
    overrides += ["data.mask_documents=true", "data.tokenizer=gpt2", "data.bpe_folder=bpe"]
    load_run(written(tmp_path), [*overrides, "evaluation.tasks=[hellaswag=a.jsonl]"])
    [problem] = problems(written(tmp_path), "evaluation.tasks=[a.jsonl]", "data.tokenizer=gpt2")
    assert "the files of gpt2. Set data.bpe_folder to their folder" in problem


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
