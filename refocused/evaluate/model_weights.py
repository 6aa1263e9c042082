"""A checkpoint's weights as transformers has them, and its tokenizer."""

import contextlib
import math
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from refocused.checkpoints.step.checkpoint_directory import (
    CHOOSE_ANOTHER,
    Checkpoint,
    in_use,
    read_mapping,
    run_settings,
)
from refocused.checkpoints.step.verify import require_intact
from refocused.config.model_shape import LARGEST_NUMBER, shape_from
from refocused.engine.zero_files import ZeroFiles
from refocused.models.causal_lm import NETWORK_PREFIX
from refocused.models.families import transformers_config
from refocused.system.errors import CheckpointError
from refocused.tokenizers import tokenizer_json
from refocused.tokenizers.encoders import BYTES, TokenizerChoice, settings_file

Dtype = Literal["bf16", "fp16", "fp32"]
TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# In the configuration: tokens of a training sequence, which may be fewer than the model can take.
# transformers keeps unknown names.
TRAINED_LENGTH = "trained_sequence_length"


class ModelWeights:
    """The float32 masters and buffers of a verified checkpoint, one tensor at a time.

    Retention leaves the checkpoint alone while this exists.

    Attributes:
        settings: The run file that it was trained under.
        config: transformers' configuration, without padding rows of the vocabulary.
        padded: The same with the rows that were trained.
        shapes: The shape of each tensor by transformers' name, in the model's order; tied ones
            under one name, and without padding rows.
        parameters: Elements of all shapes.
        ties: Further names, and the name that their tensor is stored under.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Verify every byte of a checkpoint, and match its tensors with its `model.json`.

        Raises:
            CheckpointError: A file is damaged or missing, not as DeepSpeed writes it, or of another
                model.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(in_use(checkpoint.path))
            except OSError as error:
                what = f"cannot be read any more ({error.strerror})"
                raise CheckpointError(f"{checkpoint.path} {what}. {CHOOSE_ANOTHER}") from None
            require_intact(checkpoint)
            self.step = checkpoint
            self._files = ZeroFiles(checkpoint.path / "zero", ranks=checkpoint.manifest.world_size)
            self._names = {_plain(name): name for name in self._files.shapes}
            self.ties = {_plain(other): _plain(name) for other, name in self._files.ties.items()}
            self.settings: Mapping[str, Mapping[str, Any]] = run_settings(checkpoint)
            self._describe(self.settings["model"])
            weakref.finalize(self, stack.pop_all().close)

    def _describe(self, model: Mapping[str, Any]) -> None:
        """Set configurations and shapes, and compare them with what the files hold."""
        shape = shape_from(
            read_mapping(self.step.path / "model.json"), where=str(self.step.path / "model.json")
        )
        rows = shape.padded_vocabulary(self._count(model, "vocabulary_multiple", 128))
        self.config, self.padded = (
            transformers_config(
                shape.settings, vocabulary=vocabulary, dropout=model.get("dropout", 0.0)
            )
            for vocabulary in (shape.vocabulary, rows)
        )
        setattr(self.config, TRAINED_LENGTH, self._count(model, "sequence_length", 0))
        self._trained = {name: self._files.shapes[key] for name, key in self._names.items()}
        saved = self._trained | {other: self._trained[name] for other, name in self.ties.items()}
        described = _shapes(self.padded)
        names = {*saved, *described}
        if odd := sorted(name for name in names if saved.get(name) != described.get(name)):
            first = odd[0]
            raise CheckpointError(
                f"{self.step.path} holds another model than its model.json describes: {first} is "
                f"{saved.get(first, 'missing')}, not {described.get(first, 'there')} ({len(odd)} "
                "such tensors). Use the version of refocused that wrote the checkpoint."
            )
        without_padding = _shapes(self.config)
        self.shapes = {name: without_padding[name] for name in self._names}
        self.parameters = sum(math.prod(shape) for shape in self.shapes.values())

    def _count(self, model: Mapping[str, Any], name: str, usual: int) -> int:
        count = model.get(name, usual)
        if type(count) is not int or not 0 < count <= LARGEST_NUMBER:
            raise CheckpointError(
                f"{self.step.path / 'run.yaml'}: model.{name} = {count!r:.80}; expected a whole "
                f"number from 1. {CHOOSE_ANOTHER}"
            )
        return count

    def tensor(
        self, name: str, *, dtype: torch.dtype = torch.float32, padded: bool = False
    ) -> Tensor:
        """Return one whole tensor, rounded to `dtype`, with or without padding rows."""
        whole = torch.empty(self._trained[name], dtype=dtype)
        self._files.fill(whole.view(-1), self._names[name])
        if padded or self._trained[name] == self.shapes[name]:
            return whole
        return whole[: self.shapes[name][0]]


def _plain(name: str) -> str:
    """Return transformers' own name of a tensor of our wrapper."""
    return name.removeprefix(NETWORK_PREFIX)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model, without allocating any."""
    with torch.device("meta"):
        network = network_class(config)(config)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def network_class(config: Any) -> Any:
    """Return transformers' class of a causal language model."""
    import transformers

    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def tokenizer_of(
    weights: ModelWeights, choice: TokenizerChoice | None = None, *, is_optional: bool = False
) -> Any:
    """Return a named tokenizer, or the one saved in the checkpoint, as transformers' own class.

    Raises:
        CheckpointError: None is saved and none is named; if `is_optional`, None is returned.
        ShardError: Its files are missing or damaged, or it has ids that the model does not know.
    """
    vocabulary, step = int(weights.config.vocab_size), weights.step
    data = weights.settings["data"]
    trained_on = data.get("tokenizer", "unknown")
    saved = step.path / tokenizer_json.TOKENIZER_FILE
    is_saved = saved.is_file()
    if choice is None and not is_saved and trained_on == BYTES:
        choice = TokenizerChoice(BYTES)
    if choice is not None:
        content = tokenizer_json.tokenizer_file(choice, vocabulary=vocabulary)
        saved = settings_file(choice) or saved
    elif is_saved:
        content = saved.read_bytes()
        tokenizer_json.check_vocabulary(content, vocabulary=vocabulary, where=str(saved))
    elif is_optional:
        return None
    else:
        raise CheckpointError(
            f"{step.path} has no tokenizer (its run says data.tokenizer: {trained_on}, and names "
            "no files of it). Name it: --tokenizer gpt2 --bpe-folder FOLDER, --tokenizer hub:MODEL "
            "or --tokenizer FILE; an export may do without: --no-tokenizer."
        )
    named = (data.get(name) for name in ("document_id", "separator_id"))
    return tokenizer_json.as_transformers(
        content,
        end_of_text_id=next((number for number in named if number is not None), None),
        max_length=int(weights.config.max_position_embeddings),
        file=saved,
    )
