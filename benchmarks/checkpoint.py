"""Saving, verifying and copying a step: our ways beside those of others, in one run.

    .venv/bin/python benchmarks/checkpoint.py [--parameters 100e6] [--repeats 5] [--json FILE]

Two ranks save a real ZeRO-3 state by `torch.save`, by DeepSpeed, by us, and in the background; then
the files of a step go to a storage emulator and back, by us and by google-cloud-storage's
transfer_manager; then a small model is trained with the mirror on and off. Everything is measured
in turns, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoint_mirror import measure_mirror
from emulator import storage_process
from measuring import ROOT, Column, Record, medians, say, seconds, table, write_report

sys.path.insert(0, str(ROOT / "tests"))

RANKS = 2
FILES, FILE_BYTES = 8, 16_000_000
WORK = Path("/tmp/refocused-benchmarks")
# Each row, what it is compared with, and the ratio that it is to reach.
TARGETS = {
    "ours": ("DeepSpeed, then fsync", 1.1),  # a save that waits for the disk, as ours does
    "async, stall": ("memory copy", 2.0),
    "verified": ("read", 1.1),
    "upload, ours": ("upload, transfer_manager", 1 / 0.9),
    "download, ours": ("download, transfer_manager", 1 / 0.9),
    "step, mirror on": ("step, mirror off", 1.02),
}
COLUMNS = (
    Column("wall_s", "seconds", "{:.3f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("target", "at most", "{:.2f}"),
)


def main() -> None:
    """Measure, print the table, write everything down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--json", type=Path, default=WORK / "checkpoint.json")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=chosen.work) as folder:
        saves = measure_saves(Path(folder), chosen.parameters, chosen.repeats)
        transfers = measure_transfers(Path(folder), chosen.repeats)
        steps = measure_mirror(Path(folder) / "mirror", chosen.repeats)
    rows = compared(medians(saves) | medians(transfers) | medians(steps))
    title = f"{chosen.parameters / 1e6:.0f} M parameters on {RANKS} ranks, of {chosen.repeats}"
    print(table(rows, COLUMNS, title=title))
    settings = {"parameters": chosen.parameters, "repeats": chosen.repeats}
    results = {"saves": saves, "transfers": transfers, "steps": steps, "rows": rows}
    write_report(chosen.json, settings=settings, results=results)


def compared(found: Record) -> dict[str, Record]:
    """Return a row for each measurement, with its ratio to what it is compared with."""
    rows: dict[str, Record] = {}
    for name, wall in found.items():
        other, target = TARGETS.get(name, (None, None))
        rows[name] = {
            "wall_s": wall,
            "ratio": wall / found[other] if other else None,
            "target": target,
        }
    rows["ours, to DeepSpeed alone"] = {
        "wall_s": found["ours"],
        "ratio": found["ours"] / found["DeepSpeed"],
        "target": None,  # it does not wait for the disk
    }
    return rows


def measure_saves(folder: Path, parameters: float, repeats: int) -> list[Record]:
    """Start the ranks; return the seconds of the slowest one, by row."""
    from ranks import free_port

    say(f"{RANKS} ranks with {parameters / 1e6:.0f} M parameters")
    place, port = folder / "saves", free_port()
    place.mkdir()
    script = str(ROOT / "benchmarks" / "checkpoint_ranks.py")
    arguments = [str(place), "--parameters", str(parameters), "--repeats", str(repeats)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONWARNINGS": "ignore",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank has failed")
    records: list[Record] = json.loads(printed[0].splitlines()[-1])
    return records


def measure_transfers(folder: Path, repeats: int) -> list[Record]:
    """Send files to an emulator and fetch them, by us and by transfer_manager, in turns."""
    sources = {f"{number}.bin": folder / "files" / f"{number}.bin" for number in range(FILES)}
    (folder / "files").mkdir()
    for path in sources.values():
        path.write_bytes(os.urandom(FILE_BYTES))
    records = []
    with storage_process("benchmark") as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        for number in range(repeats):
            say(f"{number + 1}/{repeats}  transfers")
            record: Record = {}
            for name, transfer in (("ours", _ours), ("transfer_manager", _theirs)):
                upload, download = transfer(sources, f"{name}-{number}", folder / "back")
                record[f"upload, {name}"] = seconds(upload)
                record[f"download, {name}"] = seconds(download)
                shutil.rmtree(folder / "back")
            records.append(record)
    return records


def _ours(
    sources: dict[str, Path], prefix: str, target: Path
) -> tuple[Callable[[], object], Callable[[], object]]:
    """As the mirror sends, which has the checksums from the manifest, and as a resume fetches."""
    from refocused.bucket.bucket import crc32c_of
    from refocused.bucket.gcs import GcsBucket
    from refocused.bucket.transfer import download_many

    bucket = GcsBucket("gs://benchmark")
    known = {name: crc32c_of(path) for name, path in sources.items()}

    def send(name: str) -> None:
        bucket.upload(sources[name], f"{prefix}/{name}", crc32c=known[name])

    def upload() -> None:
        with ThreadPoolExecutor(FILES) as threads:
            list(threads.map(send, sources))

    def download() -> None:
        download_many(bucket, list(bucket.list(f"{prefix}/")), target)

    return upload, download


def _theirs(
    sources: dict[str, Path], prefix: str, target: Path
) -> tuple[Callable[[], object], Callable[[], object]]:
    from google.cloud import storage
    from google.cloud.storage import transfer_manager as manager

    bucket = storage.Client(project="x").bucket("benchmark")
    target.mkdir()

    def upload() -> None:
        pairs = [(str(path), bucket.blob(f"{prefix}/{name}")) for name, path in sources.items()]
        results = manager.upload_many(pairs, max_workers=8, worker_type="thread")
        assert not any(isinstance(result, Exception) for result in results), results

    def download() -> None:
        pairs = [(bucket.blob(f"{prefix}/{name}"), str(target / name)) for name in sources]
        results = manager.download_many(pairs, max_workers=8, worker_type="thread")
        assert not any(isinstance(result, Exception) for result in results), results

    return upload, download


if __name__ == "__main__":
    main()
