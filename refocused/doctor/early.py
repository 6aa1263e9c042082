"""Find mistakes that would end a run at its start, before ranks start and without torch."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.open_bucket import Credentials, open_bucket
from refocused.bucket.partial_files import existing_folder
from refocused.checkpoints.step.checkpoint_directory import saved_steps
from refocused.config.data import PYTHON_STDLIB, STDLIB_FOLDER, DataConfig
from refocused.config.load_run import LoadedRun
from refocused.config.run_config import RunConfig
from refocused.data.formats.object_names import MANIFEST_NAME, matches
from refocused.doctor.run_fits import host_shortage
from refocused.estimate.memory_plan import (
    BF16_CAPABILITY,
    Device,
    native_dtype,
    process_bytes,
    with_dtype,
)
from refocused.metrics.run_time import require_budget
from refocused.system.errors import (
    BucketError,
    ConfigError,
    RefocusedError,
    ShardError,
    as_typed,
    how_to_install,
)
from refocused.system.hardware import cpu_flags, memory_now

MIRROR = "checkpoint.mirror"
TRACKERS = {f"tracking.{name}": name for name in ("wandb", "tensorboard")}  # their packages
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
    """Check in about a second that a run can start.

    `started`: the ranks are running and already hold the memory planned for their processes.

    Raises:
        StoppedEarlyError: Its budget is spent.
        ConfigError: It cannot start; one line for each reason.
    """
    config, memory = loaded.config, memory_now()
    require_budget(Path(config.run.directory) / config.run.name, config.cost)
    places = place_problems(loaded, resume=resume, credentials_file=credentials_file)
    if config.precision.dtype == "auto":
        native = native_dtype(
            capability=BF16_CAPABILITY if device == "cuda" else None, cpu_flags=cpu_flags()
        )
        # From the flags alone, without torch. A resume keeps its checkpoint's precision: plan for
        # the smallest, so that none is refused.
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
    """Return the problems of a run's folders, sources, mirror and trackers, by setting.

    Files in a folder are checked as far as that is quick. Files in a bucket are not: that takes
    requests, which the run makes itself.
    """
    config = loaded.config
    sources = sources_of(config.data)
    problems: dict[str, str] = {}
    remote: dict[str, list[str]] = {}  # settings by server
    stores: dict[str, Bucket] = {}  # one by server
    for setting, url in places_of(config).items():
        data = sources.get(setting)
        try:
            bucket = open_bucket(url, Credentials(credentials_file))
            if bucket.endpoint is not None:
                # A run with local checkpoints starts without its mirror.
                if data is not None or (resume != "none" and not _has_checkpoints(config)):
                    remote.setdefault(bucket.endpoint, []).append(setting)
                    stores[bucket.endpoint] = bucket
            elif data is not None and not is_made_at_the_start(data):
                known = None if config.model.vocabulary == "auto" else loaded.shape.vocabulary
                _check_files(bucket, data, vocabulary=known)
        except RefocusedError as error:
            problems[setting] = f"{setting}: {error}"
    run = Path(config.run.directory) / config.run.name
    for setting, folder in (("run.directory", run), ("data.cache", Path(config.data.cache))):
        existing = existing_folder(folder)
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            problem = f"{folder} cannot be written: {existing} is read-only or a file. Make it"
            problems[setting] = f"{setting}: {problem} writable, or set another folder."
    for setting, package in TRACKERS.items():
        if getattr(config.tracking, package) and importlib.util.find_spec(package) is None:
            problem = f"needs {package}. Install it: {how_to_install(package)}"
            problems[setting] = f"{setting}: {problem}, or leave the setting out."
    for endpoint, settings in remote.items():
        try:
            if credentials_file is not None:
                _ = stores[endpoint].identity  # reads it
            if (host := missing_store_name(endpoint)) is not None:
                raise BucketError(
                    f"Unknown host {host}. Check the network and DNS of this machine (getent hosts "
                    f"{host}), or name a folder."
                )
        except BucketError as error:
            problems |= dict.fromkeys(settings, f"{', '.join(settings)}: {error}")
    return problems


def places_of(config: RunConfig) -> Mapping[str, str]:
    """Return the addresses of the sources and the mirror, by setting."""
    mirror = config.checkpoint.mirror
    places = {setting: data.address for setting, data in sources_of(config.data).items()}
    return places | ({} if mirror is None else {MIRROR: mirror})


def sources_of(data: DataConfig) -> Mapping[str, DataConfig]:
    """Return the data settings of each source, by the setting with its address."""
    return {
        f"data.mixture.{name}" if name else "data.source": source
        for name, source in data.by_source.items()
    }


def is_made_at_the_start(data: DataConfig) -> bool:
    """Return whether training writes the source when it starts."""
    return data.source == PYTHON_STDLIB and not Path(STDLIB_FOLDER, MANIFEST_NAME).is_file()


def _has_checkpoints(config: RunConfig) -> bool:
    return bool(saved_steps(Path(config.run.directory) / config.run.name / "checkpoints"))


def missing_store_name(endpoint: str) -> str | None:
    """Return the host name of a store's server if DNS reports that it does not exist, else None.

    A slow or failing DNS proves nothing, and a proxy looks names up itself.
    """
    address = urllib.parse.urlsplit(endpoint)
    host, answers = address.hostname, []
    if host is None or address.scheme in urllib.request.getproxies():
        return None

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            answers.append(error.errno)

    thread = threading.Thread(target=look_up, daemon=True)  # DNS may be slow
    thread.start()
    thread.join(LOOKUP_SECONDS)
    return host if answers and answers[0] in (socket.EAI_NONAME, socket.EAI_NODATA) else None


def _check_files(bucket: Bucket, data: DataConfig, *, vocabulary: int | None) -> None:
    """Raise RefocusedError for a problem of a folder's token files that shows quickly."""
    from refocused.data.formats.object_reader import ObjectReader
    from refocused.data.formats.token_blocks import token_blocks
    from refocused.data.formats.token_layout import read_layout
    from refocused.data.manifest.shard_manifest import chosen_names, listed_rows

    listing = {blob.name: blob for blob in bucket.list()}
    rows = listed_rows(bucket, listing, exclude=data.exclude)
    names = chosen_names(rows or listing, data=data, url=bucket.url)
    if vocabulary is None:
        return
    names = [name for name in names if not matches(name, data.skip)]
    largest_ids = {name: rows[name].max_id for name in names if name in rows}
    if names and not rows:
        reader = ObjectReader(bucket, listing[names[0]])
        with contextlib.suppress(RefocusedError):  # unreadable: the run reports it
            layout = read_layout(reader, name=names[0], data=data)
            blocks = itertools.islice(token_blocks(reader, layout, name=names[0]), SAMPLED_BLOCKS)
            largest = max((int(block.max()) for block in blocks if block.size), default=None)
            largest_ids = {names[0]: largest}
    for name, largest in largest_ids.items():
        if largest is not None and largest >= vocabulary:
            raise ShardError(
                f"{bucket.url}: {name} has the id {largest:,}, and the model has ids up to "
                f"{vocabulary - 1:,}. Set data.tokenizer to the tokenizer that made the data, or "
                "model.vocabulary to more than the largest id, which this shows: "
                f"{as_typed('prepare_data inspect')} {bucket.url}"
            )
