"""The buckets and folders that a command line names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.system.errors import ConfigError

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket


def add_credentials(parser: Parser) -> None:
    """Add the options that reaching `gs://` may need."""
    parser.add_argument("--gcs-credentials", type=Path, metavar="FILE", help="key file for gs://")
    parser.add_argument("--gcp-project", metavar="ID", help="Google Cloud project")


def place(url: str, arguments: argparse.Namespace) -> Bucket:
    """Return the bucket of an address, reached as the command line says.

    Raises:
        BucketError: The address names none.
    """
    from refocused.bucket.open_bucket import open_bucket

    return open_bucket(
        url, credentials_file=arguments.gcs_credentials, project=arguments.gcp_project
    )


def work_folder(out: str, named: Path | None) -> Path:
    """Return where unfinished work is kept: inside a folder that is written, or beside a run.

    Args:
        out: Where the work goes when it is finished.
        named: What the command line names; None: nothing.

    Raises:
        ConfigError: One is named though `out` is a folder, which keeps its own.
    """
    if not out.startswith("gs://"):
        if named is not None:
            raise ConfigError("--work-folder: it is for a gs:// --out; a folder keeps its own.")
        return Path(out).expanduser() / ".prepare"
    return named or Path("data/prepare") / re.sub(r"[^a-z0-9._-]+", "_", out[5:].lower())
