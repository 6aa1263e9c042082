"""Prices of machines and buckets: `config/prices.yaml`, and what a run costs."""

import datetime
import math
from pathlib import Path

import pydantic

from refocused.config import shipped_files
from refocused.config.section import Count, NotNegative, Positive, Section
from refocused.config.yaml_source import parse_yaml
from refocused.system.errors import ConfigError
from refocused.system.strict_json import MalformedError

PRICES_FILE = shipped_files() / "prices.yaml"


class MachinePrice(Section):
    """A machine for rent, with its on-demand price and the page it is from."""

    provider: str
    machine: str
    gpu: str  # short name
    gpus: Count
    per_hour_usd: Positive
    looked_up: datetime.date
    source: str

    def for_gpus(self, gpus: int) -> float:
        """Return the price an hour of as many machines as hold so many GPUs, in dollars."""
        return math.ceil(gpus / self.gpus) * self.per_hour_usd


class BucketPrice(Section):
    """An object store, with its prices of 1e9 bytes and the page they are from."""

    provider: str
    gb_month_usd: NotNegative
    gb_out_usd: NotNegative  # egress to another provider
    looked_up: datetime.date
    source: str


class Prices(Section):
    """The prices of machines, and of a bucket for data and checkpoints."""

    machines: tuple[MachinePrice, ...]
    bucket: BucketPrice


def cost_usd(seconds: float | None, per_hour_usd: float | None) -> float | None:
    """Return the price of a machine for a time; None: one of the two is unknown.

    The cost of a run counts all of its sessions from start to end: start-up, validations, saves,
    steps that were discarded by going back, and the wait for the mirror at the end.
    """
    if seconds is None or per_hour_usd is None:
        return None
    return seconds / 3600 * per_hour_usd


def usd_per_million_tokens(cost_usd: float | None, tokens: int | None) -> float | None:
    """Return the price of a million tokens; None where it is unknown."""
    return cost_usd / tokens * 1e6 if cost_usd is not None and tokens else None


def read_prices(file: Path = PRICES_FILE) -> Prices:
    """Read the price list; raise ConfigError if it is missing or has a wrong entry."""
    try:
        return Prices.model_validate(parse_yaml(file.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}).") from error
    except MalformedError as error:
        raise ConfigError(f"{file} is not YAML: {error}.") from error
    except pydantic.ValidationError as error:
        problems = [
            f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from error
