"""Certifies a machine with NVIDIA GPUs: what runs, how fast, in how much memory, in one report.

    .venv/bin/python benchmarks/certify_gpu.py [--seconds 560] [--only SLICES] [--out FOLDER]

Slices run by value, each in processes of its own with a hard time box: the machine; the smallest
training with a save, a resume and an export, and one compared to the last bit; tests marked gpu;
steps of 124 M and 0.76 B in turns with nanoGPT's and DeepSpeed's loops; host waits; the forms of
the loss, of scans and of attention; memory against its plan; a profile; 8 bits; sequences of 32,768
tokens; transformers' Trainer. `results.jsonl` and `report.md` have each result as soon as it is
known, also if the sitting is killed; `log.txt` has all output. The same command goes on with the
slices that have not ended; `--only` runs those again whose names begin so (`--only fp8,long`).

It needs no network, and no package that a training does not need; the tests need pytest, the
Trainer accelerate. MFU is by the convention of `refocused.estimate.flops`, of the data sheet's bf16
peak, in 8 bits too. Batches are for 80 GB: smaller GPUs make smaller passes. All GPUs that
CUDA_VISIBLE_DEVICES shows make the steps. `--tiny` walks all slices in small sizes, also on a CPU.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from certify_report import RESULT, failures, write_report
from measuring import ROOT, Record, lines_of, say

from refocused.system.atomic_files import replace_file
from refocused.system.launchers import torch_settings

sys.path.insert(0, str(ROOT / "tests"))

# Time boxes on one H100, by value. Of a row with several none measures a speed: they run at once.
PLAN: Sequence[dict[str, float]] = (
    {"machine": 45},
    {"train": 150, "exact": 150, "tests": 150},
    {"124M": 100},
    {"waits": 75},
    {"0.76B": 110},
    {"kernels": 45},
    {"memory-1.41B": 60},
    {"memory-recomputed": 60},
    {"memory-offloaded": 45},
    {"profile": 75},
    {"fp8": 75},
    {"long-ten": 45},
    {"long-resonance": 45},
    {"long-llama": 45},
    {"trainer": 75},
)
ALONE = ("machine", "train", "exact", "tests", "kernels")  # one process; others one for each GPU
TINY_FACTOR = 8  # of time boxes, for a busy CPU


class Certificate:
    """Results so far, kept in a folder."""

    def __init__(self, folder: Path, *, tiny: bool, gpus: int) -> None:
        """Continue the certificate of a folder, or start one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tiny, self.gpus = folder, tiny, gpus
        self.results, self._began = lines_of(folder / "results.jsonl"), time.monotonic()

    def waiting(self) -> list[str]:
        """Return the slices that have not come to their ends."""
        ended = [one["slice"] for one in self.results if one["what"] == "ended"]
        return [name for row in PLAN for name in row if name not in ended]

    def measure(self, names: Sequence[str], *, seconds: float) -> None:
        """Run slices row by row within so many seconds."""
        for row in PLAN:
            left = seconds - (time.monotonic() - self._began)
            if left < 15:  # too little to begin
                break
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stopping:
                factor = TINY_FACTOR if self.tiny else 1
                boxes = {name: min(factor * row[name], left) for name in row if name in names}
                self.results = [result for result in self.results if result["slice"] not in boxes]
                kept = "".join(json.dumps(result) + "\n" for result in self.results)
                replace_file(
                    self.folder / "results.jsonl", kept.encode()
                )  # without those to repeat
                running = [_Running(name, box, self, folder) for name, box in boxes.items()]
                for one in running:
                    stopping.callback(one.kill)  # also when this sitting is stopped
                while running:
                    time.sleep(0.2)
                    running = [one for one in running if not one.has_ended()]

    def keep(self, name: str, result: Record) -> None:
        """Add a result of a slice to the files."""
        result = {"slice": name, "at": round(time.monotonic() - self._began, 1), **result}
        self.results.append(result)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        long = ("trace", "places", "kernels_ms", "listed", "computed")
        say(json.dumps({key: of for key, of in result.items() if key not in long})[:400])
        write_report(self.folder / "report.md", self.results, waiting=self.waiting())

    def log(self, name: str, lines: Sequence[str]) -> None:
        """Add output of a slice to the log."""
        with (self.folder / "log.txt").open("a") as file:
            file.writelines(f"{name}| {line.rstrip()[:2000]}\n" for line in lines)


class _Running:
    """The processes of one slice."""

    def __init__(self, name: str, seconds: float, certificate: Certificate, folder: str) -> None:
        from ranks import Ranks

        self._name, self._seconds, self._certificate = name, seconds, certificate
        self._began, self._seen = time.monotonic(), 0  # lines of rank 0
        count = 1 if name in ALONE else max(1, certificate.gpus)
        command = [str(Path(__file__).resolve()), "--slice", name, f"--seconds={seconds:.0f}"]
        command += ["--tiny"] * certificate.tiny
        environment = {
            **torch_settings({**os.environ, "LOCAL_WORLD_SIZE": str(count)}),
            "DS_ACCELERATOR": "cuda" if certificate.gpus else "cpu",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
        place = Path(tempfile.mkdtemp(dir=folder))
        self._ranks = Ranks(count, command, folder=place, environment=environment)

    def has_ended(self) -> bool:
        """Keep what has been printed; whether the slice, or its time, is at its end."""
        codes = [process.poll() for process in self._ranks.processes]
        whole = self._ranks.printed().split("\n")[:-1]  # the last line may be half written
        for line in whole[self._seen :]:
            if line.startswith(RESULT):
                self._certificate.keep(self._name, json.loads(line.removeprefix(RESULT)))
            else:
                self._certificate.log(self._name, [line])
        self._seen = len(whole)
        seconds, error = time.monotonic() - self._began, None
        if any(codes):
            error = f"exit codes {codes}"
        elif seconds > self._seconds:
            error = f"stopped at the end of its {self._seconds:.0f} s"
        elif None in codes:
            return False
        self.kill()
        errors = self._ranks.wait(10).err[0].splitlines()
        self._certificate.log(self._name, errors)
        failed = {"error": error, "trace": errors[-12:]} if error else {}
        ended = {"what": "stopped" if error else "ended", "seconds": round(seconds), **failed}
        self._certificate.keep(self._name, ended)
        return True

    def kill(self) -> None:
        """End all processes of the slice: each leads a group of its own."""
        for process in self._ranks.processes:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Measure what is waiting within the given seconds; write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this sitting")
    parser.add_argument("--only", metavar="SLICES", help="beginnings of names, with commas")
    parser.add_argument("--out", type=Path, default=Path("docs/reports/this_machine"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--slice", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.slice:
        from certify_slices import run_slice

        os.setsid()  # so that one signal ends what this starts, too
        run_slice(chosen.slice, seconds=chosen.seconds, tiny=chosen.tiny)
        sys.stdout.flush()
        os._exit(0)  # gloo's threads sometimes abort a normal exit
    gpus = torch.cuda.device_count()
    if not gpus and not chosen.tiny:
        parser.error("torch sees no GPU here; --tiny walks all slices on a CPU")
    certificate = Certificate(chosen.out, tiny=chosen.tiny, gpus=gpus)
    names = certificate.waiting()
    if chosen.only:
        every = [name for row in PLAN for name in row]
        names = [name for name in every if name.startswith(tuple(chosen.only.split(",")))]
        if not names:
            parser.error(f"--only {chosen.only} names no slice: {', '.join(every)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the slices, too
    certificate.measure(names, seconds=chosen.seconds)
    failed = len(failures(certificate.results))
    say(f"{chosen.out}/report.md: {failed} failures; not run: {', '.join(certificate.waiting())}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
