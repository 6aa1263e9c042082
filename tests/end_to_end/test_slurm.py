"""Runs that a real SLURM starts on two hosts, whose disk is shared."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from data.text_samples import files_of, random_texts, write_jsonl
from host_runs import ENVIRONMENT, HostRun
from hosts import network
from test_launch_files import checkout
from test_many_hosts import alone
from tiny import losses

pytestmark = pytest.mark.long
TRAIN = [".venv/bin/python", "launch/train.py", "--config", "tiny.yaml"]
TWO = ["--nodes=2", "--ntasks-per-node=1"]
BATCH = ["sbatch", *TWO, "--cpus-per-task=1", "--gpus-per-node=1", "--parsable", "-o", "%j.txt"]


class Slurm(HostRun):
    """A cluster, in whose folder is a checkout; commands run on the first host."""

    def run(self, *command: str, code: int = 0, typed: str = "") -> str:
        """Run a command to its end and return what it printed; `typed` are lines for its shell."""
        process = self.hosts[0].start(
            ["timeout", "120", "env", "-C", str(self.root), *command],
            environment={**ENVIRONMENT, "SLURM_CONF": str(self.root / "slurm" / "slurm.conf")},
            **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
            stderr=subprocess.STDOUT,
        )
        printed = process.communicate(typed.encode())[0].decode()
        assert process.returncode == code, printed
        return printed

    def wait_for(self, job: str, text: str) -> str:
        """Wait until what a job has printed, or SLURM knows of it, has a text; return both."""
        deadline, file = time.monotonic() + 400, self.root / f"{job}.txt"
        while True:
            shown = self.run("scontrol", "show", "job", job)
            shown += file.read_text() if file.exists() else ""
            if text in shown:
                return shown
            assert "=FAILED" not in shown and time.monotonic() < deadline, shown
            time.sleep(0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    script = Path(__file__).with_name("slurm_node.sh")
    checkout(tmp_path)
    with network(tmp_path, 2) as hosts:
        for host in hosts:
            if "not installed" in host.run("bash", str(script), str(tmp_path / "slurm"), "2"):
                pytest.skip("SLURM is not installed (Debian: slurm-wlm)")
        yield Slurm(tmp_path, hosts)


def test_tasks_of_srun_train_as_one_host_does(cluster: Slurm) -> None:
    settings = ["run.steps=4", "checkpoint.interval=4"]
    assert cluster.run("srun", *TWO, *TRAIN, *settings).count("done  step 4 of 4") == 1
    wanted = alone(cluster, *settings, ranks=2)
    assert losses(cluster.root / "runs" / "tiny") == wanted and sorted(wanted) == [1, 2, 3, 4]
    evaluate = [".venv/bin/python", "launch/evaluate.py", "latest", "--run", "runs/tiny", "--json"]
    outputs = [cluster.run("srun", *tasks, *evaluate) for tasks in (TWO, ["--ntasks=1"])]
    two, one = (json.loads(output[output.index("{\n") :]) for output in outputs)
    assert two["ranks"] == 2
    assert two["tasks"]["validation"]["loss"] == one["tasks"]["validation"]["loss"]


def test_tasks_of_srun_tokenize_as_one_process_does(cluster: Slurm) -> None:
    write_jsonl(cluster.root / "texts" / "1.jsonl", random_texts(40_000, words=400))  # two tasks
    command = [".venv/bin/python", "launch/prepare_data.py", "tokenize", "texts"]
    options = ["--tokenizer", "bytes", "--val-ratio", "0.1", "--shard-tokens", "9000000"]
    tasks = ["--kill-on-bad-exit=1", "--nodes=2", "--ntasks-per-node=2"]
    cluster.run("srun", *tasks, *command, "--out", "many", *options, "--executor", "slurm")
    cluster.run(*command, "--out", "one", *options)
    assert files_of(cluster.root / "many") == files_of(cluster.root / "one")


@pytest.mark.parametrize("by", ["limit", "preemption"])
def test_a_job_goes_back_to_the_queue_and_resumes(cluster: Slurm, by: str) -> None:
    settings = ["run.steps=300", "checkpoint.interval=300", "evaluation.interval=0"]
    job = cluster.run(*BATCH, "launch/slurm.sbatch", *TRAIN[2:], *settings).strip()
    cluster.wait_for(job, "step       1/300")
    if by == "limit":  # as --signal does
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    else:
        cluster.run("sbatch", *TWO, "--partition=high", "--exclusive", "--wrap", "sleep 1")
    shown = cluster.wait_for(job, "JobState=COMPLETED")
    assert "Restarts=1 " in shown and "resume   step " in shown, shown
    assert losses(cluster.root / "runs" / "tiny") == alone(cluster, *settings, ranks=2)


def test_separate_runs_are_refused_in_batch_scripts_but_not_in_shells(cluster: Slurm) -> None:
    job = cluster.run(*BATCH, "--wait", "--wrap", " ".join(TRAIN), code=2).strip()
    assert (
        "is 2, but this process is part of a run of 1" in (cluster.root / f"{job}.txt").read_text()
    )
    train = " ".join([*TRAIN, "run.steps=2", "checkpoint.mirror=null", "--run"])
    inside = f"{train} granted; srun --interactive {train} interactive"
    printed = cluster.run("salloc", *TWO, "bash", "-c", inside)
    launched = train.replace("/python", "/deepspeed --num_gpus 2")
    typed = f"{train} typed\n{launched} launched\nsrun --overlap {train} inner </dev/null\nexit 7\n"
    shell = f"srun {' '.join(TWO)} --pty bash -i"
    printed += cluster.run("script", "-qec", shell, "/dev/null", code=7, typed=typed)
    assert [printed.count(f"done  step 2 of 2, {n} tokens") for n in (256, 512)] == [3, 2], printed
