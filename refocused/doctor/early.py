"""Mistakes that would end a run soon after its start, found before ranks start, without torch."""

from __future__ import annotations

import dataclasses
import itertools
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
from refocused.doctor.storage import missing_store_name, sources_of
from refocused.estimate.memory_plan import Device, process_bytes
from refocused.estimate.precision import BF16_CAPABILITY, native_dtype, with_dtype
from refocused.monitor.sampler.machine_readings import memory_now
from refocused.system.errors import BucketError, ConfigError, RefocusedError
from refocused.system.hardware import cpu_flags

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
    """Refuse a run that cannot start, in about a second.

    Args:
        loaded: The run.
        ranks: Of it.
        ranks_here: On this machine.
        device: What they compute on.
        resume: What is to be resumed.
        credentials_file: Key file for `gs://`.
        started: Whether the ranks run, and hold already what is planned for processes.

    Raises:
        ConfigError: Everything that was found, one line each.
    """
    if loaded.config.precision.dtype == "auto":
        native = native_dtype(
            capability=BF16_CAPABILITY if device == "cuda" else None, cpu_flags=cpu_flags()
        )
        # By the flags alone, since torch is not imported here. A resume keeps its checkpoint's
        # precision; planned in the smallest, none is refused.
        config = loaded.config
        may_resume = resume != "none" and (config.checkpoint.mirror or _has_checkpoints(config))
        loaded = with_dtype(loaded, "bf16" if may_resume else native.dtype)
    memory = memory_now()
    held = process_bytes(device, ranks_here=ranks_here) if started else 0
    places = place_problems(loaded, resume=resume, credentials_file=credentials_file)
    found = list(dict.fromkeys(places.values()))
    shortage = host_shortage(
        loaded,
        ranks=ranks,
        ranks_here=ranks_here,
        device=device,
        gpu_bytes=None,
        memory=dataclasses.replace(memory, available=memory.available + held),
    )
    if shortage is not None:
        found.append(f"{loaded.config.run.name}: {shortage.text}. {shortage.fix}")
    if found:
        raise ConfigError("\n".join(found))


def place_problems(
    loaded: LoadedRun, *, resume: str = "auto", credentials_file: Path | None = None
) -> Mapping[str, str]:
    """Return what is wrong with the places that a run names, by the setting that names it.

    The files of a folder are looked at as far as that is quick. Those in a bucket are not: that
    takes requests, which the run makes itself.

    Args:
        loaded: The run.
        resume: What is to be resumed.
        credentials_file: Key file for `gs://`.
    """
    config = loaded.config
    sources = sources_of(config.data)
    places = {setting: str(data.source) for setting, data in sources.items()}
    if config.checkpoint.mirror is not None:
        places["checkpoint.mirror"] = config.checkpoint.mirror
    problems: dict[str, str] = {}
    buckets: dict[str, Bucket] = {}
    for setting, url in places.items():
        try:
            buckets[setting] = open_bucket(url)
        except BucketError as error:
            problems[setting] = f"{setting}: {error}"
    for setting, data in sources.items():
        if setting in buckets and not places[setting].startswith("gs://") and data.prepare is None:
            known = None if config.model.vocabulary == "auto" else loaded.shape.vocabulary
            problem = _problem_of_files(buckets[setting], data, vocabulary=known)
            if problem is not None:
                problems[setting] = f"{setting}: {problem}"
    remote = [
        setting
        for setting in buckets
        if places[setting].startswith("gs://")
        and (setting != "checkpoint.mirror" or _reads_mirror(config, resume))
    ]
    if remote and (problem := _problem_of_store(credentials_file)):
        problems |= dict.fromkeys(remote, f"{', '.join(remote)}: {problem}")
    return problems


def _reads_mirror(config: RunConfig, resume: str) -> bool:
    """Whether a run needs its mirror to begin: one with checkpoints of its own goes on without."""
    return resume != "none" and not _has_checkpoints(config)


def _has_checkpoints(config: RunConfig) -> bool:
    folder = Path(config.run.directory) / config.run.name
    return bool(saved_steps(folder / "checkpoints"))


def _problem_of_store(credentials_file: Path | None) -> str | None:
    host = missing_store_name()
    if host is not None:
        return (
            f"DNS knows no host {host}. Check this machine's network and DNS "
            f"(getent hosts {host}), or name a folder."
        )
    try:
        if credentials_file is not None:
            find_credentials(credentials_file)
    except BucketError as error:
        return str(error)
    return None


def _problem_of_files(bucket: Bucket, data: DataConfig, *, vocabulary: int | None) -> str | None:
    """Return why a folder's token files cannot be trained on, as far as a look tells."""
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
    known = {name: row.max_id for name in names if (row := rows.get(name)) is not None}
    if names and not rows:
        known = {names[0]: _largest_sampled(bucket, listing[names[0]], data)}
    for name, largest in known.items():
        if largest is not None and largest >= vocabulary:
            return (
                f"{bucket.url}: {name} holds the id {largest:,}, and the model's vocabulary ends "
                f"at {vocabulary - 1:,}. Name the tokenizer that made the data in "
                "data.tokenizer, or set model.vocabulary to a number above all ids: "
                f"python launch/prepare_data.py inspect {bucket.url} shows the largest."
            )
    return None


def _largest_sampled(bucket: Bucket, blob: BlobInfo, data: DataConfig) -> int | None:
    """Return the largest id at the start of a file; None: it cannot be read, as the run will say.

    The run reads all files, and names those that are damaged.
    """
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
