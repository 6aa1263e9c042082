"""Print what a run will take before it starts: `.venv/bin/python docs/examples/estimate.py`."""

import refocused

for gpus in (4, 8):
    found = refocused.estimate_run("llama_1b_8xh100", gpus=gpus, per_hour_usd=3 * gpus)
    slow, likely, fast = found["scenarios"]
    cost = f"${likely['cost_usd']:,.0f} (${fast['cost_usd']:,.0f} to ${slow['cost_usd']:,.0f})"
    peak = f"{found['memory_bytes']['peak'] / 1e9:.1f} GB a GPU"
    print(f"{gpus} x {found['gpu']['name']}: {likely['hours']:,.0f} h, {cost}, {peak}")
