"""The logs in the bucket: each machine's own, bounded, and never in the way of training."""

import socket
from pathlib import Path

import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import PREFIX

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror import mirror_logs
from refocused.checkpoints.mirror.mirror import MirrorSettings
from refocused.checkpoints.mirror.mirror_logs import PART_BYTES, LogCopier, fetch_logs
from refocused.metrics.history import MOST_BYTES
from refocused.system.errors import BucketError
from refocused.system.processes import ProcessIdentity


class Refusing(FaultyBucket):
    """Refuses one name."""

    def write(self, name: str, content: bytes, *, overwrite: bool | int = False) -> BlobInfo:
        if name.endswith("state.json"):
            raise BucketError("refused")
        self.sent.append(name.rpartition("/")[2])
        return super().write(name, content, overwrite=overwrite)


def test_changed_logs_are_copied_once_a_minute_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, bucket = tmp_path / "run", Refusing(tmp_path / "bucket")
    ended = ProcessIdentity(pid=1, started=-1)
    settings = MirrorSettings(run=run, bucket=bucket.url, prefix=PREFIX, training=ended)
    (run / "logs").mkdir(parents=True)
    for name in (
        "state.json",
        "expected_loss.json",
        "logs/events.jsonl",
        "logs/rank-0.log",
        "logs/mirror.log",
    ):
        (run / name).write_text("{}\n")
    (run / "logs" / "gpu_metrics.jsonl").write_text("{0000000}\n" * (MOST_BYTES // 8))
    copier = LogCopier(bucket, settings)
    refused = copier.copy()
    assert str(refused) == "refused"
    assert {name.partition(".0")[0] for name in bucket.sent} == {
        *("expected_loss.json", "events.jsonl", "gpu_metrics.jsonl", "rank-0.log")
    }
    there = tmp_path / "bucket" / Path(PREFIX).parent / "logs" / socket.gethostname()
    cut = b"".join(path.read_bytes() for path in sorted(there.glob("gpu_metrics.jsonl*")))
    log = run / "logs" / "gpu_metrics.jsonl"
    assert MOST_BYTES - PART_BYTES <= len(cut) <= MOST_BYTES and log.read_bytes().endswith(cut)
    bucket.sent.clear()
    (run / "logs" / "events.jsonl").write_text("{}\n{}\n")
    assert copier.copy() is None
    assert not bucket.sent  # not within a minute
    monkeypatch.setattr(mirror_logs, "COPY_SECONDS", 0.0)
    (run / "state.json").unlink()
    assert copier.copy(at_once=True) is None
    assert bucket.sent == ["events.jsonl"] and (there / "events.jsonl").stat().st_size == 6
    copier.copy()
    assert len(bucket.sent) == 1  # nothing has changed
    with log.open("ab") as file:
        file.write(b"{1}\n")
    bucket.sent.clear()
    copier.copy()
    assert len(bucket.sent) == 1, "regression: 24 GB a day, each log whole once a minute"
    cut = b"".join(path.read_bytes() for path in sorted(there.glob("gpu_metrics.jsonl*")))
    assert log.read_bytes().endswith(cut)
    log.write_bytes(b"{2}\n")  # another session's, on a new disk
    copier.copy()
    assert [path.name for path in there.glob("gpu_metrics.jsonl*")] == ["gpu_metrics.jsonl"]


def test_the_logs_of_all_machines_become_those_of_one_run(tmp_path: Path) -> None:
    bucket, folder = DirectoryBucket(tmp_path), tmp_path / "copy" / "one"
    lost, head, other = (f"one/logs/{host}/" for host in ("a", "b", "c"))
    for below, time in ((lost, "2026-01-01"), (head, "2026-01-02")):
        bucket.write(f"{below}state.json", f'{{"updated": "{time}"}}'.encode())
        bucket.write(f"{below}events.jsonl", f'{{"time": "{time}"}}\n'.encode())
        bucket.write(f"{below}expected_loss.json", f'{{"at": "{time}"}}'.encode())
    bucket.write(f"{other}gpu_metrics-node-1.jsonl", b"{}\n")
    bucket.write(f"{other}gpu_metrics-node-1.jsonl.000001", b"{1}\n")  # a later part
    bucket.write(f"{other}rank-1.log", b"no record")
    fetch_logs(bucket, "one", folder)
    assert "01-02" in (folder / "state.json").read_text()
    assert "01-02" in (folder / "expected_loss.json").read_text()
    assert {path.name: path.read_text() for path in (folder / "logs").iterdir()} == {
        "events.jsonl": '{"time": "2026-01-02"}\n',
        "events-a.jsonl": '{"time": "2026-01-01"}\n',
        "gpu_metrics-node-1-c.jsonl": "{}\n{1}\n",
    }
    followed_by = (folder / "logs" / "events.jsonl").stat().st_ino
    bucket.write(f"{head}events.jsonl", b'{"time": "2026-01-02"}\n{}\n', overwrite=True)
    fetch_logs(bucket, "one", folder)
    events = folder / "logs" / "events.jsonl"
    assert events.read_text().endswith("\n{}\n") and events.stat().st_ino == followed_by
    with pytest.raises(BucketError, match="no machine has sent logs of a run two here"):
        fetch_logs(bucket, "two", folder)
