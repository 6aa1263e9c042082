import math

import numpy as np
import pytest
import torch

from refocused.engine import engine
from refocused.engine.engine import BINS, histogram_of


def test_it_is_the_histogram_that_numpy_makes() -> None:
    values = torch.randn(30, 40, generator=torch.Generator().manual_seed(1))
    found = histogram_of("weights/x", values)
    assert found is not None
    counts, edges = np.histogram(values.numpy(), bins=BINS)
    assert list(found.counts) == counts.tolist()
    assert (found.low, found.high) == pytest.approx((edges[0], edges[-1]))
    assert found.total == pytest.approx(float(values.sum()), rel=1e-4)
    assert found.squares == pytest.approx(float(values.square().sum()))


def test_elements_are_divided_by_the_scale() -> None:
    found = histogram_of("weights/x", torch.tensor([-8.0, 4.0], dtype=torch.bfloat16), scale=4.0)
    assert found is not None
    assert (found.low, found.high, found.total, found.squares) == (-2.0, 1.0, -1.0, 5.0)


def test_equal_elements_are_in_one_bin() -> None:
    found = histogram_of("weights/x", torch.ones(10))
    assert found is not None
    assert (found.low, found.high, sum(found.counts), max(found.counts)) == (0.5, 1.5, 10, 10)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e30])
def test_non_finite_tensors_have_none(odd: float) -> None:
    tensor = torch.tensor([1.0, odd, 2.0])  # the square of 1e30 is infinite
    assert histogram_of("weights/x", tensor) is None


def test_no_element_of_a_large_tensor_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_TOGETHER", 7)
    values = torch.linspace(0, 1, 100)
    found = histogram_of("weights/x", values)
    assert found is not None
    assert list(found.counts) == np.histogram(values.numpy(), bins=BINS)[0].tolist()
