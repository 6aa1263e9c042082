"""Chooses `batch.micro_batch_size: auto` for devices that are as large as real steps, measured
first."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from live_memory import LiveMemory

from refocused.bucket.folder import DirectoryBucket
from refocused.config.load_run import find_config, load_run
from refocused.estimate.memory_plan import largest_micro
from refocused.system.world import World
from refocused.train.lifecycle.trainer import memory_of_a_step, settle

SMALL = {
    "vocab_size": 3136,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 352,
    "max_position_embeddings": 512,
}
WINDOWS = 64  # of a rank in a step
MICROS = (32, 16, 8, 4, 2, 1)
# A sequence is shorter than the model is wide, and its pass peaks when all gradients exist; or
# blocks are recomputed.
CASES = [(32, False), (128, True)]


class Device:
    """Stands for the memory of `torch.cuda`: counts the tensors that live."""

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory

    def memory_allocated(self, device: Any) -> int:
        return self._memory.bytes

    def max_memory_allocated(self, device: Any) -> int:
        return self._memory.peak

    def reset_peak_memory_stats(self, device: Any) -> None:
        self._memory.peak = self._memory.bytes


def micro_batches(world: World) -> list[dict[str, Any]]:
    """Return for each case the peaks of steps, what is chosen for each, and what is not freed."""
    preset = Path.cwd() / f"llama_{world.rank}.json"
    llama = json.loads(find_config("models", "llama_1b").read_text())
    preset.write_text(json.dumps(llama | SMALL))
    with LiveMemory() as memory:
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            setattr(torch.cuda, name, getattr(Device(memory), name))
        return [_choices(world, preset, *case) | {"left": memory.bytes} for case in CASES]


def _choices(world: World, preset: Path, length: int, recomputes: bool) -> dict[str, Any]:
    settings = [
        *(f"model.preset={preset}", f"model.sequence_length={length}", "model.vocabulary=3136"),
        *(f"model.activation_checkpointing={str(recomputes).lower()}", "data.tokenizer=unknown"),
        *("model.head_chunk_tokens=64", "precision.dtype=fp32", "zero.stage=2"),
        *("batch.micro_batch_size=auto", f"batch.global_batch_size={WINDOWS * world.world_size}"),
        "evaluation.sample_prompt=null",
    ]
    loaded = load_run("demo", settings)
    run, planned = settle(loaded, world, open_source=lambda name: DirectoryBucket(Path(name)))

    @functools.cache
    def step(micro_batch_size: int) -> tuple[int, int, int]:
        batch = dataclasses.replace(
            planned.batch,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=WINDOWS // micro_batch_size,
        )
        choice = dataclasses.replace(planned.choice, micro_batch_size=micro_batch_size)
        return memory_of_a_step(
            run, dataclasses.replace(planned, choice=choice, batch=batch), world
        )

    def chosen(limit: float, formula: int) -> int:
        choice = dataclasses.replace(planned.choice, micro_batch_size=formula)
        return largest_micro(loaded, choice, ranks=world.world_size, limit=limit, measure=step)

    peaks = {micro_batch_size: step(micro_batch_size)[2] for micro_batch_size in MICROS}
    # The formula is right, or says that everything fits.
    return {
        "peaks": peaks,
        "chosen": [
            (peak, chosen(peak, formula))
            for micro_batch_size, peak in peaks.items()
            for formula in (micro_batch_size, MICROS[0])
        ],
    }
