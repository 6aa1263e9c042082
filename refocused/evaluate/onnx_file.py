"""An exported model as an ONNX file: whole sequences in, logits out, for other runtimes."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refocused.evaluate.load_model import load_network
from refocused.system.errors import CheckpointError

ONNX_FILE = "model.onnx"
FAMILIES = ("gpt2", "gpt_neox")  # of which torch's exporter makes a graph of any length
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of the largest logit
_EXAMPLE, _CHECKED = (2, 10), (3, 16)  # rows and tokens: traced with one, compared with another


class _Logits(nn.Module):
    """A network whose only answer is its logits."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids, use_cache=False).logits
        return logits


def require_onnx(family: str) -> None:
    """Refuse, before any work is done, what cannot become an ONNX file.

    Raises:
        CheckpointError: The family has no such form, or a package is not installed.
    """
    if family not in FAMILIES:
        raise CheckpointError(
            f"A model of the family {family} is not exported to ONNX, only {' and '.join(FAMILIES)}"
            " are. Leave --onnx out."
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"--onnx needs {', '.join(missing)}. Install: pip install 'refocused[onnx]'"
        )


def write_onnx(folder: Path) -> Path:
    """Write `model.onnx` (float32) beside the weights of an exported folder, and compare it.

    Raises:
        CheckpointError: It cannot be written, or its logits are others than the model's; what was
            written of it is removed.
    """
    model = _Logits(load_network(folder, dtype="fp32")).eval()
    target = folder / ONNX_FILE
    longest = int(model.network.config.max_position_embeddings)
    sizes = {
        0: torch.export.Dim("rows", min=1),
        1: torch.export.Dim("tokens", min=2, max=longest),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's exporter about torch
        program = torch.onnx.export(
            model,
            (_ids(_EXAMPLE),),
            dynamo=True,
            dynamic_shapes={"input_ids": sizes},
            input_names=["input_ids"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None  # dynamo's exporter returns one
    try:
        program.save(str(target))
    except OSError as error:
        _remove(target)
        raise CheckpointError(
            f"{target} was not written: {error.strerror or error}. What was written of it is "
            "removed; the folder itself is good. Make room on that disk, and export anew."
        ) from None
    difference = _difference(model, target)
    if not difference <= TOLERANCE:  # so that NaN fails too
        _remove(target)
        raise CheckpointError(
            f"The ONNX file is not the model: its logits are {difference:.1e} of the largest one "
            "away. It is removed; the folder itself is good."
        )
    return target


def _remove(target: Path) -> None:
    """Remove the graph, and the file of weights that a large one has beside it."""
    for path in (target, target.with_name(f"{target.name}.data")):
        path.unlink(missing_ok=True)


def _difference(model: _Logits, file: Path) -> float:
    import onnxruntime

    ids = _ids(_CHECKED)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
    with torch.no_grad():
        wanted = model(ids)
    return float((found - wanted).abs().max() / wanted.abs().max())


def _ids(shape: tuple[int, int]) -> Tensor:
    rows, tokens = shape
    return torch.arange(rows * tokens).view(rows, tokens)
