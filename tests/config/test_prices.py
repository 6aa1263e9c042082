import datetime
from pathlib import Path

import pytest

from refocused.config.prices import cost_usd, read_prices, usd_per_million_tokens
from refocused.system.errors import ConfigError
from refocused.system.hardware import gpu_spec

MACHINE = "{provider: A, machine: m, gpu: H100 SXM, gpus: 8, per_hour_usd: 24, source: s%s}"
BUCKET = "bucket: {provider: B, gb_month_usd: 0, gb_out_usd: 0, looked_up: 2026-01-02, source: s}"


def list_of(machine: str) -> str:
    return f"machines:\n- {MACHINE % machine}\n{BUCKET}"


def test_the_shipped_prices_name_known_gpus_with_a_day_and_a_page() -> None:
    prices = read_prices()
    assert {price.gpu for price in prices.machines} >= {"H100 SXM", "H200"}
    for price in prices.machines:
        facts = gpu_spec(price.gpu)
        assert facts is not None and facts.name == price.gpu
        assert price.source.startswith("https://")
        assert price.looked_up >= datetime.date(2026, 1, 1)
        assert 0.5 < price.per_hour_usd / price.gpus < 20


def test_machines_are_rented_whole(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(list_of(", looked_up: 2026-11-01"))
    [eight] = read_prices(tmp_path / "prices.yaml").machines
    assert [eight.for_gpus(gpus) for gpus in (1, 8, 9, 16)] == [24.0, 24.0, 48.0, 48.0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (list_of(""), "machines.0.looked_up: Field required"),
        ("machines: [", "is not YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_list_is_refused_with_the_place(
    tmp_path: Path, text: str | None, wanted: str
) -> None:
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        read_prices(file)


def test_a_cost_needs_a_time_and_a_price() -> None:
    assert [cost_usd(*known) for known in ((1800.0, 24.0), (0.0, 24.0))] == [12.0, 0.0]
    assert cost_usd(None, 24.0) is None and cost_usd(1800.0, None) is None
    assert usd_per_million_tokens(30.0, 10_000_000) == 3.0
    assert usd_per_million_tokens(None, 5) is None and usd_per_million_tokens(3.0, 0) is None
