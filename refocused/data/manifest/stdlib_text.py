"""Prepare the source text of Python's standard library as a small corpus."""

import hashlib
import io
import re
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from refocused.bucket.bucket import Bucket, extended_crc32c
from refocused.config.data import PYTHON_STDLIB
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest, write_manifest
from refocused.system.errors import BucketError, ShardError
from refocused.tokenizers.encoders import BYTES, BYTES_END_OF_TEXT

SHARD_TOKENS = 1_000_000
VALIDATION_SHARE = 20  # one document in twenty: about 5 %
_SHARD_NAME = re.compile(r"stdlib_(train|val)_\d{6}\.npy")
EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


def prepare_stdlib(bucket: Bucket) -> Manifest:
    """Write the standard library's `*.py` files as byte tokens, unless the bucket has them.

    Ids 0 to 255 are the bytes of the text; 256 precedes each file. One file in twenty, by a hash
    of its name, goes to `stdlib_val_NNNNNN.npy`, the others to `stdlib_train_NNNNNN.npy`. The
    manifest is written last.

    Raises:
        BucketError: The bucket cannot be written.
        ShardError: This Python's library has no source text, or the folder holds something else.
    """
    manifest = None if bucket.info(MANIFEST_NAME) is None else read_manifest(bucket)
    if manifest is None:
        names = [blob.name for blob in bucket.list()] if Path(bucket.url).is_dir() else []
    else:
        names = [shard.name for shard in manifest.shards]
    if other := [name for name in names if not _SHARD_NAME.fullmatch(name)]:
        raise ShardError(
            f"{bucket.url}: data.source={PYTHON_STDLIB} writes its tokens here, but the folder "
            f"holds other files ({other[0]}). Nothing was written. Move them elsewhere, or name "
            f"them as the source: data.source={bucket.url}"
        )
    if manifest is not None:
        return manifest
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if not EXCLUDED.intersection(path.parts))
    if not names:
        raise ShardError(
            f"{root}: this Python's library has no source text (*.py). Use another Python, or "
            "set data.source to token files."
        )
    shards = []
    digests = {name: hashlib.sha256(name.encode()).digest()[:4] for name in names}
    held_out = {
        name for name in names if not int.from_bytes(digests[name], "big") % VALIDATION_SHARE
    }
    for kind in ("train", "val"):
        tokens = _tokens(root, [name for name in names if (name in held_out) == (kind == "val")])
        for number, start in enumerate(range(0, len(tokens), SHARD_TOKENS)):
            ids, name = tokens[start:][:SHARD_TOKENS], f"stdlib_{kind}_{number:06d}.npy"
            np.save(file := io.BytesIO(), ids.astype("<u2"))
            content = file.getvalue()
            try:  # several processes may prepare the same folder: an object there keeps its age
                blob = bucket.write(name, content)
            except BucketError:  # an interrupted preparation by another Python left another object
                blob = bucket.write(name, content, overwrite=True)
            documents, max_id = int(np.count_nonzero(ids == BYTES_END_OF_TEXT)), int(ids.max())
            facts = len(content), extended_crc32c(0, content), blob.generation, max_id, documents
            shards.append(Shard(name, len(ids), "uint16", *facts))
    manifest = Manifest(tuple(shards), BYTES)
    write_manifest(bucket, manifest)
    return manifest


def _tokens(root: Path, names: list[str]) -> npt.NDArray[np.uint16]:
    """Return the documents, each after a separator."""
    separator = np.array([BYTES_END_OF_TEXT], np.uint16)
    texts = (np.frombuffer((root / name).read_bytes(), np.uint8) for name in names)
    return np.concatenate([part for text in texts for part in (separator, text)])
