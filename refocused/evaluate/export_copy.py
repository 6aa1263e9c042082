"""Copy an exported model to a bucket or the hub and back, whole and verified."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pydantic

from refocused.bucket.bucket import BlobInfo, Bucket, crc32c_of, with_checksum
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.transfer import Progress, download_many, upload_many
from refocused.checkpoints.step.checkpoint_directory import read_mapping
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.system.atomic_files import fsync_directories, replace_folder
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.locks import FileLock
from refocused.tokenizers.encoders import END_OF_TEXT_ENTRIES, HUB
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE

MODELS = Path("data/models")  # models downloaded from buckets, each below its address
FOLDER = "final_model"  # what a finished run becomes, here and in its mirror
ORIGIN = "origin.json"  # in that folder: of which save it is
CONFIG = "config.json"  # every folder of transformers' form has it
HUB_SECONDS = 10.0  # until the hub counts as unreachable
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in transformers' folders
INDEX = ".index.json"  # after those names: of several files
_ANOTHER = f"is not the file listed in {COMMITTED}"

logger = logging.getLogger(__name__)


_Files = Mapping[str, BlobInfo]  # a model's, as they should be
_MARKER = pydantic.TypeAdapter(dict[str, dict[str, int | None]])  # `bytes` and `crc32c` of each


def upload_folder(folder: Path, bucket: Bucket, prefix: str) -> None:
    """Make a prefix of a bucket the copy of a folder; `COMMITTED` is written last.

    A marker of other content is removed first, so that no reader sees a mixture.

    Raises:
        BucketError: The bucket cannot be read or written.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    sums = {name: crc32c_of(path) for name, path in files.items()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    marked = {name: {"bytes": sizes[name], "crc32c": sums[name]} for name in files}
    content = json.dumps(marked, indent=1).encode()
    marker = f"{prefix}/{COMMITTED}"
    if bucket.info(marker) is not None and bucket.read(marker) == content:
        return
    bucket.delete(marker)
    for blob in list(bucket.list(f"{prefix}/")):
        known = sums.get(blob.name.removeprefix(f"{prefix}/"))
        if known is None or with_checksum(bucket, blob).crc32c != known:
            bucket.delete(blob.name)
    upload_many(bucket, {f"{prefix}/{name}": path for name, path in files.items()})
    bucket.write(marker, content)


def fetch_folder(bucket: Bucket, folder: Path, *, progress: Progress | None = None) -> Path:
    """Make a folder the copy of the model at a bucket's own prefix; return it.

    Every byte is verified against the bucket's checksums and the marker's. The folder replaces an
    older copy only when it is complete; files of an interrupted download are reused.

    Raises:
        CheckpointError: The model is incomplete there, or another process is downloading it.
        BucketError: The bucket cannot be read, or the disk is full.
    """
    blobs = {blob.name: blob for blob in bucket.list() if "/" not in blob.name}
    files = _described(bucket, blobs)
    with disk_errors(folder):
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        if not lock.acquire():
            raise CheckpointError(
                f"Another process is fetching {bucket.url} to {folder}. Wait until it is done."
            )
        try:
            if _others(folder, files) or _missing(folder, files):
                stage = folder.with_name(f".{folder.name}.fetch")
                metadata = [blobs[name] for name in _missing(stage, files)]
                download_many(bucket, metadata, stage, progress=progress)
                for path in _others(stage, files):
                    path.unlink()
                if damaged := _missing(stage, files):
                    for name in damaged:
                        (stage / name).unlink(missing_ok=True)
                    raise _damaged(bucket, f"{damaged[0]} {_ANOTHER}")
                fsync_directories(stage)
                replace_folder(stage, folder)
        finally:
            lock.release()
    return folder


def _described(bucket: Bucket, blobs: _Files) -> _Files:
    """Return a model's files with the checksums of its marker, or as listed if it has none."""
    if COMMITTED not in blobs:
        if CONFIG not in blobs or ORIGIN in blobs or bucket.url.rstrip("/").endswith(f"/{FOLDER}"):
            raise CheckpointError(
                f"{bucket.url} has no {COMMITTED} object: no model is there, or its upload never "
                "finished. Run the command that trained the run again to finish it. If the folder "
                "was copied there by other means, copy it to the disk and name it there."
            )
        what = "%s has no %s object: whether its upload was finished is not known"
        logger.warning(what, bucket.url, COMMITTED)
        return blobs
    content = bucket.read(COMMITTED)
    try:
        marked = _MARKER.validate_json(content)
    except pydantic.ValidationError:
        what = f"{COMMITTED} holds {content[:80]!r}, which is no marker"
        raise _damaged(bucket, what) from None
    files = {}
    for name, file in marked.items():
        if (blob := blobs.get(name)) is None:
            raise _damaged(bucket, f"{name} is missing")
        checksum = file.get("crc32c")
        if blob.size != file.get("bytes") or blob.crc32c not in (None, checksum):
            raise _damaged(bucket, f"{name} {_ANOTHER}")
        files[name] = dataclasses.replace(blob, crc32c=checksum)
    return files


def _missing(folder: Path, files: _Files) -> list[str]:
    def is_copy(path: Path, blob: BlobInfo) -> bool:
        if not path.is_file() or path.stat().st_size != blob.size:
            return False
        return blob.crc32c is None or crc32c_of(path) == blob.crc32c

    return [name for name, blob in files.items() if not is_copy(folder / name, blob)]


def _others(folder: Path, files: _Files) -> list[Path]:
    """Return files that do not belong to the model; transformers might load their weights."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if path.is_file() and path.name not in files]


def _damaged(bucket: Bucket, what: str) -> CheckpointError:
    return CheckpointError(
        f"{bucket.url} is damaged: {what}. Remove {COMMITTED} there, and run the command that "
        "trained the run again to upload the model once more."
    )


def other_form(folder: Path) -> str | None:
    """Return what a folder or file holds in place of a whole model, and the remedy, if known."""
    files = folder.iterdir() if folder.is_dir() else (folder,)
    names = [path.name for path in files]
    if "adapter_config.json" in names:
        return (
            f"{folder} is an adapter, which changes a model and is none. Merge it into its base "
            "model (peft's merge_and_unload, then save_pretrained), and name the result."
        )
    if any(name.endswith(".gguf") for name in names):
        return (
            f"{folder} holds a model as GGUF, llama.cpp's form, which is not read here. Name the "
            "transformers folder that it was made from."
        )
    return None


def weight_files(folder: Path, *, trusts_pickles: bool) -> list[str]:
    """Return which files of a transformers folder hold the weights; safetensors come first.

    Raises CheckpointError if there are none, or only pickled ones and `trusts_pickles` is not set.
    """
    names = {path.name for path in folder.iterdir()}
    single = next((file for file in WEIGHTS if names & {file, file + INDEX}), None)
    if single is None and (other := other_form(folder)) is not None:
        raise CheckpointError(other)
    if single is None or not (trusts_pickles or single == WEIGHTS[0]):
        what = "no model.safetensors" if single is None else f"pickled weights alone ({single})"
        raise CheckpointError(
            f"{folder} has {what}. Name another, or convert it with transformers (from_pretrained, "
            "then save_pretrained). If you trust its source, add --trust, which reads tensors from "
            "a pytorch_model.bin and executes nothing."
        )
    if single + INDEX not in names:
        return [single]
    listed = read_mapping(folder / (single + INDEX)).get("weight_map")
    files = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
    if not files or any("/" in file or Path(file).suffix not in single for file in files):
        raise CheckpointError(f"{folder / (single + INDEX)} names no files. Download it again.")
    return files


def fetch_hub(
    address: str, *, trusts_pickles: bool, fetches: bool = True
) -> tuple[Path | None, str]:
    """Download a model of the hub, `hub:MODEL[@REVISION]`; return its folder and commit.

    If it is not to be fetched, look only whether it is there, and return None for the folder.
    `HF_ENDPOINT` names another hub; with `HF_HUB_OFFLINE` the cached files are used. Raises
    CheckpointError if the hub is out of reach, or has no such model.
    """
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    model, _, asked = address.removeprefix(HUB).partition("@")
    patterns = [
        CONFIG,
        "adapter_config.json",
        *(TOKENIZER_FILE, *END_OF_TEXT_ENTRIES),
        "model*.safetensors",
        *(file + INDEX for file in WEIGHTS),
    ]
    patterns += ["pytorch_model*.bin"] * trusts_pickles
    with hub_errors(f"{address} cannot be downloaded"):
        api, revision = huggingface_hub.HfApi(), asked or None
        with contextlib.suppress(OfflineModeIsEnabled):  # the download itself has no time limit
            files = api.model_info(model, revision=revision, timeout=HUB_SECONDS)
            if not fetches:
                return None, files.sha or ""
        folder = Path(api.snapshot_download(model, revision=revision, allow_patterns=patterns))
    return folder, folder.name


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Raise CheckpointError in place of the errors of huggingface_hub."""
    from huggingface_hub import constants

    try:
        yield
    except RefocusedError:
        raise
    except Exception as error:  # also of its HTTP library, which depends on its version
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise CheckpointError(
            f"{what} ({reason:.300}). Check the name, HF_TOKEN and the connection to "
            f"{constants.ENDPOINT}."
        ) from None
