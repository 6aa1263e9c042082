"""What a run says differently from the step it resumes: told, refused, or allowed by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints.fake_owner import FACTS
from checkpoints.step_samples import fill, make_step, manifest_for

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.changes import (
    ALLOWABLE,
    Changes,
    RunFacts,
    changes_since,
    check_allowable,
)
from refocused.checkpoints.resume.comparison import read_contents
from refocused.checkpoints.step.step_directory import StepDirectory
from refocused.config.suggestions import settings_in
from refocused.system.errors import CheckpointError, ConfigError

Settings = dict[str, dict[str, Any]]
RUN: Settings = {
    "run": {"name": "sample", "seed": 1},
    "data": {"block_shards": 4},
    "optimizer": {"lr": 0.1, "weight_decay": 0.1},
    "zero": {"stage": 3, "offload_optimizer": "none"},
}
MODEL = {"model_type": "gpt2", "n_head": 4, "initializer_range": 0.02, "vocab_size": 50_000}


def model(**changes: object) -> dict[str, str]:
    return {"model_json": json.dumps(MODEL | changes)}


def facts(settings: Settings, **changes: Any) -> RunFacts:
    resolved = {name: RUN.get(name, {}) | settings.get(name, {}) for name in RUN | settings}
    text = {"run_yaml": yaml.safe_dump(resolved, sort_keys=False), **model()}
    return dataclasses.replace(FACTS, **(text | changes))


@pytest.fixture
def step(tmp_path: Path) -> StepDirectory:
    fill(tmp_path, seed=1)
    (tmp_path / "run.yaml").write_text(facts({}).run_yaml)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return StepDirectory(tmp_path, manifest_for(tmp_path, 10))


def compared(
    step: StepDirectory,
    settings: Settings | None = None,
    *,
    world_size: int = 2,
    allowed: tuple[str, ...] = (),
    **changes: Any,
) -> Changes:
    return changes_since(
        step, facts=facts(settings or {}, **changes), world_size=world_size, allowed=allowed
    )


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({}, []),
        (
            {"optimizer": {"lr": 0.2, "eps": 1e-8}, "run": {"name": "other"}},
            [
                'run.name "sample" -> "other"',
                "optimizer.lr 0.1 -> 0.2",
                "optimizer.eps not set -> 1e-08",
            ],
        ),
        ({"data": {"skip": ["bad.npy"]}}, ['data.skip not set -> ["bad.npy"]']),
        (
            {"precision": {"initial_scale_power": 12, "scale_window": 500}},  # one takes effect
            ["precision.scale_window not set -> 500"],
        ),
        ({"model": {"vocabulary": None}}, []),  # unknown to the version before, and not used
        (
            {"optimizer": {f"s{number:02d}": 1 for number in range(15)}},
            [*(f"optimizer.s{n:02d} not set -> 1" for n in range(12)), "and 3 more settings"],
        ),
    ],
)
def test_settings_that_change_no_model_and_no_data_are_told(
    step: StepDirectory, settings: Settings, lines: list[str]
) -> None:
    changes = compared(step, settings)
    assert changes.lines() == lines
    assert (changes.allowed, changes.way, changes.new_data) == ((), "exact", False)


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"zero": {"stage": 1}}, {"zero_stage": 1}),
        ({"zero": {"offload_optimizer": "cpu"}}, {}),
        ({}, {"world_size": 8}),
    ],
)
def test_another_layout_divides_the_states_anew(
    step: StepDirectory, settings: Settings, others: dict[str, Any]
) -> None:
    assert compared(step, settings, **others).way == "resharded"


def test_without_zero_all_ranks_read_one_file_and_no_other_precision(step: StepDirectory) -> None:
    plain = StepDirectory(step.path, step.manifest.model_copy(update={"zero_stage": 0}))
    assert compared(plain, zero_stage=0, world_size=8).way == "exact"
    with pytest.raises(CheckpointError) as told:
        compared(plain, allowed=("precision.dtype",), zero_stage=0, dtype="fp32")
    assert "--allow-change" not in str(told.value)


ACCEPT = ", or accept what follows from it with --allow-change"
REFUSED: list[tuple[dict[str, Any], Settings, str, str]] = [
    ({"zero_stage": 0}, {}, "zero.stage 3; this run has 0", "set zero.stage=3 (1, 2 and 3"),
    ({"parameters": 7}, {}, "parameters 1000; this run has 7", "set model.preset back;"),
    (
        {"parameters": 7, **model(vocab_size=50_257)},
        {},
        "parameters 1000; this run has 7",
        "set model.vocabulary=50000;",
    ),
    (
        model(vocab_size=50_001),
        {},
        "model.vocab_size 50000; this run has 50001",
        f"set model.vocabulary=50000{ACCEPT} model.preset",
    ),
    (
        {"dtype": "fp32"},
        {},
        "precision.dtype bf16; this run has fp32",
        f"set precision.dtype=bf16{ACCEPT} precision.dtype (the masters are float32 in both);",
    ),
    (
        {},
        {"optimizer": {"kind": "muon"}},
        "optimizer.kind adamw; this run has muon",
        "set optimizer.kind=adamw",
    ),
    (
        {"data_fingerprint": "b"},
        {},
        "data f00d; this run has b",
        f"set data.source back{ACCEPT} data (a new pass over the data begins);",
    ),
    (
        {"data_order": "seed 2"},
        {"run": {"seed": 2}, "data": {"block_shards": 8}},
        "data order seed 1; this run has seed 2",
        "--allow-change run.seed --allow-change data.block_shards (a new pass",
    ),
    (
        {"data_mixture": "a 512, b 512"},
        {},
        "data.mixture none; this run has a 512, b 512",
        "--allow-change data.mixture (every source goes on where it stands, in its new share)",
    ),
    (
        model(n_head=8, initializer_range=0.1),
        {},
        "model.n_head 4; this run has 8",
        f"set model.preset back{ACCEPT} model.preset (the weights were trained for the other",
    ),
]


@pytest.mark.parametrize(("change", "settings", "found", "way_out"), REFUSED)
def test_what_changes_the_model_or_the_data_is_refused_with_the_way_out(
    step: StepDirectory, change: dict[str, Any], settings: Settings, found: str, way_out: str
) -> None:
    with pytest.raises(CheckpointError) as told:
        compared(step, settings, **change)
    message = str(told.value)
    assert message.startswith(f"checkpoint_step_10 was saved with {found}.")
    assert way_out in message
    assert message.endswith("to start anew, give another --run name or --resume none.")


@pytest.mark.parametrize(
    ("change", "settings", "allowed", "way", "new_data"),
    [
        ({"dtype": "fp32"}, {}, "precision.dtype", "resharded", False),
        ({"data_fingerprint": "b"}, {}, "data", "exact", True),
        ({"data_fingerprint": "b", "data_order": "seed 2"}, {}, "data", "exact", True),
        ({"data_order": "seed 2"}, {"run": {"seed": 2}}, "run.seed", "exact", True),
        ({"data_mixture": "a 512"}, {}, "data.mixture", "exact", False),
        (model(n_head=8), {}, "model.preset", "exact", False),
    ],
)
def test_what_is_allowed_by_name_is_taken_and_told(
    step: StepDirectory,
    change: dict[str, Any],
    settings: Settings,
    allowed: str,
    way: str,
    new_data: bool,
) -> None:
    changes = compared(step, settings, allowed=(allowed,), **change)
    assert (changes.way, changes.new_data) == (way, new_data)
    assert "changes here: it was" in changes.allowed[0]


def test_one_allowed_change_allows_no_other(step: StepDirectory) -> None:
    with pytest.raises(CheckpointError, match="data f00d") as told:
        compared(step, allowed=("precision.dtype",), dtype="fp32", data_fingerprint="b")
    assert "precision" not in str(told.value)
    seed = {"run": {"seed": 2}, "data": {"block_shards": 8}}
    with pytest.raises(CheckpointError, match="data order"):
        compared(step, seed, allowed=("run.seed",), data_order="seed 2")


def test_a_checkpoint_of_an_earlier_version_is_compared_by_names_and_sizes(
    step: StepDirectory,
) -> None:
    changes = compared(step, data_fingerprint="content", data_fingerprint_by_size="f00d")
    assert (changes.way, changes.new_data) == ("exact", False)
    (said,) = changes.allowed
    assert "checkpoint_step_10 was saved by an earlier version" in said
    assert compared(step, data_fingerprint_by_size="other").allowed == ()
    with pytest.raises(CheckpointError, match="with data f00d; this run has content"):
        compared(step, data_fingerprint="content", data_fingerprint_by_size="other")


def test_every_name_that_can_be_allowed_is_a_setting_and_no_other_can() -> None:
    check_allowable(ALLOWABLE)
    for name in ALLOWABLE[1:]:
        path = name.split(".")
        assert path[-1] in settings_in(path[:-1]), name
    with pytest.raises(ConfigError, match=r"optimizer.lr: .* There are data, data.mixture"):
        check_allowable(["data", "optimizer.lr"])


def test_a_broken_step_has_no_contents(local: Path) -> None:
    (make_step(local, 10).path / "model.json").unlink()
    catalog = Catalog(local)
    with pytest.raises(CheckpointError, match=r"cannot be read: incomplete: local: model\.json"):
        read_contents(catalog, catalog.entries()[0])
