"""Spikes of loss and gradient norm: which steps are judged, found, skipped and gone back over."""

import math
import random

import pytest
from run_fakes import FakeEngine, Log, happened, trainer_of, watch_of

from refocused.config.cadence import Cadence
from refocused.engine.finite_updates import Limits
from refocused.system.errors import CheckpointError, TrainingError
from refocused.train.lifecycle.resume import go_back
from refocused.train.step.loop import train
from refocused.train.step.spikes import LAG, WINDOW, JudgedStep, SpikeError, limits_after
from refocused.train.step.state import TrainState, read_part

STEPS = 120
SPIKE = 100  # a step with enough before it


def judged(losses, norms):
    """Whether loss and norm of each step are spikes, by the limits of the steps before it."""
    steps = [JudgedStep(n, n, *one, False) for n, one in enumerate(zip(losses, norms, strict=True))]
    found = []
    for step in steps:
        end = max(0, step.step - LAG + 1)
        limits = limits_after(steps[max(0, end - WINDOW) : end])
        found.append((step.loss > limits.loss, (step.norm or 0.0) > limits.norm))
    return found


def curve(steps, *, seed, freedom=8):
    """A falling loss and log-normal norms, both with the heavy tails of Student's t."""
    draw = random.Random(seed)

    def t():
        return draw.gauss(0, 1) / math.sqrt(draw.gammavariate(freedom / 2, 2) / freedom)

    losses = [2.5 + 5 * math.exp(-step / 300) + 0.03 * t() for step in range(steps)]
    return losses, [math.exp(-0.7 + 0.15 * t()) for _ in range(steps)]


def test_heavy_tails_of_10_000_steps_make_at_most_the_documented_false_alarms():
    assert sum(map(any, judged(*curve(10_000, seed=0)))) <= 2
    assert judged(*curve(10_000, seed=1, freedom=50)) == [(False, False)] * 10_000


def test_a_spike_is_found_as_soon_as_64_steps_lie_before_it():
    losses, norms = curve(400, seed=1)
    for step in (5, 60, 70, 200, 399):
        losses[step] += 3.0 + losses[step]
        norms[step] *= 8
    found = judged(losses, norms)
    assert [step for step, one in enumerate(found) if one[0]] == [70, 200, 399]
    assert [step for step, one in enumerate(found) if one[1]] == [70, 200, 399]


def test_small_rises_of_a_curve_without_noise_are_none():
    for rise, factor, expected in ((0.09, 1.9, False), (0.11, 2.1, True)):
        losses, norms = [1.0] * 150, [0.5] * 150
        losses[140] += rise
        norms[140] *= factor
        assert judged(losses, norms)[140] == (expected, expected)


def with_spikes(action, *spikes, norms=()):
    """Train with losses of 9 at some steps, and norms of 90 at others; return log and error."""
    log: Log = []

    class Engine(FakeEngine):
        def update(self, learning_rate, judge, **others):
            self.norm = 90.0 if self.updates + 1 in norms else 1.5
            return super().update(learning_rate, judge)

    engine = Engine(log, training_loss=lambda step: 9.0 if step in spikes else 1.0)
    trainer = trainer_of(log, engine=engine, total_steps=STEPS, spikes=watch_of(log, action))
    try:
        train(trainer, TrainState())
    except TrainingError as error:
        return log, error
    return log, None


def test_a_warning_names_the_sequences_once_in_a_row():
    log, error = with_spikes("warn", SPIKE, SPIKE + 1, 110)
    assert error is None
    first, second = happened(log, "spike_warning:")
    assert first.startswith(
        "spike_warning: Spike at step 100: loss 9.0000 (limit 1.1000), gradient norm 1.5 (limit "
        "3). Its update was made. Sequences stream[198:200]: a.npy sequences "
    )
    assert "Spike at step 110: " in second


def test_limits_that_a_step_gets_do_not_depend_on_when_the_host_reads():
    class Engine(FakeEngine):
        def update(self, learning_rate, judge, **others):
            seen[-1].append(judge.limits)
            return super().update(learning_rate, judge)

    seen: list[list[Limits]] = []
    draws = curve(STEPS + 1, seed=2)[0]
    for interval in (1, 7):
        log: Log = []
        seen.append([])
        engine = Engine(log, training_loss=lambda step: draws[step])
        cadence = Cadence(log=interval, validation=0, checkpoint=0)
        spikes = watch_of(log, "skip")
        changes = {"cadence": cadence, "spikes": spikes}
        train(trainer_of(log, engine=engine, total_steps=STEPS, **changes), TrainState())
    assert seen[0] == seen[1]
    assert [one.loss == math.inf for one in seen[0]] == [True] * 65 + [False] * 55
    assert seen[0][-1].skips


def test_a_skip_goes_on_and_five_in_a_row_stop():
    log, error = with_spikes("skip", 90, 91, 92, 93, 110)
    assert error is None
    skipped = happened(log, "spike_warning:")
    assert len(skipped) == 5
    assert all("Its update was skipped. Sequences stream[" in one for one in skipped)
    _, error = with_spikes("skip", 90, 91, 92, 93, 94)
    assert isinstance(error, TrainingError) and error.on_every_rank
    assert "step 94: " in str(error) and "5 updates in a row were skipped" in str(error)
    assert "run.on_spike=warn" in str(error)


def test_a_rewind_leaves_out_the_sequences_of_the_spike_and_of_the_step_before():
    log, error = with_spikes("rewind", SPIKE, norms=[90])
    assert isinstance(error, SpikeError) and error.on_every_rank
    assert (error.step, error.good_step, error.sequences) == (SPIKE, SPIKE - 2, range(196, 200))
    assert error.names.startswith("a.npy sequences ") and error.names.count(",") == 3
    # A jump of the norm alone, which clipping bounds, is reported.
    (told,) = happened(log, "spike_warning:")
    assert "Spike at step 90: loss 1.0000 (limit 1.1000), gradient norm 90 (limit 3)" in told
    assert log[-1] == "close"


def test_nothing_is_judged_in_the_warm_up():
    watch = watch_of([], "skip", warmup_steps=100)
    watch.steps.extend(JudgedStep(step, step, 1.0, 1.0, False) for step in range(1, 100))
    assert watch.limits(80) == watch.limits(100) == Limits()
    assert watch.limits(101) == (pytest.approx(1.1), pytest.approx(2.0), True)


def test_a_step_is_judged_by_the_128_steps_that_end_two_before_it():
    def limit(*losses):  # of step 200, with these losses of its steps and 1 for the others
        watch = watch_of([], "warn")
        steps = [JudgedStep(n, n, dict(losses).get(n, 1.0), 1.0, False) for n in range(60, 200)]
        watch.restore(steps)
        assert len(watch.steps) == WINDOW + LAG
        return watch.limits(200).loss

    inside = [(n, 2.0) for n in range(135, 199)]  # the half of the window, and the half above it
    assert limit(*inside[1:]) == limit(*inside[1:], (70, 2.0), (199, 2.0)) == pytest.approx(1.1)
    for first, last in ((71, 134), (135, 198)):
        assert limit(*((n, 2.0) for n in range(first, last + 1))) > 2


def test_a_malformed_record_of_a_checkpoint_is_an_error():
    def read(record):
        return read_part({"spikes": record}, "spikes", tuple[JudgedStep, ...])

    for record in ([[1, 2]], [[1, 2, "high", 1.0, False]], {"steps": []}):
        with pytest.raises(CheckpointError, match="malformed part: spikes"):
            read(record)
    assert read([[1, 0, 2.5, None, False]]) == (JudgedStep(1, 0, 2.5, None, False),)
    assert read(None) is None


def test_a_run_goes_back_at_most_so_many_times():
    _, spike = with_spikes("rewind", SPIKE)
    assert isinstance(spike, SpikeError)
    state = TrainState(left_out=((0, 4), (8, 12)))
    with pytest.raises(TrainingError, match=r"at step 100: .* run.max_rewinds=2 times, and stops"):
        go_back(trainer_of([]), state, spike)
