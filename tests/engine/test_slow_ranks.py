"""Real ranks, one of which computes more slowly: who is named, by ZeRO stage."""

import time

import pytest
from engine_cases import Case, make_step, sequences, start_engine
from ranks import on_ranks

from refocused.metrics.meter import MARKED_EVERY
from refocused.metrics.rank_times import OWN, WINDOW, RankTimes
from refocused.train.step.reporter import gather_figures

STAGES = (2, 3)
SLOW_RANK = 1
# Sleep is what a busy machine lengthens least. The passes' own computation takes a tenth of it.
FORWARD_SECONDS, SLOW_SECONDS = 0.15, 0.2
MOST_WINDOWS = 6  # the first one names the rank, unless other programs disturb the steps too much
GATHERING = {"stage3_param_persistence_threshold": 200, "stage3_max_reuse_distance": 0}


def measure(world):
    def sleeping(model):
        block = next(one for one in model.modules() if isinstance(one, model.block_class))
        forward = block.forward

        def slow_forward(*args, **named):
            time.sleep(SLOW_SECONDS if world.rank == SLOW_RANK else FORWARD_SECONDS)
            return forward(*args, **named)

        block.forward = slow_forward

    found = {}
    for stage in STAGES:
        fragment = {"zero_optimization": GATHERING} if stage == 3 else {}
        engine = start_engine(Case(stage), world, prepare=sleeping, fragment=fragment)
        passes, times = sequences()[0, :1, world.rank], RankTimes()
        for step in range(1, MOST_WINDOWS * MARKED_EVERY * WINDOW + 1):
            engine.begin_step(1)
            make_step(engine, passes)
            if step % 10 == 0:
                rows = engine.meter.step_phases(data_seconds=0.0)
                figures, seconds = gather_figures(world, [0.0, 0.0], rows, times)
                if figures.slowest is not None and figures.slowest.is_slow:
                    break
        assert figures.slowest is not None
        found[str(stage)] = {
            "rank": figures.slowest.rank,
            "phase": figures.slowest.phase,
            "excess": figures.slowest.excess_fraction,
            "limit": figures.slowest.limit_fraction,
            "steps": step,
            **{name.split("_")[1]: by_rank for name, by_rank in seconds.items()},
        }
        engine.close()
    return found


@pytest.mark.slow
def test_a_rank_that_is_30_percent_slower_is_named(tmp_path):
    found, _ = on_ranks(measure, folder=tmp_path)
    assert set(found) == {"2", "3"}
    for of_stage in found.values():
        assert (of_stage["rank"], of_stage["phase"]) == (SLOW_RANK, "forward"), found
        assert of_stage["excess"] > of_stage["limit"], found
        work = [sum(of_stage[one][rank] for one in OWN) for rank in (0, 1)]
        # Both take the same steps: the fast rank waits for what the slow one works longer.
        waited = of_stage["wait"][0] - of_stage["wait"][1]
        assert waited == pytest.approx(work[1] - work[0], abs=FORWARD_SECONDS / 5), found
