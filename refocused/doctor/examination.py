"""The whole examination: what is looked at, in which order, and what is left out after a fault."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.gcs_client import ANONYMOUS, find_credentials
from refocused.bucket.gcs_errors import RetryPolicy
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.remote_steps import prefix_of
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun
from refocused.doctor import gpus as gpu_checks
from refocused.doctor import machine as machine_checks
from refocused.doctor import run_fits, storage
from refocused.doctor import software as software_checks
from refocused.doctor.early import place_problems
from refocused.doctor.finding import Finding
from refocused.doctor.rank_process import RankTask
from refocused.doctor.ranks import RanksOutcome, judge_allreduce, judge_step, run_ranks
from refocused.doctor.storage import store_time_s
from refocused.estimate.memory_plan import Choice, Device, refuse_cpu
from refocused.estimate.precision import BF16_CAPABILITY, cpu_bf16_gain, native_dtype, with_dtype
from refocused.system.errors import BucketError, ConfigError
from refocused.system.hardware import cpu_flags, gpu_facts

CPU_RANKS = 2
# Training waits a bucket out for minutes; who asks whether it is there wants to know now.
BRIEF = RetryPolicy(attempts=4)
CUDA_PAYLOAD_BYTES, CPU_PAYLOAD_BYTES = 256 * 2**20, 16 * 2**20
SOURCE_NEEDS = frozenset({"list", "read"})
MIRROR = "checkpoint.mirror"
MIRROR_NEEDS = frozenset({"list", "read", "write"})


@dataclasses.dataclass(frozen=True, slots=True)
class Examinee:
    """What is to be examined.

    Attributes:
        loaded: The run.
        config: Its file, as the command line names it.
        overrides: Settings that differ from it.
        name: Of the run, where the command line gives one.
        gpus: Ranks that it is to have; None: all GPUs, or two ranks without any.
        is_quick: Start no ranks, and read fewer tokens.
        credentials_file: Key file for `gs://`.
        project: Google Cloud project.
    """

    loaded: LoadedRun
    config: str
    overrides: tuple[str, ...] = ()
    name: str | None = None
    gpus: int | None = None
    is_quick: bool = False
    credentials_file: Path | None = None
    project: str | None = None

    def open(self, url: str) -> Bucket:
        """Open a bucket that gives up soon."""
        return open_bucket(
            url, credentials_file=self.credentials_file, project=self.project, retry=BRIEF
        )


class Examination:
    """Looks at everything that a run depends on, and leaves out what would only fail again."""

    def __init__(self, who: Examinee, *, say: Callable[[str], None]) -> None:
        """Begin with nothing known.

        Args:
            who: The run, and how it is to be started.
            say: Told what takes long, before it is begun.
        """
        self._who = who
        self._say = say
        self._fails = False
        self._unreadable: set[str] = set()
        self._tokens: int | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield each finding as it comes."""
        for finding in self._checks():
            self._fails = self._fails or finding.level == "fail"
            yield finding

    def _checks(self) -> Iterator[Finding]:
        who, config = self._who, self._who.loaded.config
        packages = software_checks.probe_packages()
        yield from software_checks.judge_packages(packages)
        if packages.missing:  # what follows imports them
            text = "nothing else is looked at, for packages are missing"
            yield Finding("machine", "warn", text, "Install them, then ask again.")
            return
        gpus = gpu_checks.probe_gpus(socket.gethostname(), wanted=who.gpus, environment=os.environ)
        device: Device = "cuda" if gpus.samples and config.run.device != "cpu" else "cpu"
        ranks = who.gpus or (gpus.torch_count if device == "cuda" else 0) or CPU_RANKS
        yield from _compiling(who, device)
        yield from gpu_checks.judge_gpus(gpus, wanted=who.gpus, device=config.run.device)
        memory_bytes = gpu_checks.smallest_memory_bytes(gpus.samples) if device == "cuda" else None
        native = native_dtype(
            capability=(gpus.capability or BF16_CAPABILITY) if device == "cuda" else None,
            cpu_flags=cpu_flags(),
            cpu_gain=cpu_bf16_gain,
        )
        yield run_fits.judge_precision(config.precision, native)
        choice: Choice | None = None
        try:
            if config.precision.dtype == "auto":
                who = dataclasses.replace(who, loaded=with_dtype(who.loaded, native.dtype))
            if device == "cpu":
                refuse_cpu(who.loaded, ranks=ranks)
            choice = run_fits.plan_choice(who.loaded, ranks=ranks, memory_bytes=memory_bytes)
        except ConfigError as error:
            yield run_fits.plan_failure(error)
        else:
            name = gpus.samples[0].name if device == "cuda" else None
            yield run_fits.judge_plan(
                who.loaded,
                choice,
                ranks=ranks,
                memory_bytes=memory_bytes,
                gpu=None if name is None else gpu_facts(name),
            )
        machine = machine_checks.probe_machine()
        yield from machine_checks.judge_machine(machine, ranks=ranks, device=device)
        if who.loaded.config.precision.dtype != "auto":
            shortage = run_fits.host_shortage(
                who.loaded,
                ranks=ranks,
                ranks_here=ranks,
                device=device,
                gpu_bytes=memory_bytes,
                memory=machine.memory,
            )
            if shortage is not None:
                yield shortage
        yield from self._places()
        yield from self._store()
        yield from self._data()
        if choice is not None:
            needs = run_fits.disk_needs(who.loaded, choice, ranks=ranks, tokens=self._tokens)
            yield from map(machine_checks.judge_disk, machine_checks.probe_disks(list(needs)))
        if not who.is_quick:
            links = gpu_checks.fewest_links(gpus.samples)
            yield from self._trial(ranks=ranks, device=device, nvlinks=links)

    def _places(self) -> Iterator[Finding]:
        """Look at the places as a start does; what fails there is not looked at again."""
        problems = place_problems(self._who.loaded, credentials_file=self._who.credentials_file)
        self._unreadable |= set(problems)
        for problem in dict.fromkeys(problems.values()):
            yield Finding("bucket" if problem.startswith(MIRROR) else "data", "fail", problem)

    def _store(self) -> Iterator[Finding]:
        """Look at the clock, the credentials and what they may do."""
        who, mirror = self._who, self._who.loaded.config.checkpoint.mirror
        sources = storage.sources_of(who.loaded.config.data)
        places = {setting: str(one.source) for setting, one in sources.items()}
        places |= {MIRROR: mirror} if mirror else {}
        remote = {setting for setting, url in places.items() if url.startswith("gs://")}
        asks = bool(remote - self._unreadable)
        store_s = store_time_s() if asks else None
        yield machine_checks.judge_clock(now_s=time.time(), store_s=store_s, signs=asks)
        try:
            identity = find_credentials(who.credentials_file).identity if asks else None
        except BucketError as error:
            yield Finding("credentials", "fail", str(error))
            self._unreadable |= set(sources)
            return
        if asks or not remote:
            yield storage.judge_credentials(
                identity=identity,
                anonymous=identity == ANONYMOUS,
                writes=mirror is not None and mirror.startswith("gs://"),
                exposed=storage.exposed_key(who.credentials_file) if asks else None,
            )
        for setting, data in sources.items():
            if not _will_be_made(data) and setting not in self._unreadable:
                yield from self._source_rights(setting, str(data.source))
        if MIRROR not in self._unreadable:
            yield from _mirror_rights(who, mirror)
        if who.loaded.config.tracking.wandb is not None:
            from refocused.metrics.wandb import what_keeps_offline

            yield storage.judge_wandb(what_keeps_offline())

    def _source_rights(self, setting: str, url: str) -> Iterator[Finding]:
        for finding in _rights(
            lambda: storage.probe_source(self._who.open(url), setting), setting, wanted=SOURCE_NEEDS
        ):
            if finding.level == "fail":
                self._unreadable.add(setting)
            yield finding

    def _data(self) -> Iterator[Finding]:
        """Look at each source's files."""
        vocabulary = self._who.loaded.shape.vocabulary
        for setting, data in storage.sources_of(self._who.loaded.config.data).items():
            if _will_be_made(data):
                text = (
                    f"{data.source}: training makes it at its start (data.prepare={data.prepare})"
                )
                yield Finding("data", "ok", text)
            elif setting not in self._unreadable:
                found = storage.probe_data(
                    self._who.open(str(data.source)),
                    data,
                    vocabulary=vocabulary,
                    is_quick=self._who.is_quick,
                )
                if isinstance(found, Finding):
                    yield found
                    continue
                self._tokens = (self._tokens or 0) + found.tokens
                yield from storage.judge_data(found, data, vocabulary=vocabulary, setting=setting)

    def _trial(self, *, ranks: int, device: Device, nvlinks: int | None) -> Iterator[Finding]:
        """Start real ranks, where nothing has failed so far."""
        if self._fails:
            text = "no ranks are started, for something above fails already"
            yield Finding("step", "warn", text, "Mend that first, then ask again.")
            return
        name = self._who.loaded.config.run.name
        self._say(f"starting {ranks} ranks, for an all-reduce and the first step of {name}")
        outcome = _outcome(self._who, ranks=ranks, device=device)
        yield judge_allreduce(outcome, device=device, nvlinks=nvlinks)
        if outcome.doing in (None, "step"):
            yield judge_step(outcome)


def _compiling(who: Examinee, device: Device) -> Iterator[Finding]:
    config = who.loaded.config
    yield software_checks.judge_compilers(
        software_checks.probe_compilers(), device=device, compiles=config.model.compile
    )
    uses_nvme = "nvme" in (config.zero.offload_optimizer, config.zero.offload_parameters)
    missing = None
    if uses_nvme:
        from refocused.engine.build_engine import why_no_async_io

        missing = why_no_async_io(device)
    yield software_checks.judge_operators(uses_nvme=uses_nvme, missing=missing)


def _mirror_rights(who: Examinee, mirror: str | None) -> Iterator[Finding]:
    setting, config = MIRROR, who.loaded.config
    if mirror is None:
        text = f"{setting} is not set: a machine that is lost takes its checkpoints along"
        yield Finding("bucket", "warn", text, f"{setting}=gs://BUCKET/PREFIX")
        return
    removes = config.checkpoint.keep_remote != "all"
    canary = storage.canary_name(prefix_of(config.run.name))
    yield from _rights(
        lambda: storage.probe_mirror(who.open(mirror), setting, canary=canary),
        setting,
        wanted=MIRROR_NEEDS | {"delete"} if removes else MIRROR_NEEDS,
    )


def _rights(
    probe: Callable[[], storage.Rights], setting: str, *, wanted: frozenset[str]
) -> Iterator[Finding]:
    try:
        rights = probe()
    except BucketError as error:  # the address is none
        yield Finding("bucket", "fail", f"{setting}: {error}")
    else:
        yield from storage.judge_rights(rights, wanted=wanted)


def _outcome(who: Examinee, *, ranks: int, device: Device) -> RanksOutcome:
    payload = CUDA_PAYLOAD_BYTES if device == "cuda" else CPU_PAYLOAD_BYTES
    config = who.loaded.config
    with tempfile.TemporaryDirectory(prefix="refocused-doctor-") as name:
        folder = Path(name)
        task = RankTask(
            device=config.run.device,
            payload_bytes=payload if ranks > 1 else 0,
            config=who.config,
            overrides=(*who.overrides, *_places(config.data, folder)),
            name=who.name,
            folder=folder / "run",
            credentials_file=who.credentials_file,
            project=who.project,
        )
        return run_ranks(task, ranks=ranks)


def _will_be_made(data: DataConfig) -> bool:
    """Tell whether training makes the source at its start."""
    return data.prepare is not None and not Path(str(data.source)).expanduser().is_dir()


def _places(data: DataConfig, folder: Path) -> list[str]:
    """Return the settings by which the step makes nothing that training would not fetch.

    Shards go to the run's own cache, on the disk that was chosen for them; training finds them.
    """
    if not _will_be_made(data):
        return []
    return [f"data.source={folder / 'source'}", f"data.cache={folder / 'cache'}"]
