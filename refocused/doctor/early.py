"""Mistakes that would end a run soon after its start, found before ranks start, without torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.gcs_client import find_credentials
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.step.branches import saved_steps
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun
from refocused.config.run_config import RunConfig
from refocused.doctor.run_fits import host_shortage
from refocused.estimate.memory_plan import Device, process_bytes
from refocused.estimate.precision import BF16_CAPABILITY, native_dtype, with_dtype
from refocused.monitor.sampler.machine_readings import memory_now
from refocused.system.errors import BucketError, ConfigError, RefocusedError
from refocused.system.hardware import cpu_flags

MIRROR = "checkpoint.mirror"
STORE = "https://storage.googleapis.com"
LOOKUP_SECONDS = 1.5
SAMPLED_BLOCKS = 16  # of 65,536 ids, from the first file


def refuse_early(
    loaded: LoadedRun,
    *,
    ranks: int,
    ranks_here: int,
    device: Device,
    resume: str,
    credentials_file: Path | None,
    started: bool = False,
) -> None:
    """Refuse a run that cannot start, in about a second, with a line for each reason.

    `started`: the ranks run already, and hold what the plan counts for their processes.

    Raises:
        ConfigError: It cannot start.
    """
    config, memory = loaded.config, memory_now()
    places = place_problems(loaded, resume=resume, credentials_file=credentials_file)
    if config.precision.dtype == "auto":
        native = native_dtype(
            capability=BF16_CAPABILITY if device == "cuda" else None, cpu_flags=cpu_flags()
        )
        # By the flags alone, since torch is not imported here. A resume keeps its checkpoint's
        # precision; planned in the smallest, none is refused.
        may_resume = resume != "none" and (config.checkpoint.mirror or _has_checkpoints(config))
        loaded = with_dtype(loaded, "bf16" if may_resume else native.dtype)
    if started:
        held = process_bytes(device, ranks_here=ranks_here)
        memory = dataclasses.replace(memory, available=memory.available + held)
    shortage = host_shortage(
        loaded, ranks=ranks, ranks_here=ranks_here, device=device, gpu_bytes=None, memory=memory
    )
    problems = list(dict.fromkeys(places.values()))
    problems += [f"{config.run.name}: {shortage.text}. {shortage.fix}"] if shortage else []
    if problems:
        raise ConfigError("\n".join(problems))


def place_problems(
    loaded: LoadedRun, *, resume: str = "auto", credentials_file: Path | None = None
) -> Mapping[str, str]:
    """Return what is wrong with the places that a run names, by the setting that names it.

    The files of a folder are checked as far as that is quick. Those in a bucket are not: that
    takes requests, which the run makes itself.
    """
    config = loaded.config
    sources = sources_of(config.data)
    problems: dict[str, str] = {}
    remote = []
    for setting, url in places_of(config).items():
        data, problem = sources.get(setting), None
        try:
            bucket = open_bucket(url)
        except BucketError as error:
            problem = str(error)
        else:
            if url.startswith("gs://"):
                # A run with checkpoints of its own begins without its mirror.
                if data is not None or (resume != "none" and not _has_checkpoints(config)):
                    remote.append(setting)
            elif data is not None and data.prepare is None:
                known = None if config.model.vocabulary == "auto" else loaded.shape.vocabulary
                problem = _problem_of_files(bucket, data, vocabulary=known)
        if problem is not None:
            problems[setting] = f"{setting}: {problem}"
    if remote and (problem := _problem_of_store(credentials_file)):
        problems |= dict.fromkeys(remote, f"{', '.join(remote)}: {problem}")
    return problems


def places_of(config: RunConfig) -> Mapping[str, str]:
    """Return the address of each source and of the mirror, by the setting that names it."""
    mirror = config.checkpoint.mirror
    places = {setting: str(data.source) for setting, data in sources_of(config.data).items()}
    return places | ({} if mirror is None else {MIRROR: mirror})


def sources_of(data: DataConfig) -> Mapping[str, DataConfig]:
    """Return the settings of each source, by the setting that names it."""
    if data.source is not None:
        return {"data.source": data}
    return {f"data.mixture.{name}": data.of_source(name) for name in data.mixture}


def _has_checkpoints(config: RunConfig) -> bool:
    return bool(saved_steps(Path(config.run.directory) / config.run.name / "checkpoints"))


def _problem_of_store(credentials_file: Path | None) -> str | None:
    if (host := missing_store_name()) is not None:
        fix = f"Check this machine's network and DNS (getent hosts {host}), or name a folder."
        return f"DNS knows no host {host}. {fix}"
    try:
        if credentials_file is not None:
            find_credentials(credentials_file)
    except BucketError as error:
        return str(error)
    return None


def missing_store_name() -> str | None:
    """Return the store's host name where DNS says that there is none; None: it may be reached.

    A slow or failing DNS proves nothing, and behind a proxy names are looked up elsewhere.
    """
    address = urllib.parse.urlsplit(os.environ.get("STORAGE_EMULATOR_HOST") or STORE)
    host, answers = address.hostname, []
    if host is None or address.scheme in urllib.request.getproxies():
        return None

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            answers.append(error.errno)

    thread = threading.Thread(target=look_up, daemon=True)  # DNS may take longer than we wait
    thread.start()
    thread.join(LOOKUP_SECONDS)
    return host if answers and answers[0] in (socket.EAI_NONAME, socket.EAI_NODATA) else None


def _problem_of_files(bucket: Bucket, data: DataConfig, *, vocabulary: int | None) -> str | None:
    """Return why a folder's token files cannot be trained on, as far as a quick look shows."""
    from refocused.data.formats.object_names import MANIFEST_NAME, matches
    from refocused.data.manifest.select_files import chosen_names
    from refocused.data.manifest.shard_manifest import Shard, read_manifest

    rows: dict[str, Shard] = {}
    try:
        listing = {blob.name: blob for blob in bucket.list()}
        if MANIFEST_NAME in listing and not matches(MANIFEST_NAME, data.exclude):
            rows = {shard.name: shard for shard in read_manifest(bucket).shards}
        names = chosen_names(rows or listing, data=data, url=bucket.url)
    except RefocusedError as error:
        return str(error)
    if vocabulary is None:
        return None
    names = [name for name in names if not matches(name, data.skip)]
    largest_ids = {name: rows[name].max_id for name in names if name in rows}
    if names and not rows:
        largest_ids = {names[0]: _largest_sampled(bucket, listing[names[0]], data)}
    for name, largest in largest_ids.items():
        if largest is not None and largest >= vocabulary:
            return (
                f"{bucket.url}: {name} holds the id {largest:,}, and the model's vocabulary ends "
                f"at {vocabulary - 1:,}. Name the tokenizer that made the data in "
                "data.tokenizer, or set model.vocabulary to a number above all ids: "
                f"python launch/prepare_data.py inspect {bucket.url} shows the largest."
            )
    return None


def _largest_sampled(bucket: Bucket, blob: BlobInfo, data: DataConfig) -> int | None:
    """Return the largest id at the start of a file; None: unreadable, which the run reports."""
    from refocused.data.formats.object_reader import ObjectReader
    from refocused.data.formats.token_blocks import token_blocks
    from refocused.data.formats.token_layout import read_layout

    reader = ObjectReader(bucket, blob)
    try:
        layout = read_layout(reader, name=blob.name, data=data)
        blocks = itertools.islice(token_blocks(reader, layout, name=blob.name), SAMPLED_BLOCKS)
        return max((int(block.max()) for block in blocks if block.size), default=None)
    except RefocusedError:
        return None
