"""Hosts in namespaces: what a run on several machines meets."""

import subprocess
from pathlib import Path

import pytest
from forked import train
from host_runs import HostRun, wait
from hosts import network
from tiny import losses


def test_hosts_reach_each_other_until_a_cable_is_pulled(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (first, second):
        first.run("touch", "/mnt/mine")
        assert first.run("hostname").strip() == "host0"
        assert second.run("ls", "/mnt") == ""
        listener = second.start(["sh", "-c", "exec sleep 600"])
        reach = ["python3", "-c", "import socket; socket.create_connection(('host1', 9), 5)"]
        assert "refused" in first_error(first.start(reach, stderr=subprocess.PIPE))
        second.pull_cable()
        assert "refused" not in first_error(first.start(reach, stderr=subprocess.PIPE))
        second.plug_cable()
        assert "refused" in first_error(first.start(reach, stderr=subprocess.PIPE))
        second.kill()
        assert listener.wait(60) != 0
        with pytest.raises(subprocess.CalledProcessError):
            second.run("true")


def first_error(process: "subprocess.Popen[bytes]") -> str:
    """Return what a process that ends by itself printed to stderr."""
    return process.communicate(timeout=60)[1].decode()


@pytest.mark.slow
def test_two_hosts_train_as_one_does(tmp_path: Path) -> None:
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts, "run.steps=4", "checkpoint.interval=0")
        wait(run.torchrun())
        wanted = alone(run, ranks=2)
        assert [losses(run.folder(host)) for host in hosts] == [wanted, {}]
        parts = [sorted((run.folder(host) / "checkpoints").rglob("*.pt")) for host in hosts]
        assert all(parts) and not {p.name for p in parts[0]} & {p.name for p in parts[1]}


def alone(run: HostRun, *arguments: str, ranks: int) -> dict[int, str]:
    """Train the run on one host and return its losses."""
    folder = run.root / f"alone-{ranks}"
    folder.mkdir()
    train(folder, *run.settings, *arguments, "checkpoint.mirror=null", ranks=ranks)
    return losses(folder / "runs" / "tiny")
