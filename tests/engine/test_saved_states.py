"""Files in DeepSpeed's layout, read parameter by parameter."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from refocused.engine.resharding import KINDS, reshard
from refocused.engine.zero_files import ZeroFiles
from refocused.engine.zero_layout import is_of_all_ranks, model_file_rank, optimizer_file_rank
from refocused.system.errors import CheckpointError

# Two groups, as for weight decay, of sizes that the numbers of ranks do not divide.
GROUPS = [{"a.weight": (5, 7), "b.weight": (11, 3)}, {"a.bias": (7,), "b.bias": (1,)}]
SIZES = {name: torch.Size(shape).numel() for group in GROUPS for name, shape in group.items()}
STEP = 12.0


def content(name, kind):
    """The flattened parameter, or a moment of it."""
    draw = torch.Generator().manual_seed(sum(map(ord, name + kind)))
    return torch.rand(SIZES[name], generator=draw)


def adam(groups):
    states = {
        index: {"step": torch.tensor(STEP), **{kind: group[kind] for kind in KINDS[1:]}}
        for index, group in enumerate(groups)
    }
    return {"state": states, "param_groups": []}


def padded(flat, size):
    return torch.cat([flat, torch.full((size - flat.numel(),), -1.0)])


def partitioned(rank, ranks):
    """One rank's file of ZeRO 1 and 2: a concatenated group, split into equal parts."""
    groups, mappings = [], []
    for named in GROUPS:
        whole = sum(SIZES[name] for name in named)
        part = -(-whole // (2 * ranks)) * 2
        begin, mapping, offset = rank * part, {}, 0
        for name in named:
            first, last = max(offset, begin), min(offset + SIZES[name], begin + part)
            if first < last:
                mapping[name] = {"numel": last - first, "start": first - begin}
            offset += SIZES[name]
        mappings.append(mapping)
        flats = {kind: torch.cat([content(name, kind) for name in named]) for kind in KINDS}
        groups.append(
            {kind: padded(flat, part * ranks)[begin : begin + part] for kind, flat in flats.items()}
        )
    return {
        "base_optimizer_state": adam(groups),
        "single_partition_of_fp32_groups": [group["master"] for group in groups],
        "param_slice_mappings": mappings,
    }


def sharded(rank, ranks, *, sub_group=None):
    """One rank's file of ZeRO 3: each parameter split into equal parts, groups by size."""
    groups = []
    for named in GROUPS:
        parts = {kind: [] for kind in KINDS}
        for name, kind in itertools.product(named, KINDS):
            part = -(-SIZES[name] // ranks)
            whole = padded(content(name, kind), part * ranks)
            parts[kind].append(whole[rank * part : (rank + 1) * part])
        flat = {kind: torch.cat(tensors) for kind, tensors in parts.items()}
        size = sub_group or len(flat["master"])
        cut = zip(*(flat[kind].split(size) for kind in KINDS), strict=True)
        groups += [dict(zip(KINDS, pieces, strict=True)) for pieces in cut]
    return {
        "optimizer_state_dict": adam(groups),
        "fp32_flat_groups": [group["master"] for group in groups],
    }


def cut_by_size(rank, ranks):
    return sharded(rank, ranks, sub_group=4)


def write(folder, ranks, state):
    counters = {"global_steps": 12, "global_samples": 96, "skipped_steps": 0}
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in GROUPS]
    module = {name: torch.zeros(0) for group in GROUPS for name in group}
    model = {"module": module, "shared_params": {}, "buffer_names": [], "frozen_param_shapes": None}
    torch.save({"param_shapes": shapes, **counters, **model}, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        torch.save(
            {"optimizer_state_dict": state(rank, ranks)},
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("form", [partitioned, sharded, cut_by_size])
def test_every_element_of_every_parameter_is_found(tmp_path, ranks, form):
    write(tmp_path, ranks, form)
    saved = ZeroFiles(tmp_path, ranks=ranks)
    assert saved.shapes == {**GROUPS[0], **GROUPS[1]} == saved.trained
    assert saved.step == STEP
    assert saved.counters["global_steps"] == 12
    for name, kind in itertools.product(SIZES, KINDS):
        for start in range(0, SIZES[name], 4):
            target = torch.full((min(6, SIZES[name] - start),), -2.0)
            saved.fill(target, name, kind, start=start)
            assert torch.equal(target, content(name, kind)[start : start + 6]), (name, kind, start)


def test_before_the_first_update_there_are_only_masters(tmp_path):
    def skipped(rank, ranks):
        return sharded(rank, ranks) | {"optimizer_state_dict": {"state": {}, "param_groups": []}}

    write(tmp_path, 2, skipped)
    saved = ZeroFiles(tmp_path, ranks=2)
    assert saved.step == 0
    saved.fill(target := torch.zeros(SIZES["a.weight"]), "a.weight", "master", start=0)
    assert torch.equal(target, content("a.weight", "master"))


def test_more_ranks_than_saved_are_rejected(tmp_path):
    write(tmp_path, 2, sharded)
    with pytest.raises(CheckpointError, match="2 optimizer files, and 3 ranks have saved it"):
        ZeroFiles(tmp_path, ranks=3)


@pytest.mark.parametrize(("change", "elements"), [(-1, 39), (1, 41)])
def test_a_rank_with_another_number_of_elements_is_rejected(tmp_path, change, elements):
    def other(rank, ranks):
        state = sharded(rank, ranks)
        last = state["fp32_flat_groups"][-1]
        state["fp32_flat_groups"][-1] = torch.zeros(len(last) + change)
        return state

    write(tmp_path, 2, other)
    with pytest.raises(CheckpointError, match=f"rank 0 .* {elements} elements, not the 40 of"):
        ZeroFiles(tmp_path, ranks=2)


def test_file_names_give_the_rank():
    assert optimizer_file_rank("bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt") == 12
    assert optimizer_file_rank("zero/zero_pp_rank_3_mp_rank_00_optim_states.pt") == 3
    assert optimizer_file_rank("zero_pp_rank_3_mp_rank_00_model_states.pt") is None
    assert model_file_rank("zero_pp_rank_3_mp_rank_00_model_states.pt") == 3
    assert model_file_rank("zero/mp_rank_00_model_states.pt") == 0
    assert is_of_all_ranks("zero/mp_rank_00_model_states.pt")
    assert not is_of_all_ranks("zero/zero_pp_rank_0_mp_rank_00_model_states.pt")


@pytest.mark.parametrize(("saved", "now"), [(True, False), (False, True), (True, True)])
def test_states_on_nvme_are_not_resharded(tmp_path, saved, now):
    engine = SimpleNamespace(zero_nvme_offload_optimizer=lambda: now)
    if saved:
        (tmp_path / "offloaded_tensors" / "rank00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"cannot be resharded\. Resume on 2 ranks"):
        reshard(engine, tmp_path, ranks=2)
