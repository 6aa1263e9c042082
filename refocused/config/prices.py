"""What machines and buckets cost: what a run pays, and the form of `config/prices.yaml`."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

import pydantic

from refocused.config.section import Count, NotNegative, Positive, Section
from refocused.config.yaml_source import parse_yaml
from refocused.system.errors import ConfigError
from refocused.system.strict_json import MalformedError

PRICES_FILE = Path(__file__).resolve().parents[2] / "config" / "prices.yaml"


class MachinePrice(Section):
    """A machine that can be rented, with its price on demand and the page that gave it."""

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
    """An object store, with its prices of 1e9 bytes and the page that gave them."""

    provider: str
    gb_month_usd: NotNegative
    gb_out_usd: NotNegative  # leaving for another provider's machines
    looked_up: datetime.date
    source: str


class Prices(Section):
    """All prices: of machines to train on, and of the bucket for data and checkpoints."""

    machines: tuple[MachinePrice, ...]
    bucket: BucketPrice


def cost_usd(seconds: float | None, per_hour_usd: float | None) -> float | None:
    """Return what a machine costs for a time; None: one of the two is not known.

    A run pays for all of its sessions, each from its start to its end: for start-up, validations,
    saves, steps that a rewind threw away, and the wait for the mirror after the last step. The cost
    of an earlier moment, such as a checkpoint, is the cost up to then.
    """
    if seconds is None or per_hour_usd is None:
        return None
    return seconds / 3600 * per_hour_usd


def usd_per_million_tokens(cost_usd: float | None, tokens: int | None) -> float | None:
    """Return the price of a million tokens; None where it is unknown."""
    return cost_usd / tokens * 1e6 if cost_usd is not None and tokens else None


def read_prices(file: Path = PRICES_FILE) -> Prices:
    """Read the price list.

    Raises:
        ConfigError: It is missing, or something in it cannot be.
    """
    try:
        return Prices.model_validate(parse_yaml(file.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}).") from error
    except MalformedError as error:
        raise ConfigError(f"{file} is no YAML: {error}.") from error
    except pydantic.ValidationError as error:
        problems = [
            f"{file}: {'.'.join(map(str, found['loc']))}: {found['msg']}"
            for found in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from error
