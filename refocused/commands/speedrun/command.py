"""`speedrun`, which is also `launch/speedrun.sh`: from raw text to a scored, exported model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser, add_overrides
from refocused.commands.output import count, positive, table
from refocused.system.errors import ConfigError, ExitCode, RefocusedError, as_typed
from refocused.system.logs import print_message
from refocused.system.number_text import duration

if TYPE_CHECKING:
    from refocused.config.load_run import LoadedRun
    from refocused.config.run_config import RunConfig
    from refocused.estimate.depth_rules import Rules

DEPTHS = range(2, 41, 2)  # that --budget chooses from
LARGE_VOCABULARY, SMALL_VOCABULARY = 32_768, 4_096
GPU_SEQUENCE, CPU_SEQUENCE = 2048, 256  # tokens
LEAST_TEXT, BYTES_A_TOKEN = 3_000_000, 5  # characters of docstrings to collect
CPU_TOKENIZER_BYTES = 5_000_000  # of text; four times as much gave 0.2 % shorter tokens
FEW_TOKENS = 100_000_000  # of a run: 2 % of the documents validate it, else 0.2 %
GPT2_CORE = 0.2565  # as nanochat's table gives it
PROMPTS = ["This function", "The", "If the"]
# Without --depth and --budget, in place of the rules: what two cores do in about a minute.
DEMONSTRATION_DEPTH = 2
DEMONSTRATION: dict[str, Any] = {
    **{"run.steps": 300, "batch.global_batch_size": 8, "optimizer.kind": "muon"},
    **{"optimizer.lr": 1.2e-2, "optimizer.betas": [0.9, 0.99], "optimizer.normuon": True},
    **{"schedule.kind": "wsd", "schedule.warmup_steps": 10, "schedule.decay": "linear"},
    **{"schedule.decay_fraction": 0.65, "schedule.min_lr_ratio": 0.05},
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

# Of a stage: its name, the words of its command, what it makes, and whether that is there, whole.
Stage = tuple[str, list[str], Path, Callable[[], bool]]


@dataclasses.dataclass(frozen=True, slots=True)
class SizedRun:
    """A run of a depth, before any text is read."""

    depth: int
    vocabulary: int  # ids of the tokenizer to train
    gpus: int  # of this machine; 0: the run is made on the CPU
    model: dict[str, Any]  # transformers' configuration
    settings: Rules  # for the run file
    loaded: LoadedRun  # with the settings of the command line, and stand-ins for data and model

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        config = self.loaded.config
        if config.run.tokens is not None:
            return config.run.tokens
        sequences = config.run.total_steps * (config.batch.global_batch_size or 0)
        return sequences * config.model.sequence_length


def run_speedrun(parser: Parser) -> int:
    """Carry out the stages that are left; print times, dollars and where the results are."""
    parser.examples = (
        "",
        "--data hub:HuggingFaceFW/fineweb-edu:sample/10BT/* --depth 12",
        "--data texts/ --budget 40 cost.per_hour_usd=24",
    )
    add_overrides(parser)
    add = parser.group("input")
    data = "texts: a folder, gs://, s3:// or hub:DATASET[@REVISION][:NAMES] (default: the "
    add("--data ADDRESS", f"{data}docstrings of the installed Python packages)")
    add("--field NAME", "field of .json(l), .parquet and .arrow to read", default="text")
    size = parser.group("model", exclusive=True)
    size("--depth N", "layers; all else follows from them (default: a demonstration)", type=count)
    size("--budget USD", "the depth that these dollars pay for on these GPUs", type=positive)
    ids = f"ids of the tokenizer (default: {LARGE_VOCABULARY:,}; without GPUs {SMALL_VOCABULARY:,})"
    parser.group("model")("--vocabulary N", ids, type=count)
    out, add = Path("data/speedrun"), parser.group("output")
    add("--out DIR", "folder of text, tokenizer, shards and run file", type=Path, default=out)
    add("--dry-run", "print the settings and the commands, and write nothing")
    arguments = parser.read()
    from refocused.commands.main import run_command
    from refocused.config.outputs import without_secrets
    from refocused.config.prices import cost_usd
    from refocused.evaluate.tasks import CORE, CORE_MEAN, find_tasks
    from refocused.metrics.history import METRICS_FILE
    from refocused.metrics.jsonl import JsonLinesTail, number, read_json

    began = time.monotonic()
    run = sized_run(
        arguments.overrides,
        depth=arguments.depth,
        budget_usd=arguments.budget,
        vocabulary=arguments.vocabulary,
    )
    typed = {change.key: (change.after, "command line") for change in run.loaded.changes}
    rules = {name: of for name, of in (run.settings | typed).items() if of[1]}
    print(f"depth {run.depth}, by nanochat's rules of July 2026 (scripts/base_train.py, 92d63d4):")
    rows = [(name, str(value), rule) for name, (value, rule) in rules.items()]
    print(*table(rows, indent=2), sep="\n", flush=True)
    results = list[str]()
    for name, words, makes, is_right in stages_of(run, arguments):
        if is_right():
            print(f"\n== {name}: {makes} is there", flush=True)
            results.append(f"  {name:<10} was there  {makes}")
            continue
        shown = shlex.join(map(without_secrets, words[1:]))
        print(f"\n== {name}: {as_typed(words[0])} {shown}", flush=True)
        if arguments.dry_run:
            continue
        if makes.is_file():  # damaged
            makes.unlink()
        started = time.monotonic()
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        code = run_command(words[0], words[1:])
        for number_, handler in handlers.items():  # which a command may have replaced
            signal.signal(number_, handler)
        if code != ExitCode.OK:
            done = ", ".join(line.split()[0] for line in results) or "nothing"
            same = f"{as_typed('speedrun')} {shlex.join(parser.given or [])}"
            text = f"Stopped in stage {name} (finished: {done}). The same command continues: {same}"
            print_message("hint", text)
            return code
        results.append(f"  {name:<10} {duration(time.monotonic() - started):<10} {makes}")
    if arguments.dry_run:
        return ExitCode.OK
    seconds = time.monotonic() - began
    usd = cost_usd(seconds, run.loaded.config.cost.per_hour_usd)
    paid = number(read_json(makes / "state.json") or {}, "cost_usd")
    money = "unknown: set cost.per_hour_usd"
    if usd is not None and paid is not None:
        money = f"${usd:,.2f} for this command; ${paid:,.2f} for all sessions of the run"
    results.append(f"  dollars    {money}")
    scored = dict[str, Any]()  # by its last steps
    for record in JsonLinesTail(makes / METRICS_FILE).records():
        scored |= record["tasks"] if record.get("kind") == "tasks" else {}
    if CORE in scored:
        mean = scored[CORE][CORE_MEAN]["value"]
        results.append(f"  CORE       {mean:.4f} (GPT-2: {GPT2_CORE})")
    tasks = run.loaded.config.evaluation.tasks
    if any(task.name not in scored for task in find_tasks(tasks, data=None)):  # set since it ended
        score = [as_typed("evaluate"), str(makes), "--tasks", ",".join(tasks)]
        results.append(f"  scores     not yet measured: {shlex.join(score)}")
    page, generate = (makes / "summary.html").absolute().as_uri(), as_typed("generate")
    print(
        f"\nfinished in {duration(seconds)}",
        *results,
        f"  page       {page}",
        f"  model      {makes / 'final_model'}",
        f"  write      {generate} {makes} {shlex.quote(PROMPTS[0])}",
        sep="\n",
    )
    return ExitCode.OK


def sized_run(
    overrides: Sequence[str], *, depth: int | None, budget_usd: float | None, vocabulary: int | None
) -> SizedRun:
    """Derive a run of a depth, or of the largest one that a budget pays for on this machine.

    Raises:
        ConfigError: A setting is wrong, the depth does not fit the memory, no depth fits the
            budget, or there is no GPU with a known price.
    """
    from refocused.commands.launch import CPU_RANKS, usable_gpus
    from refocused.config.load_run import load_run
    from refocused.config.prices import read_prices
    from refocused.doctor.run_fits import host_shortage
    from refocused.estimate.memory_plan import refuse_cpu, with_dtype
    from refocused.estimate.run_cost import OnGpus, estimate
    from refocused.monitor.sampler.gpu_reader import gpu_names
    from refocused.system.hardware import gpu_spec, memory_now

    devices = [words for words in overrides if words.startswith("run.device=")]
    gpus = usable_gpus(load_run("demo", devices))
    spec = gpu_spec(gpu_names()[0] or "") if gpus else None
    cost: dict[str, float] = {}

    def of_depth(depth: int | None) -> SizedRun:
        return run_of_depth(depth, overrides, vocabulary=vocabulary, gpus=gpus, cost=cost)

    def on_gpus(loaded: LoadedRun) -> OnGpus:
        assert spec is not None
        price = loaded.config.cost.per_hour_usd
        prices = read_prices()
        return estimate(loaded, gpus=gpus, gpu=spec.name, prices=prices, per_hour_usd=price).main

    if budget_usd is None:
        run = of_depth(depth)
        if spec is not None:
            on_gpus(run.loaded)  # refuses what does not fit
        elif not gpus:
            refuse_cpu(run.loaded, ranks=CPU_RANKS)
            shortage = host_shortage(
                with_dtype(run.loaded, "bf16"),
                ranks=CPU_RANKS,
                ranks_here=CPU_RANKS,
                device="cpu",
                gpu_bytes=None,
                memory=memory_now(),
            )
            if shortage is not None:
                raise ConfigError(f"--depth {run.depth}: {shortage.text}. {shortage.fix}")
        return run
    if spec is None:
        raise ConfigError(
            "--budget needs GPUs of a known kind, whose speed is estimated; this machine has "
            f"{'others' if gpus else 'none'}. Name the size: --depth N"
        )
    offers = [price for price in read_prices().machines if gpu_spec(price.gpu) == spec]
    price = of_depth(DEPTHS[0]).loaded.config.cost.per_hour_usd
    if price is None and not offers:
        text = f"--budget: the price list has no {spec.name}. Give the price of this machine"
        raise ConfigError(f"{text}: cost.per_hour_usd=USD")
    cost["per_hour_usd"] = price or min(offer.for_gpus(gpus) for offer in offers)
    cost["budget_usd"] = budget_usd
    best: SizedRun | None = None
    for layers in DEPTHS:
        run = of_depth(layers)
        try:
            likely = on_gpus(run.loaded).likely
        except ConfigError:  # it does not fit
            if best is None:
                raise
            break
        usd = likely.cost_usd or 0.0
        if usd > budget_usd:
            break
        rule = f"{likely.hours:,.1f} h, ${usd:,.2f} on {gpus} x {spec.name} by estimate_cost"
        best = dataclasses.replace(run, settings={"depth": (layers, rule)} | run.settings)
    if best is None:
        raise ConfigError(
            f"--budget {budget_usd:g}: depth {DEPTHS[0]} is estimated at ${usd:,.2f}."
        )
    return best


def run_of_depth(
    depth: int | None,
    overrides: Sequence[str],
    *,
    vocabulary: int | None,
    gpus: int,
    cost: dict[str, float],
) -> SizedRun:
    """Return the run of a depth; None: the demonstration."""
    from refocused.config.load_run import load_run
    from refocused.estimate.depth_rules import derive, model_of

    layers = depth or DEMONSTRATION_DEPTH
    vocabulary = vocabulary or (LARGE_VOCABULARY if gpus else SMALL_VOCABULARY)
    length = GPU_SEQUENCE if gpus and depth else CPU_SEQUENCE
    settings: Rules = {
        name: (value, "of the demonstration, as measured") for name, value in DEMONSTRATION.items()
    }
    if depth is not None:
        settings = derive(layers, vocabulary=vocabulary, sequence_length=length)
    steps = settings["run.steps"][0]
    interval = max(1, min(250, steps // 3))
    others = {
        **{"zero.stage": "auto" if gpus else 3, "checkpoint.interval": interval},
        **{"evaluation.interval": interval, "evaluation.sequences": 512 if gpus else 128},
        **{"evaluation.sample_prompt": PROMPTS[0], "evaluation.further_prompts": PROMPTS[1:]},
        **{"evaluation.sample_temperature": 0.7, "evaluation.sample_tokens": 60},
        **{"log.interval": max(1, min(20, steps // 10)), "batch.micro_batch_size": "auto"},
        **{f"cost.{name}": value for name, value in cost.items()},
    }
    settings["model.sequence_length"] = (length, "2048 on GPUs, as there; else 256")
    settings |= {name: (value, "") for name, value in others.items()}
    model = model_of(layers, vocabulary=vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        stand_ins = {"data.source": folder, "data.tokenizer": f"{folder}/tokenizer.json"}
        known = {"model.vocabulary": vocabulary}
        file = write_run(Path(folder), f"d{layers}", model, settings, **stand_ins, **known)
        loaded = load_run(file, overrides)
    return SizedRun(layers, vocabulary, gpus, model, settings, loaded)


def write_run(
    folder: Path, name: str, model: dict[str, Any], settings: Rules, **others: object
) -> Path:
    """Write a run file and the model's configuration; return the run file."""
    from refocused.bucket.partial_files import disk_errors
    from refocused.config.yaml_source import write_yaml
    from refocused.system.atomic_files import replace_file

    shape, file = folder / f"{name}.json", folder / f"{name}.yaml"
    values = {name: value for name, (value, _) in settings.items() if "." in name}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in (values | others | {"model.preset": str(shape)}).items():
        section, _, setting = key.partition(".")
        sections.setdefault(section, {})[setting] = value
    with disk_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(shape, json.dumps(model, indent=1).encode())
        replace_file(file, f"# By {as_typed('speedrun')}.\n{write_yaml(sections)}".encode())
    return file


def stages_of(run: SizedRun, arguments: argparse.Namespace) -> list[Stage]:
    """Return what leads to the model; names hold a digest of what their content depends on."""
    from refocused.prepare.texts.docstrings import docstrings_key
    from refocused.prepare.texts.text_inputs import find_inputs
    from refocused.tokenizers.encoders import TokenizerChoice, open_tokenizer

    out, config, vocabulary = arguments.out, run.loaded.config, run.vocabulary
    stages = list[Stage]()

    def named(*content: object) -> str:
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:6]

    source = arguments.data
    if source is None:
        characters = max(LEAST_TEXT, BYTES_A_TOKEN * run.tokens)
        depends: list[Any] = [docstrings_key(), characters]
        text = out / f"docstrings-{named(depends)}.jsonl"
        words = ["prepare_data", "docstrings", str(text), "--characters", str(characters)]
        stages.append(("text", words, text, text.is_file))
        source = str(text)
    else:
        files = find_inputs([source])
        depends = [[file.path.name, file.size, file.edges] for file in files]
    depends += [arguments.field, vocabulary]
    texts = [source, "--field", arguments.field]

    tokenizer = out / f"tokenizer-{vocabulary}-{named(depends)}.json"
    words = ["prepare_data", "train-tokenizer", *texts, "--vocabulary", str(vocabulary)]
    words += ["--out", str(tokenizer)]
    words += [] if run.gpus else ["--max-bytes", str(CPU_TOKENIZER_BYTES)]

    def is_tokenizer() -> bool:
        with contextlib.suppress(RefocusedError):
            return open_tokenizer(TokenizerChoice(str(tokenizer))).vocabulary > 0
        return False

    stages.append(("tokenizer", words, tokenizer, is_tokenizer))

    share = "0.02" if run.tokens < FEW_TOKENS else "0.002"
    packed = ["--best-fit", str(config.model.sequence_length)] if run.gpus else []
    depends += [share, packed]
    tokens = out / f"tokens-{vocabulary}-{named(depends)}"
    words = ["prepare_data", "tokenize", *texts, "--tokenizer", str(tokenizer)]
    words += ["--out", str(tokens), "--val-ratio", share, *packed]
    stages.append(("shards", words, tokens, lambda: is_whole(tokens)))

    sections = {"model", "batch", "data", "optimizer", "schedule", "precision"}
    stand_ins = {"model": {"preset"}, "data": {"source", "tokenizer"}}
    trained = config.model_dump(mode="json", include=sections)
    for section, names in stand_ins.items():
        trained[section] = {k: v for k, v in trained[section].items() if k not in names}
    trained["run"] = [config.run.steps, config.run.tokens, config.run.seed]
    name = f"d{run.depth}-{named(depends, run.model, trained)}"
    data = {"source": str(tokens), "tokenizer": str(tokenizer), "document_id": 0}
    data |= {"mask_documents": bool(packed), "validation_files": ["tokens_val_*"]}
    others = {f"data.{key}": value for key, value in data.items()}
    if not arguments.dry_run:
        write_run(out, name, run.model, run.settings, **others, **{"model.vocabulary": "auto"})
    words = ["launch", "--config", str(out / f"{name}.yaml"), *arguments.overrides]
    is_named = any(setting.startswith("run.name=") for setting in arguments.overrides)
    folder = Path(config.run.directory, config.run.name if is_named else name)
    stages.append(("training", words, folder, lambda: is_finished(folder, config)))
    return stages


def is_whole(tokens: Path) -> bool:
    """Whether a data set has its manifest, which is written last, and files of the right sizes."""
    from refocused.bucket.folder import DirectoryBucket
    from refocused.data.manifest.shard_manifest import read_manifest

    with contextlib.suppress(RefocusedError, OSError):
        shards = read_manifest(DirectoryBucket(tokens)).shards
        return all((tokens / shard.name).stat().st_size == shard.size for shard in shards)
    return False


def is_finished(run: Path, config: RunConfig) -> bool:
    """Whether a run made its last step, and its model is exported."""
    from refocused.metrics.jsonl import read_json

    state = read_json(run / "state.json") or {}
    is_exported = not config.checkpoint.export_final or (run / "final_model/config.json").is_file()
    if config.run.tokens is not None:
        is_whole_run = (state.get("tokens") or 0) >= config.run.tokens
    else:
        is_whole_run = state.get("step") == config.run.steps
    return state.get("status") == "finished" and is_whole_run and is_exported
