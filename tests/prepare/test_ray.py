"""Tokenization on a Ray cluster of two workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data.text_samples import files_of, random_texts, write_jsonl
from prepare.test_tokenize import make

from refocused.prepare.texts import task_pools, text_inputs
from refocused.system.errors import ShardError

SCRIPT = Path(__file__).with_name("tokenize_process.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two workers, which the calls of this file join."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 3000)
    return write_jsonl(tmp_path / "texts" / "1.jsonl", random_texts(200))


@pytest.mark.slow
def test_a_killed_worker_costs_one_task(
    cluster: None, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, original = tmp_path / "tasks.log", task_pools.stream_task

    def stream(request: Any, version: str, number: int, spans: Any) -> Iterator[bytes]:
        first = f"{number}\n" not in (log.read_text() if log.exists() else "")
        with log.open("a") as file:
            file.write(f"{number}\n")
        for block in original(request, version, number, spans):
            yield block
            if number == 1 and first:
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(task_pools, "stream_task", stream)
    make(texts, tmp_path / "ray", executor="ray")
    make(texts, tmp_path / "local")
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    begun = sorted(map(int, log.read_text().split()))
    assert len(set(begun)) > 4
    assert begun == sorted([1, *set(begun)])


@pytest.mark.slow
def test_a_bad_document_gives_the_same_message(cluster: None, texts: Path, tmp_path: Path) -> None:
    lines = texts.read_text().splitlines()
    texts.write_text("\n".join([*lines[:40], '{"text": 1}', *lines[40:50], "{}", *lines[50:]]))
    messages = []
    for executor in ("local", "ray"):
        with pytest.raises(ShardError) as error:
            make(texts, tmp_path / executor, executor=executor)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "it has no text under 'text'" in messages[0]
    texts.write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("refocused.__version__", "0.0.9")
        with pytest.raises(ShardError, match=r"installed here, 0\.0\.9 where the command runs"):
            make(texts, tmp_path / "version", executor="ray")


@pytest.mark.long
def test_the_command_continues_after_its_driver_was_killed(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out, log = tmp_path / "out", tmp_path / "tasks.log"
    log.touch()
    command = [sys.executable, SCRIPT, "tokenize", texts, "--out", out, "--tokenizer", "bytes"]
    options = ["--shard-tokens", "1000", "--val-ratio", "0.2", "--executor", "ray"]
    environment = os.environ | {"TASK_BYTES": "3000", "TASK_LOG": str(log), "TASK_SECONDS": "0.5"}
    environment.pop("RAY_ADDRESS", None)
    output = (tmp_path / "output").open("w")
    running = subprocess.Popen([*command, *options], env=environment, stderr=output, stdout=output)
    until = time.monotonic() + 60
    while len(log.read_text().split()) < 6:
        assert running.poll() is None and time.monotonic() < until, output.name
        time.sleep(0.01)
    running.kill()
    running.wait()
    begun = log.read_text().split()
    again = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    make(texts, tmp_path / "local")
    assert files_of(out) == files_of(tmp_path / "local")
    repeated = [number for number in begun if log.read_text().split().count(number) > 1]
    assert len(repeated) <= 2, (begun, log.read_text())
