"""The FLOPs and bytes of a pass against those of every operation of one, counted on a CPU."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from memory_cases import CHUNK, FAMILIES, ROWS, Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from refocused.config.model_shape import families
from refocused.config.optimization import Dtype
from refocused.estimate.step_time import Work, pass_work
from refocused.models import resonance as causal_convolution
from refocused.models.head_loss import LossHead

PRODUCTS = {"aten::mm", "aten::addmm"}
UNMOVED = {"aten::detach", "aten::_reshape_alias", "aten::_unsafe_view"}
# Their first argument is not read, or only where an index points.
NOT_READ = {"aten::copy_", "aten::gather", "aten::scatter_add_", "aten::embedding"}


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, by kind.

    What a convolution does inside is counted, as it is one operation of torch's to others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema, kwargs = function._schema, kwargs or {}
        namespace, name = schema.name.split("::")
        if namespace == "refocused":
            with self:
                return getattr(causal_convolution, name)._init_fn(*args, **kwargs)
        result = function(*args, **kwargs)
        is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
        if is_view or schema.name in UNMOVED or "empty" in name:
            return result
        others = {key: value for key, value in kwargs.items() if key != "out"}
        read = tree_leaves((args[schema.name in NOT_READ :], others))
        written = [] if name == "scatter_add_" else tree_leaves(result)
        kind = "fft" if "fft" in name else "moved"
        if schema.name in PRODUCTS or "scaled_dot_product" in name:
            kind = "products"
        for leaf in (*read, *written):
            if isinstance(leaf, Tensor):  # what is expanded is read from where it is
                size = leaf.numel() * leaf.element_size()
                self.bytes[kind] += min(size, leaf.untyped_storage().nbytes())
        return result


def summed(_: Any, a: tuple[int, int], b: tuple[int, int], **__: Any) -> int:
    """FLOPs of `addmm_`, which sums the head's gradient; torch's counter leaves it out."""
    return 2 * a[0] * a[1] * b[1]


def counted(case: Case, *, layers: int) -> tuple[float, list[Counter[str]]]:
    """Return the FLOPs of products of a pass, and the bytes forward and backward."""
    model, ids = case.built(layers=layers).to(case.numbers), case.ids()
    traffic = [Traffic(), Traffic()]
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: summed}) as flops:
        with traffic[0]:
            loss = model(ids, ids)
        with traffic[1]:
            loss.backward()
    return float(flops.get_total_flops()), [one.bytes for one in traffic]


def computed(case: Case, *, layers: int) -> tuple[Work, Work]:
    shape = dataclasses.replace(case.shape(), layers=layers)
    size = case.numbers.itemsize
    return pass_work(
        shape,
        model=case.run(compile="off").config.model,
        micro_batch_size=case.micro_batch_size,
        size=size,
    )


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_products_of_a_pass_are_those_that_torch_counts(family: Any, recomputes: bool) -> None:
    case = Case(0, family, "bf16", recomputes)
    flops, _ = counted(case, layers=2)
    forward, backward = computed(case, layers=2)
    work = forward + backward
    # torch's counter knows no attention of CPUs
    assert work.products + work.head + work.exact == pytest.approx(flops, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "recall"),
    [("ten", "bf16", "memory"), ("ten", "fp32", "hybrid"), ("resonance", "fp32", "memory")],
)
def test_recall_computes_and_moves_what_is_counted(family: Any, dtype: Any, recall: Any) -> None:
    case = Case(0, family, dtype, length=1024, recall=recall)
    few, many = (counted(case, layers=layers) for layers in (2, 4))
    less, more = (computed(case, layers=layers) for layers in (2, 4))
    flops = [sum(w.products + w.exact + w.head for w in work) for work in (less, more)]
    assert flops[1] - flops[0] == pytest.approx(many[0] - few[0], rel=0.02)
    for part in (0, 1):
        expected = more[part].elementwise + more[part].mixing
        expected -= less[part].elementwise + less[part].mixing
        moved = many[1][part]["moved"] - few[1][part]["moved"]
        moved += 2 * (many[1][part]["fft"] - few[1][part]["fft"])
        assert expected == pytest.approx(moved, rel=0.15)


def test_attention_is_the_causal_half_of_what_torch_counts() -> None:
    from torch.utils import flop_counter

    forward, backward = (part.attention for part in computed(Case(0), layers=1))
    case, heads = Case(0), 4
    states = (case.micro_batch_size, heads, case.length, case.shape().width // heads)
    assert 2 * forward == flop_counter.sdpa_flop_count(states, states, states)
    assert 2 * backward == flop_counter.sdpa_backward_flop_count(states, *(states,) * 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_moves_what_its_operations_read_and_write(family: Any, dtype: Dtype) -> None:
    # Attention blocks move as much for each token at any length.
    case = Case(0, family, dtype, length=256 if families()[family].has_attention else 1024)
    one, two = (counted(case, layers=layers)[1] for layers in (1, 2))
    for part in (0, 1):
        less, more = (computed(case, layers=layers)[part] for layers in (1, 2))
        expected = more.elementwise + more.mixing - less.elementwise - less.mixing
        moved = two[part]["moved"] - one[part]["moved"]
        moved += 2 * (two[part]["fft"] - one[part]["fft"])  # long transforms go over it twice
        assert expected == pytest.approx(moved, rel=0.15)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_head_moves_what_its_operations_read_and_write(dtype: Dtype) -> None:
    case = Case(0, dtype=dtype)  # type: ignore[arg-type]
    like = case.numbers
    width, tokens = case.shape().width, case.micro_batch_size * case.length
    head = LossHead(torch.nn.Parameter(torch.randn(ROWS, width, dtype=like)), chunk_tokens=CHUNK)
    hidden = torch.randn(tokens, width, dtype=like, requires_grad=True)
    with Traffic() as traffic:
        head(hidden, torch.randint(ROWS, (tokens,))).backward()
    expected, _ = computed(case, layers=0)
    moved = traffic.bytes["moved"]
    if dtype == "bf16":  # a CPU widens the operands of the float32 sum, a GPU does not
        moved -= (2 + 4) * tokens * (ROWS + width)
    assert expected.elementwise == pytest.approx(moved, rel=0.15)
