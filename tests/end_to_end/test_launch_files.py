"""The files of launch/ for SkyPilot, JobSet and Docker: their fields and their commands."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_runs import HostRun, Started, wait
from hosts import network
from ranks import ROOT
from test_many_hosts import alone
from tiny import losses

from refocused.config.yaml_source import parse_yaml

LAUNCH = ROOT / "launch"
FIELDS = parse_yaml(Path(__file__).with_name("launch_fields.yaml").read_text())


def read(kind: str) -> Any:
    """Return a file's content, which has the fields of `launch_fields.yaml`."""
    content = parse_yaml((LAUNCH / f"{kind}.yaml").read_text())
    check(content, FIELDS[kind], kind)
    return content


def check(value: Any, wanted: Any, name: str) -> None:
    if isinstance(wanted, str):
        assert re.fullmatch(wanted, json.dumps(value), re.S), f"{name}: {value!r}"
    elif isinstance(wanted, list):
        for one in value:
            check(one, wanted[0], name)
    else:
        found = {key: [own for own in wanted if re.fullmatch(own, key)] for key in value}
        assert all(found.values()) and {own for owns in found.values() for own in owns} == {*wanted}
        for key, owns in found.items():
            check(value[key], wanted[owns[0]], f"{name}.{key}")


def test_skypilots_file_has_its_fields() -> None:
    task = read("skypilot")
    assert (ROOT / task["setup"]).stat().st_mode & 0o100
    assert {*re.findall(r"\$(?!SKYPILOT_)([A-Z_]+)", task["run"])} == {*task["envs"]}


def test_jobsets_file_has_its_fields() -> None:
    one = read("jobset")
    job = one["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in pod["env"]}
    assert job["parallelism"] == job["completions"] == int(variables["NODES"])
    assert int(variables["GPUS"]) == pod["resources"]["limits"]["nvidia.com/gpu"]
    job_name, domain = one["spec"]["replicatedJobs"][0]["name"], one["spec"]["network"]["subdomain"]
    assert f" {one['metadata']['name']}-{job_name}-0-0.{domain} " in pod["args"][0]
    used = {*re.findall(r"\$([A-Z_]+)", pod["args"][0])}
    assert used == {*variables, "JOB_COMPLETION_INDEX"}


def test_torchrun_waits_less_than_a_minute_for_a_node() -> None:
    files = [*LAUNCH.glob("*.yaml"), *LAUNCH.glob("*.s*"), *(ROOT / "docs").rglob("*.md")]
    start = re.compile(r"torchrun\s[^`]*?--nnodes[^`]*?launch/train\.py")
    commands = [one for file in files for one in start.findall(file.read_text())]
    waits = [re.findall(r"--rdzv_conf timeout=(\d+)\s", one) for one in commands]
    assert waits == [["20"]] * 3  # torch waits up to 2.5 times as long for node 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["skypilot", "jobset"])
def test_the_command_of_a_file_trains_on_two_hosts(tmp_path: Path, kind: str) -> None:
    files = (("CONFIG", "tiny.yaml"), ("DATA", "tokens"), ("MIRROR", "mirror"))
    own: dict[str, Any] = {name: str(tmp_path / path) for name, path in files}
    counts = {"NODES": "2", "NUM_NODES": "2", "GPUS": "1", "NUM_GPUS_PER_NODE": "1"}
    own |= counts | {f"SKYPILOT_{name}": count for name, count in counts.items()}
    content = read(kind)
    if kind == "jobset":
        pod = content["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        content["run"] = pod["containers"][0]["args"][0]
    command = ["bash", "-c", content["run"]]
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts)
        own["SKYPILOT_NODE_IPS"] = "\n".join(host.address for host in hosts)
        with (tmp_path / "hosts").open("a") as names:  # of the headless service
            names.write(f"{hosts[0].address} refocused-node-0-0.ranks\n")
        for host in hosts:
            checkout(tmp_path / f"disk-{host.name}")

        def start(settings: str) -> None:
            started = []
            for n, host in enumerate(hosts):
                given = own | {"SKYPILOT_NODE_RANK": n, "JOB_COMPLETION_INDEX": n}
                words = [
                    f"{name}={value}" for name, value in (given | {"SETTINGS": settings}).items()
                ]
                started.append(Started(host, ["env", *words, *command], tmp_path / f"{n}.txt"))
            wait(started)

        settings = "run.steps=4 checkpoint.interval=2 evaluation.interval=0"
        start(settings)
        wanted = alone(run, *settings.split(), ranks=2)
        assert losses(run.folder(hosts[0])) == wanted and sorted(wanted) == [1, 2, 3, 4]
        for host in hosts:  # machines are replaced: only the mirror is left
            host.run("rm", "-rf", "/mnt/runs", "/mnt/cache")
        start(settings.replace("steps=4", "steps=6"))
        assert {5, 6} <= set(losses(run.folder(hosts[0])))


@pytest.mark.long
def test_the_script_for_ray_train_trains_as_torchrun_does(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    guide = (ROOT / "docs" / "guides" / "many_machines.md").read_text()
    (tmp_path / "ray_train.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    checkout(tmp_path)
    run = HostRun(tmp_path, [], "run.steps=4", "checkpoint.interval=0")
    without_gpus = {**os.environ, "GPUS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "ray_train.py", "2", *run.settings]
    subprocess.run(command, cwd=tmp_path, env=without_gpus, check=True, timeout=500)
    assert losses(tmp_path / "runs" / "tiny") == alone(run, ranks=2)


def checkout(folder: Path) -> None:
    """Make a folder look like this checkout, set up."""
    (folder / "launch").symlink_to(LAUNCH)
    (folder / ".venv").symlink_to(sys.prefix)


def instructions() -> list[str]:
    """Return the lines of the Dockerfile, each whole."""
    text = (LAUNCH / "Dockerfile").read_text()
    return re.sub(r"^#.*\n|\\\n", "", text, flags=re.M).splitlines()


def test_the_image_is_pinned_and_does_not_run_as_root() -> None:
    lines = instructions()
    assert re.fullmatch(r"FROM nvidia/cuda:(\d+\.){2}\d+-runtime-ubuntu\d+\.\d+", lines[0])
    assert lines[-3:] == ["USER trainer", "RUN launch/setup_environment.sh", lines[-1]]
    assert lines[-1] == 'CMD ["./launch/train.sh"]'


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_steps_of_the_image_run_in_a_fresh_debian(tmp_path: Path) -> None:
    if os.getuid() or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    root, user, links = tmp_path / "root", "root", os.environ.get("PIP_FIND_LINKS", "")
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True)
    for name in ("resolv.conf", "pip.conf"):  # how this machine reaches its package index
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), root / "etc" / name)
    authorities = root / "usr" / "local" / "share" / "ca-certificates"
    authorities.mkdir(parents=True, exist_ok=True)
    shutil.copy(ssl.get_default_verify_paths().cafile, authorities / "machine.crt")
    if Path(links).is_dir():
        shutil.copytree(links, f"{root}{links}")

    def step(command: str) -> str:
        words = ["unshare", "--mount", "--pid", "--fork", f"--root={root}", "--mount-proc=/proc"]
        words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        paths = {"HOME": "/tmp", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        environment = {**os.environ, **paths}
        environment = {name: one for name, one in environment.items() if name[:6] != "PYTHON"}
        words += ["bash", "-c", f"cd /refocused 2>/dev/null; {command}"]
        return subprocess.check_output(words, env=environment, text=True, timeout=3000)

    for line in instructions():
        kind, _, rest = line.partition(" ")
        if kind == "RUN":
            step(rest)
        elif kind == "USER":
            user = rest
        elif kind == "COPY":
            listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
            for name in listed.splitlines():
                (root / "refocused" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / "refocused" / name)
            step("chown --recursive trainer .")
    assert "name: demo" in step(".venv/bin/python launch/train.py --config demo --print-config")
