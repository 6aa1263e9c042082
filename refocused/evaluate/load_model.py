"""Load a model for inference: a checkpoint or a transformers folder, on any device."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.config.model_shape import MOST_LAYERS
from refocused.estimate.memory_plan import native_dtype
from refocused.evaluate.export_copy import other_form
from refocused.evaluate.model_weights import (
    TORCH_DTYPES,
    TRAINED_LENGTH,
    Dtype,
    ModelWeights,
    network_class,
    tokenizer_of,
)
from refocused.models.families import register_families
from refocused.system.atomic_files import read_regular
from refocused.system.errors import CheckpointError, ConfigError, RefocusedError, as_typed
from refocused.system.strict_json import parse_json_object
from refocused.system.world import settle_vector_math
from refocused.tokenizers.encoders import TokenizerChoice, settings_file, turn_off_sampling
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

ATTENTION = "sdpa"  # transformers' own choice is slower on some machines
FACTS = ("run", "step", "tokens", "parameters", "loss", "validation_loss", "data_fingerprint")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, and its source."""

    network: Any  # transformers' model; its embedding has no padding rows
    tokenizer: Any  # transformers' tokenizer; None: not loaded
    source: Path  # the checkpoint or the transformers folder
    facts: Mapping[str, Any]  # `FACTS` of the checkpoint; empty for a transformers folder
    is_trained: bool = True  # False: random weights

    @property
    def trained_length(self) -> int | None:
        """Tokens of a training sequence; None: unknown."""
        length = getattr(self.network.config, TRAINED_LENGTH, None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def longest_sequence(self) -> int | None:
        """Most tokens of one sequence; None: no limit, as for a recurrence."""
        config = self.network.config
        longest = getattr(config, "max_position_embeddings", None)
        length: int | None = getattr(config, "longest_sequence", longest)
        return length

    def beyond_training(self, tokens: int) -> str | None:
        """Return a warning if a sequence of so many tokens is longer than those of training."""
        known = self.trained_length
        if known is None or tokens <= known or not self.is_trained:
            return None
        return (
            f"{self.source}: the sequence has {tokens:,} tokens, and the model was trained on "
            f"{known:,}. Results beyond those are unreliable."
        )


def load_model(
    source: Path,
    *,
    dtype: Dtype = "bf16",
    device: str = "cpu",
    tokenizer: TokenizerChoice | None = None,
    without_tokenizer: bool = False,
) -> LoadedModel:
    """Load a checkpoint or a transformers folder, and a tokenizer: by default its own.

    Raises:
        CheckpointError: The folder holds no model, or a damaged one, or no tokenizer.
        ShardError: The tokenizer is damaged, or has ids beyond the model's vocabulary.
    """
    facts: dict[str, Any] = {}
    chosen: Any = None
    if (source / MANIFEST).is_file():
        weights = ModelWeights(read_checkpoint(source))
        chosen = None if without_tokenizer else tokenizer_of(weights, tokenizer)
        kind = TORCH_DTYPES[dtype]
        tensors = {name: weights.tensor(name, dtype=kind) for name in weights.shapes}
        network = build_network(weights.config, tensors, dtype=dtype)
        facts = {name: getattr(weights.step.manifest, name) for name in FACTS}
    elif (source / "config.json").is_file():
        try:
            network = load_network(source, dtype=dtype)
            if not without_tokenizer:
                chosen = _tokenizer_beside(source, network.config, tokenizer)
        except RefocusedError:
            raise
        except Exception as error:  # transformers raises nothing narrower
            reason = " ".join(str(error).split()).rstrip(".")
            what = f"{source} cannot be loaded by transformers: {reason}."
            for file in (source / "config.json", source / "tokenizer_config.json"):
                is_read = "trust_remote_code" in reason and file.is_file()
                settings = parse_json_object(read_regular(file)) if is_read else {}
                if classes := settings.get("auto_map"):
                    what = (
                        f"{file} needs Python code that came with the model (auto_map: "
                        f"{', '.join(sorted(classes))}), and refocused runs no such code. Convert "
                        "the model to an architecture that transformers includes; for a tokenizer "
                        "alone, name another: --tokenizer."
                    )
                    break
            raise CheckpointError(what) from None
    elif (other := other_form(source)) is not None:
        raise CheckpointError(other)
    else:
        raise CheckpointError(
            f"{source} is no model: it has neither {MANIFEST} (a checkpoint) nor config.json "
            f"(a transformers folder). Choose a checkpoint: {as_typed('checkpoints list')}"
        )
    return LoadedModel(network.to(device), chosen, source, facts)


def usual_dtype(device: str) -> Dtype:
    """Return the default precision of a device."""
    if not device.startswith("cuda"):
        return "fp32"
    return native_dtype(capability=torch.cuda.get_device_capability(device)).dtype


def model_for_inference(
    source: Path,
    *,
    device: str | None = None,
    dtype: Dtype | None = None,
    tokenizer: TokenizerChoice | None = None,
    without_tokenizer: bool = False,
) -> LoadedModel:
    """Load a model as `load_model` does, on a GPU if there is one, in what that computes fastest.

    Raises:
        ConfigError: There is no such device.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--device {device}: {reason}. Name cpu, cuda or cuda:N.") from None
    return load_model(
        source,
        dtype=dtype or usual_dtype(device),
        device=device,
        tokenizer=tokenizer,
        without_tokenizer=without_tokenizer,
    )


def untrained(model: LoadedModel) -> LoadedModel:
    """Return a model of the same shape with random weights, as before training."""
    loaded = model.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = network_class(loaded.config)(loaded.config)
    network = network.to(device=loaded.device, dtype=loaded.dtype).eval()
    return dataclasses.replace(model, network=network, facts={}, is_trained=False)


def build_network(config: Any, tensors: Mapping[str, Tensor], *, dtype: Dtype) -> Any:
    """Build transformers' model from its tensors, in evaluation mode, on the CPU.

    `tensors` holds tied tensors under one name. Tensors of type `dtype` are not copied.
    """
    quiet_transformers()
    settle_vector_math()
    network = network_class(config).from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=TORCH_DTYPES[dtype],
        attn_implementation=ATTENTION,
    )
    return network.eval()


def load_network(folder: Path, *, dtype: Dtype) -> Any:
    """Load a transformers folder in evaluation mode, on the CPU, without a download.

    Raises:
        OSError: A file is missing.
        ValueError: The kind of model is unknown, a file is damaged, or tensors that `config.json`
            describes are missing, which transformers would fill with random numbers.
    """
    import transformers
    from safetensors import SafetensorError

    quiet_transformers()
    register_families()
    settle_vector_math()
    # Building a larger model than the files hold would fill the memory.
    parse_json_object(read_regular(folder / "config.json"))  # transformers' reader may recurse
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(
            f"its config.json describes {layers:,} layers, and at most {MOST_LAYERS:,} are read"
        )
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    described = network.num_parameters()
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if described > 8 * stored_bytes:  # not even a bit for each
        raise ValueError(
            f"its config.json describes {described:,} parameters, and its safetensors files have "
            f"{stored_bytes:,} bytes"
        )
    try:
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ValueError(f"a file of its weights is cut off or damaged ({error})") from None
    others = [name for name, *_ in report["mismatched_keys"]]
    if names := report["missing_keys"] or others:
        what = "lack" if report["missing_keys"] else "have another shape of"
        raise ValueError(
            f"its weights {what} {min(names)} ({len(names)} such tensors) that its config.json "
            "describes. Copy or export the folder again"
        )
    if unknown := report["unexpected_keys"]:
        left_out = "%s: %d tensors are left out that its config.json does not describe, as %s"
        logger.warning(left_out, folder, len(unknown), min(unknown))
    return network.eval()


def _tokenizer_beside(source: Path, config: Any, choice: TokenizerChoice | None) -> Any:
    import transformers

    if choice is not None:
        end = config.eos_token_id
        return as_transformers(
            tokenizer_file(choice, vocabulary=int(config.vocab_size)),
            end_of_text_id=end if isinstance(end, int) else None,
            max_length=int(config.max_position_embeddings),
            file=settings_file(choice),
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source, local_files_only=True, trust_remote_code=False
    )
    # Without files, transformers returns a tokenizer with special tokens only.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise CheckpointError(
            f"{source} has no tokenizer. Name it: --tokenizer bytes, --tokenizer gpt2 "
            "--bpe-folder FOLDER, --tokenizer hub:MODEL or --tokenizer FILE."
        )
    if tokenizer.is_fast:
        turn_off_sampling(tokenizer.backend_tokenizer)
    return tokenizer


def quiet_transformers() -> None:
    """Turn off transformers' progress bars and warnings; `load_network` reports problems itself."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
