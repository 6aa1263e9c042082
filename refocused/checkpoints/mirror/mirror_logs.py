"""Copy a machine's logs to the bucket, where a lost machine leaves them, and all of them back."""

import contextlib
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.checkpoints.mirror.mirror import MirrorSettings
from refocused.metrics.jsonl import as_record
from refocused.system.atomic_files import replace_file
from refocused.system.errors import BucketError

COPY_SECONDS = 60.0
STATE_FILE = "state.json"
# Beside the folder of logs.
OF_RUN = (STATE_FILE, "run.yaml", "mirror.json", "expected_loss.json")
PART_BYTES = 64 * 1024
KEPT_PARTS = 64
_PART = re.compile(r"(\.\d{6})?$")


class LogCopier:
    """Copies changed logs once a minute to `RUN/logs/HOST/`, each by its last 4 MiB.

    A log is sent in parts of 64 KiB, `NAME`, `NAME.000001` and so on, of which only those with new
    bytes are sent again. A failure is left to the next call: it never delays or disturbs training.
    """

    def __init__(self, bucket: Bucket, settings: MirrorSettings) -> None:
        """Prepare, without a request."""
        self._bucket, self._settings = bucket, settings
        self._below = f"{settings.prefix.rpartition('/')[0]}/logs/{socket.gethostname()}".strip("/")
        self._sent: dict[Path, tuple[int, int, int]] = {}  # inode, modification time (ns), size
        self._due = 0.0

    def copy(self, *, at_once: bool = False) -> BucketError | None:
        """Copy what has changed, if that is due or `at_once`; return why the bucket lacks some."""
        if time.monotonic() < self._due and not at_once:
            return None
        self._due, lacking = time.monotonic() + COPY_SECONDS, None
        run = self._settings.run
        for path in (*(run / name for name in OF_RUN), *sorted((run / "logs").glob("*"))):
            try:
                status = path.stat()
                now = (status.st_ino, status.st_mtime_ns, status.st_size)
                if path.name != "mirror.log" and self._sent.get(path) != now:
                    self._send(path, now)
                    self._sent[path] = now
            except BucketError as error:
                lacking = error
            except OSError:  # it was removed, or cannot be read here: nothing that waiting mends
                continue
        return lacking

    def _send(self, path: Path, now: tuple[int, int, int]) -> None:
        name, last = f"{self._below}/{path.name}", now[2] // PART_BYTES
        before = self._sent.get(path, (0, 0, 0))
        first = max(0, last - KEPT_PARTS + 1)
        if before[0] == now[0] and before[2] <= now[2] and path.name not in OF_RUN:
            first = max(first, before[2] // PART_BYTES)
        else:  # another file than the one that the bucket may have under this name
            kept = {_part(name, number) for number in range(first, last + 1)}
            for blob in list(self._bucket.list(name)):
                if _PART.fullmatch(blob.name.removeprefix(name)) and blob.name not in kept:
                    self._bucket.delete(blob.name)
        with path.open("rb") as file:
            for number in range(first, last + 1):
                file.seek(number * PART_BYTES)
                content = file.read(PART_BYTES)
                if content or not number:
                    self._bucket.write(_part(name, number), content, overwrite=True)


def _part(name: str, number: int) -> str:
    return f"{name}.{number:06d}" if number else name


def fetch_logs(bucket: Bucket, run: str, folder: Path) -> None:
    """Copy what the machines of a run have sent to `folder`, as the files of one run.

    The state is that of rank 0's last machine; records of other machines get their host's name.

    Raises:
        BucketError: The bucket cannot be read, or holds no logs of this run.
    """
    below, contents = f"{run}/logs/", dict[tuple[str, str], bytes]()
    for blob in bucket.list(below):
        host, _, name = blob.name.removeprefix(below).partition("/")
        name = _PART.sub("", name)
        if blob.size and name.endswith((".json", ".jsonl", ".yaml")):
            part = bucket.read(blob.name, start=0, length=blob.size)  # they come in their order
            contents[host, name] = contents.get((host, name), b"") + part
    states = {
        h: as_record(content) or {} for (h, name), content in contents.items() if name == STATE_FILE
    }
    if not states:
        raise BucketError(
            f"{bucket.url}: no machine has sent logs of a run {run} here. Check its name and "
            "checkpoint.mirror; mirrors send logs once a minute."
        )
    head = max(states, key=lambda host: str(states[host].get("updated")))
    for (host, name), content in contents.items():
        path = folder / (name if name in OF_RUN else f"logs/{name}")
        if host != head and path.parent == folder:
            continue
        path = path if host == head else path.with_stem(f"{path.stem}-{host}")
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_bytes() if path.exists() else b""
        if known and content.startswith(known):  # readers go on where they were
            with path.open("ab") as file:
                file.write(content[len(known) :])
        else:
            replace_file(path, content)


@contextlib.contextmanager
def followed(bucket: Bucket, runs: Sequence[str]) -> Iterator[list[str]]:
    """Keep copies of runs' logs in temporary folders, whose paths are yielded."""
    ended = threading.Event()

    def repeat(folders: Mapping[str, Path]) -> None:
        while not ended.wait(COPY_SECONDS):
            for run, folder in folders.items():
                with contextlib.suppress(BucketError, OSError):  # they stay as they are
                    fetch_logs(bucket, run, folder)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folders = {run: Path(name, run) for run in runs}
        for run, folder in folders.items():
            fetch_logs(bucket, run, folder)
        threading.Thread(target=repeat, args=(folders,), daemon=True).start()
        try:
            yield [str(folder) for folder in folders.values()]
        finally:
            ended.set()
