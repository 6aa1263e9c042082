"""Compare the files of a data set with its manifest, or with their own headers."""

import dataclasses
from collections.abc import Callable

import numpy as np

from refocused.bucket.bucket import Bucket, stored_crc32c
from refocused.bucket.transfer import map_in_threads
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import count_tokens, token_blocks
from refocused.data.formats.token_layout import read_layout, vocabulary_advice
from refocused.data.manifest.shard_manifest import (
    chosen_names,
    list_source,
    listed_rows,
    wrong_type,
)
from refocused.system.errors import RefocusedError, ShardError


@dataclasses.dataclass(frozen=True, slots=True)
class FileCheck:
    """Result of one file's verification."""

    name: str
    size: int  # bytes, as listed; 0 if it is missing
    tokens: int | None = None  # without padding; None: not counted
    max_id: int | None = None  # None: not read
    problem: str | None = None  # with its remedy


def verify_data(
    bucket: Bucket,
    data: DataConfig,
    *,
    deep: bool,
    vocabulary: int | None,
    progress: Callable[[int, int], None],
) -> list[FileCheck]:
    """Verify every file, in parallel; return the findings in name order.

    With a manifest, sizes and checksums are compared; without one, the headers are checked. `deep`
    also reads all tokens, and checks their number and that their ids are below `vocabulary`.
    `progress` is called with bytes done and bytes in all. Raises `ShardError` if there are no
    token files or the manifest cannot be read, and `BucketError` if the source cannot be listed.
    """
    listing = list_source(bucket, exclude=data.exclude)
    rows = listed_rows(bucket, listing, exclude=data.exclude)
    names = chosen_names(rows or listing, data=data, url=bucket.url)
    total = sum(listing[name].size for name in names if name in listing)

    def find(name: str) -> FileCheck:
        row = rows.get(name)
        if name not in listing:
            problem = "it is in the manifest, but not in the listing. Upload it, or exclude it."
            return FileCheck(name, 0, problem=f"{name}: {problem}")
        blob = listing[name]
        finding = FileCheck(name, blob.size)
        try:
            if row is not None:
                if blob.size != row.size:
                    raise ShardError(
                        f"{name}: it has {blob.size:,} bytes, but {MANIFEST_NAME} says "
                        f"{row.size:,}. Download or upload it again."
                    )
                if row.crc32c is not None and (crc := stored_crc32c(bucket, blob)) != row.crc32c:
                    raise ShardError(
                        f"{name}: its CRC-32C is {crc:#010x}, but {MANIFEST_NAME} says "
                        f"{row.crc32c:#010x}: its bytes are damaged. Download or upload it again."
                    )
                finding = dataclasses.replace(finding, tokens=row.tokens)
            if deep or row is None:
                reader = ObjectReader(bucket, blob)
                layout = read_layout(reader, name=name, data=data)
                if deep:
                    blocks = token_blocks(reader, layout, name=name)
                    counts = [(len(block), int(block.max())) for block in blocks if block.size]
                    tokens = sum(count for count, _ in counts)
                    largest = max((max_id for _, max_id in counts), default=0)
                    finding = FileCheck(name, blob.size, tokens, largest)
                else:
                    tokens, _ = count_tokens(reader, layout, name=name)
                    finding = FileCheck(name, blob.size, tokens)
                max_id = finding.max_id or 0
                if row is not None and finding.tokens != row.tokens:
                    raise ShardError(
                        f"{name}: it holds {finding.tokens:,} tokens, but {MANIFEST_NAME} says "
                        f"{row.tokens:,}. Write the manifest again: refocused prepare_data "
                        "manifest --write"
                    )
                if row is not None and max_id > np.iinfo(row.dtype).max:
                    raise ShardError(wrong_type(row, max_id))
                if vocabulary is not None and max_id >= vocabulary:
                    raise ShardError(
                        f"{name}: its largest id is {max_id:,}, but a vocabulary of "
                        f"{vocabulary:,} ends at {vocabulary - 1:,}. {vocabulary_advice(max_id)}, "
                        "or exclude the file."
                    )
        except RefocusedError as error:
            return dataclasses.replace(finding, problem=str(error))
        return finding

    done = 0

    def count(finding: FileCheck) -> None:
        nonlocal done
        done += finding.size
        progress(done, total)

    progress(done, total)
    return map_in_threads(find, names, threads=data.fetch_threads, on_result=count)
