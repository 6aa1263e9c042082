"""List the checkpoints of a run, and download the best one from its mirror.

`.venv/bin/python docs/examples/checkpoints.py`, after `start_training.py`.
"""

import refocused

manager = refocused.CheckpointManager("runs/example")
for one in manager.list_checkpoints():
    loss = "-" if one.validation_loss is None else f"{one.validation_loss:.4f}"
    notes = ", ".join(one.notes)
    print(f"step {one.step:4}  local {one.local:3} bucket {one.bucket:3} loss {loss}  {notes}")

# On another machine, only the bucket is needed.
elsewhere = refocused.CheckpointManager(
    "runs/copy", bucket="data/demo_mirror", prefix="example/checkpoints"
)
print("downloaded and verified:", elsewhere.download_checkpoint("best"))
