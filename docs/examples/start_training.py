"""Train a small GPT-2 for 40 steps: `.venv/bin/python docs/examples/start_training.py`.

Needs no GPU. It makes the run `runs/example`, which the other examples read. Started again,
it resumes.
"""

import refocused

settings = {
    "run.steps": 40,
    "schedule.warmup_steps": 5,
    "checkpoint.interval": 20,
    "evaluation.interval": 20,
    "evaluation.sequences": 16,
    "evaluation.sample_tokens": 16,
}
run = refocused.start_training("demo", settings, name="example")

status = run.status()
print(f"{run.folder}: {status['status']} at step {status['step']}")
print(f"best validation loss {status['best_loss']:.4f} at step {status['best_step']}")
print(f"that is {status['best_bits_per_byte']:.4f} bits per byte")
