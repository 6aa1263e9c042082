"""All checks of the doctor, their order, and what a failure makes unnecessary."""

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import Bucket
from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials, open_bucket
from refocused.bucket.retry import Retry
from refocused.checkpoints.mirror.remote_checkpoints import prefix_of
from refocused.checkpoints.resume.catalog import Catalog
from refocused.config.load_run import LoadedRun
from refocused.config.optimization import PrecisionConfig
from refocused.config.outputs import without_secrets
from refocused.config.prices import read_prices
from refocused.config.run_config import idle_settings
from refocused.data.manifest.shard_manifest import Facts
from refocused.doctor import machine, run_fits, storage
from refocused.doctor.early import (
    MIRROR,
    TRACKERS,
    is_made_at_the_start,
    place_problems,
    places_of,
    sources_of,
)
from refocused.doctor.finding import Finding
from refocused.estimate.memory_plan import (
    BF16_CAPABILITY,
    Choice,
    Device,
    NativeDtype,
    choose,
    cpu_bf16_gain,
    native_dtype,
    needless_offload,
    plan_host,
    refuse_cpu,
    with_dtype,
)
from refocused.estimate.run_cost import estimate
from refocused.estimate.step_time import GPUS_A_MACHINE, step_of_run
from refocused.evaluate.tasks import find_tasks
from refocused.system.errors import (
    BucketError,
    ConfigError,
    ExitCode,
    RefocusedError,
    TrainingError,
    as_typed,
    counted,
    local_path,
)
from refocused.system.hardware import GpuSpec, cpu_flags, gpu_spec, memory_now
from refocused.system.number_text import duration, size_text
from refocused.system.world import DeviceKind

CPU_RANKS = 2
# Training retries a bucket for minutes; the doctor should report an outage soon.
BRIEF = Retry(attempts=4)
SAMPLED_TOKENS, SAMPLED_TOKENS_QUICK = 4_000_000, 400_000
LONGEST_SECONDS = 900.0
GRACE_SECONDS = 30  # for the ranks to end after that
# One direction of an NVLink of the A100 and H100. Assumed: the share of all links that a large
# all-reduce reaches, and the least that PCIe gives.
LINK_BYTES_PER_SECOND = 25e9
REACHED_SHARE = 0.4
LEAST_PCIE_BYTES_PER_SECOND = 2e9
LATE = "no result before the time-out"


@dataclasses.dataclass
class Examination:
    """Checks everything that a run depends on, except what would only fail again.

    `arguments` are those of `train`, with which its ranks start. `gpus` is the number of ranks
    (None: one per GPU, or two without GPUs). `is_quick` starts no ranks and reads fewer tokens.
    `say` announces what takes long. With `rented`, the run is checked for `gpus` of these GPUs, as
    far as it can be without them; `per_hour_usd` is their price.
    """

    loaded: LoadedRun
    arguments: Sequence[str]
    say: Callable[[str], None]
    gpus: int | None = None
    is_quick: bool = False
    credentials: Credentials = BY_ENVIRONMENT
    rented: GpuSpec | None = None
    per_hour_usd: float | None = None

    _fails: bool = dataclasses.field(default=False, init=False)
    _unreadable: set[str] = dataclasses.field(default_factory=set, init=False)  # failed settings
    _tokens: int | None = dataclasses.field(default=None, init=False)  # of all sources
    _choice: Choice | None = dataclasses.field(default=None, init=False)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings one by one."""
        for finding in self._checks():
            self._fails = self._fails or finding.level == "fail"
            yield finding

    def _checks(self) -> Iterator[Finding]:
        packages = machine.probe_packages()
        yield machine.judge_packages(packages)
        if None in packages.installed.values():  # the other checks import them
            text = "skipped all other checks because packages are missing"
            yield Finding("machine", "warn", text, "Install them, then run doctor again.")
            return
        config = self.loaded.config
        if self.rented is not None and self.gpus is not None:
            yield from self._for_gpus(self.rented, self.gpus)
            yield from self._but_machine(ranks=self.gpus)
            text = (
                "NOT CHECKED without the GPUs: their health and links, compilers, free memory and "
            )
            words = [without_secrets(w) if w[:3] in ("log", "run") else w for w in self.arguments]
            fix = f"On the machine: {as_typed('doctor')} {shlex.join(words)}"
            yield Finding("step", "warn", f"{text}and disk, an all-reduce, a real step", fix)
            return
        gpus = machine.probe_gpus(socket.gethostname(), requested=self.gpus, environment=os.environ)
        requested = config.run.device
        device: Device = "cuda" if gpus.samples and requested != "cpu" else "cpu"
        ranks = self.gpus or (gpus.torch_count if device == "cuda" else 0) or CPU_RANKS
        yield machine.check_compilers(device=device, compiles=config.model.compile)
        if "nvme" in (config.zero.offload_optimizer, config.zero.offload_parameters):
            yield machine.check_async_io(device)
        yield from machine.judge_gpus(gpus, requested=self.gpus, device=requested)
        yield from self._memory(gpus, device=device, ranks=ranks)
        yield from self._but_machine(ranks=ranks)
        if self.is_quick:
            return
        if self._fails:
            text = "skipped, because a check above failed"
            yield Finding("step", "warn", text, "Fix that, then run doctor again.")
            return
        of_run = f"the first step of {config.run.name}"
        self.say(f"starting {counted(ranks, 'rank')}, for an all-reduce and {of_run}")
        outcome = start_ranks(self.arguments, ranks=ranks)
        links = machine.fewest_links(gpus.samples)
        yield judge_allreduce(outcome, device=device, nvlinks=links)
        if outcome.doing in (None, "step"):
            yield judge_step(outcome)

    def _but_machine(self, *, ranks: int) -> Iterator[Finding]:
        """Check what a start needs besides the machine, and the room for it."""
        yield from self._places()
        yield from self._store()
        yield from self._start_from()
        yield from self._data()
        run = self.loaded.config.run
        has_length = run.epochs is None or run.tokens is not None  # else the data cannot be read
        if self._choice is not None and has_length:
            needs = run_fits.disk_needs(self.loaded, self._choice, ranks=ranks, tokens=self._tokens)
            if self.rented is None:
                yield from run_fits.check_disks(needs)
            else:
                parts = ", ".join(f"{size_text(need.wanted_bytes)} {need.what}" for need in needs)
                yield Finding("disk", "ok", f"needs {parts}")

    def _for_gpus(self, gpu: GpuSpec, ranks: int) -> Iterator[Finding]:
        """Report what the run needs and costs on GPUs that are not here."""
        ranks_here, memory_bytes = min(ranks, GPUS_A_MACHINE), gpu.memory_gib * 2**30
        if self.loaded.config.precision.dtype == "auto":
            self.loaded = with_dtype(self.loaded, "bf16")  # every known GPU has it
        try:
            expected = estimate(
                self.loaded,
                gpus=ranks,
                gpu=gpu.name,
                prices=read_prices(),
                per_hour_usd=self.per_hour_usd or self.loaded.config.cost.per_hour_usd,
            )
        except ConfigError as error:
            yield Finding("plan", "fail", str(error))
        else:
            choice, likely = expected.main.choice, expected.main.likely
            self._choice = choice
            yield judge_plan(self.loaded, choice, ranks=ranks, memory_bytes=memory_bytes, gpu=gpu)
            host = plan_host(self.loaded, choice, ranks=ranks, ranks_here=ranks_here, device="cuda")
            text = (
                f"each machine needs {size_text(host.total)} of memory for {ranks_here} GPU ranks"
            )
            yield Finding("memory", "ok", text)
            usd = likely.cost_usd or next((usd for _, usd in expected.offers_usd()), None)
            money = "" if usd is None else f" and ${usd:,.2f}"
            where = "" if likely.cost_usd or usd is None else ", at the cheapest price known"
            text = f"about {duration(likely.hours * 3600)}{money} on {ranks} x {gpu.name}{where}"
            yield Finding("cost", "ok", f"{text}, without tasks")

    def _memory(self, gpus: machine.Gpus, *, device: Device, ranks: int) -> Iterator[Finding]:
        """Choose precision and ZeRO stage; check the memory of GPUs and machine."""
        on_gpus = device == "cuda"
        capability = (gpus.capability or BF16_CAPABILITY) if on_gpus else None
        native = native_dtype(capability=capability, cpu_flags=cpu_flags(), cpu_gain=cpu_bf16_gain)
        memory_bytes = machine.smallest_memory_bytes(gpus.samples) if on_gpus else None
        precision = self.loaded.config.precision
        yield judge_precision(precision, native)
        try:
            if precision.dtype == "auto":
                self.loaded = with_dtype(self.loaded, native.dtype)
            if not on_gpus:
                refuse_cpu(self.loaded, ranks=ranks)
            choice = choose(self.loaded, ranks=ranks, memory_bytes=memory_bytes)
        except ConfigError as error:
            yield Finding("plan", "fail", str(error))
        else:
            gpu = gpu_spec(gpus.samples[0].name or "") if on_gpus else None
            yield judge_plan(self.loaded, choice, ranks=ranks, memory_bytes=memory_bytes, gpu=gpu)
            self._choice = choice
        memory = memory_now()
        yield from machine.check_machine(memory, ranks=ranks, device=device)
        if self.loaded.config.precision.dtype != "auto":
            shortage = run_fits.host_shortage(
                self.loaded,
                ranks=ranks,
                ranks_here=ranks,
                device=device,
                gpu_bytes=memory_bytes,
                memory=memory,
            )
            yield from [] if shortage is None else [shortage]

    def _places(self) -> Iterator[Finding]:
        """Check folders, sources and mirror as a start does; skip later checks of what fails."""
        problems = {**place_problems(self.loaded, credentials_file=self.credentials.key_file)}
        self._unreadable |= set(problems)
        checks = {MIRROR: "bucket", "run.directory": "disk", "data.cache": "disk"}
        checks |= dict.fromkeys(TRACKERS, "packages")
        for setting in ("run.directory", "data.cache", *TRACKERS) if self.rented else ():
            problems.pop(setting, None)  # of another machine
        for problem in dict.fromkeys(problems.values()):
            yield Finding(checks.get(problem.partition(":")[0], "data"), "fail", problem)
        try:
            find_tasks(self.loaded.config.evaluation.tasks, data=None)
        except ConfigError as error:
            yield Finding("tasks", "fail", f"evaluation.tasks: {error}")
        config = self.loaded.config
        commands = {"run.on_end": config.run.on_end, "log.on_alarm": config.log.on_alarm}
        for setting, command in commands.items() if self.rented is None else ():
            if command is not None and not command.startswith("https://"):
                yield machine.judge_command(setting, command)

    def _store(self) -> Iterator[Finding]:
        """Check the clock, the credentials and their rights."""
        config = self.loaded.config
        places, sources = places_of(config), sources_of(config.data)
        remote = {setting for setting, url in places.items() if "://" in url}
        asked = [
            self._open(url) for name, url in places.items() if name in remote - self._unreadable
        ][-1:]
        store_s = storage.store_time_s(str(asked[0].endpoint)) if asked else None
        yield machine.judge_clock(now_s=time.time(), store_s=store_s, signs=bool(asked))
        try:
            identity = asked[0].identity if asked else None
        except BucketError as error:
            yield Finding("credentials", "fail", str(error))
            self._unreadable |= set(sources)
            return
        if asked or not remote:
            yield storage.judge_credentials(
                identity, writes=MIRROR in remote, key=self.credentials.key_file if asked else None
            )
        for setting, data in sources.items():
            if not is_made_at_the_start(data) and setting not in self._unreadable:
                yield from self._rights(setting, places[setting])
        if MIRROR not in places:
            text = f"{MIRROR} is not set: if this machine is lost, so are its checkpoints"
            yield Finding("bucket", "warn", text, f"{MIRROR}=gs://BUCKET/PREFIX")
        elif MIRROR not in self._unreadable:
            yield from self._rights(MIRROR, places[MIRROR])
        if config.tracking.wandb is not None and "tracking.wandb" not in self._unreadable:
            from refocused.metrics.wandb import what_keeps_offline

            yield storage.judge_wandb(what_keeps_offline())

    def _rights(self, setting: str, url: str) -> Iterator[Finding]:
        config, bucket = self.loaded.config, self._open(url)
        if setting == MIRROR:
            prefix, removes = prefix_of(config.run.name), config.checkpoint.keep_remote != "all"
            findings = storage.check_mirror(bucket, setting, prefix=prefix, removes=removes)
        else:
            findings = storage.check_source(bucket, setting)
        for finding in findings:
            self._unreadable |= {setting} if finding.level == "fail" else set()
            yield finding

    def _start_from(self) -> Iterator[Finding]:
        """Look for the model to start from, and match it if it is here."""
        from refocused.evaluate.origin import find_model, match, open_model

        config, shape, trusts = self.loaded.config, self.loaded.shape, {"trusts_pickles": False}
        runs, model, mirror = Path(config.run.directory), config.model, config.checkpoint.mirror
        address, name = model.start_from, config.run.name
        catalog = Catalog(runs / name / "checkpoints")
        is_there = mirror is not None and ("://" in mirror or local_path(mirror).is_dir())
        if mirror is not None and is_there and MIRROR not in self._unreadable:
            catalog = Catalog(catalog.local, self._open(mirror), prefix_of(name))
        try:
            if address is None or catalog.entries():  # a run that resumes does not read it
                return
            folder, revision = find_model(
                address, runs=runs, open_url=self._open, fetches=False, **trusts
            )
            if folder is not None:
                stored, resizes = open_model(folder, **trusts), bool(model.resize_vocabulary)
                match(stored, shape, where=address, preset=model.preset, resizes=resizes)
        except RefocusedError as error:
            yield Finding("start_from", "fail", str(error))
        else:
            what = revision or ("its folder matches the model" if folder else "it is there")
            yield Finding("start_from", "ok", f"{address}: {what}")

    def _data(self) -> Iterator[Finding]:
        from refocused.data.manifest.run_manifest import describe_run
        from refocused.data.order.sources import data_warnings, split_sources
        from refocused.prepare.inspect_data import inspect_data

        for key, problem in idle_settings(self.loaded.config):
            text, _, fix = f"{key} is {problem}".partition(". ")
            yield Finding("data", "warn", text, fix)
        vocabulary, headers = self.loaded.shape.vocabulary, dict[str, Facts]()  # read once
        tokens = SAMPLED_TOKENS_QUICK if self.is_quick else SAMPLED_TOKENS
        for setting, data in sources_of(self.loaded.config.data).items():
            url = data.address
            if is_made_at_the_start(data):
                text = f"{url}: written at the start of training ({setting}={data.source})"
                yield Finding("data", "ok", text)
            elif setting not in self._unreadable:
                try:
                    bucket = self._open(url)
                    report = inspect_data(
                        bucket, data, tokens, vocabulary, shows_text=False, known=headers
                    )
                except RefocusedError as error:
                    yield Finding("data", "fail", str(error))
                else:
                    self._tokens = (self._tokens or 0) + report.tokens
                    yield from storage.judge_data(report, vocabulary=vocabulary, setting=setting)
                    self._unreadable |= {setting} if report.problems else set()
        # Split the data into sequences as a start does, if all of it is there and readable.
        config = self.loaded.config
        every = sources_of(config.data)
        if self._unreadable & set(every) or any(map(is_made_at_the_start, every.values())):
            return
        length = config.model.sequence_length
        buckets = {
            name: self._open(section.address) for name, section in config.data.by_source.items()
        }
        try:
            manifest = describe_run(buckets, config.data, cache_file=headers)
            sources = split_sources(
                manifest,
                config.data,
                sequence_length=length,
                evaluation_sequences=config.evaluation.sequences,
            )
        except RefocusedError as error:
            yield Finding("data", "fail", str(error))
            return
        for warning in data_warnings(sources, manifest, config.data, sequence_length=length):
            text, _, fix = warning.partition(". ")
            yield Finding("data", "warn", text, fix)

    def _open(self, url: str) -> Bucket:
        return open_bucket(url, self.credentials, retry=BRIEF)


def judge_precision(precision: PrecisionConfig, native: NativeDtype) -> Finding:
    """Report the precision of the run, and why `auto` chose it."""
    if precision.dtype == "auto":
        text = f"{native.dtype} (precision.dtype=auto): {native.reason}"
        return Finding("precision", "ok", f"{text}; a resumed run keeps its checkpoint's")
    if precision.dtype == "bf16" != native.dtype:
        text = f"bf16 is slow here: {native.reason}"
        return Finding("precision", "warn", text, f"Set precision.dtype={native.dtype}.")
    return Finding("precision", "ok", f"{precision.dtype}, set by the run")


def judge_plan(
    loaded: LoadedRun,
    choice: Choice,
    *,
    ranks: int,
    memory_bytes: float | None,
    gpu: GpuSpec | None = None,
) -> Finding:
    """Report whether a step fits into the smallest GPU, and its expected time on a known GPU."""
    zero, memory = choice.zero, choice.memory
    whole = f" of {size_text(memory_bytes)}" if memory_bytes else ""
    text = (
        f"a step needs {size_text(memory.peak)}{whole} a rank ({size_text(memory.states)} "
        f"states): ZeRO-{zero.stage}, micro-batch {choice.micro_batch_size}, "
        f"{counted(ranks, 'rank')}"
    )
    if memory_bytes is not None and not memory.fits(memory_bytes):
        fix = run_fits.fitting_on_gpus(loaded, choice, ranks=ranks, memory_bytes=memory_bytes)
        return Finding("plan", "fail" if memory.peak > memory_bytes else "warn", text, fix)
    bare = needless_offload(loaded, choice, ranks=ranks, memory_bytes=memory_bytes)
    if bare is not None:
        text = (
            f"{text}; it would fit without the offload ({size_text(bare.peak)}), which costs 8-55 %"
        )
        fix = "Set zero.offload_optimizer=none and zero.offload_parameters=none."
        return Finding("plan", "warn", text, fix)
    if gpu is not None:
        try:
            batch, step = step_of_run(loaded, choice, ranks=ranks, gpu=gpu)
        except ConfigError as error:
            return Finding("plan", "fail", str(error))
        text = f"{text}; expected: {step.as_text(batch.tokens)}"
    return Finding("plan", "ok", text)


@dataclasses.dataclass(frozen=True, slots=True)
class RanksOutcome:
    """Results of rank 0 (`allreduce`, `step`); if the start failed, in which of them, and why."""

    ranks: int
    results: Mapping[str, Any]
    doing: str | None = None
    failure: str | None = None


def judge_allreduce(outcome: RanksOutcome, *, device: DeviceKind, nvlinks: int | None) -> Finding:
    """Report whether the ranks can communicate, and how fast.

    `nvlinks` is the smallest number of active links of a GPU.
    """
    library = "NCCL" if device == "cuda" else "gloo"
    if outcome.doing == "allreduce":
        fix = "NCCL_DEBUG=INFO shows more; check /dev/shm, firewalls and NCCL_SOCKET_IFNAME."
        text = (
            f"{counted(outcome.ranks, 'rank')} cannot communicate over {library}: {outcome.failure}"
        )
        return Finding("allreduce", "fail", text, fix if device == "cuda" else None)
    result = outcome.results.get("allreduce")
    if result is None:
        return Finding("allreduce", "ok", "not needed by a single rank")
    if not result["is_right"]:
        text = f"{library} returns wrong sums over {counted(outcome.ranks, 'rank')}"
        fix = "Try NCCL_P2P_DISABLE=1; if that helps, ask for another machine."
        return Finding("allreduce", "fail", text, fix)
    speed = float(result["bus_bytes_per_second"])
    text = (
        f"{library}, {counted(outcome.ranks, 'rank')}: {speed / 1e9:.2f} GB/s bus bandwidth "
        f"({result['payload_bytes'] / 2**20:.0f} MiB in {result['seconds'] * 1e3:.1f} ms)"
    )
    least = REACHED_SHARE * (nvlinks or 0) * LINK_BYTES_PER_SECOND or LEAST_PCIE_BYTES_PER_SECOND
    if device == "cuda" and speed < least:
        text = f"{text}; at least {least / 1e9:.0f} are usual, so every step is slower"
        fix = "Check nvidia-smi topo -m, and which links NCCL uses (NCCL_DEBUG=INFO)."
        return Finding("allreduce", "warn", text, fix)
    return Finding("allreduce", "ok", text)


def judge_step(outcome: RanksOutcome) -> Finding:
    """Report the result of the step."""
    if outcome.failure is not None:
        return Finding("step", "fail", f"failed: {outcome.failure}")
    result = outcome.results["step"]
    if not result:
        return Finding("step", "ok", "the run is finished; it can be opened and loaded")
    memory = ""
    if result["peak_bytes"] is not None:
        memory = (
            f", {size_text(result['peak_bytes'])} of {size_text(result['gpu_bytes'])} a GPU "
            f"(planned {size_text(result['planned_bytes'])})"
        )
    return Finding(
        "step",
        "ok",
        f"{result['step']:,}, {result['tokens']:,} tokens, took {result['seconds']:.1f} s, loss "
        f"{result['loss']:.4f} (untrained {result['untrained_loss']:.4f}){memory}; ZeRO-"
        f"{result['zero_stage']}, micro-batch {result['micro_batch_size']}, {result['compute']}; "
        f"{result['start_seconds']:.0f} s to start",
    )


def start_ranks(arguments: Sequence[str], *, ranks: int) -> RanksOutcome:
    """Start the run by its own supervisor, as a dry run with a trial, and wait for the end of all.

    `arguments` are those of `train`.
    """
    with tempfile.TemporaryDirectory(prefix="refocused-doctor-") as name:
        results_file, output_file = Path(name, "trial.json"), Path(name, "stderr.txt")
        command = [sys.executable, "-P", "-m", "refocused.commands.launch", *arguments]
        command += ["--dry-run", "--first-step", str(results_file), "--grace", str(GRACE_SECONDS)]
        imports = os.pathsep.join(path for path in sys.path if path)
        with output_file.open("wb") as output:
            launch = subprocess.Popen(
                command,
                env={**os.environ, "RANKS": str(ranks), "PYTHONPATH": imports},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
        is_late = False
        try:
            launch.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            launch.terminate()
            code = launch.wait()
        results = json.loads(results_file.read_bytes()) if results_file.is_file() else {}
        lines = output_file.read_text(errors="replace").splitlines()
    if code == ExitCode.OK:
        return RanksOutcome(ranks, results)
    lines = [line.strip() for line in lines if not line.startswith(("warning:", "hint:"))]
    words = [line.removeprefix("error: ") for line in lines if line]
    # A wrong setting does not reach the other ranks; its error cuts what is too long.
    is_apart = results or code == ExitCode.WRONG_USE
    text = str(TrainingError(" / ".join([LATE] * is_late + words) or f"exit code {code}"))
    return RanksOutcome(ranks, results, "step" if is_apart else "allreduce", text)
