"""Train a bigram model on the demonstration's tokens in a plain torch loop, and resume it.

`.venv/bin/python docs/examples/token_loader.py`. On several ranks (torchrun), wrap the model in
torch's DistributedDataParallel: the loader gives each rank sequences of its own. Under Accelerate,
pass `rank=accelerator.process_index` and `world_size=accelerator.num_processes`, and do not
`prepare` the loader.
"""

import itertools
import os
from pathlib import Path

import torch

import refocused

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
saved = Path("data/token_loader_example.pt")

model = torch.nn.Embedding(257, 257)  # the logits of the byte after each byte
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

# The order, the sequences and the tokens are those of `launch/train.sh --config demo`.
with refocused.TokenLoader.from_run("demo", batch_size=8, rank=rank, world_size=world_size) as data:
    if saved.exists():  # also after a start with another number of ranks
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        data.load_state_dict(state["data"])
        print("continuing at", data.position)
    for step, (input_ids, labels) in enumerate(itertools.islice(data, 20)):
        loss = torch.nn.functional.cross_entropy(model(input_ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1} loss {loss.item():.3f}")
    if rank == 0:
        torch.save({"model": model.state_dict(), "data": data.state_dict()}, saved)
