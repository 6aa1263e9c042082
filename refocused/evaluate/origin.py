"""Find the weights that a run starts from, and match them with the run's model."""

import dataclasses
import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from refocused.bucket.bucket import Bucket, checked_name, crc32c_of
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.import_checkpoint import find_elsewhere, is_same, split_address
from refocused.checkpoints.resume.resume_selection import select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import read_checkpoint, read_mapping
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.checkpoints.step.verify import require_intact
from refocused.config.data import DataConfig
from refocused.config.model_shape import ModelShape, families, shape_from
from refocused.engine.resharding import FillWeights
from refocused.engine.zero_files import ZeroFiles
from refocused.evaluate.export_copy import (
    CONFIG,
    MODELS,
    fetch_folder,
    fetch_hub,
    other_form,
    weight_files,
)
from refocused.models.causal_lm import NETWORK_PREFIX
from refocused.models.families import transformers_config
from refocused.system.errors import CheckpointError, ConfigError, as_typed, local_path
from refocused.tokenizers.encoders import HUB, TokenizerChoice, found_end_of_text, load_content
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE, saved_files, tokenizer_file

# Settings that change no logit, or that show in the shapes of the tensors.
_IRRELEVANT = re.compile(
    "vocab_size|initializer_range|use_cache|.*_token_id|n_inner|max_position_embeddings|summary_.*"
)
Reader = Callable[[], Tensor]
logger = logging.getLogger(__name__)
MEAN_ROWS = 8192  # read at once
_OLD_BUFFER = "rotary_emb.inv_freq"  # in files of earlier versions of transformers


def find_model(
    address: str,
    *,
    runs: Path,
    open_url: Callable[[str], Bucket],
    trusts_pickles: bool,
    fetches: bool = True,
) -> tuple[Path | None, str]:
    """Return the local folder of the model at `model.start_from`, downloaded, and its revision.

    The folder is transformers' or a checkpoint's; None if it would have to be fetched, and is not.
    `runs` holds all runs. Raises ConfigError if nothing is there, and CheckpointError or
    BucketError if it cannot be fetched.
    """
    if address.startswith(HUB):
        return fetch_hub(address, trusts_pickles=trusts_pickles, fetches=fetches)
    folder = local_path(address)
    if "://" in address:
        target = MODELS / checked_name(address.partition("://")[2].strip("/"), where=address)
        bucket = open_url(address) if split_address(address)[1] is None else None
        if bucket is not None and bucket.info(CONFIG) is not None:  # an exported model
            folder = fetch_folder(bucket, target) if fetches else target
        else:
            saved = find_elsewhere(address, open_url)
            folder = target / saved.manifest.name
            if fetches and not is_same(folder, saved.manifest):
                folder = saved.copy_into(target).path
        if not fetches:
            return None, ""
    if (folder / CONFIG).is_file():
        return folder, ""
    if (folder / MANIFEST).is_file():
        step = read_checkpoint(folder)
        require_intact(step)
    else:
        name, _, request = address.partition(":")
        run = next(
            (path for path in (Path(name), runs / name) if (path / "checkpoints").is_dir()), None
        )
        if run is None and (other := other_form(folder)) is not None:
            raise ConfigError(f"model.start_from: {other}")
        if run is None:
            raise ConfigError(
                f"model.start_from = {address!r} is neither a folder with a {CONFIG} or a "
                f"{MANIFEST}, nor a run in {runs}. Write hub:MODEL, a folder, gs://..., or "
                "RUN[:STEP]."
            )
        chosen = select_checkpoint(Catalog(run / "checkpoints"), request or "latest").checkpoint
        if chosen is None:
            raise ConfigError(f"model.start_from = {address!r}: {run} has no checkpoint yet.")
        step = chosen
    return step.path, f"{step.manifest.run} step {step.step}"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredModel:
    """The tensors of a model on this machine's disk, in memory-mapped files."""

    folder: Path
    settings: Mapping[str, Any]  # its configuration
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, by their names in the files
    read: Callable[[str, int, int], Tensor]  # name, first element and end: flat elements
    sums: Callable[[], Mapping[str, int]]  # CRC-32C of the files with weights
    is_checkpoint: bool = False  # its vocabulary has padding rows

    def fingerprint(self) -> str:
        """Return a digest of the files with weights; reads those of a transformers folder."""
        return hashlib.sha256(json.dumps(dict(self.sums())).encode()).hexdigest()[:16]


def open_model(folder: Path, *, trusts_pickles: bool) -> StoredModel:
    """Open a checkpoint or a transformers folder.

    Raises CheckpointError if it is damaged, or pickled and `trusts_pickles` is not set.
    """
    if (folder / MANIFEST).is_file():
        step = read_checkpoint(folder)
        if step.manifest.zero_stage == 0:
            raise CheckpointError(
                f"{folder} was saved with zero.stage=0, in another form. Export it, and start from "
                f"the export: {as_typed('checkpoints export')} {folder} OUT --dtype fp32"
            )
        saved = ZeroFiles(folder / "zero", ranks=step.manifest.world_size)

        def read(name: str, first: int, end: int) -> Tensor:
            part = torch.empty(end - first)
            saved.fill(part, NETWORK_PREFIX + name, start=first)
            return part

        settings = read_mapping(folder / "model.json")
        shapes = {name.removeprefix(NETWORK_PREFIX): size for name, size in saved.trained.items()}
        sums = {name: file.crc32c for name, file in step.files.items() if name.startswith("zero/")}
        return StoredModel(folder, settings, shapes, read, lambda: sums, is_checkpoint=True)
    files = weight_files(folder, trusts_pickles=trusts_pickles)
    settings, tensors = read_mapping(folder / CONFIG), dict[str, tuple[tuple[int, ...], Reader]]()
    for name in files:
        try:  # nothing is read yet
            if name.endswith(".safetensors"):
                mapped: Any = safe_open(folder / name, framework="pt")
                for key in mapped.keys():  # noqa: SIM118
                    shape = tuple(mapped.get_slice(key).get_shape())
                    tensors[key] = shape, functools.partial(mapped.get_tensor, key)
            else:
                loaded = torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)
                for key, tensor in loaded.items():
                    tensors[key] = tuple(tensor.shape), tensor.detach
        except Exception as error:  # of safetensors and of torch's reader, which raise any type
            raise CheckpointError(
                f"{folder / name} is missing, cut off or damaged ({' '.join(str(error).split())}). "
                "Copy or download it again."
            ) from None
    return StoredModel(
        folder,
        settings,
        {name: shape for name, (shape, _) in tensors.items()},
        lambda name, first, end: tensors[name][1]().flatten()[first:end],
        lambda: {name: crc32c_of(folder / name) for name in files},
    )


def match(
    stored: StoredModel, shape: ModelShape, *, where: str, preset: str, resizes: bool
) -> FillWeights:
    """Return what fills the parameters of the run's model, each element once.

    New rows of the vocabulary stay as they were drawn, around the mean of the model's rows, so that
    their ids are about as likely as its own: around 0 they would take most of the probability from
    a model whose logits are far below 0.

    `where` and `preset` are named in errors. Raises ConfigError if the family, a setting, a tensor
    or, unless it `resizes` them, the vocabulary differs.
    """
    file = stored.folder / ("model.json" if stored.is_checkpoint else CONFIG)

    def refuse(what: str, remedy: str = f"set model.preset={file}") -> ConfigError:
        return ConfigError(f"model.start_from = {where}: {what}. Start from another, or {remedy}.")

    known = shape_from(stored.settings, where=str(file))
    if known.family != shape.family:
        raise refuse(f"it is a {known.family}, and model.preset = {preset} a {shape.family}")
    expected, other = (
        transformers_config(settings, vocabulary=known.vocabulary, dropout=0.0)
        for settings in (shape.settings, stored.settings)
    )
    # Settings that make other logits or shapes.
    general = PretrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    here, there = expected.to_dict(), other.to_dict()
    odd = [
        f"{name} is {there.get(name)!r:.80} there and {here.get(name)!r:.80} here"
        for name in type(expected)().to_dict()
        if name not in general and here.get(name) != there.get(name)
        if not _IRRELEVANT.fullmatch(name)
    ]
    if odd:
        raise refuse(f"it differs from model.preset = {preset}: {'; '.join(odd)}")
    if known.vocabulary != shape.vocabulary and not resizes:
        what = f"it has a vocabulary of {known.vocabulary:,} ids, and this run {shape.vocabulary:,}"
        remedy = f"set model.vocabulary={known.vocabulary}, or model.resize_vocabulary=true"
        raise refuse(what, remedy)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(expected, trust_remote_code=False)
    first = {weight: name for name, weight in network.named_parameters()}
    ends = {network.get_input_embeddings().weight, network.get_output_embeddings().weight}
    # Also the further names of tied weights.
    weights = {n: w for n, w in network.state_dict(keep_vars=True).items() if w in first}
    new_names = {old: new for new, old in families()[shape.family].names_in_files.items()}
    ignored = [*(network._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFER]
    sources: dict[str, tuple[str, int]] = {}
    for key, size in stored.shapes.items():
        name = new_names.get(key, key)
        if name not in weights:  # files of a model without a head
            name = f"{network.base_model_prefix}.{name}"
        if name not in weights:
            if not re.search("|".join(ignored), key):
                raise refuse(f"its files hold {key}, which its config.json does not describe")
            continue
        weight = weights[name]
        is_padded = stored.is_checkpoint and weight in ends and size[0] > weight.shape[0]
        if size[is_padded:] != weight.shape[is_padded:]:
            raise refuse(f"its {key} has shape {size}, not {tuple(weight.shape)} as here")
        twin, count = sources.setdefault(first[weight], (key, weight.numel()))
        if twin != key and not stored.read(twin, 0, count).equal(stored.read(key, 0, count)):
            raise refuse(f"it ties {twin} and {key}, which differ", "untie them in its config.json")
    if missing := [name for name in first.values() if name not in sources]:
        raise refuse(f"its files lack {missing[0]} ({len(missing)} such tensors)", "copy it again")

    @functools.cache
    def mean_row(key: str) -> Tensor:
        width, rows = shape.width, range(0, known.vocabulary, MEAN_ROWS)
        ends = ((first, min(first + MEAN_ROWS, known.vocabulary)) for first in rows)
        parts = (stored.read(key, first * width, end * width) for first, end in ends)
        total = sum(part.view(-1, width).double().sum(dim=0) for part in parts)
        return torch.as_tensor(total / known.vocabulary).float()

    def fill(target: Tensor, name: str, start: int) -> None:
        key, count = sources[name.removeprefix(NETWORK_PREFIX)]
        if (end := min(count, start + target.numel())) > start:
            target[: end - start].copy_(stored.read(key, start, end))
        first, last = max(start, count), min(start + target.numel(), shape.vocabulary * shape.width)
        if first < last and count == known.vocabulary * shape.width:  # of embedding or head
            columns = torch.arange(first, last) % shape.width
            target[first - start : last - start] += mean_row(key)[columns].to(target)

    return fill


def kept_tokenizer(folder: Path, data: DataConfig, vocabulary: int) -> dict[str, bytes]:
    """Return a model's tokenizer if the data's is unknown; warn if it does not fit the data."""
    file, is_unknown = folder / TOKENIZER_FILE, data.tokenizer == "unknown"
    if not file.is_file() or not (is_unknown or data.tokenizer_is_readable):
        return {}
    content, end = file.read_bytes(), data.document_id
    inner = load_content(content, where=file)
    ids = inner.get_vocab()
    fits = max(ids.values(), default=0) < vocabulary
    if not is_unknown:
        content_here = tokenizer_file(TokenizerChoice.of_data(data), vocabulary=vocabulary)
        fits = load_content(content_here, where=data.tokenizer).get_vocab() == ids
    if not fits:
        logger.warning(
            "%s is not the tokenizer of the data (%s, %d ids), and is not kept. Rows of the "
            "embedding were trained for other tokens.",
            *(file, data.tokenizer, vocabulary),
        )
    if not (fits and is_unknown):
        return {}
    return saved_files(
        content, inner.id_to_token(end) if end is not None else found_end_of_text(inner, file)
    )
