"""Measure the cost of a layer over long sequences, forward and backward, by family.

    .venv/bin/python benchmarks/long_context.py [--families resonance] [--repeats 3] [--json FILE]

Each case is a process of its own on one thread: the CPU time of its fastest pass, and how far its
memory rose above what it had before. Freed memory is kept for the next pass, as torch's allocator
does on a GPU: the C library would give tensors beyond 32 MiB back to the kernel and have them
cleared again, so that a long sequence paid for its pages and a short one did not. The second table
holds the limits beside what was measured.
"""

import argparse
import ctypes
import json
import resource
import time

import torch
import torch.nn.functional as F
from measuring import Case, Column, Record, measure, medians, parser_of, table, write_report
from torch import Tensor, nn

from refocused.models.recall import Memory, ShortConvolution
from refocused.models.resonance import GatedResonators, ResonanceConfig
from refocused.models.ten import TenConfig, TenMixer

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of mallopt's settings, in glibc's malloc.h
PASSES = 3
WIDTH, HEADS = 384, 6  # of 64 resonators, or 64 modes a cell
LENGTHS = (8192, 16384, 32768, 65536)
AGAINST_ATTENTION = 16384
COLUMNS = (
    Column("cpu_seconds", "CPU s", "{:.3f}"),
    Column("tokens", "tokens", "{:,.0f}"),
    Column("us_per_token", "us/token", "{:.2f}"),
    Column("peak_mib", "peak MiB", "{:,.0f}"),
    Column("bytes_per_token", "bytes/token", "{:,.0f}"),
)
# Most of a token's time and memory at 65,536 over those at 8,192, and of the time of attention.
LIMITS = {"resonance": (1.25, 1.1, 0.1), "ten": (1.1, 1.1, 0.025), "recall": (1.1, 1.1, 0.15)}


class Attention(nn.Module):
    """Causal attention with its projections."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.joint, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `[B, T, D]`."""
        heads = self.joint(inputs).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        outputs: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return outputs


def resonance(length: int) -> nn.Module:
    """Return the sequence mixer of a block: gate, resonators, output projection."""
    return GatedResonators(ResonanceConfig(hidden_size=WIDTH, max_position_embeddings=length))


def ten(length: int) -> nn.Module:
    """Return the sequence mixer of a block."""
    mixer = TenMixer(TenConfig(hidden_size=WIDTH, max_position_embeddings=length))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.02)
    return mixer


def recall(length: int) -> nn.Module:
    """Return what recall adds to a block: a convolution of 4 taps and a memory."""
    sizes = {"hidden_size": WIDTH, "convolution_width": 4, "memory_heads": HEADS}
    config = TenConfig(**sizes, max_position_embeddings=length)
    return nn.Sequential(ShortConvolution(config), Memory(config))


MODULES = {"resonance": resonance, "ten": ten, "recall": recall, "sdpa": Attention}


def main() -> None:
    """Measure every case, print both tables, write the JSON."""
    parser = parser_of(__file__, __doc__, repeats=3)
    parser.add_argument("--families", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(cost(arguments.case[0], int(arguments.case[1]))))
        return
    sizes = [(family, length) for family in arguments.families for length in LENGTHS]
    sizes.append(("sdpa", AGAINST_ATTENTION))
    cases = [Case(f"{f} layer, {n:,}", [__file__, "--case", f, str(n)]) for f, n in sizes]
    found = measure(cases, repeats=arguments.repeats, timeout_s=1200)
    rows = {name: medians(records) for name, records in found.items()}
    print(table(rows, COLUMNS, title="One layer, forward and backward, one thread"))
    ratios: dict[str, Record] = {}
    for family in arguments.families:
        long, short, middle = (f"{family} layer, {n:,}" for n in (65536, 8192, AGAINST_ATTENTION))
        for key, name, other, limit in zip(
            ("us_per_token", "bytes_per_token", "cpu_seconds"),
            (long, long, middle),
            (short, short, f"sdpa layer, {AGAINST_ATTENTION:,}"),
            LIMITS[family],
            strict=True,
        ):
            ratio = rows[name][key] / rows[other][key]
            ratios[f"{key}: {name} over {other}"] = {"ratio": ratio, "at_most": limit}
    columns = (Column("ratio", "ratio", "{:.3g}"), Column("at_most", "at most", "{:.3g}"))
    print(table(ratios, columns, title="Against the limits"))
    write_report(arguments, {**rows, **ratios})


def cost(family: str, length: int) -> Record:
    """Measure a layer in eager mode: the least CPU time of several passes, its memory's growth."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, -1)):
        raise SystemExit("mallopt refuses to keep freed memory: this benchmark needs glibc.")
    module = MODULES[family](length)
    inputs = torch.randn(1, length, WIDTH, requires_grad=True)
    before_kib, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(PASSES):
        began = time.process_time()
        module.zero_grad()
        inputs.grad = None
        module(inputs).sum().backward()
        times.append(time.process_time() - began)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "cpu_seconds": min(times),
        "tokens": length,
        "us_per_token": min(times) / length * 1e6,
        "peak_mib": peak_kib / 1024,
        "bytes_per_token": peak_kib * 1024 / length,
    }


if __name__ == "__main__":
    main()
