"""The loss to expect during a run: published fits, losses of published runs, and bad input."""

import math
from typing import Any

import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import load_run
from refocused.metrics.expected_loss import (
    FITS,
    Curve,
    curve_from_record,
    expected_columns,
    expected_curve,
    expected_end,
    fitted_loss,
    half_band,
    loss_at,
)
from refocused.metrics.history import StepMetrics

PLAN = BatchPlan(16, 4, 8, 2048)  # 1,048,576 tokens
LLAMA = "llama_1b_8xh100"
HOFFMANN = list(FITS)[1]
# Parameters, tokens and validation loss at the end: FineWeb with GPT-2's ids, from the logs in
# KellerJordan/modded-nanogpt (records/track_1_short, track_2_medium/2025-01-18).
PUBLISHED = {
    "llm.c 124 M": (124.5e6, 10.26e9, 3.2722),
    "llm.c 350 M": (354e6, 31.5e9, 2.9282),
    "AdamW 124 M": (124.5e6, 5.0e9, 3.2760),
    "Adam 124 M": (124.5e6, 2.67e9, 3.3406),
    "Muon 124 M": (124.5e6, 3.25e9, 3.2785),
    "SOAP 124 M": (124.5e6, 2.67e9, 3.2752),
    "Adam 1.5 B": (1.55e9, 10.0e9, 2.7737),
    "Muon 1.5 B": (1.55e9, 10.0e9, 2.7297),
}
# llm.c's 350 M (track_2_medium/2025-01-18/main.log): step of 524,288 tokens, and validation loss.
LLMC_350M = {
    **{6000: 3.3674, 9000: 3.2689, 11_500: 3.2165, 12_000: 3.2063, 14_500: 3.1715, 15_000: 3.1648},
    **{17_500: 3.1355, 18_000: 3.1311, 60_000: 2.9282},
}


def curve_of(name: str = LLAMA, *overrides: str, parameters: int = 1_017_526_272) -> Curve:
    curve = expected_curve(load_run(name, overrides), PLAN, parameters=parameters)
    assert isinstance(curve, list)
    return curve


def test_the_fits_give_the_values_computed_by_hand() -> None:
    # Chinchilla has 70 B parameters and 1.4 T tokens: 406.4 / 4,868 and 410.7 / 2,517.
    chinchilla = fitted_loss(70e9, 1.4e12, fit=HOFFMANN)
    assert chinchilla == pytest.approx(1.69 + 0.08348 + 0.16317, abs=1e-4)
    assert fitted_loss(1e9, 1e9) == pytest.approx(
        1.8172 + 482.01 / 10**3.1302 + 2085.43 / 10**3.2922
    )


@pytest.mark.parametrize("run", PUBLISHED)
def test_published_runs_end_within_the_band(run: str) -> None:
    parameters, tokens, loss = PUBLISHED[run]
    end = fitted_loss(parameters, tokens)
    assert abs(loss - end) <= half_band([(1, 9.9), (int(tokens), end)], tokens)


@pytest.mark.parametrize("seen", [12_000, 15_000, 18_000])
def test_a_published_run_ends_where_its_losses_so_far_let_expect(seen: int) -> None:
    plan = BatchPlan(64, 1, 8, 1024)
    settings = ["run.steps=60000", "schedule.warmup_steps=700", "schedule.min_lr_ratio=0"]
    curve = expected_curve(load_run("gpt2_124m", settings), plan, parameters=354_000_000)
    assert isinstance(curve, list)
    steps = [
        StepMetrics(step, tokens=step * plan.tokens, loss=loss)
        for step, loss in LLMC_350M.items()
        if step <= seen
    ]
    expected = expected_end(curve, steps)
    assert expected is not None
    end, half = expected
    assert half == pytest.approx(0.02 + 0.15 * math.log(60_000 / seen))
    assert abs(end - LLMC_350M[60_000]) < half < abs(curve[-1][1] - LLMC_350M[60_000])


def test_the_curve_is_the_fit_above_which_the_learning_rate_holds_it() -> None:
    curve = curve_of()
    end = 19_500 * PLAN.tokens
    assert curve[-1] == (end, pytest.approx(fitted_loss(1_017_526_272, end), abs=1e-6))
    assert [loss for _, loss in curve] == sorted((loss for _, loss in curve), reverse=True)
    assert curve[0][0] >= 500e6 > curve[0][0] - 195 * PLAN.tokens
    # A constant rate stays at its peak: 0.06 x (1 - 0.1) above, and wsd until its decay begins.
    wsd = ("schedule.kind=wsd", "schedule.decay_fraction=0.2")
    constant, decaying = curve_of(LLAMA, "schedule.kind=constant"), curve_of(LLAMA, *wsd)
    assert constant[-1][1] - curve[-1][1] == pytest.approx(0.054)
    assert decaying[70] == pytest.approx(constant[70])
    assert decaying[-1] == pytest.approx(curve[-1])


def test_the_loss_between_points_and_outside() -> None:
    curve: Curve = [(100, 4.0), (200, 3.0), (400, 2.0)]
    assert [loss_at(curve, tokens) for tokens in (100, 150, 200, 300, 400)] == [4, 3.5, 3, 2.5, 2]
    assert loss_at(curve, 99) is loss_at(curve, 401) is None
    assert expected_end(curve, []) is expected_end(curve, [StepMetrics(1, tokens=50)]) is None
    steps = [StepMetrics(1, tokens=100, loss=9.0), StepMetrics(2, tokens=200, loss=3.5)]
    assert expected_end(curve, steps) == pytest.approx((2.5, 0.02 + 0.15 * math.log(2)))
    # A run that has seen more than the curve, as of another batch.
    beyond = [StepMetrics(1, tokens=400, loss=2.5), StepMetrics(2, tokens=420, loss=2.5)]
    assert expected_end(curve, beyond) == (2.5, 0.02)


def steps_to(last: int, *, total: int = 400, above: float = 0.5) -> list[StepMetrics]:
    """Steps of one token each, whose losses are above the curve of `RECORD`."""
    losses = {step: loss_at(RECORD["curve"], max(100, step)) or 2.0 for step in range(1, last + 1)}
    return [
        StepMetrics(step, total, tokens=step, loss=loss + above) for step, loss in losses.items()
    ]


RECORD: dict[str, Any] = {"curve": [(100, 4.0), (200, 3.0), (400, 2.0)]}


@pytest.mark.parametrize(
    ("last", "total", "reach"),
    [(150, 400, 225), (300, 400, 400), (400, 400, 400), (200, 1000, 300), (200, 0, 200)],
)
def test_the_drawn_curve_goes_through_the_losses_and_on_by_half_as_far(
    last: int, total: int, reach: int
) -> None:
    steps = steps_to(last, total=total)
    drawn = expected_columns(RECORD, steps)
    assert (drawn["step"][0] in range(100, 106), drawn["step"][-1]) == (True, reach)
    assert len(drawn["step"]) < 300 and drawn["step"] == sorted(set(drawn["step"]))
    rows = {step: row for step, *row in zip(*drawn.values(), strict=True)}
    for step in [step for step in drawn["step"] if step < last]:
        assert rows[step] == [pytest.approx(steps[int(step) - 1].loss, abs=1e-4)] * 3
    loss, low, high = rows[last]
    assert (loss, high - loss) == (pytest.approx(steps[-1].loss), pytest.approx(0.02))
    assert loss - low == pytest.approx(high - loss)
    if reach == total:  # where the text says that it ends
        end = expected_end(RECORD["curve"], steps)
        loss, low, high = rows[reach]
        assert end == pytest.approx((loss, high - loss), abs=2e-4)


def test_a_part_of_the_curve_is_placed_by_all_losses() -> None:
    steps = steps_to(300)
    whole, part = (expected_columns(RECORD, steps, since=since) for since in (0, 290))
    assert (part["step"][0], part["step"][-1]) == (290, 305)
    assert part["loss"][-1] == pytest.approx(2.475 + 0.5, abs=1e-3)
    assert dict(zip(whole["step"], whole["loss"], strict=True))[300] == pytest.approx(3.0)


@pytest.mark.parametrize("record", [None, {"reason": "bytes"}, {"curve": [(1, "x")]}])
def test_without_a_curve_or_losses_on_it_nothing_is_drawn(record: dict[str, Any] | None) -> None:
    assert expected_columns(record, steps_to(300)) == {}
    for steps in ([], steps_to(90), [StepMetrics(300, tokens=300)], [StepMetrics(1, loss=2.0)]):
        assert expected_columns(RECORD, steps) == {}
    # A step without tokens after others, of a damaged line.
    assert expected_columns(RECORD, [*steps_to(300), StepMetrics(301, loss=2.0)]) == {}
    assert expected_columns(RECORD, steps_to(300), since=301) == {}


@pytest.mark.parametrize(
    ("name", "settings", "changes", "reason"),
    [
        ("demo", [], {"parameters": 836_864}, "the fits hold for attention, 50 M to 17 B"),
        (LLAMA, [], {"parameters": 40_000_000}, "50 M to 17 B parameters"),
        (LLAMA, ["run.steps=900", "schedule.warmup_steps=9"], {}, "1 B tokens"),
        (LLAMA, ["model.vocabulary=257"], {}, "30 k to 70 k ids"),
        ("ten_1b", [], {}, "hold for attention"),
        (LLAMA, ["model.start_from=hub:any/model"], {}, "continues another model"),
        (LLAMA, [], {"epochs": 4.2}, "the data repeat 4.2 times"),
    ],
)
def test_no_loss_is_given_where_no_fit_holds(
    name: str, settings: list[str], changes: dict[str, Any], reason: str
) -> None:
    values = {"parameters": 1_017_526_272, **changes}
    assert reason in expected_curve(load_run(name, settings), PLAN, **values)


@pytest.mark.parametrize(
    "curve",
    [None, [], [[1, 2.0]], [[2, 1.0], [1, 1.0]], [[0, 1.0], [1, 1.0]], [[1, "x"], [2, 1.0]]],
)
def test_a_damaged_curve_is_none(curve: object) -> None:
    assert curve_from_record({"curve": curve}) is None
    assert curve_from_record(None) is curve_from_record({"reason": "none"}) is None
    assert curve_from_record({"curve": [[1, 3.0], [2, 2.0]]}) == [(1, 3.0), (2, 2.0)]
