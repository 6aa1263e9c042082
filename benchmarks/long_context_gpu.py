"""What whole stacks cost over long windows on a GPU: tokens a second, shares, memory.

    .venv/bin/python benchmarks/long_context_gpu.py [--preset resonance_32k_small] [--json FILE]

* stack: four blocks of each family at equal width, in bf16, forward and backward without the head;
* share: what of a block's time is the convolution;
* preset: one micro-batch of its run, forward and backward with the head, and the memory at its peak
  without the optimizer's states, which `launch/train.py --dry-run` tells.

`--device cpu --tiny` goes through the same code with small numbers, to see that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measuring import Column, Record, table, write_report

from refocused.config.decode import load_run
from refocused.models.build import build_model
from refocused.models.causal_convolution import causal_convolution
from refocused.models.causal_lm import CausalLM
from refocused.models.resonators import kernel

PASSES = 5
SIZES = {"width": 1024, "length": 32768, "layers": 4, "resonators": 128, "heads": 16}
TINY = {"width": 64, "length": 256, "layers": 2, "resonators": 8, "heads": 2}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="What stacks cost over long windows.")
    parser.add_argument("--preset", default="resonance_32k_small", help="a run of config/runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes, device = TINY if arguments.tiny else SIZES, torch.device(arguments.device)
    rows = {
        "sdpa stack": stack(attention_shape(sizes), sizes, device),
        "resonance stack": stack(resonance_shape(sizes), sizes, device),
        "convolution in a resonance block": share(sizes, device),
    }
    if not arguments.tiny:
        rows[arguments.preset] = preset(arguments.preset, device)
    ratio = rows["resonance stack"]["tokens_per_second"] / rows["sdpa stack"]["tokens_per_second"]
    rows["resonance stack"]["times"] = ratio
    columns = (
        Column("seconds", "s", "{:.4f}"),
        Column("tokens_per_second", "tokens/s", "{:,.0f}"),
        Column("times", "x sdpa", "{:.2f}"),
        Column("share", "share of block", "{:.1%}"),
        Column("peak_gib", "peak GiB", "{:.2f}"),
    )
    print(table(rows, columns, title=f"bf16, forward and backward, on {device}"))
    if arguments.json is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        write_report(arguments.json, settings={**sizes, "device": name}, results=rows)


def resonance_shape(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the shape of the attention-free stack."""
    return {
        "model_type": "resonance",
        "hidden_size": sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_resonators": sizes["resonators"],
        "max_position_embeddings": sizes["length"],
    }


def attention_shape(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the shape of the stack with attention."""
    return {
        "model_type": "gpt2",
        "n_embd": sizes["width"],
        "n_layer": sizes["layers"],
        "n_head": sizes["heads"],
        "n_positions": sizes["length"],
    }


def built(shape: Mapping[str, Any], device: torch.device, *, vocabulary: int = 256) -> CausalLM:
    """Build a model in bf16."""
    torch.manual_seed(0)
    model = build_model(
        shape,
        vocabulary=vocabulary,
        dropout=0.0,
        activation_checkpointing=False,
        chunk_tokens=2048,
    )
    return model.to(device, torch.bfloat16)


def stack(shape: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device) -> Record:
    """Time the body of a model, one window."""
    body = built(shape, device).network.base_model
    ids = torch.randint(256, (1, sizes["length"]), device=device)

    def step() -> None:
        body(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()

    return timed(step, tokens=sizes["length"], device=device)


def share(sizes: Mapping[str, int], device: torch.device) -> Record:
    """Time one block, and in it the convolution alone with the kernel's construction."""
    block = built(resonance_shape(sizes), device).network.base_model.layers[0]
    shape = (1, sizes["length"], sizes["width"])
    inputs = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def convolve() -> None:
        tuning = block.resonators.tuning(inputs.dtype)
        causal_convolution(inputs, kernel(tuning, sizes["length"])).sum().backward()

    whole = timed(lambda: block(inputs).sum().backward(), tokens=sizes["length"], device=device)
    part = timed(convolve, tokens=sizes["length"], device=device)
    return part | {"share": part["seconds"] / whole["seconds"]}


def preset(name: str, device: torch.device) -> Record:
    """Train on one micro-batch of a run as it is configured, with its activation checkpointing."""
    loaded = load_run(name)
    config, shape = loaded.config, loaded.shape
    micro = config.batch.micro
    if micro == "auto":
        raise SystemExit(f"{name} leaves batch.micro to each machine: give a run that says it.")
    model = build_model(
        shape.settings,
        vocabulary=shape.padded_vocabulary(config.model.vocabulary_multiple),
        dropout=config.model.dropout,
        activation_checkpointing=config.model.activation_checkpointing,
        chunk_tokens=config.model.head_chunk_tokens,
    ).to(device, torch.bfloat16)
    size = (micro, config.model.sequence_length)
    ids = torch.randint(shape.vocabulary, size, device=device)
    return timed(lambda: model(ids, ids).backward(), tokens=ids.numel(), device=device)


def timed(step: Callable[[], Any], *, tokens: int, device: torch.device) -> Record:
    """Return the fastest of some passes, after one to warm up, and the memory's peak."""
    on_gpu = device.type == "cuda"
    step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(PASSES):
        if on_gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
    return {
        "seconds": min(times),
        "tokens_per_second": tokens / min(times),
        "peak_gib": peak,
    }


if __name__ == "__main__":
    main()
