"""The buckets and folders that a command line names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser

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
    from refocused.bucket.open import open_bucket

    return open_bucket(
        url, credentials_file=arguments.gcs_credentials, project=arguments.gcp_project
    )
