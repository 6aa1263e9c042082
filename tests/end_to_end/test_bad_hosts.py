"""A host that differs from the others or does not come: each host reads where, and why."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from host_runs import TORCHRUN, HostRun, Started, wait
from hosts import network

pytestmark = pytest.mark.long
SAYS = {
    "missing": r"rank 1 of node 1 did not start in \d+ s, but rank 0 on host0 did",
    "without rank 0": r"host1 got no answer from rank 0 at 10\.77\.0\.1, port 29500",
    "twice": "Rank 0 was started twice, on host[01] and on host[01]",
    "port": r"Rank 0 cannot use port 29500 of host0|host1 got no answer from rank 0",
    "interface": "host1 has GLOO_SOCKET_IFNAME=eth9, but its network interfaces are lo, eth0",
    "version": r"host1 has torch 9\.9, but host0 has 2\.",
    "settings": r"rank 1 was started with .*: host1 has lr: 0\.0001, not lr: 0\.003",
    "clock": "The clock of host1 is 12 minutes ahead of that of host0",
    "data": r"host1, rank 1: .*other data .*shard_001\.npy is another file \(differing files: 1\)",
    "no data": "host1, rank 1: .*mine: the folder does not exist",
}


@pytest.mark.parametrize("fault", SAYS)
def test_each_host_names_the_host_and_the_cause(tmp_path: Path, fault: str) -> None:
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts, "run.steps=4", "checkpoint.interval=0")
        nodes = {"missing": [0], "without rank 0": [1], "twice": [0, 0]}.get(fault, [0, 1])
        second = {
            "clock": ["faketime", "-f", "+12m"],
            "interface": ["env", "GLOO_SOCKET_IFNAME=eth9"],
            "version": ["env", f"PYTHONPATH={other_torch(tmp_path)}:{':'.join(sys.path)}"],
        }
        settings = ["optimizer.lr=1e-4"] if fault == "settings" else []
        if fault.endswith("data"):
            run.settings.append("data.source=mine")
            for host in hosts:
                shutil.copytree(tmp_path / "tokens", tmp_path / f"disk-{host.name}" / "mine")
            spoil(tmp_path / "disk-host1" / "mine", fault)
        if fault == "port":
            listen = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(600)"
            hosts[0].start([sys.executable, "-c", listen])
        started = []
        for number, node in enumerate(nodes):
            at = node if fault == "without rank 0" else number
            launcher = [*(second.get(fault, []) if at else []), *per_node(run, node)]
            started.append(run.start(hosts[at], launcher, *(settings if at else [])))
        seconds = wait(started, timeout=180, code=1 if fault == "data" else 2)
        print(f"{fault}: {seconds:.0f} s", *map(last, started), sep="\n")
        for one in started:
            assert re.search(SAYS[fault], one.printed) and "Traceback" not in one.printed
        for host in hosts:
            assert "train.py" not in host.run("ps", "-eo", "args")


def per_node(run: HostRun, node: int) -> list[str]:
    """Return a launcher whose ranks meet by themselves: torchrun's agents wait for each other."""
    head = ["--master_addr", run.hosts[0].address]
    return [*run.deepspeed(), "--no_ssh", *head, "--node_rank", str(node)]


def other_torch(folder: Path) -> Path:
    """Return a folder whose metadata give torch another version."""
    metadata = folder / "other" / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return folder / "other"


def spoil(folder: Path, fault: str) -> None:
    shard = folder / "shard_001.npy"
    np.save(shard, np.load(shard)[::-1])
    if fault == "no data":
        shutil.rmtree(folder)


def last(started: Started) -> str:
    lines = [line for line in started.printed.splitlines() if "launch.py" not in line]
    return lines[-1] if lines else ""


def test_torchruns_own_wait_for_a_host_is_limited_by_its_option(tmp_path: Path) -> None:
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts)
        options = [*run.nodes(0), "--rdzv_conf", "timeout=20"]
        started = run.start(hosts[0], [*TORCHRUN, *options])
        wait([started], timeout=90, code=1)
        assert re.search(r"Timed out after \d+ seconds waiting for clients\. 1/2", started.printed)
