"""Hosts in namespaces: what a run on several machines meets."""

import shutil
import subprocess
from pathlib import Path

import pytest
from forked import train
from host_runs import HostRun, serve_ssh, wait
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


@pytest.mark.long
def test_deepspeed_on_each_of_two_hosts_trains_as_one_host_does(tmp_path: Path) -> None:
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts, "zero.stage=3", "run.steps=4", "checkpoint.interval=0")
        at = ["--no_ssh", "--master_addr", hosts[0].address, "--node_rank"]
        wait([run.deepspeed(host, options=[*at, str(n)]) for n, host in enumerate(hosts)])
        assert losses(run.folder(hosts[0])) == alone(run, ranks=2)


@pytest.mark.long
def test_deepspeeds_hostfile_trains_on_three_hosts_by_ssh(tmp_path: Path) -> None:
    with network(tmp_path, 3) as hosts:
        serve_ssh(tmp_path, hosts)
        run = HostRun(tmp_path, hosts, "zero.stage=2", "run.steps=4", "checkpoint.interval=0")
        (run.disk(hosts[0]) / ".deepspeed_env").write_text("OMP_NUM_THREADS=1")
        wait([run.deepspeed(hosts[0])])
        assert losses(run.folder(hosts[0])) == alone(run, ranks=3)
        assert all((run.folder(host) / "checkpoints").exists() for host in hosts)


@pytest.mark.long
def test_a_checkpoint_of_two_hosts_resumes_on_one_and_on_three(tmp_path: Path) -> None:
    with network(tmp_path, 3) as hosts:
        run = HostRun(tmp_path, hosts[:2], "batch.micro=2", "batch.accumulation=6")
        wait(run.torchrun("run.steps=4"))
        before = losses(run.folder(hosts[0]))
        assert sorted(before) == [1, 2, 3, 4]
        for count, accumulation in ((1, 12), (3, 4)):
            for host in hosts:
                host.run("rm", "-rf", "/mnt/runs", "/mnt/cache")
            run.hosts = hosts[:count]
            started = run.torchrun("run.steps=6", f"batch.accumulation={accumulation}")
            wait(started)
            assert f"ranks    2 -> {count}" in started[0].printed, started[0].printed
            after = losses(run.folder(hosts[0]))
            assert sorted(after) == [1, 2, 3, 4, 5, 6] and before.items() <= after.items()
            shutil.rmtree(run.mirrored / "checkpoint_step_6")


def alone(run: HostRun, *arguments: str, ranks: int) -> dict[int, str]:
    """Train the run on one host and return its losses."""
    folder = run.root / f"alone-{ranks}"
    folder.mkdir()
    train(folder, *run.settings, *arguments, "checkpoint.mirror=null", ranks=ranks)
    return losses(folder / "runs" / "tiny")
