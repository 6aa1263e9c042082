"""The ranks that launchers promise by their variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import TRAIN

from refocused.system.errors import ConfigError
from refocused.system.launchers import (
    alone,
    complete_environment,
    expand_nodes,
    expand_tasks,
    refuse_separate_runs,
    torch_settings,
)

BATCH = {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_NODEID": "3",
    "SLURM_JOB_NODELIST": "login,gpu[1-4]",
    "SLURM_STEP_NODELIST": "gpu[01-03,7]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HEAD = {"MASTER_ADDR": "10.0.0.1"}
DEEPSPEED = HEAD | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_SIZE": "1"}
TORCHRUN = HEAD | {"RANK": "0", "LOCAL_WORLD_SIZE": "8"}


def completed(given: dict[str, str], ranks: int | None = None) -> list[str]:
    """Return rank, size, local rank and local size of an accepted start."""
    environment = dict(given)
    complete_environment(environment)
    refuse_separate_runs(environment, ranks=ranks)
    environment = alone() | environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return [environment[name] for name in names if name in environment]


def test_a_task_of_srun_is_a_rank() -> None:
    assert completed(STEP) == completed(STEP | {"WORLD_SIZE": "7"}) == ["6", "7", "0", "1"]
    changes = ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"})
    first, other, next_step = (STEP | change for change in changes)
    for environment in (first, other, next_step):
        complete_environment(environment)
    assert first["MASTER_ADDR"] == "gpu01" and first["GROUP_RANK"] == "3"
    assert first["MASTER_PORT"] == other["MASTER_PORT"] != next_step["MASTER_PORT"]


@pytest.mark.parametrize(
    ("given", "cores", "compilers"),
    [
        ({}, 2, "2"),
        ({}, 208, "32"),
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, 208, "26"),  # DeepSpeed's launcher
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 12, "1"),  # torchrun
        ({"WORLD_SIZE": "8"}, 4, "1"),
    ],
)
def test_torch_grows_its_segments_and_compiles_with_the_ranks_share_of_the_cores(
    given: dict[str, str], cores: int, compilers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    settings = torch_settings(given)
    assert settings.pop("TORCH_CPP_LOG_LEVEL") == "ERROR"
    threads, allocator = "TORCHINDUCTOR_COMPILE_THREADS", "PYTORCH_ALLOC_CONF"
    assert settings == {threads: compilers, allocator: "expandable_segments:True"}
    for name in (allocator, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        assert torch_settings(given | {name: "", threads: "5", "TORCH_CPP_LOG_LEVEL": "INFO"}) == {}
    environment = {**given, "RANK": "0"}
    complete_environment(environment)
    assert environment[threads] == compilers


def test_lists_of_slurm_are_expanded() -> None:
    assert expand_nodes("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_nodes("r[1-2]n[09-10]x") == ["r1n09x", "r1n10x", "r2n09x", "r2n10x"]
    assert expand_nodes("") == []
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize("variables", [MPI, HYDRA], ids=["openmpi", "hydra"])
def test_a_process_of_mpirun_is_a_rank_if_the_head_is_known(variables: dict[str, str]) -> None:
    assert completed(variables | HEAD) == ["3", "4", "1", "2"]
    # Its daemons are tasks of srun, one on each host; `srun --mpi=pmi2` sets PMI_SIZE.
    daemon = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    assert completed(variables | HEAD | daemon) == ["3", "4", "1", "2"]
    assert completed(STEP | {"PMI_SIZE": "7", "PMI_RANK": "6"})[:2] == ["6", "7"]
    with pytest.raises(ConfigError, match=r"_SIZE is 4, but .* run of 1 rank.* Export MASTER_ADDR"):
        completed(variables)


SHELL = {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "8"}  # of salloc
INTERACTIVE = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}  # of salloc, as a step


@pytest.mark.parametrize(
    "accepted",
    [
        {},
        SHELL,
        INTERACTIVE,
        BATCH | {"SLURM_NTASKS": "1"},
        BATCH | DEEPSPEED,  # and launch/train.sh
        SHELL | DEEPSPEED,
        STEP | TORCHRUN | {"WORLD_SIZE": "56", "GROUP_WORLD_SIZE": "7"},
        TORCHRUN | {"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"},
        {"JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_starts_that_are_whole_are_accepted(accepted: dict[str, str]) -> None:
    assert completed(accepted)[0] == "0"


def test_what_a_person_types_into_a_shell_of_srun_is_not_a_task() -> None:
    with subprocess.Popen(["bash"], stdin=subprocess.PIPE) as shell:
        while not Path(f"/proc/{shell.pid}/cmdline").read_bytes():
            pass
        typed = STEP | {"SLURM_TASK_PID": str(shell.pid)}
        assert completed(typed) == ["0", "1", "0", "1"]
        assert completed(typed | DEEPSPEED)[:2] == ["0", "2"]
        assert completed(STEP | {"SLURM_TASK_PID": str(os.getpid())})[:2] == ["6", "7"]
        shell.communicate()


@pytest.mark.parametrize(
    ("refused", "ranks", "message"),
    [
        (BATCH, None, r"SLURM_NTASKS is 7, .*run of 1 rank: each .* with srun.*run.ranks=1"),
        (STEP | DEEPSPEED, None, r"SLURM_STEP_NUM_TASKS is 7, .*run of 2 ranks: .*one torchrun"),
        ({"JOB_COMPLETION_INDEX": "2"}, None, "JOB_COMPLETION_INDEX is 2, .*--node_rank"),
        ({"WORLD_SIZE": "8"}, None, "WORLD_SIZE=8 is set, but RANK is not"),
        ({}, 16, "run.ranks is 16, but 1 rank was started. Start that many"),
        (STEP, 8, "run.ranks is 8, but 7 ranks were started"),
        (
            DEEPSPEED | {"WORLD_SIZE": "4", "CROSS_SIZE": "2", "MASTER_ADDR": "localhost"},
            None,
            "MASTER_ADDR=localhost is a loopback address on .* several hosts.*hostname -I",
        ),
    ],
)
def test_separate_runs_are_refused(
    refused: dict[str, str], ranks: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        completed(refused, ranks)


def test_separate_runs_that_are_intended_are_accepted() -> None:
    assert (
        completed(BATCH, 1) == completed({"JOB_COMPLETION_INDEX": "2"}, 1) == ["0", "1", "0", "1"]
    )


def test_the_command_stops_before_it_waits_for_others(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, TRAIN, "--config", "gpt2_124m"],
        env=os.environ | BATCH,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: SLURM_NTASKS is 7, but this process is part of a")
    assert not list(tmp_path.iterdir())
