import sys
import types
from typing import Any

import pytest
import torch
from engine_cases import (
    ACCUMULATION,
    DOCUMENT,
    LENGTH,
    MICRO,
    RATES,
    Case,
    by_name,
    make_step,
    sequences,
    start_engine,
    train_plainly,
)
from ranks import on_ranks
from small_families import VOCABULARY, build
from torch._dynamo.utils import counters

from refocused.config.optimization import PrecisionConfig
from refocused.engine import compiled
from refocused.engine.build_engine import set_product_precision
from refocused.engine.compiled import compile_blocks
from refocused.system.errors import ConfigError
from refocused.system.world import World

Found = dict[str, Any]
ALONE = World(rank=0, local_rank=0, world_size=1, local_world_size=1)


def compile_tiny(choice, *, backend="eager", world=ALONE, family="gpt2"):
    model = build(family)
    found = compile_blocks(
        model,
        block_class=model.block_class,
        batch_shape=(MICRO, LENGTH),
        dtype="fp32",
        choice=choice,
        world=world,
        backend=backend,
    )
    return found, model


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """Clear the graphs of other tests: torch limits their number per function."""
    torch._dynamo.reset()


def is_compiled(model):
    blocks = [module for module in model.modules() if isinstance(module, model.block_class)]
    changed = {"forward" in vars(block) for block in blocks}
    assert len(changed) == 1
    return changed.pop()


def broken(graph, inputs):
    raise OSError("no such file: g++")


def test_off_and_auto_on_a_cpu_do_not_compile():
    for choice, reason in (("off", "model.compile=off"), ("auto", "on a CPU")):
        found, model = compile_tiny(choice, backend=broken)
        assert not found.is_on
        assert not found.failed
        assert reason in found.text
        assert not is_compiled(model)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3"])  # NeoX gives a nested tuple
def test_on_compiles_all_blocks_before_the_first_step(family):
    found, model = compile_tiny("on", family=family)
    assert found.is_on
    assert found.text.startswith("2 blocks compiled as one graph")
    assert found.seconds is not None
    assert is_compiled(model)
    ids = torch.zeros(MICRO, LENGTH, dtype=torch.long)
    torch.testing.assert_close(model(ids, ids), build(family)(ids, ids))


def test_on_stops_without_a_cxx_compiler(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"cannot be compiled: .*no such file: g\+\+.*compile=off"
    ):
        compile_tiny("on", backend=broken)


def test_on_continues_uncompiled_if_torchs_compiler_fails(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # there is a compiler, also on a machine without one

    def invalid(graph, inputs):
        command = f"Command: g++ {'-D MACRO ' * 100}"
        raise RuntimeError(f"C++ compile error\n{command}\nx.cpp:36:30: error: conflicting 'acc0'")

    found, model = compile_tiny("on", backend=invalid)
    assert found.failed
    assert "C++ compiler error: conflicting 'acc0'" in found.text
    assert "Install a C++ compiler" not in found.text and "model.compile=off" in found.text
    assert not is_compiled(model)


def test_auto_continues_uncompiled_if_one_rank_fails():
    reason = "RuntimeError: out of registers"
    gpus = types.SimpleNamespace(
        device=torch.device("cpu"), device_kind="cuda", gather=lambda own: [own, reason]
    )
    found, model = compile_tiny("auto", world=gpus)
    assert found.failed
    assert f"compiler failed on them in fp32 ({reason})" in found.text
    assert not is_compiled(model)


# On CPUs torch 2.11 has no products of 8 bits with a scale for each row.
SCALES_ROWS = torch.__version__ >= (2, 12)
CASES = [
    Case(0),
    Case(1, "gpt_neox"),
    Case(2, masked=True),
    Case(3),
    Case(3, "qwen3"),  # torch.nn.functional.linear, which GPT-2 does not call
    Case(3, dropout=0.2, recomputes=True),
    Case(1, "gpt_neox", "bf16", fp8="rowwise" if SCALES_ROWS else "tensorwise"),
    Case(3, dtype="bf16", fp8="tensorwise", recomputes=True),
    Case(3, "gpt_neox", recomputes=True, masked=True),
]


def compiling(world, case):
    def compile_all(model):
        if case.masked:
            model.block_shape = (MICRO, LENGTH)
        compiled = compile_blocks(
            model,
            block_class=model.block_class,
            batch_shape=(MICRO, LENGTH),
            dtype=case.dtype,
            choice="on",
            world=world,
            is_partitioned=case.stage == 3,
            backend="aot_eager",  # not inductor, which takes a minute
        )
        assert compiled.is_on, compiled.text

    return compile_all


def train(case, world, *, compiled):
    torch._dynamo.reset()
    counters.clear()
    torch.nn.functional.linear = LINEAR  # stage 3 of an earlier case has replaced it
    set_product_precision(PrecisionConfig())
    engine = start_engine(
        case, world, prepare=compiling(world, case) if compiled else lambda model: None
    )
    torch.manual_seed(world.rank)
    losses, graphs = [], []
    batches = sequences()[:, :, world.rank]
    if case.masked:
        batches[batches % 8 == 0] = DOCUMENT
    for passes, rate in zip(batches, RATES, strict=True):
        losses += make_step(engine, passes, rate)[0]
        graphs.append(counters["stats"]["unique_graphs"])
    ids = batches[0, 0]
    validated = [engine.validation_loss(ids[:, :-1], ids[:, 1:]).item() for _ in range(2)]
    graphs.append(counters["stats"]["unique_graphs"])
    # Other shapes, as those of the first loss and of samples.
    odd = [engine.validation_loss(ids[:1, :-1], ids[:1, 1:]).item()]
    odd.append(engine.next_token_logits(ids[:, :7]).sum().item())
    names = [name for name, _ in engine._engine.module.named_parameters()]
    engine.close()
    return {
        "losses": losses,
        "step losses": step_losses(losses, world),
        "validated": validated,
        "odd": odd,
        "graphs": graphs,
        "graphs after odd shapes": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "names": names,
    }


def step_losses(losses, world):
    """Return the mean loss of each step over its passes and all ranks."""
    of_ranks = world.gather(torch.tensor(losses).view(-1, ACCUMULATION).mean(1))
    return torch.stack(of_ranks).mean(0).tolist()


def measure(world):
    """Train compiled and uncompiled engines on this rank."""
    # FlexAttention refuses a backward pass on CPUs, although it has one without inductor.
    torch.nn.attention.flex_attention._validate_device = lambda *tensors: None
    return {
        case.name: {kind: train(case, world, compiled=kind == "compiled") for kind in KINDS}
        for case in CASES
    }


KINDS = ("compiled", "written")
LINEAR = torch.nn.functional.linear


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Losses of two ranks with compiled and uncompiled blocks."""
    return on_ranks(measure, folder=tmp_path_factory.mktemp("compiled"), timeout=480)[0]


pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
@by_name(CASES)
def test_compiled_blocks_train_like_uncompiled_ones(found, case):
    ours, written = found[case.name]["compiled"], found[case.name]["written"]
    for key in ("validated", "odd") if case.dropout else ("losses", "validated", "odd"):
        within = 0.2 if case.dropout else 1e-5
        assert ours[key] == pytest.approx(written[key], rel=1e-6, abs=within)
    assert ours["names"] == written["names"]


@pytest.mark.slow
@by_name(CASES)
def test_there_is_one_graph_for_training_and_one_for_validation(found, case):
    graphs = found[case.name]["compiled"]["graphs"]
    assert set(graphs) == {2}  # both from the trial, none later
    assert found[case.name]["compiled"]["breaks"] == 0
    assert found[case.name]["compiled"]["graphs after odd shapes"] == graphs[-1]
    assert found[case.name]["written"]["graphs"][-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.fp8 != "none"])
def test_products_of_8_bits_train_as_float32_does(found, case):
    losses = found[case.name]["written"]["step losses"]
    assert losses == pytest.approx(train_plainly(case.family).losses, rel=0.02)


@pytest.mark.slow
def test_inductor_compiles_a_block_where_there_is_a_compiler():
    found, model = compile_tiny("on", backend="inductor")
    plain = build("gpt2")
    ids = torch.arange(MICRO * LENGTH).reshape(MICRO, LENGTH) % VOCABULARY
    for one in (model, plain):
        one(ids, ids).backward()
    assert found.is_on
    for ours, written in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, written.grad, rtol=1e-4, atol=1e-5)
