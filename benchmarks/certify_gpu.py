"""Certifies a machine with NVIDIA GPUs: tests, speed, memory, saves and resumes in one report.

    .venv/bin/python benchmarks/certify_gpu.py [--minutes 30] [--out docs/reports/NAME] [--gpus N]

Runs slice after slice, each in processes of its own on all GPUs: the tests marked gpu; steps of a
ladder of models (124 M, 0.76 B, 1.41 B, TEN and resonance over 2,048 and 32,768 tokens) in our
variants, beside bare torch and DeepSpeed loops and transformers' Trainer; whole runs with saves and
a resume; the links between GPUs. Steps are measured in two rounds, the second in reverse order, so
that a slow minute meets all; each contender takes the largest micro-batch that fits it. What was
measured is kept after each slice: the same command goes on, `--minutes` bounds a sitting. What
cannot run (a package is missing, the memory is too small) is left out by name. It needs no network.

The report is `report.md` with three pictures, the numbers are in `certificate.json`. MFU is by the
convention of `refocused.estimate.flops`, as a share of the data sheet's bf16 peak, in 8 bits too.
`--tiny` walks the whole path on a CPU with small numbers; `--expected GPU` prints what the steps
should take by the estimate's roofline, to compare a report with.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from certify_report import expected_table, write_pictures, write_text
from certify_step import STEP_TOKENS, Contest, expected_of
from measuring import ROOT, Record, machine, say

from refocused.estimate.step_time import StepTime
from refocused.system.hardware import GpuFacts, named_gpu

sys.path.insert(0, str(ROOT / "tests"))

LADDER = ("gpt2_124m", "gpt2_1b", "neox_1_2b")
LONG = ("ten_small_32k", "resonance_small")
LENGTHS = (2048, 32768)
MICROS = (16, 8, 4, 2, 1)
SLICE_SECONDS = 900
NO_MEMORY = 86  # exit code of a process whose micro-batch does not fit
LINK_BYTES = 2**28


CONTESTS = {
    "ours, ZeRO-1": Contest(),
    "ours, ZeRO-3": Contest(stage=3),
    "ours, not compiled": Contest(compiled=False),
    "ours, recomputed": Contest(recomputes=True),
    "ours, offloaded": Contest(stage=3, offload="cpu"),
    "ours, fp8 tensorwise": Contest(fp8="tensorwise"),
    "ours, fp8 rowwise": Contest(fp8="rowwise"),
    "torch loop, compiled": Contest("torch"),
    "DeepSpeed's loop": Contest("deepspeed", compiled=False),
    "Trainer, compiled": Contest("trainer"),
    "Trainer": Contest("trainer", compiled=False),
    "Trainer, ZeRO-3, offloaded": Contest("trainer", stage=3, compiled=False, offload="cpu"),
}
LONG_CONTESTS = ("ours, ZeRO-1", "ours, not compiled", "ours, recomputed")
TINY_CONTESTS = ("ours, ZeRO-3", "DeepSpeed's loop")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of the certificate."""

    kind: Literal["tests", "step", "run", "links"]  # `tests`, `step`, `run` or `links`
    name: str  # in the report
    model: str = ""  # name of a shape in `config/models`
    contest: str = ""  # of a step; a key of `CONTESTS`
    length: int = 0  # tokens of a window
    deterministic: bool = False  # of a run


def slices(*, tiny: bool, gpus: int) -> list[Slice]:
    """Return all parts of a certificate in the order of the first round."""
    ladder, long, lengths = (LADDER, LONG, LENGTHS) if not tiny else (("gpt2_tiny",), (), (32,))
    steps = [
        Slice("step", f"{model}: {contest}", model, contest, lengths[0])
        for model in ladder
        for contest in (CONTESTS if not tiny else TINY_CONTESTS)
    ] + [
        Slice("step", f"{model}, {length}: {contest}", model, contest, length)
        for model in long
        for length in lengths
        for contest in LONG_CONTESTS
    ]
    runs = [
        Slice("run", f"run{', deterministic' * exact}", ladder[-1], "", lengths[0], exact)
        for exact in ((False, True) if not tiny else (True,))
    ]
    links = [Slice("links", "links")] if gpus > 1 else []
    return [Slice("tests", "tests"), *steps, *reversed(steps), *runs, *links]


class Certificate:
    """Results so far, kept in a file."""

    def __init__(self, folder: Path, *, tiny: bool, gpus: int) -> None:
        """Continue the certificate of a folder, or start one."""
        self.folder, self._file = folder, folder / "certificate.json"
        self.tiny, self.gpus = tiny, gpus
        self.content: Record = {"machine": describe_machine(gpus), "slices": {}, "left out": {}}
        if self._file.exists():
            self.content = json.loads(self._file.read_text())

    def waiting(self) -> list[Slice]:
        """Return the parts that are not measured yet."""
        found, seen = [], dict.fromkeys(self.content["slices"], 0)
        for part in slices(tiny=self.tiny, gpus=self.gpus):
            if part.name in self.content["left out"]:
                continue
            seen[part.name] = seen.get(part.name, 0) + 1
            if seen[part.name] > len(self.content["slices"].get(part.name, ())):
                found.append(part)
        return found

    def measure(self, part: Slice) -> None:
        """Measure one part; keep its result, or the reason to skip it."""
        reason = missing_for(part, gpus=self.gpus)
        if reason is None:
            known = self.content["slices"].get(part.name)
            micros = [known[0]["micro"]] if known and part.kind == "step" else list(MICROS)
            record, reason = self._first_that_fits(part, micros)
            if record is not None:
                self.content["slices"].setdefault(part.name, []).append(record)
        if reason is not None:
            self.content["left out"][part.name] = reason
            say(f"left out: {part.name}: {reason}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.content, indent=1) + "\n")

    def _first_that_fits(
        self, part: Slice, micros: Sequence[int]
    ) -> tuple[Record | None, str | None]:
        if part.kind == "tests":
            return run_tests(), None
        if part.kind == "run":
            try:
                return self._whole_run(part), None
            except (RuntimeError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
                return None, " ".join(str(error).split())[-300:]
        for micro in micros[-1:] if self.tiny else micros:
            record, reason = in_ranks(part, micro, tiny=self.tiny, gpus=self.gpus)
            if reason != str(NO_MEMORY):
                return record, reason
        return None, f"a micro-batch of {micros[-1]} does not fit"

    def _whole_run(self, part: Slice) -> Record:
        """Train, save and resume with the train command, on random tokens."""
        from certify_run import resumed_and_uninterrupted

        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return resumed_and_uninterrupted(
                Path(folder),
                model=part.model,
                length=part.length,
                gpus=self.gpus,
                deterministic=part.deterministic,
                tiny=self.tiny,
            )


def missing_for(part: Slice, *, gpus: int) -> str | None:
    """Return why a part cannot run on this machine, or None."""
    who = CONTESTS[part.contest].who if part.contest else "ours"
    if who == "trainer" and importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed"
    if who == "torch" and gpus > 1:
        return "the plain loop trains on one GPU; --gpus 1 measures it"
    return None


def describe_machine(gpus: int) -> Record:
    """Describe the machine."""
    found = {**machine(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    for package in ("torch", "deepspeed", "transformers"):
        found[package] = importlib.metadata.version(package)
    found["gpus"] = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
    if gpus:
        found["cuda"] = torch.version.cuda
    return found


def run_tests() -> Record:
    """Run the tests marked gpu; return their last lines and exit code."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rfEs"]
    with tempfile.TemporaryFile("w+") as out:
        tests = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            code = tests.wait(SLICE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)
            code = tests.wait()
        out.seek(0)
        return {"exit_code": code, "lines": out.read().splitlines()[-40:]}


def in_ranks(part: Slice, micro: int, *, tiny: bool, gpus: int) -> tuple[Record | None, str | None]:
    """Measure a part with one process per GPU; return rank 0's record, or the reason for none."""
    from ranks import Ranks

    options = json.dumps({"part": dataclasses.asdict(part), "micro": micro, "tiny": tiny})
    say(f"{part.name}, micro-batch {micro}")
    count = max(1, gpus)
    environment = {
        "DS_ACCELERATOR": "cuda" if gpus else "cpu",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    command = [str(Path(__file__).resolve()), "--alone", options]
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, command, folder=Path(folder), environment=environment)
        codes = ended(ranks.processes)
        told, errors = (ranks.printed(kind).strip().splitlines() for kind in ("out", "err"))
    if not any(codes) and told:
        record: Record = json.loads(told[-1])
        return record, None
    if NO_MEMORY in codes:
        return None, str(NO_MEMORY)
    return None, " ".join(errors[-2:])[-300:] or f"exit codes {codes}"


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all processes end or the first fails; return their exit codes."""
    deadline = time.monotonic() + SLICE_SECONDS
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > deadline:
            time.sleep(5)  # for the error messages of the others
            for process in processes:
                process.kill()
        time.sleep(0.1)
    return [process.returncode for process in processes]


def measured_alone(options: Record) -> Record:
    """Measure a part in this process, one of the ranks."""
    from certify_step import link_speeds, measured_step

    from refocused.system.world import join_world

    part = Slice(**options["part"])
    world = join_world("cpu" if options["tiny"] else "cuda")
    if part.kind == "links":
        return link_speeds(world, size=LINK_BYTES)
    return measured_step(
        CONTESTS[part.contest],
        part.model,
        length=part.length,
        micro=options["micro"],
        world=world,
        tiny=options["tiny"],
    )


def merged(records: Sequence[Record]) -> Record:
    """Return one record of all rounds: the median of all steps, the rest of the last round."""
    found = dict(records[-1])
    if "all_ms" in found:
        found["all_ms"] = [ms for record in records for ms in record["all_ms"]]
        factor = statistics.median(found["all_ms"]) / found["step_ms"]
        found["step_ms"] *= factor
        for key in ("tokens_per_second", "mfu", "of_products"):
            found[key] = found[key] / factor if found[key] is not None else None
    return found


def expected_steps(gpu: GpuFacts, *, gpus: int) -> dict[str, StepTime]:
    """Return the expected step time of each model of the ladder (ZeRO-1, compiled)."""
    found = {}
    cases = [(model, LENGTHS[0]) for model in LADDER]
    for model, length in [*cases, *((model, length) for model in LONG for length in LENGTHS)]:
        micro = max(1, MICROS[0] * LENGTHS[0] // length)
        found[f"{model}, {length}"] = expected_of(
            CONTESTS["ours, ZeRO-1"],
            model,
            length=length,
            micro=micro,
            accumulation=max(1, STEP_TOKENS // (micro * length)),
            ranks=gpus,
            gpu=gpu,
        )
    return found


def main() -> None:
    """Measure the remaining parts within the given minutes; write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of this sitting")
    parser.add_argument("--out", type=Path, default=Path("docs/reports/this_machine"))
    parser.add_argument("--gpus", type=int, help="take the first N (all)")
    parser.add_argument("--only", default="", help="parts with this in their names")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it runs")
    parser.add_argument(
        "--expected", metavar="GPU", help="measure nothing: print what steps should take on it"
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        try:
            print(json.dumps(measured_alone(json.loads(chosen.alone))), flush=True)
        except RuntimeError as error:  # raised by torch, NCCL, cuBLAS and Triton
            if not any(words in str(error).lower() for words in ("out of memory", "alloc_failed")):
                raise
            os._exit(NO_MEMORY)
        os._exit(0)  # gloo's threads sometimes abort a normal exit
    if chosen.expected:
        gpu = named_gpu(chosen.expected)
        for number in (1, 8):
            print(f"{number} x {gpu.name}, ms a step: expected from data sheets, NOT measured\n")
            print("\n".join(expected_table(expected_steps(gpu, gpus=number))), end="\n\n")
        return
    gpus = 0 if chosen.tiny else min(chosen.gpus or 10**6, torch.cuda.device_count())
    if not gpus and not chosen.tiny:
        parser.error("torch sees no GPU here; --tiny runs all parts on a CPU")
    certificate = Certificate(chosen.out, tiny=chosen.tiny, gpus=gpus)
    began = time.monotonic()
    for part in certificate.waiting():
        if time.monotonic() - began > 60 * chosen.minutes:
            break
        if chosen.only in part.name:
            certificate.measure(part)
    left = len(certificate.waiting())
    rows = {name: merged(found) for name, found in certificate.content["slices"].items()}
    write_pictures(chosen.out, rows)
    write_text(chosen.out / "report.md", certificate.content, rows, left=left)
    say(f"{chosen.out}/report.md" + (f"; {left} parts are left: run it again" if left else ""))


if __name__ == "__main__":
    main()
