"""Differences between a run and the checkpoint it resumes: reported, rejected or allowed."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints.fake_owner import FACTS
from checkpoints.step_samples import fill, make_step, manifest_for

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.changes import (
    ALLOWABLE,
    Changes,
    changes_since,
    check_allowable,
    read_contents,
)
from refocused.checkpoints.step.checkpoint_directory import Checkpoint
from refocused.config.setting_help import settings_in
from refocused.config.yaml_source import write_yaml
from refocused.data.order.sequences import Position
from refocused.system.errors import CheckpointError, ConfigError

# A setting by its dotted name, an entry of model.json as `shape.NAME`, or a field of RunMetadata.
Change = dict[str, Any]
RUN: dict[str, dict[str, Any]] = {
    "run": {"name": "sample", "seed": 1},
    "data": {"block_shards": 4},
    "optimizer": {"lr": 0.1, "weight_decay": 0.1},
    "zero": {"stage": 3, "offload_optimizer": "none"},
}
SHAPE = {"model_type": "gpt2", "n_head": 4, "initializer_range": 0.02, "vocab_size": 50_000}


@pytest.fixture
def step(tmp_path: Path) -> Checkpoint:
    fill(tmp_path, seed=1)
    (tmp_path / "run.yaml").write_text(write_yaml(RUN))
    (tmp_path / "model.json").write_text(json.dumps(SHAPE))
    return Checkpoint(tmp_path, manifest_for(tmp_path, 10))


def compared(
    step: Checkpoint, change: Change, *, world_size: int = 2, allowed: tuple[str, ...] = ()
) -> Changes:
    metadata: Change = {}
    sections = {**RUN, "shape": SHAPE}
    for name, value in change.items():
        section, _, key = name.rpartition(".")
        if section:
            sections[section] = sections.get(section, {}) | {key: value}
        else:
            metadata[key] = value
    metadata["model_json"] = json.dumps(sections.pop("shape"))
    metadata["run_yaml"] = write_yaml(sections)
    run = dataclasses.replace(FACTS, **metadata)
    return changes_since(step, metadata=run, world_size=world_size, allowed=allowed)


MANY = {f"optimizer.s{number:02d}": 1 for number in range(15)}
TOLD: list[tuple[Change, list[str]]] = [
    ({}, []),
    (
        {"optimizer.lr": 0.2, "data.eps": 1e-8, "run.name": "other"},
        ['run.name "sample" -> "other"', "optimizer.lr 0.1 -> 0.2", "data.eps not set -> 1e-08"],
    ),
    ({"data.skip": ["bad.npy"]}, ['data.skip not set -> ["bad.npy"]']),
    # only one of these applies
    (
        {"precision.initial_scale_power": 12, "precision.scale_window": 500},
        ["precision.scale_window not set -> 500"],
    ),
    ({"model.vocabulary": None}, []),  # new in this version, and not used
    (MANY, [*(f"{name} not set -> 1" for name in list(MANY)[:12]), "and 3 more settings"]),
]


@pytest.mark.parametrize(("change", "lines"), TOLD)
def test_changes_of_other_settings_are_reported(
    step: Checkpoint, change: Change, lines: list[str]
) -> None:
    changes = compared(step, change)
    assert changes.lines() == lines
    assert (changes.allowed, changes.load_mode, changes.new_data) == ((), "exact", False)


def test_another_layout_reshards_the_states(step: Checkpoint) -> None:
    assert compared(step, {"zero.stage": 1, "zero_stage": 1}).load_mode == "resharded"
    assert compared(step, {"zero.offload_optimizer": "cpu"}).load_mode == "resharded"
    assert compared(step, {}, world_size=8).load_mode == "resharded"
    assert compared(step, {"optimizer.head_lr": 0.2}).load_mode == "resharded"
    assert compared(step, {"optimizer.scalar_lr": 0.2}).load_mode == "exact"
    run = {**RUN, "optimizer": {**RUN["optimizer"], "head_lr": 0.2}}
    (step.path / "run.yaml").write_text(write_yaml(run))
    both = {"optimizer.head_lr": 0.3, "optimizer.head_betas": [0.8, 0.9]}
    assert compared(step, both).load_mode == "exact"
    assert compared(step, {}).load_mode == "resharded"


def test_without_zero_all_ranks_read_one_file_in_its_precision(step: Checkpoint) -> None:
    plain = Checkpoint(step.path, step.manifest.model_copy(update={"zero_stage": 0}))
    assert compared(plain, {"zero_stage": 0}, world_size=8).load_mode == "exact"
    with pytest.raises(CheckpointError) as told:
        compared(plain, {"zero_stage": 0, "dtype": "fp32"}, allowed=("precision.dtype",))
    assert "--allow-change" not in str(told.value)
    with pytest.raises(CheckpointError, match=r"neither embedding nor head; this run has head\."):
        compared(plain, {"zero_stage": 0, "optimizer.head_lr": 0.2})


ACCEPT = ", or accept the change with --allow-change"
# A change, the message, the remedy, and the load mode if it is allowed:
# `exact` or `resharded`, and whether a new pass over the data begins.
REFUSED: list[tuple[Change, str, str, tuple[str, bool] | None]] = [
    ({"zero_stage": 0}, "zero.stage 3; this run has 0", "set zero.stage=3 (1, 2 and 3", None),
    ({"parameters": 7}, "parameters 1000; this run has 7", "set model.preset back.", None),
    (
        {"parameters": 7, "shape.vocab_size": 50_257},
        "parameters 1000; this run has 7",
        "set model.vocabulary=50000.",
        None,
    ),
    (
        {"shape.vocab_size": 50_001},
        "model.vocab_size 50000; this run has 50001",
        f"set model.vocabulary=50000{ACCEPT} model.preset",
        ("exact", False),
    ),
    (
        {"dtype": "fp32"},
        "precision.dtype bf16; this run has fp32",
        f"set precision.dtype=bf16{ACCEPT} precision.dtype "
        "(the master weights are float32 in both).",
        ("resharded", False),
    ),
    (
        {"optimizer.kind": "muon"},
        "optimizer.kind adamw; this run has muon",
        "set optimizer.kind=adamw",
        None,
    ),
    (
        {"data_fingerprint": "b"},
        "data f00d; this run has b",
        f"set data.source back{ACCEPT} data (a new pass over the data begins).",
        ("exact", True),
    ),
    (
        {"data_order": "seed 2", "run.seed": 2, "data.block_shards": 8},
        "data order seed 1; this run has seed 2",
        "--allow-change run.seed --allow-change data.block_shards (a new pass",
        ("exact", True),
    ),
    (
        {"data_mixture": "a 512, b 512"},
        "data.mixture none; this run has a 512, b 512",
        "--allow-change data.mixture (each source continues at its position, with its new weight)",
        ("exact", False),
    ),
    (
        {"shape.n_head": 8, "shape.initializer_range": 0.1},
        "model.n_head 4; this run has 8",
        f"set model.preset back{ACCEPT} model.preset (the weights were trained for the other",
        ("exact", False),
    ),
]


@pytest.mark.parametrize(("change", "found", "remedy", "allowed"), REFUSED)
def test_changes_of_model_or_data_are_rejected_with_a_remedy(
    step: Checkpoint, change: Change, found: str, remedy: str, allowed: tuple[str, bool] | None
) -> None:
    with pytest.raises(CheckpointError) as told:
        compared(step, change)
    message = str(told.value)
    assert message.startswith(f"checkpoint_step_10 was saved with {found}.")
    assert remedy in message
    assert message.endswith("To start from scratch, use another --run NAME or --resume none.")
    if allowed is None:
        with pytest.raises(CheckpointError):
            compared(step, change, allowed=ALLOWABLE)
        return
    changes = compared(step, change, allowed=ALLOWABLE)
    assert (changes.load_mode, changes.new_data) == allowed
    assert re.search(r"^\S+( order)? changes from .+ to .+", changes.allowed[0])


WEB = "code 256, web 768 of 1024 sequences"
HALF, MORE = "; from sequence 400: code 512, web 512", "; from sequence 900: code 1, web 1023"


@pytest.mark.parametrize(
    ("sequences", "saved", "now", "is_allowed"),
    [
        (300, WEB, WEB + HALF, True),
        (400, WEB + HALF, WEB + MORE, True),  # none of its sequences was used
        (401, WEB + HALF, WEB + HALF + MORE, True),
        (401, WEB + HALF, WEB + MORE, False),
        (401, WEB, WEB + HALF, False),
        (300, WEB + HALF, HALF, False),
        (300, "", WEB + HALF, False),
    ],
)
def test_only_stages_that_have_not_begun_may_change(
    step: Checkpoint, sequences: int, saved: str, now: str, is_allowed: bool
) -> None:
    position = {"position": {"epoch": 0, "sequences": sequences, "sources": {}}}
    (step.path / "trainer.json").write_text(json.dumps(position))
    before = {"data_mixture": saved, "tokens": 3200}
    begun = Checkpoint(step.path, step.manifest.model_copy(update=before))
    change = {"data_mixture": now, "model.sequence_length": 32}
    if is_allowed:
        changes = compared(begun, change)
        assert changes.allowed == ()
        assert changes.lines()[-1] == f"data.mixture {json.dumps(saved)} -> {json.dumps(now)}"
    else:
        with pytest.raises(CheckpointError, match=r"was saved with data\.mixture"):
            compared(begun, change)
    # With other data, the stages go on where they are.
    changes = compared(begun, {**change, "data_fingerprint": "b"}, allowed=ALLOWABLE)
    assert changes.restart == Position(0, 100, {})


def test_allowing_one_change_allows_no_other_except_data_its_order(step: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="data f00d") as told:
        compared(step, {"dtype": "fp32", "data_fingerprint": "b"}, allowed=("precision.dtype",))
    assert "precision" not in str(told.value)
    order = {"data_order": "seed 2", "run.seed": 2, "data.block_shards": 8}
    with pytest.raises(CheckpointError, match="data order"):
        compared(step, order, allowed=("run.seed",))
    assert compared(step, {**order, "data_fingerprint": "b"}, allowed=("data",)).new_data


def test_only_listed_settings_can_be_allowed() -> None:
    check_allowable(ALLOWABLE)
    for name in ALLOWABLE[1:]:
        path = name.split(".")
        assert path[-1] in settings_in(path[:-1]), name
    with pytest.raises(ConfigError, match=r"optimizer.lr: .* Choose from data, data.mixture"):
        check_allowable(["data", "optimizer.lr"])


def test_contents_of_a_broken_checkpoint_are_rejected(local: Path) -> None:
    (make_step(local, 10).path / "model.json").unlink()
    catalog = Catalog(local)
    with pytest.raises(CheckpointError, match=r"cannot be read: unusable: local: model\.json"):
        read_contents(catalog, catalog.entries()[0])
