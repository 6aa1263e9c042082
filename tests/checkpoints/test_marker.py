from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints.step_samples import make_step, mirrored
from fakes import Emulator, Fault, Request

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, Marker
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket
STEP = "sample/checkpoints/checkpoint_step_10"


def state_of(emulator: Emulator, folder: Path) -> str:
    bucket = open_bucket(emulator.url)
    (entry,) = Catalog(folder / "new", bucket, "sample/checkpoints").entries()
    return entry.bucket


def test_a_marker_that_names_the_manifest_beside_it_is_not_read(
    emulator: Emulator, local: Path, tmp_path: Path
) -> None:
    mirrored(open_bucket(emulator.url), make_step(local, 10))
    emulator.proxy.requests.clear()
    assert state_of(emulator, tmp_path) == "ok"
    read = [request.path for request in emulator.proxy.requests if request.is_download]
    assert not any(path.endswith(COMMITTED) for path in read)


def test_a_marker_in_other_words_is_read(emulator: Emulator, local: Path, tmp_path: Path) -> None:
    bucket = open_bucket(emulator.url)
    mirrored(bucket, make_step(local, 10))
    marker = json.loads(bucket.read(f"{STEP}/{COMMITTED}"))
    emulator.put(f"{STEP}/{COMMITTED}", json.dumps(marker, indent=4).encode())
    assert state_of(emulator, tmp_path) == "ok"


def test_a_marker_of_another_manifest_makes_a_step_unusable(
    emulator: Emulator, local: Path, tmp_path: Path
) -> None:
    step = mirrored(open_bucket(emulator.url), make_step(local, 10))
    sizes = {"files": len(step.manifest.files), "bytes": step.manifest.total_bytes}
    emulator.put(f"{STEP}/{COMMITTED}", Marker(**sizes, manifest_crc32c=1).to_json())
    assert state_of(emulator, tmp_path) == "broken: COMMITTED belongs to other files"


def test_a_manifest_replaced_while_the_files_are_sent_is_not_marked(
    emulator: Emulator, local: Path
) -> None:
    def replace(request: Request) -> bool:
        if request.is_upload and b"checkpoint_step_10/model.json" in request.body:
            emulator.put(f"{STEP}/manifest.json", b"{}")  # by a second run of that name
        return False

    emulator.proxy.script(replace, Fault())
    with pytest.raises(BucketError, match=r"manifest\.json is not what was sent"):
        mirrored(open_bucket(emulator.url), make_step(local, 10))
    assert open_bucket(emulator.url).info(f"{STEP}/{COMMITTED}") is None
