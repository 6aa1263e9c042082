import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refocused.config.optimization import OptimizerConfig, ScheduleConfig
from refocused.engine.schedule import RatePlan, rate_change, saved_plan, unfinished_cycle


def plan_of(total, schedule, peak=1e-3, **optimizer):
    return RatePlan(OptimizerConfig(lr=peak, **optimizer), total, schedule)


def rates(schedule, total, *, peak=1.0):
    return [plan_of(total, schedule, peak).at(step) for step in range(total)]


ROOT_HALF = math.sqrt(0.5)
QUARTER = (1 - ROOT_HALF) / 2  # of a cosine's way at a quarter of its length
BY_HAND = [
    (
        {"kind": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},  # a quarter a step, and after
        [0.5, 1.0, 1 - 0.9 * QUARTER, 0.55, 0.1 + 0.9 * QUARTER, 0.1, 0.1, 0.1],
    ),
    ({"kind": "constant", "warmup_steps": 2, "min_lr_ratio": 0.1}, [0.5, *[1.0] * 7]),
    (
        {"kind": "one_cycle", "warmup_steps": 4, "min_lr_ratio": 0.0},  # it rises along a cosine
        [QUARTER, 0.5, 1 - QUARTER, 1.0, 0.5, 0.0, 0.0, 0.0],
    ),
    (  # of 2, 4 and 8 steps
        {
            "kind": "warm_restarts",
            "warmup_steps": 2,
            "min_lr_ratio": 0.2,
            "cycle_steps": 2,
            "cycle_growth": 2.0,
        },
        [0.5, 1.0, 1.0, 0.6, 1.0, 1 - 0.8 * QUARTER, 0.6, 0.2 + 0.8 * QUARTER, 1.0],
    ),
    (
        {"kind": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2},
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
    (
        {"kind": "wsd", "min_lr_ratio": 0.2, "decay": "linear", "decay_steps": 4},
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
    (
        {"kind": "wsd", "min_lr_ratio": 0.2, "decay_steps": 4},  # a quarter makes a half
        [1.0, 1.0, 0.6, 1 - 0.8 * ROOT_HALF, 1 - 0.8 * math.sqrt(0.75), 0.2, 0.2],
    ),
]


@pytest.mark.parametrize(("settings", "expected"), BY_HAND)
def test_rates_by_hand(settings, expected):
    plan = plan_of(6, ScheduleConfig(**settings), 6e-4)
    assert [plan.at(step) / 6e-4 for step in range(len(expected))] == pytest.approx(expected)


@given(st.integers(1, 200), st.integers(0, 200), st.floats(0, 1))
def test_the_stable_phase_does_not_depend_on_the_length(total, more, share):
    schedule = ScheduleConfig(kind="wsd", decay_fraction=share)
    stable = schedule.decay_begins(total)
    assert rates(schedule, total + more)[:stable] == [1.0] * stable


SHAPES = st.builds(
    dict, total=st.integers(2, 200), share=st.floats(0, 1), min_lr_ratio=st.floats(0, 1)
)


@given(SHAPES, st.sampled_from(["cosine", "linear", "wsd", "one_cycle", "constant"]))
def test_it_rises_through_the_warmup_and_never_again(shape, kind):
    total = int(shape["total"])
    warmup = int(shape["share"] * total)
    schedule = ScheduleConfig(
        kind=kind,
        warmup_steps=warmup,
        min_lr_ratio=shape["min_lr_ratio"],
        decay_steps=max(1, total - warmup) if kind == "wsd" else None,
    )
    rate = rates(schedule, total)
    rise, fall = rate[:warmup], rate[max(0, warmup - 1) :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(0 < value <= 1 for value in rate[:-1])
    assert max(rate) == 1.0
    assert all(value >= shape["min_lr_ratio"] - 1e-12 for value in rate[warmup:])
    if kind != "constant" and warmup < total > 1:
        assert rate[-1] == pytest.approx(shape["min_lr_ratio"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.95] * 8),
        ({"momentum": 0.9}, [0.9] * 8),
        ({"momentum_warmup_steps": 4}, [0.85, 0.875, 0.9, 0.925, 0.95, 0.95, 0.95, 0.95]),
        # It falls from step 4 on, the last one at the peak rate, to the last step.
        (
            {"momentum": 0.97, "momentum_end": 0.91},
            [0.97, 0.97, 0.97, 0.97, 0.955, 0.94, 0.925, 0.91],
        ),
        (
            {"momentum": 0.97, "momentum_end": 0.91, "momentum_warmup_steps": 2},
            [0.85, 0.91, 0.97, 0.97, 0.955, 0.94, 0.925, 0.91],
        ),
    ],
)
def test_muons_momentum_by_hand(settings, expected):
    plan = plan_of(8, ScheduleConfig(kind="wsd", decay_steps=4), kind="muon", **settings)
    assert [plan.momentum_at(step) for step in range(8)] == pytest.approx(expected)


def test_weight_decay_falls_to_zero_by_hand():
    shares = {
        "constant": [1.0, 1.0, 1.0, 1.0],
        "linear": [1.0, 0.75, 0.5, 0.25],
        "cosine": [1.0, 0.5 + ROOT_HALF / 2, 0.5, 0.5 - ROOT_HALF / 2],
    }
    for schedule, expected in shares.items():
        plan = plan_of(4, ScheduleConfig(), decay_schedule=schedule)
        assert [plan.decay_share_at(step) for step in range(4)] == pytest.approx(expected)


COSINE = ScheduleConfig(kind="cosine", min_lr_ratio=0.1)
WSD = ScheduleConfig(kind="wsd", min_lr_ratio=0.0, decay_fraction=0.2)
CONSTANT = ScheduleConfig(kind="constant")


def change(step, planned, total, before, now=None):
    plans = plan_of(planned, before), plan_of(total, now or before)
    return rate_change(step, saved=plans[0], now=plans[1]) or ""


def test_raising_the_steps_of_a_finished_cosine_says_what_the_rate_will_do():
    text = change(500, 500, 1000, COSINE)
    # Half way down from 1e-3 to 1e-4 is 5.5e-4; the last step was at the floor.
    assert "(cosine) was planned for 500 steps; now it is cosine over 1,000." in text
    assert "jumps from 1.00e-04 to 5.49e-04 at step 501 and ends at 1.00e-04." in text
    assert "set optimizer.lr=1.0e-04 schedule.kind=constant" in text
    assert "schedule.kind=wsd" in text and "--resume STEP --as NAME run.steps=N" in text


def test_a_later_peak_is_named():
    restarts = ScheduleConfig(kind="warm_restarts", min_lr_ratio=0.1, cycle_steps=400)
    text = change(500, 500, 1000, COSINE, restarts)
    assert "to 8.68e-04 at step 501, reaches 1.00e-03 at step 801 and ends at" in text


def test_a_jump_from_or_into_a_decay_names_the_stable_steps():
    assert "jumps from 0.00e+00 to 1.00e-03 at step 401" in change(400, 400, 1000, WSD)
    assert "resume from step 320 or before it, at the peak" in change(400, 400, 1000, WSD)
    assert "resume from step 480 or before it" in change(500, 1000, 600, WSD)
    assert "jumps from 5.51e-04 to 1.59e-04" in change(500, 1000, 600, COSINE)
    assert "set back" in change(500, 1000, 600, COSINE)


def test_a_jump_of_the_matrices_rate_alone_is_named():
    saved, raised = plan_of(500, COSINE), plan_of(500, COSINE, kind="muon", matrix_lr=2e-3)
    text = rate_change(250, saved=saved, now=raised) or ""
    assert "The learning rate of Muon's matrices jumps from 5.51e-04 to 1.10e-03" in text
    assert "set optimizer.lr=5.5e-04 optimizer.matrix_lr=5.5e-04 schedule.kind=constant" in text
    assert "set back" in (rate_change(250, saved=raised, now=saved) or "")
    assert rate_change(250, saved=raised, now=raised) is None
    longer = plan_of(1000, COSINE, kind="muon", matrix_lr=2e-3)
    text = rate_change(500, saved=raised, now=longer) or ""
    assert "The learning rate jumps" in text
    assert "optimizer.lr=1.0e-04 optimizer.matrix_lr=2.0e-04 " in text


@pytest.mark.parametrize(
    ("name", "of"), [("embedding", "the embeddings"), ("head", "the head"), ("scalar", "vectors")]
)
def test_a_jump_of_another_rate_alone_is_named(name, of):
    saved, raised = plan_of(500, COSINE), plan_of(500, COSINE, **{f"{name}_lr": 2e-3})
    text = rate_change(250, saved=saved, now=raised) or ""
    assert f"The learning rate of {of} jumps from 5.51e-04 to 1.10e-03" in text
    assert f"set optimizer.lr=5.5e-04 optimizer.{name}_lr=5.5e-04 schedule" in text
    assert rate_change(250, saved=raised, now=raised) is None


@pytest.mark.parametrize(
    ("step", "planned", "total", "before", "now"),
    [
        (500, 500, 500, COSINE, COSINE),
        (0, 500, 1000, COSINE, COSINE),
        (600, 1000, 600, COSINE, COSINE),  # nothing is left to train
        (500, 500, 1000, CONSTANT, CONSTANT),
        (10, 1000, 1010, COSINE, COSINE),
        (320, 400, 1000, WSD, WSD),  # stable
        (400, 400, 402, COSINE, COSINE),  # at its floor
        (800, 1000, 900, WSD, CONSTANT),  # stable in both
    ],
)
def test_changes_that_do_not_affect_the_rate_are_not_reported(step, planned, total, before, now):
    assert change(step, planned, total, before, now) == ""


def test_a_cycle_that_the_run_does_not_finish_is_named():
    restarts = ScheduleConfig(kind="warm_restarts", warmup_steps=100, cycle_steps=400)
    (text,) = filter(None, [unfinished_cycle(501, restarts)])
    assert "the last update is at 100% of the peak rate" in text
    assert "ends at step 900. Set run.steps" in text
    assert [unfinished_cycle(steps, restarts) for steps in (500, 900)] == [None, None]
    growing = restarts.model_copy(update={"cycle_growth": 1.5})
    assert unfinished_cycle(1100, growing) is None is not unfinished_cycle(1099, growing)
    assert unfinished_cycle(501, COSINE) is None


PLANNED = "{run: {name: a, steps: 500}, optimizer: {lr: 0.5}, schedule: {kind: linear}}"


@pytest.mark.parametrize(
    ("content", "plan"),
    [
        (PLANNED, plan_of(500, ScheduleConfig(kind="linear"), 0.5)),
        (
            PLANNED.replace("0.5", "0.5, kind: muon, matrix_lr: 2.0"),
            plan_of(500, ScheduleConfig(kind="linear"), 0.5, kind="muon", matrix_lr=2.0),
        ),
        (PLANNED.replace("linear", "of the future"), None),
        (PLANNED.replace("500", "many"), None),
        ("run: {steps: 500}", None),
        ("", None),
        ("[1", None),
        ("3", None),
    ],
)
def test_the_plan_is_read_from_the_checkpoints_run_file(tmp_path, content, plan):
    (tmp_path / "run.yaml").write_text(content)
    assert saved_plan(tmp_path / "run.yaml") == plan
    assert saved_plan(tmp_path / "none.yaml") is None
    assert rate_change(5, saved=None, now=plan_of(10, COSINE)) is None
