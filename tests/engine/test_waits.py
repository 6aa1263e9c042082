from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.forked import measured

# Where a host may wait for its device between two lines of the log, and why.
NAMED = {
    # At most two buckets of gradients are under way: this bounds their memory. The device still
    # has the work of those two when the host waits.
    # Once a step, after the update, all work is waited for: weights are gathered on a stream of
    # their own, which nothing else orders behind the update that writes them.
    "zero3": {
        "event in stage3.py:__reduce_and_partition_ipg_grads",
        "device in partition_parameters.py:_allgather_params_coalesced",
    },
    # DeepSpeed's 16-bit optimizer without ZeRO looks for overflows tensor by tensor. `auto` never
    # chooses this stage; stage 1 does the same without waiting.
    "bf16-zero0": {
        "read in utils.py:has_overflow_serial",
        "read in utils.py:has_overflow",
        "read in utils.py:get_weight_norm",
    },
}


@pytest.mark.slow
def test_the_host_waits_for_the_device_only_where_named(tmp_path: Path) -> None:
    (found, _), _ = measured("waits_ranks", tmp_path)
    assert len(found) == 8
    for case, waits in found.items():
        allowed = set().union(*(places for part, places in NAMED.items() if case.endswith(part)))
        assert set(waits) == allowed, case
