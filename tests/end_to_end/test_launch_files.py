"""The files of launch/ for SkyPilot, JobSet and Docker: their fields, and their commands on hosts.

The models list the fields that our files use, so that a misspelled one fails. Sources: SkyPilot's
YAML specification (docs.skypilot.co/en/latest/reference/yaml-spec.html) and managed-jobs guide;
kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go; Kubernetes' Job and Pod reference.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from host_runs import HostRun, wait
from hosts import network
from pydantic import ConfigDict, Field, create_model
from ranks import ROOT
from test_many_hosts import alone
from tiny import losses

LAUNCH = ROOT / "launch"
Name = Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]  # RFC 1123
Positive = Annotated[int, Field(gt=0)]


def fields(**types: Any) -> Any:
    """Return the type of a mapping with these fields, all required, and no others."""
    closed = ConfigDict(extra="forbid", strict=True)
    required = {name: (kind, ...) for name, kind in types.items()}
    return create_model("Fields", __config__=closed, **required)  # type: ignore[call-overload]


SKYPILOT = fields(
    name=Name,
    workdir=str,
    num_nodes=Positive,
    resources=fields(
        accelerators=Annotated[str, Field(pattern=r"^[\w-]+:\d+$")],
        use_spot=Literal[True],
        disk_size=Positive,
        job_recovery=fields(max_restarts_on_errors=Positive),
    ),
    envs=dict[str, str],
    setup=str,
    run=str,
)
CONTAINER = fields(
    name=Name,
    image=str,
    env=list[fields(name=str, value=str)],
    command=list[str],
    args=list[str],
    resources=fields(limits=dict[Literal["nvidia.com/gpu"], Positive]),
    volumeMounts=list[fields(name=Name, mountPath=str)],
)
POD = fields(
    restartPolicy=Literal["Never"],
    terminationGracePeriodSeconds=Positive,
    containers=Annotated[list[CONTAINER], Field(max_length=1)],
    volumes=list[fields(name=Name, emptyDir=fields(medium=Literal["Memory"]))],
)
JOB = fields(
    completionMode=Literal["Indexed"],
    parallelism=Positive,
    completions=Positive,
    backoffLimit=Literal[0],
    template=fields(spec=POD),
)
JOBSET = fields(
    apiVersion=Literal["jobset.x-k8s.io/v1alpha2"],
    kind=Literal["JobSet"],
    metadata=fields(name=Name),
    spec=fields(
        network=fields(
            enableDNSHostnames=Literal[True],
            subdomain=Name,
            publishNotReadyAddresses=Literal[True],  # ranks meet before all pods are ready
        ),
        failurePolicy=fields(maxRestarts=Positive),
        replicatedJobs=list[fields(name=Name, replicas=Literal[1], template=fields(spec=JOB))],
    ),
)


def test_skypilots_file_has_its_fields() -> None:
    task = SKYPILOT.model_validate(yaml.safe_load((LAUNCH / "skypilot.yaml").read_text()))
    assert (ROOT / task.setup).stat().st_mode & 0o100
    used = set(re.findall(r"\$\{?([A-Z_]+)", task.run))
    given = {"SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"}
    assert used == {*task.envs, *given, "SKYPILOT_NUM_GPUS_PER_NODE"}


def test_jobsets_file_has_its_fields() -> None:
    one = JOBSET.model_validate(yaml.safe_load((LAUNCH / "jobset.yaml").read_text()))
    (replicated,) = one.spec.replicatedJobs
    job = replicated.template.spec
    (container,) = job.template.spec.containers
    variables = {variable.name: variable.value for variable in container.env}
    assert job.parallelism == job.completions == int(variables["NODES"])
    assert int(variables["GPUS"]) == container.resources.limits["nvidia.com/gpu"]
    head = f"{one.metadata.name}-{replicated.name}-0-0.{one.spec.network.subdomain}"
    assert f"--master_addr {head} " in container.args[0]
    assert set(re.findall(r"\$([A-Z_]+)", container.args[0])) == {
        *variables,
        "JOB_COMPLETION_INDEX",
    }
    assert [mount.name for mount in container.volumeMounts] == [
        volume.name for volume in job.template.spec.volumes
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["skypilot", "jobset"])
def test_the_command_of_a_file_trains_on_two_hosts(tmp_path: Path, kind: str) -> None:
    read = yaml.safe_load((LAUNCH / f"{kind}.yaml").read_text())
    with network(tmp_path, 2) as hosts:
        run = HostRun(tmp_path, hosts)
        settings = "run.steps=4 checkpoint.interval=2 evaluation.interval=0"
        own = {
            "CONFIG": str(tmp_path / "tiny.yaml"),
            "DATA": str(tmp_path / "tokens"),
            "MIRROR": str(tmp_path / "mirror"),
            "SETTINGS": settings,
        }
        command, given = (skypilot if kind == "skypilot" else jobset)(read, run)
        for host in hosts:
            checkout(run.disk(host))

        def start(settings: str) -> None:
            own["SETTINGS"] = settings
            wait(
                [
                    run.start(host, command, environment={**own, **given(node)})
                    for node, host in enumerate(hosts)
                ]
            )

        start(settings)
        wanted = alone(run, *settings.split(), ranks=2)
        assert losses(run.folder(hosts[0])) == wanted and sorted(wanted) == [1, 2, 3, 4]
        for host in hosts:  # machines are replaced: only the mirror is left
            host.run("rm", "-rf", "/mnt/runs", "/mnt/cache")
        start(settings.replace("steps=4", "steps=6"))
        assert {5, 6} <= set(losses(run.folder(hosts[0])))


def skypilot(read: Mapping[str, Any], run: HostRun) -> tuple[list[str], Any]:
    """Return the command, and the variables that SkyPilot gives to a node."""
    nodes = {
        "SKYPILOT_NODE_IPS": "\n".join(host.address for host in run.hosts),
        "SKYPILOT_NUM_NODES": str(len(run.hosts)),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    return ["bash", "-c", read["run"]], lambda node: nodes | {"SKYPILOT_NODE_RANK": str(node)}


def jobset(read: Mapping[str, Any], run: HostRun) -> tuple[list[str], Any]:
    """Return the command, and a pod's variables; its headless service names the hosts."""
    (replicated,) = read["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    with (run.root / "hosts").open("a") as names:
        for node, host in enumerate(run.hosts):
            names.write(f"{host.address} refocused-node-0-{node}.ranks\n")
    own = {"NODES": str(len(run.hosts)), "GPUS": "1"}
    return (
        [*container["command"], *container["args"]],
        lambda node: own | {"JOB_COMPLETION_INDEX": str(node)},
    )


def checkout(folder: Path) -> None:
    """Make a folder look like this checkout, set up."""
    (folder / "launch").symlink_to(LAUNCH)
    (folder / ".venv").symlink_to(sys.prefix)


INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, their continued lines joined."""
    lines = re.sub(r"^#.*\n|\\\n", "", text, flags=re.M).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def test_the_image_is_pinned_and_does_not_run_as_root() -> None:
    found = instructions((LAUNCH / "Dockerfile").read_text())
    assert {word for word, _ in found} == INSTRUCTIONS
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d+\.\d+", found[0][1])
    words = [word for word, _ in found]
    users = [rest for word, rest in found if word == "USER"]
    assert users[-1] != "root" and found[-1] == ("CMD", '["./launch/train.sh"]')
    assert found[words.index("USER") + 1] == ("RUN", "launch/setup_environment.sh")
