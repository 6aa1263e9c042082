"""How often the detector of `run.on_spike` is wrong, on curves of real runs and on simulated ones.

    .venv/bin/python benchmarks/spikes.py runs/*/logs/training_metrics.jsonl

The runs must have logged every step (`log.interval=1`). Simulated losses and logarithms of gradient
norms have noise of Student's t: with 4 degrees of freedom far heavier tails than any real curve.
A spike is a rise of a loss by so many standard deviations of its noise.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from refocused.train.step.spikes import LAG, WINDOW, JudgedStep, limits_after

FREEDOM = (math.inf, 8.0, 5.0, 4.0)
LOSS, NOISE, NORM, NORM_NOISE = 3.0, 0.03, 0.5, 0.2


def alarms(losses: list[float], norms: list[float]) -> tuple[int, int, int]:
    """Return how many losses and norms are spikes, and how many steps were judged."""
    steps = [JudgedStep(n, n, *one, False) for n, one in enumerate(zip(losses, norms, strict=True))]
    by_loss = by_norm = judged = 0
    for number, step in enumerate(steps):
        end = max(0, number - LAG + 1)
        limits = limits_after(steps[max(0, end - WINDOW) : end])
        judged += limits.loss < math.inf
        by_loss += step.loss > limits.loss
        by_norm += (step.norm or 0.0) > limits.norm
    return by_loss, by_norm, judged


def noise(draw: np.random.Generator, freedom: float, steps: int) -> np.ndarray:
    """Return standard normal values, or those of Student's t."""
    return draw.standard_normal(steps) if freedom == math.inf else draw.standard_t(freedom, steps)


def main() -> None:
    """Print a line for each curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    for file in arguments.files:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [one for one in records if one["kind"] == "step"]
        found = alarms([one["loss"] for one in steps], [one["gradient_norm"] for one in steps])
        print(f"{file}: {found[0]} by loss and {found[1]} by norm in {found[2]:,} judged steps")
    draw = np.random.default_rng(0)
    for freedom in FREEDOM:
        losses = LOSS + NOISE * noise(draw, freedom, arguments.steps)
        norms = NORM * np.exp(NORM_NOISE * noise(draw, freedom, arguments.steps))
        found = alarms(losses.tolist(), norms.tolist())
        rates = [number / found[2] * 10_000 for number in found[:2]]
        print(f"t({freedom:g}): {rates[0]:.2f} by loss, {rates[1]:.2f} by norm in 10,000 steps")
    for rise in (4, 8, 10, 12, 16):
        losses = LOSS + NOISE * noise(draw, math.inf, 40_000)
        losses[200::200] += rise * NOISE
        found = alarms(losses.tolist(), [NORM] * len(losses))
        print(f"a rise by {rise} standard deviations is found in {found[0] / 199:.0%}")


if __name__ == "__main__":
    main()
