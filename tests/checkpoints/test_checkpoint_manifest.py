from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest
from checkpoints.step_samples import make_step

from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, parse_manifest
from refocused.system.errors import CheckpointError


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, object]:
    manifest = make_step(tmp_path, 20, epoch=1).manifest
    return dict(json.loads(manifest.to_json()))


def parsed(fields: dict[str, object]) -> CheckpointManifest:
    return parse_manifest(json.dumps(fields).encode(), where="here/manifest.json")


def test_a_manifest_survives_its_own_json(tmp_path: Path) -> None:
    manifest = make_step(tmp_path, 20).manifest
    assert parse_manifest(manifest.to_json(), where="x") == manifest
    assert manifest.total_bytes == 7000


def test_a_manifest_without_labels_is_of_a_rolling_save(fields: dict[str, object]) -> None:
    del fields["tiers"]
    assert parsed(fields).tiers == ("rolling",)
    with pytest.raises(CheckpointError, match=r"tiers\.0: .*rolling.*found 'hourly'"):
        parsed(fields | {"tiers": ["hourly"]})


def test_the_alias_tells_epoch_step_and_files(fields: dict[str, object]) -> None:
    assert parsed(fields).alias == "checkpoint-epoch1-step20-files2"


def test_a_loss_that_is_not_finite_is_read_back_as_unknown(tmp_path: Path) -> None:
    manifest = make_step(tmp_path, 1, loss=float("nan"), validation_loss=float("inf")).manifest
    again = parse_manifest(manifest.to_json(), where="x")
    assert (again.loss, again.validation_loss) == (None, None)


def test_torn_json_is_named_with_its_length() -> None:
    with pytest.raises(CheckpointError, match=r"here is not whole JSON \(14 bytes"):
        parse_manifest(b'{"step": 12, "', where="here")


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"schema_version": 3}'])
def test_another_schema_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="this program reads 1 and 2"):
        parse_manifest(content, where="here")


def test_an_unknown_and_a_missing_field_are_named(fields: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="colour: Extra inputs are not permitted"):
        parsed(fields | {"colour": "red"})
    del fields["tokens"]
    with pytest.raises(CheckpointError, match="tokens: Field required"):
        parsed(fields)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "zero/../../x", "a\\b"])
def test_a_file_outside_the_directory_is_refused(fields: dict[str, object], name: str) -> None:
    with pytest.raises(CheckpointError, match="outside its folder"):
        parsed(fields | {"files": {name: {"size": 1, "crc32c": 1}}})


def test_a_time_without_a_zone_is_refused_by_the_writer(tmp_path: Path) -> None:
    with pytest.raises(pydantic.ValidationError, match="created"):
        make_step(tmp_path, 1, created="2026-11-21T08:00:00")
