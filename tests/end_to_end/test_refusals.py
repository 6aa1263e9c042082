"""Bad input of every kind: one message that names it, the right exit code, no partial files."""

import contextlib
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints.step_samples import reseal
from fakes import Emulator, Fault, Request, storage_emulator
from ranks import Ended, ForkedRanks, metrics, train, write_tokens
from tiny import damage, tiny_run

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest

pytestmark = pytest.mark.slow


def short_shards(folder: Path) -> None:
    shutil.rmtree(folder / "tokens")
    write_tokens(folder / "tokens", shards=2, tokens=30, vocabulary=512)


def large_ids(folder: Path) -> None:
    write_tokens(folder / "tokens", shards=3, tokens=4000, vocabulary=700)


def truncated_shard(folder: Path) -> None:
    shard = folder / "tokens" / "shard_001.npy"
    shard.write_bytes(shard.read_bytes()[:4000])


def damaged_shard(folder: Path) -> None:
    """Flip a byte after the manifest was written."""
    bucket = DirectoryBucket(folder / "tokens")
    manifest = build_manifest(bucket, DataConfig(source="tokens"))
    shards = tuple(
        dataclasses.replace(shard, crc32c=crc32c_of(folder / "tokens" / shard.name))
        for shard in manifest.shards
    )
    write_manifest(bucket, dataclasses.replace(manifest, shards=shards))
    damaged = folder / "tokens" / "shard_001.npy"
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(content)


def pickled_shard(folder: Path) -> None:
    objects = np.array([{"not": "tokens"}], dtype=object)
    np.savez(folder / "tokens" / "shard_003.npz", input_ids=objects)


def add_shard(folder: Path) -> None:
    write_tokens(folder / "tokens", shards=4, tokens=4000, vocabulary=512)


def file_in_the_way(folder: Path) -> None:
    (folder / "mirror").write_text("a file, so that nothing can be below it")


STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def train_and_wait_briefly(arguments: list[str]) -> int:
    from refocused.commands.train import main
    from refocused.system import roll_call

    roll_call.HEAD_SECONDS = 0.5
    return main(arguments)


def test_a_port_that_another_job_has_is_named(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    command = [sys.executable, "-c", STORE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        assert other.stdout is not None
        port = other.stdout.readline().strip()
        taken = {"MASTER_PORT": port}
        words, together = ["--config", "tiny.yaml"], train_and_wait_briefly
        ranks = ForkedRanks(2, words, folder=tmp_path, environment=taken, command=together)
        ended = ranks.wait(60)  # no launcher ends one rank for the other
        other.communicate()
    assert ended.codes == [2, 2], ended.everything
    assert f"used by process {other.pid} (" in ended.err[0]
    assert f"Port {port} of 127.0.0.1" in ended.err[0] and "--master_port" in ended.err[0]


def make_unloadable(folder: Path) -> None:
    """The checksums are right, so only the reader detects it."""
    reseal(folder / "runs/tiny/checkpoints/checkpoint_step_20", ZERO_FILE, b"what was written")


@dataclasses.dataclass(frozen=True)
class Case:
    """Bad input, and its message: each text of `says` once, by rank 0 only.

    `code` 2 is of the configuration, before anything was written. `resumes`: it meets a run of 20
    steps with two checkpoints.
    """

    code: int
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda folder: None
    rank_1: tuple[str, ...] | None = None
    resumes: bool = False


RESUMES: Any = functools.partial(Case, resumes=True)
ZERO_FILE = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
CORRUPT = f"checkpoint_step_20 is corrupt: {ZERO_FILE}"
CHOOSE = "Choose another checkpoint, or the newest usable one with --resume latest"
CASES: dict[str, Case] = {
    "two problems at once": Case(
        2,
        ("optimizer.lr=fast", "run.stepz=3", "zero.stage=7"),
        (
            "optimizer.lr = 'fast'",
            "run.stepz is not a setting. Did you mean run.steps?",
            "zero.stage = 7: expected one of 0, 1, 2, 3, auto",
        ),
    ),
    "more ranks than GPUs": Case(
        2,
        ("run.device=cuda",),
        ("torch sees no GPU on this machine (2 ranks", "set run.device=cpu for a trial"),
    ),
    "ranks with different settings": Case(
        2,
        (),
        ("rank 1 was started with other settings than rank 0", "the same run file"),
        rank_1=("--config", "tiny.yaml", "optimizer.lr=1e-4"),
    ),
    "missing bucket folder": Case(
        2, ("data.source=nowhere",), ("nowhere: the folder does not exist", "Check the path")
    ),
    "shards shorter than a sequence": Case(
        1,
        (),
        ("the longest of 2 files, shard_000.npy, has 30 tokens", "model.sequence_length to at"),
        short_shards,
    ),
    "ids outside the vocabulary": Case(
        2,
        (),
        ("shard_000.npy has the id 6", "the model has ids up to 511", "inspect tokens"),
        large_ids,
    ),
    "truncated shard": Case(
        1,
        (),
        ("shard_001.npy: the header says (4000,) of uint16", "has 3,872", "data.exclude"),
        truncated_shard,
    ),
    "damaged shard": Case(
        1, (), ("shard_001.npy: it is corrupt", "put its name in data.skip"), damaged_shard
    ),
    "pickled shard": Case(
        1,
        (),
        ("shard_003.npz[input_ids]: it holds Python objects", "Pickled arrays are not supported"),
        pickled_shard,
    ),
    "missing credentials file": Case(
        2,
        ("data.source=gs://refused/x", "--gcs-credentials", "nokey.json"),
        ("The credentials file nokey.json cannot be read: No such file", "Check the path"),
    ),
    "permission that is missing": Case(
        1,
        ("data.source=gs://refused/x",),
        ("gs://refused/x/: HTTP 403 no entry", "Grant the role roles/storage.objectViewer"),
    ),
    "mirror that cannot be made": Case(
        1,
        ("checkpoint.mirror=mirror/below",),
        ("mirror/below: the folder does not exist", "from step 0 with --resume none"),
        file_in_the_way,
    ),
    "a step that does not exist": RESUMES(
        1,
        ("--resume", "17"),
        ("There is no checkpoint '17'", "Nearest: checkpoint_step_20, checkpoint_step_10"),
    ),
    "other data": RESUMES(
        1,
        (),
        (
            "checkpoint_step_20 was saved with data a7d0fa5f",
            "this run has 2e6f3c7d8",
            "data.source",
        ),
        add_shard,
    ),
    "another precision": RESUMES(
        1,
        ("precision.dtype=bf16",),
        ("saved with precision.dtype fp32; this run has bf16", "set precision.dtype=fp32"),
    ),
    "a step of another run": RESUMES(
        1,
        ("--run", "other", "--resume", "runs/tiny"),
        ("checkpoint_step_20 was saved by run tiny, not by other", "add --trust"),
    ),
    "fewer steps than were made": RESUMES(
        2, ("run.steps=15",), ("checkpoint_step_20 is beyond run.steps=15", "Raise run.steps")
    ),
    "a named step that is corrupt": RESUMES(
        1, ("--resume", "20"), (CORRUPT, "has CRC-32C", CHOOSE), lambda folder: damage(folder, 20)
    ),
    "a named step with a file that one rank cannot load": RESUMES(
        1, ("--resume", "20"), (CORRUPT, "cannot be loaded: ", CHOOSE), make_unloadable
    ),
    "no step that is not corrupt": RESUMES(
        1,
        (),
        ("No usable checkpoint in runs/tiny/checkpoints: all 2", "start a new run with"),
        lambda folder: damage(folder, 10, 20),
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Ended]]]:
    """All cases, started together: they mostly wait for each other's ranks."""
    trained = tmp_path_factory.mktemp("trained")
    tiny_run(trained)
    train(trained, "--config", "tiny.yaml", "checkpoint.mirror=null", ranks=2)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(storage_emulator("refused"))
        no_entry = Fault(status=403, message="no entry")
        store.proxy.script(lambda request: True, no_entry, times=1000)
        started = {}
        for number, (name, case) in enumerate(CASES.items()):
            folder = tmp_path_factory.mktemp(f"case{number}")
            words = ["--config", "tiny.yaml", *case.arguments]
            if case.resumes:
                shutil.copytree(trained, folder, dirs_exist_ok=True)
                words.append("checkpoint.mirror=null")
            else:
                tiny_run(folder)
            case.prepare(folder)
            ranks = ForkedRanks(
                2,
                words,
                folder=folder,
                others={} if case.rank_1 is None else {1: case.rank_1},
                environment={"STORAGE_EMULATOR_HOST": store.proxy.url},
            )
            started[name] = folder, stack.enter_context(ranks)
        yield {name: (folder, ranks.wait(200)) for name, (folder, ranks) in started.items()}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_reported_once_by_name(
    name: str, refused: dict[str, tuple[Path, Ended]]
) -> None:
    case, (folder, ended) = CASES[name], refused[name]
    assert ended.codes == [case.code, case.code], ended.everything
    assert "Traceback" not in ended.everything
    lines = [line for line in ended.err[0].splitlines() if not line.startswith("warning: ")]
    for text in case.says:
        assert "\n".join(lines).count(text) == 1, ended.everything
        assert text not in ended.out[0]
    assert ended.out[1] + ended.err[1] == ""
    assert not list(folder.rglob(".tmp-*"))
    if case.resumes:
        return
    assert not list(folder.rglob("checkpoint_step_*"))
    if case.code == 2:
        assert not (folder / "runs").exists()
    state = folder / "runs" / "tiny" / "state.json"
    assert not state.exists() or json.loads(state.read_text())["status"] == "failed"


@pytest.mark.bucket
def test_a_validation_shard_unreadable_on_one_rank_stops_all(
    tmp_path: Path, emulator: Emulator
) -> None:
    tiny_run(tmp_path)
    for shard in sorted((tmp_path / "tokens").iterdir()):
        emulator.put(f"data/{shard.name}", shard.read_bytes())
    gone = Fault(status=404, message="gone", delay_s=2.0)
    emulator.proxy.script(
        lambda request: request.is_download and "shard_002" in request.path and is_whole(request),
        gone,
        times=100,
    )
    ended = train(
        tmp_path,
        "--config",
        "tiny.yaml",
        f"data.source={emulator.url}/data",
        "data.validation_fraction=0",
        "data.validation_files=[shard_001.npy, shard_002.npy]",
        "evaluation.interval=1",
        "evaluation.sequences=4",  # the first two are rank 0's, in shard_001
        "checkpoint.mirror=null",
        "data.fetch_timeout_s=6",
        ranks=2,
        environment={"STORAGE_EMULATOR_HOST": emulator.proxy.url},
        code=1,
    )
    assert list(metrics(tmp_path / "runs" / "tiny")) == [1]
    assert "Traceback" not in ended.everything and ended.err[1] == ""
    assert ended.err[0].count("\nerror: rank 1: shard_002.npy: it is not local") == 1


def is_whole(request: Request) -> bool:
    """A download of all of an object, not of its header."""
    return "Range" not in request.headers and "range" not in request.headers


def test_a_machine_with_another_run_file_reports_it(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    with ForkedRanks(
        2,
        ["--config", "tiny.yaml"],
        folder=tmp_path,
        others={1: ["--config", "tiny.yaml", "optimizer.lr=fast"]},
        environment={"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        local_ranks=(0, 0),
    ) as ranks:
        assert ranks.processes[1].wait(30) == 2
        assert ranks.processes[0].poll() is None  # it waits for the other rank
    ended = ranks.wait(60)
    assert ended.err[1].startswith("error: rank 1: command line: optimizer.lr = 'fast'"), (
        ended.everything
    )
    assert ended.err[0] == ""
