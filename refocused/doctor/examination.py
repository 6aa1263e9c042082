"""The whole examination: what is looked at, in which order, and what is left out after a fault."""

from __future__ import annotations

import dataclasses
import functools
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from refocused.bucket.bucket import Bucket
from refocused.bucket.google_connection import ANONYMOUS, find_credentials
from refocused.bucket.open import open_bucket
from refocused.bucket.retry import RetryPolicy
from refocused.bucket.store_clock import store_time_s
from refocused.checkpoints.remote_steps import prefix_of
from refocused.config.data import DataConfig
from refocused.config.decode import LoadedRun
from refocused.doctor import data as data_checks
from refocused.doctor import gpus as gpu_checks
from refocused.doctor import machine as machine_checks
from refocused.doctor import plan as plan_checks
from refocused.doctor import software as software_checks
from refocused.doctor import storage as storage_checks
from refocused.doctor.finding import Finding, any_fails
from refocused.doctor.rank_process import RankTask
from refocused.doctor.ranks import judge_allreduce, judge_step, run_ranks
from refocused.errors import BucketError, ConfigError
from refocused.estimate.choice import Choice

CPU_RANKS = 2
# Training waits a bucket out for minutes; who asks whether it is there wants to know now.
BRIEF = RetryPolicy(attempts=4)
CUDA_PAYLOAD_BYTES, CPU_PAYLOAD_BYTES = 256 * 2**20, 16 * 2**20
SOURCE_NEEDS = frozenset({"list", "read"})
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


def examine(who: Examinee, *, say: Callable[[str], None]) -> Iterator[Finding]:
    """Look at everything that a run depends on; yield each finding as it comes.

    Args:
        who: The run, and how it is to be started.
        say: Told what takes long, before it is begun.
    """
    config = who.loaded.config
    findings: list[Finding] = []

    def noted(some: Iterable[Finding]) -> Iterator[Finding]:
        for finding in some:
            findings.append(finding)
            yield finding

    gpus = gpu_checks.probe_gpus(socket.gethostname())
    device: Literal["cuda", "cpu"] = (
        "cuda" if gpus.samples and config.run.device != "cpu" else "cpu"
    )
    ranks = who.gpus or (gpus.torch_count if device == "cuda" else 0) or CPU_RANKS
    yield from noted(_software(who, device))
    yield from noted(gpu_checks.judge_gpus(gpus, wanted=who.gpus, device=config.run.device))
    memory_bytes = gpu_checks.smallest_memory_bytes(gpus.samples) if device == "cuda" else None
    choice: Choice | None = None
    try:
        choice = plan_checks.plan_choice(who.loaded, ranks=ranks, memory_bytes=memory_bytes)
    except ConfigError as error:
        yield from noted([plan_checks.plan_failure(error)])
    else:
        yield from noted(
            [plan_checks.judge_plan(who.loaded, choice, ranks=ranks, memory_bytes=memory_bytes)]
        )
    yield from noted(_machine(who, choice, ranks=ranks, device=device))
    yield from noted(_store(who))
    tokens: list[int] = []
    yield from noted(_data(who, tokens))
    if choice is not None:
        needs = plan_checks.disk_needs(
            who.loaded, choice, ranks=ranks, tokens=sum(tokens) if tokens else None
        )
        yield from noted(map(machine_checks.judge_disk, machine_checks.probe_disks(list(needs))))
    if who.is_quick:
        return
    if any_fails(findings):
        text = "no ranks are started, for something above fails already"
        yield Finding("step", "warn", text, "Mend that first, then ask again.")
        return
    say(f"starting {ranks} ranks, for an all-reduce and the first step of {config.run.name}")
    yield from _ranks(
        who, ranks=ranks, device=device, nvlinks=gpu_checks.fewest_links(gpus.samples)
    )


def _software(who: Examinee, device: Literal["cuda", "cpu"]) -> Iterator[Finding]:
    config = who.loaded.config
    yield from software_checks.judge_packages(software_checks.probe_packages())
    yield software_checks.judge_compilers(
        software_checks.probe_compilers(), device=device, compiles=config.model.compile
    )
    uses_nvme = "nvme" in (config.zero.offload_optimizer, config.zero.offload_parameters)
    missing = None
    if uses_nvme:
        from refocused.engine.operators import why_no_async_io

        missing = why_no_async_io(device)
    yield software_checks.judge_operators(uses_nvme=uses_nvme, missing=missing)


def _machine(
    who: Examinee, choice: Choice | None, *, ranks: int, device: Literal["cuda", "cpu"]
) -> Iterator[Finding]:
    kept = 0 if choice is None else plan_checks.host_bytes(who.loaded, choice, ranks=ranks)
    yield from machine_checks.judge_machine(
        machine_checks.probe_machine(), ranks=ranks, device=device, host_bytes=kept
    )


def _store(who: Examinee) -> Iterator[Finding]:
    """Look at the clock, the credentials and what they may do."""
    mirror = who.loaded.config.checkpoint.mirror
    sources = data_checks.sources_of(who.loaded.config.data)
    urls = [str(one.source) for one in sources.values()] + ([mirror] if mirror else [])
    asks = any(url.startswith("gs://") for url in urls)
    store_s = store_time_s() if asks else None
    yield machine_checks.judge_clock(now_s=time.time(), store_s=store_s, signs=asks)
    try:
        identity = find_credentials(who.credentials_file).identity if asks else None
    except BucketError as error:
        yield Finding("credentials", "fail", str(error))
        return
    yield storage_checks.judge_credentials(
        identity=identity,
        anonymous=identity == ANONYMOUS,
        writes=mirror is not None and mirror.startswith("gs://"),
        exposed=storage_checks.exposed_key(who.credentials_file) if asks else None,
    )
    yield from _rights(who, sources, mirror)


def _rights(
    who: Examinee, sources: Mapping[str, DataConfig], mirror: str | None
) -> Iterator[Finding]:
    checkpoint, name = who.loaded.config.checkpoint, who.loaded.config.run.name
    for setting, data in sources.items():
        if not _will_be_made(data):
            probe = functools.partial(storage_checks.probe_source, setting=setting)
            yield from _of_bucket(who, str(data.source), setting, probe, SOURCE_NEEDS)
    if mirror is None:
        text = "checkpoint.mirror is not set: a machine that is lost takes its checkpoints along"
        yield Finding("bucket", "warn", text, "checkpoint.mirror=gs://BUCKET/PREFIX")
        return
    wanted = MIRROR_NEEDS | ({"delete"} if checkpoint.keep_remote != "all" else set())
    probe = functools.partial(
        storage_checks.probe_mirror,
        setting="checkpoint.mirror",
        canary=storage_checks.canary_name(prefix_of(name)),
    )
    yield from _of_bucket(who, mirror, "checkpoint.mirror", probe, wanted)


def _of_bucket(
    who: Examinee,
    url: str,
    setting: str,
    probe: Callable[[Bucket], storage_checks.Rights],
    wanted: frozenset[str],
) -> Iterator[Finding]:
    try:
        rights = probe(who.open(url))
    except BucketError as error:
        yield Finding("bucket", "fail", f"{setting}: {error}")
    else:
        yield from storage_checks.judge_rights(rights, wanted=wanted)


def _data(who: Examinee, tokens: list[int]) -> Iterator[Finding]:
    """Look at each source's files; `tokens` gets what is in them."""
    config = who.loaded.config
    sources = data_checks.sources_of(config.data)
    for setting, data in sources.items():
        if _will_be_made(data):
            text = f"{data.source}: training makes it at its start (data.prepare={data.prepare})"
            yield Finding("data", "ok", text)
            continue
        try:
            bucket = who.open(str(data.source))
        except BucketError:
            continue  # said with the rights
        found = data_checks.probe_data(
            bucket, data, vocabulary=who.loaded.shape.vocabulary, is_quick=who.is_quick
        )
        if isinstance(found, Finding):
            yield found
            continue
        tokens.append(found.tokens)
        yield from data_checks.judge_data(
            found, data, vocabulary=who.loaded.shape.vocabulary, setting=setting
        )


def _ranks(
    who: Examinee, *, ranks: int, device: Literal["cuda", "cpu"], nvlinks: int | None
) -> Iterator[Finding]:
    payload = CUDA_PAYLOAD_BYTES if device == "cuda" else CPU_PAYLOAD_BYTES
    with tempfile.TemporaryDirectory(prefix="refocused-doctor-") as name:
        folder = Path(name)
        outcome = run_ranks(
            RankTask(
                device=who.loaded.config.run.device,
                payload_bytes=payload if ranks > 1 else 0,
                config=who.config,
                overrides=(*who.overrides, *_places(who.loaded.config.data, folder)),
                name=who.name,
                folder=folder / "run",
                credentials_file=who.credentials_file,
                project=who.project,
            ),
            ranks=ranks,
        )
    yield judge_allreduce(outcome, device=device, nvlinks=nvlinks)
    if outcome.doing in (None, "step"):
        yield judge_step(outcome)


def _will_be_made(data: DataConfig) -> bool:
    """Tell whether training makes the source at its start."""
    return data.prepare is not None and not Path(str(data.source)).expanduser().is_dir()


def _places(data: DataConfig, folder: Path) -> list[str]:
    """Return the settings by which the step makes nothing that was not there.

    Shards go to the run's own cache where there is one: training finds them there.
    """
    places = []
    if _will_be_made(data):
        places.append(f"data.source={folder / 'source'}")
    if not Path(data.cache).is_dir():
        places.append(f"data.cache={folder / 'cache'}")
    return places
