"""Hosts in namespaces: what a run on several machines meets."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from host_runs import TORCHRUN, HostRun, serve_ssh, wait
from hosts import network
from ranks import train
from tiny import losses, wait_for_the_mirror

from refocused.checkpoints.step.checkpoint_manifest import COMMITTED

SHORT = ["run.steps=4", "checkpoint.interval=0"]
ENDLESS = ["run.steps=100000", "checkpoint.interval=10"]


@pytest.mark.slow
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
        run = HostRun(tmp_path, hosts, *SHORT)
        wait(run.torchrun())
        wanted = alone(run, ranks=2)
        assert [losses(run.folder(host)) for host in hosts] == [wanted, {}]
        parts = [sorted((run.folder(host) / "checkpoints").rglob("*.pt")) for host in hosts]
        assert all(parts) and not {p.name for p in parts[0]} & {p.name for p in parts[1]}


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_deepspeed_trains_on_hosts_as_on_one(tmp_path: Path, count: int) -> None:
    with network(tmp_path, count) as hosts:
        run = HostRun(tmp_path, hosts, f"zero.stage={count}", *SHORT)
        if count == 2:  # started on each host
            each = [*run.deepspeed(), "--no_ssh", "--master_addr", hosts[0].address, "--node_rank"]
            wait([run.start(host, [*each, str(node)]) for node, host in enumerate(hosts)])
        else:  # on the first one, which starts the others by ssh
            serve_ssh(tmp_path, hosts)
            (tmp_path / "disk-host0" / ".deepspeed_env").write_text("OMP_NUM_THREADS=1")
            wait([run.start(hosts[0], run.deepspeed())])
        assert losses(run.folder(hosts[0])) == alone(run, ranks=count)
        assert all((run.folder(host) / "checkpoints").exists() for host in hosts)


@pytest.mark.long
def test_a_checkpoint_of_two_hosts_resumes_on_one_and_on_three(tmp_path: Path) -> None:
    with network(tmp_path, 3) as hosts:
        run = HostRun(
            tmp_path, hosts[:2], "batch.micro_batch_size=2", "batch.gradient_accumulation_steps=6"
        )
        wait(run.torchrun("run.steps=4"))
        before = losses(run.folder(hosts[0]))
        for count, accumulation in ((1, 12), (3, 4)):
            for host in hosts:
                if run.folder(host).exists():
                    wait_for_the_mirror(run.folder(host))
                host.run("rm", "-rf", "/mnt/runs", "/mnt/cache")
            run.hosts = hosts[:count]
            wait(run.torchrun("run.steps=6", f"batch.gradient_accumulation_steps={accumulation}"))
            after = losses(run.folder(hosts[0]))
            assert sorted(after) == [1, 2, 3, 4, 5, 6] and before.items() <= after.items()
            shutil.rmtree(run.mirrored / "checkpoint_step_6")


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 2])
def test_a_pulled_cable_stops_all_hosts_and_the_run_resumes(tmp_path: Path, lost: int) -> None:
    with network(tmp_path, 3) as hosts:
        run = HostRun(tmp_path, hosts, *ENDLESS)
        started = run.torchrun()
        started[0].wait_for("save +10 local")
        hosts[lost].pull_cable()
        seconds = wait(started, timeout=5 * 60, code=1)
        print(f"stopped after {seconds:.0f} s")
        for node, name in {0: {1: "10.77.0.1", 2: "10.77.0.1"}, 2: {0: "host2"}}[lost].items():
            assert f"{name} does not answer (" in started[node].printed
        hosts[lost].plug_cable()
        resumes(run)


# The number of hosts, and the most bytes of packets that the last one sends; None: none at all go
# between the last two.
DEAD = {"all": (2, None), "not rank 0's": (3, None), "one way": (3, 1), "large packets": (2, 500)}


@pytest.mark.long
@pytest.mark.parametrize("fault", DEAD)
def test_a_hang_by_a_dead_network_names_the_hosts(tmp_path: Path, fault: str) -> None:
    count, most = DEAD[fault]
    with network(tmp_path, count) as hosts:
        limit = ["run.hang_minutes=0.1", "log.sample_seconds=1", "evaluation.interval=0"]
        started = HostRun(tmp_path, hosts, *ENDLESS, *limit).torchrun()
        started[0].wait_for("save +30 local")
        for host in hosts[-2:] if most is None else ():
            host.isolate()
        if most is not None:
            hosts[-1].disturb("tbf", "rate", "1gbit", "latency", "50ms", "burst", str(most))
        print(f"{fault}: ended after {wait(started, timeout=60, code=1):.0f} s")
        told = "".join(one.printed for one in started)
        print(*re.findall("HANG.*\n.*\n.*\n", told))
        named = re.findall(r"network between (host\d) and (.*) is dead", told)
        pairs = [
            {host, f"host{int(to[-1]) - 1}"} for host, all_ in named for to in all_.split(", ")
        ]
        at = {host.name for host in hosts[-1 if most else -2 :]}
        assert pairs and all(at <= pair for pair in pairs), told
        assert "is missing: it" not in told


@pytest.mark.long
@pytest.mark.parametrize("fault", ["slow", "half-dead", "clock"])
def test_a_bad_network_and_other_clocks_change_no_loss(tmp_path: Path, fault: str) -> None:
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts, *SHORT)
        later = ["faketime", "-f", "+2m"] if fault == "clock" else []
        if fault == "slow":
            hosts[1].disturb("tbf", "rate", "5mbit", "burst", "16kb", "latency", "100ms")
        first, second = ([*TORCHRUN, *run.nodes(n)] for n in (0, 1))
        started = [run.start(hosts[0], first), run.start(hosts[1], [*later, *second])]
        while fault == "half-dead" and any(one.process.poll() is None for one in started):
            hosts[1].pull_cable()
            time.sleep(0.05)
            hosts[1].plug_cable()
            time.sleep(0.4)
        print(f"{fault}: {wait(started, timeout=560):.0f} s")
        assert losses(run.folder(hosts[0])) == alone(run, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["save", "upload"])
def test_a_host_without_power_is_replaced_by_an_empty_one(tmp_path: Path, moment: str) -> None:
    with network(tmp_path, 3) as (first, second, spare):
        run = HostRun(tmp_path, [first, second], *ENDLESS)
        started, _ = run.torchrun()
        started.wait_for("save +30 local")
        folder = run.mirrored if moment == "upload" else run.folder(second) / "checkpoints"
        while not any(unfinished(one, moment) for one in folder.iterdir()):
            assert started.process.poll() is None
        second.pull_cable()
        second.kill()
        print(f"{moment}: stopped after {wait([started], timeout=5 * 60, code=1):.0f} s")
        run.hosts, began = [first, spare], time.monotonic()
        resumes(run)
        print(f"next step after {time.monotonic() - began:.0f} s")


def unfinished(folder: Path, moment: str) -> bool:
    if moment == "save":
        return not folder.name.startswith("checkpoint_step_")
    return folder.is_dir() and not (folder / COMMITTED).exists()


def resumes(run: HostRun) -> None:
    again = run.torchrun("run.steps=100001")
    again[0].wait_for("resume +step [1-9]")
    again[0].wait_for("step +[0-9]+/100,001")


def alone(run: HostRun, *arguments: str, ranks: int) -> dict[int, str]:
    folder = run.root / f"alone-{ranks}"
    folder.mkdir()
    train(folder, *run.settings, *arguments, "checkpoint.mirror=null", ranks=ranks, timeout=240)
    return losses(folder / "runs" / "tiny")
