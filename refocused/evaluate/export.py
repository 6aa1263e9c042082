"""Export a checkpoint to a transformers folder: written, compared with the checkpoint, renamed."""

import ast
import contextlib
import dataclasses
import fcntl
import importlib
import inspect
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.resume.changes import checked_trainer
from refocused.checkpoints.step.checkpoint_directory import in_use, read_checkpoint, read_mapping
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.config.model_shape import families
from refocused.evaluate.export_copy import FOLDER, HUB_SECONDS, ORIGIN, hub_errors, upload_folder
from refocused.evaluate.final_model import FinalModelAnswer, FinalModelRequest
from refocused.evaluate.load_model import build_network, load_network
from refocused.evaluate.model_weights import (
    TORCH_DTYPES,
    TRAINED_LENGTH,
    Dtype,
    ModelWeights,
    network_class,
    tokenizer_of,
)
from refocused.metrics.history import perplexity
from refocused.models.causal_lm import CausalLM
from refocused.system.atomic_files import (
    fsync_directories,
    fsync_path,
    replace_folder,
    write_json_atomic,
)
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.number_text import known
from refocused.system.strict_json import parse_json
from refocused.tokenizers.encoders import BYTES, HUB, TOKENIZER_CONFIG

CHECKED_TOKENS = 64
STRIDE = 7919  # a prime, so that the checked tokens are spread over the vocabulary
TOLERANCE = 1e-4  # of the largest logit, in float32: sums are ordered by the shapes of products
GGUF_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}  # llama.cpp's of every GPT-NeoX
FILE_BYTES = 5_000_000_000
LEFTOVER_AGE_S = 3600.0
PACKAGE = "refocused"
INDEX = "model.safetensors.index.json"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """A written export."""

    folder: Path
    bytes: int  # of all its files
    parameters: int  # of the model, without padding rows of the vocabulary
    logit_difference: float | None  # as a share of the largest logit; None: not compared


def export_step(
    weights: ModelWeights,
    folder: Path,
    *,
    tokenizer: Any,
    dtype: Dtype = "bf16",
    file_bytes: int = FILE_BYTES,
    compare: bool = True,
    report: Callable[[str], None] = lambda _line: None,
) -> Exported:
    """Write a checkpoint as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    The folder gets its name once it is complete and compared. Writing needs the memory of one file,
    the comparison that of the model in float32. For our own families the code is exported too,
    generated from the modules that train the model.

    The weights are rounded to `dtype`, in files of at most `file_bytes`, unless a single tensor is
    larger. If `compare`, the folder is loaded again, see `largest_difference`. `report` receives
    the name of each stage. If `tokenizer` (transformers') is None, the folder has none.

    Raises:
        CheckpointError: The folder exists, cannot be written, or is not the checkpoint's model.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already. Remove it, or name another folder.")
    prefix, difference = f".{folder.name}.exporting-", None
    for path in folder.parent.glob(f"{prefix}*"):  # of killed exports
        with contextlib.suppress(OSError):  # another export was just completed
            newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - newest > LEFTOVER_AGE_S:
                shutil.rmtree(path, ignore_errors=True)
    staging = folder.with_name(f"{prefix}{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        report("writing the weights")
        _write(weights, staging, tokenizer=tokenizer, dtype=dtype, file_bytes=file_bytes)
        if compare:
            report("loading it again, to compare")
            difference = largest_difference(weights, staging, dtype=dtype)
        fsync_directories(staging)
        staging.rename(folder)
        fsync_path(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder} was not written: {error.strerror or error}. Its partial files were removed. "
            "Make room on that disk, or name another folder."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, size, weights.parameters, difference)


def push_folder(folder: Path, address: str) -> str:
    """Upload an export to `hub:MODEL` in one commit; return its address.

    A model that is not there is created, private. Raises CheckpointError.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    model = address.removeprefix(HUB)
    remedy = f"`hf upload {model} {folder}` uploads it"
    with hub_errors(f"{folder} is complete, but was not uploaded to {address}; {remedy}"):
        api = huggingface_hub.HfApi()
        try:
            api.model_info(model, timeout=HUB_SECONDS)
        except RepositoryNotFoundError:
            api.create_repo(model, private=True)
        return str(api.upload_folder(repo_id=model, folder_path=folder).commit_url)


def export_final_model(argument: str) -> None:
    """Make the final model of a run in this process; the argument is FinalModelRequest as JSON."""
    request = FinalModelRequest.model_validate_json(argument)
    _log.info("process %d exports %s", os.getpid(), request.step)
    answer = answer_to(request)
    _log.info("%s: %s", answer.status, answer.text)


def answer_to(request: FinalModelRequest) -> FinalModelAnswer:
    """Export and upload a final model, in place of an older one, and write the answer."""
    text, status = "", "failed"
    try:
        step, known = read_checkpoint(request.step), None
        sums = {"manifest_crc32c": crc32c_of(step.path / MANIFEST)}
        origin = {"run": step.manifest.run, "step": step.step, **sums}
        # A process of an earlier session may still be running.
        with (request.run / f".{FOLDER}.lock").open("w") as lock, in_use(step.path):
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(OSError, ValueError):  # no model, or one of unknown origin
                known = parse_json((request.folder / ORIGIN).read_bytes())
            if known != origin:
                fresh, weights = request.run / f".{FOLDER}.new", ModelWeights(step)
                shutil.rmtree(fresh, ignore_errors=True)
                export_step(weights, fresh, tokenizer=tokenizer_of(weights, is_optional=True))
                write_json_atomic(fresh / ORIGIN, origin)
                replace_folder(fresh, request.folder)
        size = sum(path.stat().st_size for path in request.folder.iterdir())
        text, status = f"step {step.step:,}, {size / 1e6:,.1f} MB", "made"
        if request.bucket is not None:
            bucket = open_bucket(request.bucket, request.credentials)
            upload_folder(request.folder, bucket, request.prefix)
            copy = f"{bucket.url.rstrip('/')}/{request.prefix}"
            text, status = f"{text}, also in {copy}", "uploaded"
    except RefocusedError as error:
        text = f"{text}. {error}" if text else str(error)
    record = {"token": request.token, "status": status, "text": text}
    write_json_atomic(request.answer, record)
    return FinalModelAnswer.model_validate(record)


def _write(
    weights: ModelWeights, folder: Path, *, tokenizer: Any, dtype: Dtype, file_bytes: int
) -> None:
    from transformers import GenerationConfig

    config = type(weights.config).from_dict(weights.config.to_dict())
    config.architectures = [network_class(config).__name__]
    config.dtype = TORCH_DTYPES[dtype]
    if tokenizer is not None:
        config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    _write_weights(weights, folder, dtype=dtype, file_bytes=file_bytes)
    add_modeling_file(config, folder)
    config.save_pretrained(folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | _older_names(config)
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    end = config.eos_token_id
    GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        # transformers 5 writes its name of the class, which transformers 4 does not know.
        settings = read_mapping(folder / TOKENIZER_CONFIG)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        # Else llama.cpp begins texts of most kinds with it, as the model was never prompted here.
        settings["add_bos_token"] = False
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2))
    card = folder / "README.md"
    remarks = [_other_as_gguf(config), "" if tokenizer is None else _refused_as_gguf(tokenizer)]
    for remark in filter(None, remarks):
        _log.warning("%s: %s", weights.step.manifest.run, remark)
    card.write_text(_card(weights, remarks, dtype=dtype))
    for path in folder.iterdir():
        shutil.copymode(card, path)  # save_file makes files that only their owner can read
        fsync_path(path)


def _older_names(config: Any) -> dict[str, Any]:
    """Return what transformers 4 and llama.cpp's converter read, and transformers 5 never writes.

    Without these names transformers 4 takes its own rotary base, silently.
    """
    if config.model_type == "gpt2":
        return {"n_ctx": config.n_positions}
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if not rope:
        return {}
    base, share = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    older = {"rope_theta": base, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    if config.model_type == "gpt_neox":
        older |= {"rotary_emb_base": base, "rotary_pct": share}
    return older


def _other_as_gguf(config: Any) -> str:
    """Return which settings a GGUF file lacks, so that llama.cpp silently takes its own."""
    family, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    name = "activation_function" if family == "gpt2" else "hidden_act"
    theirs = {"gpt2": "gelu", "gpt_neox": "gelu", "llama": "silu", "qwen3": "silu"}
    activation = str(getattr(config, name, ""))
    lost = [] if activation.startswith(theirs.get(family, "")) else [f"{name} {activation}"]
    if family == "gpt_neox":
        given = {key: rope[key] for key in GGUF_ROPE if rope[key] != GGUF_ROPE[key]}
        lost += [f"{key} {value}" for key, value in given.items()]
    if not lost:
        return ""
    return (
        f"llama.cpp gives other logits for this {family}, without an error: its converter leaves "
        f"out {' and '.join(lost)}. Do not convert the model to GGUF."
    )


def _refused_as_gguf(tokenizer: Any) -> str:
    """Return what llama.cpp's converter does not do with a tokenizer; "" if it reads it.

    It knows byte-level BPE by a digest of what it encodes, and reads BPE of the kind of Llama 2.
    """
    inner = tokenizer.backend_tokenizer
    model = json.loads(inner.to_str())["model"]
    kind = model["type"] if model.get("merges") or model["type"] != "BPE" else BYTES
    if model.get("byte_fallback") or inner.encode("Hello world").ids == [15496, 995]:  # GPT-2's
        return ""
    if kind != "BPE":
        return f"llama.cpp's converter refuses the tokenizer {kind}: there will be no GGUF file."
    return (
        "llama.cpp's converter knows the BPE of published models by a digest, and refuses one of "
        'your own ("BPE pre-tokenizer was not recognized"): then there will be no GGUF file.'
    )


def _write_weights(weights: ModelWeights, folder: Path, *, dtype: Dtype, file_bytes: int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kind = TORCH_DTYPES[dtype]
    # Where transformers' files have kept an older name than its modules.
    renamed = families()[weights.config.model_type].names_in_files
    names = {renamed.get(name, name): name for name in weights.shapes}
    split = split_torch_state_dict_into_shards(
        {
            stored: torch.empty(weights.shapes[name], dtype=kind, device="meta")
            for stored, name in names.items()
        },
        max_shard_size=file_bytes,
    )
    for file, stored_names in split.filename_to_tensors.items():
        tensors = {stored: weights.tensor(names[stored], dtype=kind) for stored in stored_names}
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def largest_difference(weights: ModelWeights, folder: Path, *, dtype: Dtype) -> float:
    """Load an export as a user would; return how far its logits are from the checkpoint's.

    Every tensor must be the checkpoint's, rounded, bit for bit. The logits are compared, in float32
    and as a share of the largest, with those of the model that was trained: our head, padding rows
    and all, with weights that are rounded alike.

    Raises:
        CheckpointError: A tensor or the logits differ.
    """
    kind, vocabulary = TORCH_DTYPES[dtype], int(weights.config.vocab_size)
    length = min(CHECKED_TOKENS, int(weights.config.max_position_embeddings))
    ids = (torch.arange(length) * STRIDE % vocabulary).unsqueeze(0)
    tensors = {
        name: weights.tensor(name, dtype=kind, padded=True).float() for name in weights.shapes
    }
    trained = CausalLM(build_network(weights.padded, tensors, dtype="fp32"), chunk_tokens=1)
    with torch.no_grad():
        expected = trained.logits(ids)[..., :vocabulary].clone()
    del trained, tensors
    try:
        network = load_network(folder, dtype="fp32")
    except (OSError, ValueError) as error:
        raise _differs(f"transformers cannot load it ({error})") from None
    stored = network.state_dict()
    for name in weights.shapes:
        if not torch.equal(stored[name], weights.tensor(name, dtype=kind).float()):
            raise _differs(f"its {name} is another")
    with torch.no_grad():
        exported = network(ids).logits
    difference = float((exported - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # so that NaN fails too
        raise _differs(f"its logits are {difference:.1e} of the largest one away")
    return difference


def _differs(how: str) -> CheckpointError:
    return CheckpointError(
        f"The exported model is not the one that was trained: {how}. The export is removed. Please "
        "report this with the versions of torch and transformers."
    )


def _card(weights: ModelWeights, remarks: Sequence[str], *, dtype: Dtype) -> str:
    """Return the README.md of an exported model."""
    step, config, manifest = weights.step, weights.config, weights.step.manifest
    begin = "scratch" if manifest.origin is None else f"the weights of {manifest.origin}"
    trainer = checked_trainer(read_mapping(step.path / "trainer.json"), where=str(step.path))
    cost, trained = trainer["cost_usd"], getattr(config, TRAINED_LENGTH)
    longest = config.max_position_embeddings
    fewer = f", of {longest:,} that it takes" if trained < longest else ""
    tokenizer = weights.settings["data"].get("tokenizer", "unknown")
    losses = [
        "not known" if loss is None else f"{loss:.4f} (perplexity {perplexity(loss):,.2f}{bits})"
        for loss, bits in (
            (manifest.loss, ""),
            (manifest.validation_loss, known(", {:.4f} bits per byte", manifest.bits_per_byte)),
        )
    ]
    rows = {
        "run": f"{manifest.run}, step {manifest.step:,}",
        "saved": manifest.created.isoformat(timespec="seconds"),
        "architecture": (
            f"{config.model_type}, {weights.parameters:,} parameters, stored as {dtype}"
        ),
        "context": f"trained on {trained:,} tokens at once{fewer}",
        "vocabulary": f"{config.vocab_size:,} ids, tokenizer {tokenizer}",
        "tokens": f"{manifest.tokens:,} trained on",
        "data": f"fingerprint {manifest.data_fingerprint}, order {manifest.data_order}",
        "training loss": losses[0],
        "validation loss": losses[1],
        "time": f"{trainer['seconds'] / 3600:,.2f} h until this step was saved",
        "cost": "unknown" if cost is None else f"${cost:,.2f} until this step was saved",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    name = _modeling_name(config)
    code = "" if name is None else f"It needs torch, transformers 5 and its code, {name}.py."
    notes = "".join(f"{note}\n\n" for note in (code, *remarks) if note)
    consent = "" if name is None else ", trust_remote_code=True"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {manifest.run}

A causal language model, pre-trained from {begin}; it is not tuned to follow instructions.

| | |
|---|---|
{table}

{notes}```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{consent})
tokenizer = AutoTokenizer.from_pretrained("."{consent})
```
"""


def add_modeling_file(config: Any, folder: Path) -> None:
    """Write the code of a model that transformers lacks, and name it in its configuration.

    With `trust_remote_code=True` transformers then loads the model without this package. The
    configuration of a family of transformers' own stays as it is.
    """
    import transformers

    name = _modeling_name(config)
    if name is None:
        return
    classes = {
        "AutoConfig": type(config),
        "AutoModel": transformers.MODEL_MAPPING[type(config)],
        "AutoModelForCausalLM": network_class(config),
    }
    config.auto_map = {auto: f"{name}.{known.__name__}" for auto, known in classes.items()}
    (folder / f"{name}.py").write_text(modeling_source(type(config).__module__))


def _modeling_name(config: Any) -> str | None:
    """Return the module that a model's code is written as; None: transformers has its code."""
    is_ours = type(config).__module__.startswith(f"{PACKAGE}.")
    return f"modeling_{config.model_type}" if is_ours else None


def modeling_source(module: str) -> str:
    """Return the source of a module, preceded by all that it imports from this package.

    All modules share one namespace, so none of their names may be another's (a test compares them),
    and they must import from this package by `from refocused.x import name`, at their top.
    """
    imports: dict[str, None] = {}
    bodies: dict[str, str] = {}
    _collect(module, imports, bodies)
    head = f"The code of a model that {PACKAGE} trained, made of these of its modules:"
    title = "\n".join((f'"""{head}', "", *bodies, '"""'))
    first = "\n".join((title, "", "from __future__ import annotations", "", *sorted(imports)))
    return re.sub(r"\n{4,}", "\n\n\n", "\n\n\n".join((first, *bodies.values()))) + "\n"


def _collect(module: str, imports: dict[str, None], bodies: dict[str, str]) -> None:
    """Collect a module's external imports, and its other lines after those it depends on."""
    if module in bodies:
        return
    source = inspect.getsource(importlib.import_module(module))
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
        origin = str(getattr(node, "module", ""))
        if origin.startswith(f"{PACKAGE}."):
            _collect(origin, imports, bodies)
        elif origin != "__future__":
            imports[ast.unparse(node)] = None
    bodies[module] = "\n".join(lines).strip()
