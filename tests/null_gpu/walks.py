"""Walk the GPU's paths without a GPU: walks.py [WORDS] (called by launch/test.sh --null-gpu).

Each walk runs commands of refocused on the null GPU, with torch's CUDA build at the lowest version
that pyproject.toml allows and at the pinned one. A word that begins with a digit chooses a version,
any other the walks whose name has it. Prints a line for each walk with what was counted: waits of
the host for the device and copies of pageable memory, both in a step between lines of the log;
compiled graphs; compiler processes of a rank. Exits with 1 if any differs from the table, and with
77 if an environment cannot be had.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Kept between calls: an environment of 5 GB for each version, compiled kernels, the last walks.
FOLDER = Path(os.environ.get("NULL_GPU_FOLDER") or ROOT / ".null_gpu").absolute()
CANNOT, FREE_GB, LIMIT_SECONDS = 77, 8, 1200.0
REFOCUSED = ("-P", "-m", "refocused")
CERTIFY = str(ROOT / "benchmarks" / "certify_gpu.py")
# Not `exact`, which compares bits, nor `tests`, which compare what kernels compute. `trainer` makes
# steps where accelerate is installed, too.
CERTIFIED = (
    *("machine", "train", "124M", "waits", "0.76B", "kernels", "memory", "profile", "fp8"),
    *("long", "trainer"),
)
# A run that logs, validates, saves, mirrors and writes samples; six of its steps are counted.
RUN = [
    *(
        "--config",
        "demo",
        "run.device=cuda",
        "run.steps=9",
        "log.interval=3",
        "batch.micro_batch_size=4",
    ),
    *("model.vocabulary_multiple=64", "schedule.warmup_steps=2", "schedule.kind=constant"),
    *("evaluation.interval=4", "evaluation.sequences=8", "evaluation.sample_tokens=4"),
    *("checkpoint.interval=4", "checkpoint.async=true", "checkpoint.export_final=false"),
    "checkpoint.mirror=data/mirror",
]
COMMON = {"vocab_size": 257, "max_position_embeddings": 256, "num_hidden_layers": 2}
HEADS = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 257, "n_positions": 256, "n_embd": 128, "n_layer": 2, "n_head": 2},
    "gpt_neox": {**COMMON, **HEADS},
    "llama": {**COMMON, **HEADS},
    "llama_10": {**COMMON, **HEADS, "num_hidden_layers": 10},
    "qwen3": {**COMMON, **HEADS, "num_key_value_heads": 1, "head_dim": 64},
    "nanochat": {**COMMON, **HEADS, "num_key_value_heads": 2},
    "ten": {**COMMON, "hidden_size": 128, "num_eigenstates": 16, "scales": [1], "chunk_size": 64},
    "resonance": {**COMMON, "hidden_size": 128, "num_resonators": 16},
}


@dataclasses.dataclass(frozen=True)
class Walk:
    """Commands, and what is counted in them. Waits and copies are those of a step."""

    settings: Sequence[str] = ()  # besides those of `RUN`
    family: str = "llama"
    stage: int = 1
    compiled: bool = False
    ranks: int = 1
    resumes: bool = False  # for three more steps, from the last checkpoint
    command: Sequence[str] | None = None  # in place of a run
    says: str = ""  # must be in the output: that the path was taken
    waits: float = 0
    copies: float = 0
    graphs: int = 0

    @property
    def last_step(self) -> int:
        """The step that the run's last checkpoint is of."""
        given = [one for one in self.settings if one.startswith("run.steps=")] or [RUN[3]]
        return 12 if self.resumes else int(given[0].partition("=")[2])

    def commands(self) -> Iterator[list[str]]:
        """Return the arguments of Python, one list for each process started in turn."""
        if self.command is not None:
            yield list(self.command)
            return
        run = [*REFOCUSED, "launch" if self.ranks > 1 else "train", *RUN, "--run", "walk"]
        run += [f"zero.stage={self.stage}", f"model.preset={self.family}.json"]
        run += [f"model.compile={'on' if self.compiled else 'off'}", *self.settings]
        yield run
        if self.resumes:
            yield [*run, f"run.steps={self.last_step}"]


OFFLOADED = ("optimizer.kind=adamw", "zero.offload_optimizer=cpu")
# Stage 3 waits once after the update, for gathering on another stream.
GATHERED = 1
BLOCKS = 2  # graphs of a block: for training and for validation
WALKS = {
    "eager-1": Walk(resumes=True),
    "eager-2": Walk(stage=2, resumes=True),
    "eager-3": Walk(stage=3, resumes=True, waits=GATHERED),
    "compiled-1": Walk(compiled=True, resumes=True, graphs=BLOCKS),
    "compiled-2": Walk(stage=2, compiled=True, resumes=True, graphs=BLOCKS),
    "compiled-3": Walk(stage=3, compiled=True, resumes=True, waits=GATHERED, graphs=BLOCKS),
    "ten-blocks-3": Walk(family="llama_10", stage=3, compiled=True, waits=GATHERED, graphs=BLOCKS),
    # The host updates the weights, so it waits for gradients and norms.
    "offload-optimizer": Walk(OFFLOADED, stage=3, waits=17, copies=10),
    "offload-parameters": Walk(
        [*OFFLOADED, "zero.offload_parameters=cpu"], stage=3, waits=15, copies=8
    ),
    "two-ranks": Walk(stage=3, ranks=2, compiled=True, resumes=True, waits=GATHERED, graphs=BLOCKS),
    "two-ranks-1": Walk(ranks=2),
    "micro-auto": Walk(  # which measures a smaller micro-batch first
        ["batch.micro_batch_size=auto"], stage=3, compiled=True, waits=GATHERED, graphs=2 * BLOCKS
    ),
    **{
        f"family-{name}": Walk(family=name, stage=3, compiled=True, waits=GATHERED, graphs=BLOCKS)
        for name in ("gpt2", "gpt_neox", "qwen3", "nanochat", "ten", "resonance")
    },
    "documents": Walk(  # FlexAttention is tried first, in a graph of its own
        ["data.mask_documents=true", "data.document_id=10"],
        *("llama", 1, True),
        says="attention by FlexAttention",
        graphs=BLOCKS + 1,
    ),
    "fp8-tensorwise": Walk(["precision.fp8=tensorwise"], compiled=True, says="fp8", graphs=BLOCKS),
    "fp8-rowwise": Walk(["precision.fp8=rowwise"], compiled=True, says="fp8", graphs=BLOCKS),
    "replay": Walk(["run.replay_every=2"], stage=3, waits=GATHERED),
    "sequence-parallel": Walk(["model.sequence_parallel=2"], ranks=2, says="share the tokens"),
    "profile": Walk(["run.steps=14", "--profile", "2"]),
    "doctor": Walk(
        command=[*REFOCUSED, "doctor", *RUN, "model.compile=off"],
        ranks=2,
        says="allreduce    NCCL, 2 ranks",  # however fast
    ),
    "certificate": Walk(  # without the slices whose result is that numbers are right
        command=[CERTIFY, "--tiny", "--out=report", f"--only={','.join(CERTIFIED)}"],
        says="0 failures; not run: exact, tests",
        waits=GATHERED,  # these are of its slice `train`: ZeRO-3, micro-batch auto
        graphs=2 * BLOCKS,
    ),
}


RUNNING = set[int]()  # processes, each the first of its group


class CannotWalkError(Exception):
    """There is no environment to walk in; the text says why."""


def versions() -> list[str]:
    """Return the lowest version of torch that is allowed, and the pinned one."""
    lowest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==([\d.]+)", requirements(), re.MULTILINE)
    assert lowest and pinned
    return [lowest[1] + ".0" * (2 - lowest[1].count(".")), pinned[1]]


def requirements() -> str:
    """Return the pinned packages, a line each."""
    return (ROOT / "requirements_training.txt").read_text()


def environment(version: str) -> Path:
    """Return an environment with torch's CUDA build and the pinned packages; make it if needed."""
    folder = FOLDER / f"torch-{version}"
    python, stamp = folder / "bin" / "python", folder / "null_gpu_packages.txt"
    pinned = sorted(re.findall(r"^[a-z].*==.*\n", requirements(), re.MULTILINE))
    others = "".join(one for one in pinned if not one.startswith("torch=="))
    if not (stamp.exists() and stamp.read_text() == others):
        FOLDER.mkdir(parents=True, exist_ok=True)
        free_gb = shutil.disk_usage(FOLDER).free / 1e9
        if free_gb < FREE_GB:
            raise CannotWalkError(f"{FOLDER} has {free_gb:.0f} GB of free space, not {FREE_GB}")
        print(f"torch {version} for CUDA, 3 GB to download, into {folder}", flush=True)
        # `===` leaves out builds like 2.13.0+cpu, which pip's other places may offer and prefer.
        torch = f"torch==={version}"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        listed = FOLDER / "packages.txt"
        listed.write_text(others)
        try:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([*pip, "setuptools", "wheel", torch], check=True)
            subprocess.run([*pip, torch, "-r", listed], check=True)
        except subprocess.CalledProcessError as error:
            raise CannotWalkError(f"torch {version} cannot be installed: {error}") from error
        stamp.write_text(others)
    command = [python, "-c", "import torch; print(torch.__version__, torch.version.cuda)"]
    found, cuda = subprocess.check_output(command, text=True).split()
    if found.partition("+")[0] != version or cuda == "None":
        raise CannotWalkError(
            f"{folder} has torch {found}, CUDA {cuda}, not {version} for CUDA. Remove that folder, "
            "and point pip to an index with the build for CUDA"
        )
    return folder


def build(folder: Path, to: Path) -> None:
    """Build the stand-in of CUDA for an environment."""
    missing = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if missing:
        raise CannotWalkError(f"{' and '.join(missing)} cannot be found")
    (packages,) = folder.glob("lib/python3*/site-packages")
    to.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "build.py", packages, to], check=True)


def walked(walk: Walk, *, python: Path, library: Path, kernels: Path, folder: Path) -> str:
    """Run a walk in a folder; return what was counted in words, and what is wrong after a `!`."""
    reports = folder / "reports"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, shape in FAMILIES.items():
        family = {"model_type": name.partition("_10")[0], **shape}
        (folder / f"{name}.json").write_text(json.dumps(family))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "inside", library, ROOT))),
        "LD_PRELOAD": str(library / "libnullgpu.so"),
        "LD_LIBRARY_PATH": str(library),
        "TRITON_LIBCUDA_PATH": str(library),
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "NULL_GPU_COUNT": str(walk.ranks),
        "NULL_GPU_REPORTS": str(reports),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    reports.mkdir()
    for arguments in walk.commands():
        with (folder / "output.txt").open("a") as output:
            process = subprocess.Popen(
                [python, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            RUNNING.add(process.pid)
            try:
                code: int | str = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"none after {LIMIT_SECONDS:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
            RUNNING.discard(process.pid)
        if code:
            return f"! exit code {code}"
    found, wrong = [json.loads(file.read_text()) for file in reports.glob("*.json")], list[str]()
    if walk.says not in (folder / "output.txt").read_text(errors="replace"):
        wrong.append(f"{walk.says!r} is not in the output")
    if walk.command is None and not list(folder.glob(f"data/mirror/walk/*/*_{walk.last_step}")):
        wrong.append(f"step {walk.last_step} was not mirrored")
    counted = [report for report in found if report["counted_steps"]]
    if walk.command is None and len(counted) != walk.ranks:
        wrong.append(f"{len(counted)} ranks counted steps, not {walk.ranks}")

    def compare(what: str, has: float, wanted: float, places: object = "") -> str:
        if abs(has - wanted) > 0.01:
            wrong.append(f"{what} should be {wanted:g} {places or ''}".rstrip())
        return f"{what} {has:g}"

    figures = []
    for what in ("waits", "copies"):
        report = max(counted, key=lambda one: sum(one[what].values()), default={what: {}})
        places = {place: round(number, 2) for place, number in report[what].items()}
        figures.append(compare(what, round(sum(places.values()), 2), getattr(walk, what), places))
    figures.append(compare("graphs", max((one["graphs"] for one in found), default=0), walk.graphs))
    late = max((one["late_graphs"] for one in found), default=0)
    if late:
        wrong.append(f"{late} graphs were compiled after the warm-up")
    workers = max((one["workers"] for one in found), default=0)
    most = 1 + len(os.sched_getaffinity(0)) // walk.ranks  # and the one that starts the others
    if workers > most:
        wrong.append(f"{workers} compiler processes of a rank, more than {most}")
    return " ".join([*figures, f"workers {workers}", *(f"! {one}" for one in wrong)])


def walk_all(version: str, names: Sequence[str]) -> int:
    """Make the walks with a version of torch, one after the other; return how many failed."""
    folder, walks = environment(version), FOLDER / f"walks-{version}"
    paths = {"python": folder / "bin" / "python", "library": walks / "library"}
    build(folder, paths["library"])
    failed = 0
    for name in names:
        began, place = time.monotonic(), walks / name
        said = walked(WALKS[name], folder=place, kernels=walks / "kernels", **paths)
        figures, *wrong = said.split("! ")
        failed += bool(wrong)
        seconds = time.monotonic() - began
        mark = "FAIL" if wrong else "ok  "
        print(f"{mark} {version:7} {name:20} {seconds:4.0f} s  {figures}", flush=True)
        for line in [*wrong, *([str(place / "output.txt")] if wrong else [])]:
            print(f"       {line.strip()}", flush=True)
    return failed


def end(number: int, _: object) -> None:
    """End with all processes of the walks, which are not in the terminal's group."""
    for process in RUNNING:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os._exit(128 + number)


def main() -> int:
    """Make the walks of the arguments with both versions beside each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    words = parser.parse_args().words
    wanted = [word for word in words if word[0].isdigit()]
    chosen = [one for one in versions() if not wanted or any(map(one.startswith, wanted))]
    words = [word for word in words if word not in wanted]
    names = [name for name in WALKS if not words or any(word in name for word in words)]
    if not chosen or not names:
        parser.error(f"there are {', '.join(WALKS)}, each with torch {' and '.join(versions())}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        for version in chosen:
            environment(version)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            failed = sum(pool.map(lambda version: walk_all(version, names), chosen))
    except CannotWalkError as error:
        print(f"The null GPU cannot be walked: {error}", file=sys.stderr)
        return CANNOT
    print(f"{len(chosen) * len(names)} walks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
