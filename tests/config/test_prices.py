from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from refocused.config.prices import MachinePrice, cost_usd, read_prices, usd_per_million_tokens
from refocused.system.errors import ConfigError
from refocused.system.hardware import gpu_facts

LINE = "{provider: A, machine: m, gpu: H100 SXM, gpus: 8, per_hour_usd: 24, source: s%s}"
BUCKET = "bucket: {provider: B, gb_month_usd: 0, gb_out_usd: 0, looked_up: 2026-01-02, source: s}"


def test_the_shipped_prices_name_known_gpus_with_a_day_and_a_page() -> None:
    prices = read_prices()
    assert {price.gpu for price in prices.machines} >= {"H100 SXM", "H200"}
    for price in prices.machines:
        facts = gpu_facts(price.gpu)
        assert facts is not None and facts.name == price.gpu
        assert price.source.startswith("https://")
        assert price.looked_up >= datetime.date(2026, 1, 1)
        assert 0.5 < price.per_hour_usd / price.gpus < 20


def test_machines_are_rented_whole() -> None:
    eight = MachinePrice.model_validate(
        {
            "provider": "A",
            "machine": "8x",
            "gpu": "H100 SXM",
            "gpus": 8,
            "per_hour_usd": 24.0,
            "looked_up": datetime.date(2026, 11, 1),
            "source": "https://example.com",
        }
    )
    assert [eight.for_gpus(gpus) for gpus in (1, 8, 9, 16)] == [24.0, 24.0, 48.0, 48.0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"machines:\n- {LINE % ''}\n{BUCKET}", "machines.0.looked_up: Field required"),
        (
            f"machines:\n- {LINE % ', looked_up: 2026-01-02, spot: 1'}\n{BUCKET}",
            "machines.0.spot: Extra inputs",
        ),
        ("machines: [", "is no YAML"),
    ],
)
def test_a_wrong_list_is_refused_with_the_place(tmp_path: Path, text: str, wanted: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        read_prices(file)


def test_a_missing_list_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prices(tmp_path / "prices.yaml")


@pytest.mark.parametrize(
    ("seconds", "price", "expected"),
    [(1800.0, 24.0, 12.0), (0.0, 24.0, 0.0), (None, 24.0, None), (1800.0, None, None)],
)
def test_the_cost_of_a_time(
    seconds: float | None, price: float | None, expected: float | None
) -> None:
    assert cost_usd(seconds, price) == expected


@pytest.mark.parametrize(
    ("cost", "tokens", "expected"), [(30.0, 10_000_000, 3.0), (None, 5, None), (3.0, 0, None)]
)
def test_the_price_of_a_million_tokens(
    cost: float | None, tokens: int, expected: float | None
) -> None:
    assert usd_per_million_tokens(cost, tokens) == expected
