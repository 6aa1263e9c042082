"""Mistakes in run files and overrides: each is reported with its place and a remedy."""

import json
from pathlib import Path

import pytest
from run_texts import MIXTURE, SMALL_RUN, problems, written

MASKED = "data.source=a; data.mask_documents=true"
WSD = "schedule.kind=wsd; schedule.warmup_steps=3; schedule."
CYCLES = "schedule.kind=warm_restarts; schedule.warmup_steps=3"
ALIASES = "\n".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}' if level else '1'] * 9)}]"
    for level in range(9)
)
STAGE, ONES = "data.stages.b", "weights: {web: 1, code: 1}"
NVME = "zero.offload_optimizer=nvme"


EARLIER_NAMES = """\
run: {steps: 100}
model: {preset: gpt2_tiny, sequence_length: 64}
batch: {micro: 2, windows: 8}
data: {source: tokens}
optimizer: {lr: 3e-4}
schedule: {floor_fraction: 0.2}
evaluation: {windows: 64}
"""


def test_renamed_settings_are_refused_with_their_new_names_alone(tmp_path: Path) -> None:
    assert [
        line.partition("mine.yaml")[2] for line in problems(written(tmp_path, EARLIER_NAMES))
    ] == [
        ":3: batch.micro is now batch.micro_batch_size.",
        ":3: batch.windows is now batch.global_batch_size.",
        ":6: schedule.floor_fraction is now schedule.min_lr_ratio.",
        ":7: evaluation.windows is now evaluation.sequences.",
    ]
    renamed = {
        "batch.micro": "batch.micro_batch_size",
        "batch.windows": "batch.global_batch_size",
        "batch.accumulation": "batch.gradient_accumulation_steps",
        "evaluation.windows": "evaluation.sequences",
        "schedule.floor_fraction": "schedule.min_lr_ratio",
    }
    run = written(tmp_path)
    for before, present in renamed.items():
        assert f"command line: {before} is now {present}." in problems(run, f"{before}=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.lr=abc", "optimizer.lr = 'abc': expected a number"),
        ("optimizer.lr=true", "optimizer.lr = true: expected a number"),
        ("optimizer.lr=null", "optimizer.lr = null: expected a number"),
        ("optimizer.lr=0", "optimizer.lr = 0: expected more than 0"),
        ("optimizer.lr=.inf", "optimizer.lr = .inf: expected a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: too few values"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas = [0.9, 1]: expected less than 1"),
        *(
            (f"run.steps={text}", f"run.steps = {text}: expected a finite number")
            for text in ("1e400", ".nan", "-.INF")
        ),
        *(
            (f"{setting}={text}", f"{setting} = {text.strip(chr(34))!r}: expected a number such")
            for setting in ("run.steps", "run.time_limit_hours", "run.hang_minutes")
            for text in ("11:30", "1_000", "1,000", "2024-01-01", "yes", "0b11", '"12"', "1e3s")
        ),
        *(
            (f"precision.tf32={text}", "expected true or false, without quotes")
            for text in ("yes", "no", "on", "off", "y", "1", "0", "'true'")
        ),
        ("run.seed=1e25", "run.seed = 1e25: expected a number of at most 63 bits"),
        (f"run.seed={2**63}", "expected a number of at most 63 bits"),
        ("zero.stage=yes", "zero.stage = 'yes': expected one of 0, 1, 2, 3, auto"),
        ("zero.stage=true", "zero.stage = true: expected one of 0, 1, 2, 3, auto"),
        ("zero.stage='1'", "zero.stage = '1': expected one of 0, 1, 2, 3, auto"),
        ("evaluation.sample_prompt=# Title", "'# Title': not YAML: a comment (#) or a mark of t"),
        ("evaluation.sample_prompt=Title # 1", "follows the value. Put the value in quotes."),
        ("evaluation.sample_prompt=Q: why", "= Q: why: expected text, in quotes"),
        ("evaluation.sample_prompt=[a]", "= [a]: expected text, in quotes"),
        ("evaluation.sample_prompt=!!binary YQ==", "the tag tag:yaml.org,2002:binary is not allo"),
        ("run.steps=2.5", "run.steps = 2.5: expected a whole number"),
        ("run.steps=0", "run.steps = 0: expected at least 1"),
        ("model.vocabulary=many", "'many': expected a whole number of at least 1, or auto"),
        ("data.include=a", "data.include = 'a': expected a list such as [a, b]"),
        ("data.source=", "data: source is missing: set it, or a mixture of several sources"),
        ("data.validation_fraction=2", "data.validation_fraction = 2: expected at most 1"),
        ("precision.tf32=maybe", "precision.tf32 = 'maybe': expected true or false"),
        ("zero.stage=4", "zero.stage = 4: expected one of 0, 1, 2, 3, auto"),
        (
            "model.head=auto",
            "model.head = 'auto': expected one of chunked, fused, kernel. Did you mean chunked?",
        ),
        ("schedule.kind=cosin", "warm_restarts, constant. Did you mean cosine?"),
        ("run.name=../x", "= '../x': a run's name is letters, digits, '.', '_' and '-', at"),
        ("evaluation.tasks=[a.json]", "a task is NAME=FILE.jsonl, as hellaswag="),
        ("evaluation.sample_temperature=1e-40", "1e-40: expected at least 0.01"),
        ("log.sample_seconds=0.1", "expected 0, or at least 0.5"),
        ("run.spot_notice=gcp", "'gcp': expected auto, none, gce, aws, azure or a path"),
        *(
            (f"log.on_alarm={wrong}", "expected an https:// address or a shell command")
            for wrong in ("''", "gs://bucket/x", "https://")
        ),
        ("cost.budget_usd=100", "cost: budget_usd needs per_hour_usd"),
        ("cost.credit_usd=100", "cost: credit_usd needs per_hour_usd"),
        ("tracking.histogram_interval=9", "tracking: histogram_interval needs wandb or tensorboar"),
        ("tracking.openmetrics=node/run.txt", "expected a file that ends in .prom"),
        *(
            (f"tracking.wandb={project}", "expected PROJECT or ENTITY/PROJECT")
            for project in ("''", "a/b/c", "a b")
        ),
        (
            "batch.gradient_accumulation_steps=2",
            "batch: set either gradient_accumulation_steps or global_batch_size",
        ),
        (
            "batch.global_batch_size=null; batch.gradient_accumulation_steps=4; "
            "batch.micro_batch_size=auto",
            "micro_batch_size: auto needs global_batch_size",
        ),
        ("precision.fp8=rowwise; precision.dtype=fp32", "precision: fp8: rowwise needs dtype:"),
        ("zero.stage=2; zero.offload_parameters=cpu", "zero: offload_parameters needs stage: 3"),
        (
            "optimizer.matrix_lr=1e-2; optimizer.normuon=true",
            "set kind: muon to use matrix_lr, normuon",
        ),
        (NVME, "zero: an offload to nvme needs nvme_path"),
        ("data.source=a; data.bpe_folder=b; data.tokenizer=bytes", "data: bpe_folder holds gpt2's"),
        (MASKED, "data: mask_documents needs document_id"),
        (f"{MASKED}; data.document_id=3; data.separator_id=4", "separated by separator_id = 4"),
        # settings of different sections
        ("schedule.warmup_steps=100", "= 100: the warmup must end before run.steps = 100."),
        (f"{WSD}decay_steps=99", "decay_steps = 99: the decay would begin at step 1, and"),
        (f"{WSD}decay_fraction=0.99", "and the warmup ends at step 3. Shorten one of"),
        (f"{WSD}decay_fraction=1; schedule.decay_steps=3", "either decay_fraction or decay_steps"),
        ("schedule.decay=linear", "decay, decay_fraction and decay_steps need kind: wsd"),
        (f"{CYCLES}; schedule.cycle_steps=3", "must be longer than schedule.warmup_steps = 3"),
        (
            "batch.micro_batch_size=3",
            "batch.global_batch_size = 8: not a multiple of batch.micro_batch_size = 3",
        ),
        (f"checkpoint.async=true; {NVME}; zero.nvme_path=/x", "states offloaded to nvme"),
        ("evaluation.tasks=[a.jsonl]", "needs data.tokenizer. Set it to the tokenizer"),
        # settings and the files that they name
        ("model.sequence_length=65", "model.sequence_length = 65: gpt2_tiny allows up to 64."),
        ("model.preset=gpt2_tini", "model.preset = 'gpt2_tini': no file gpt2_tini.json. Did you"),
        ("zero.fragment=nvm", "zero.fragment = 'nvm': no file nvm.json. Did you mean nvme?"),
        ("zero.fragment=nvme", "offload_optimizer works only with zero.offload_optimizer"),
        # names
        ("model.lr=1", "model.lr is not a setting. Did you mean optimizer.lr?"),
        ("optimizer.lr.a=3", "optimizer.lr.a is not a setting. optimizer.lr takes a value of its"),
        ("optimizer.eps=1; optimizer.eps.a=3", "optimizer.eps.a is not a setting. optimizer.eps"),
        ("optimizer.weight_deacy=1", "Did you mean optimizer.weight_decay?"),
        ("optimizer.warmup_steps=1", "mean batch.warmup_steps or schedule.warmup_steps?"),
        ("run.interval=1", "mean checkpoint.interval or evaluation.interval or log.interval?"),
        ("log.zzz=1", "log.zzz is not a setting. log has interval, sample_seconds, on_alarm."),
        ("optimiser.lr=1", "optimiser is not a section. Did you mean optimizer?"),
        ("training.x=1", "training is not a section. Did you mean run?"),
        ("lr=1", "'lr=1' is not an option or a setting. Write settings as"),
        ("data.source=[", "data.source = '[': not YAML"),
        # of the mixture
        ("data.mixture.web.wieght=1", "is not a setting. Did you mean data.mixture.web.weight?"),
        ("data.mixture.wbe.weight=1", "data.mixture.wbe.source is missing. Did you mean web?"),
        ("data.mixture.web=3", "data.mixture.web = 3: expected a group of settings"),
        ("data.mixture.web.weight.a=3", "data.mixture.web.weight takes a value of its own."),
        ("data.mixture.web.weight=0", "mixture.web.weight is 0, and no stage uses it; remove it"),
        # of its stages
        (f"{STAGE}={{{ONES}}}", "give each either from_step or from_tokens"),
        (f"{STAGE}={{from_step: 9, from_tokens: 9, {ONES}}}", "either from_step or from_tokens"),
        (f"{STAGE}={{from_step: 9, {ONES}}}; {STAGE}c={{from_tokens: 7, {ONES}}}", "the same one"),
        (f"{STAGE}={{from_step: 9, {ONES}}}; {STAGE}c={{from_step: 9, {ONES}}}", "so overlap"),
        (f"{STAGE}={{from_step: 0, {ONES}}}", "data.stages.b.from_step"),
        (f"{STAGE}={{from_step: 9, weights: {{web: 1}}}}", "source of the mixture (web, code)"),
        (
            f"{STAGE}={{from_step: 9, weights: {{web: 0, code: 0}}}}",
            "stages.b: expected a weight for each",
        ),
        (
            f"{STAGE}={{from_step: 9, from_stpe: 9, {ONES}}}",
            "Did you mean data.stages.b.from_step?",
        ),
        (
            "data.source=a; data.stages.b={from_step: 9, weights: {}}",
            "of the mixture (there is none)",
        ),
        ('data.skip=["stream[9:9]"]', "stream[A:B] holds no sequence unless A is less than B"),
    ],
)
def test_a_wrong_override_says_what_was_wanted(
    tmp_path: Path, overrides: str, message: str
) -> None:
    is_mixed = overrides.startswith(("data.mixture", STAGE))
    text = MIXTURE if is_mixed else SMALL_RUN
    [problem] = problems(written(tmp_path, text), *overrides.split("; "))
    assert message in problem
    assert problem.startswith(("command line: ", str(tmp_path)))


def test_the_name_of_a_dtype_in_torch_leads_to_ours(tmp_path: Path) -> None:
    first = problems(written(tmp_path, SMALL_RUN), "precision.dtype=float16")[0]
    assert first.endswith("Did you mean fp16?")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("  lr:", "  learning_rate: 1\n  lr:", ":12: optimizer.learning_rate is not a setting. Di"),
        ("3e-4", "{a: 3}", ":12: optimizer.lr = {a: 3}: expected a number"),
        (
            "global_batch_size: 8",
            "global_batch_size: 8\n  gradient_accumulation_steps: 2",
            ":6: batch: set either gradient_accumulation_steps or",
        ),
        ("3e-4", "3e-4\n  lr: 1", ":13: optimizer.lr is set twice, first on line 12. Keep one."),
        ("run:", "log: 7\nrun:", ":1: log is a section: write its settings below it"),
        ("run:", "zzz:\nrun:", ":1: zzz is not a section. Sections: run, model, batch"),
        ("run:", "max_steps: 3\nrun:", ":1: max_steps is not a section. Did you mean run.steps?"),
        ("run:", "log.interval: 3\nrun:", ":1: log.interval is not a section. Write interval be"),
        # no run at all
        (SMALL_RUN, "", ":1: expected sections"),
        (SMALL_RUN, "run:\n  steps: [1\nmodel: 2\n", ":3: not YAML"),
        (SMALL_RUN, "run:\n  steps: !!python/name:os.system 1\n", ":2: not YAML"),
        (SMALL_RUN, "run:\n  steps: &a [*a]\n", ":2: not YAML"),
        (SMALL_RUN, f"run:\n  steps: {'[' * 300}", ":2: not YAML: maximum depth"),
        (SMALL_RUN, f"run: {{a: {'1' * 101}}}", ":1: not YAML: '11111"),
        (SMALL_RUN, "run: {? [a] : 1}", ":1: not YAML: a name is text"),
        (SMALL_RUN, "%YAML 1.1\n---\nrun:\n  steps: 0o17\n", ": batch.micro_batch_size is missing"),
        ("3e-4", "11:30", ":12: optimizer.lr = '11:30': expected a number"),
        (
            "run:",
            f"{ALIASES}\nrun:",
            ":1: not YAML: an alias contains itself, or its aliases expand",
        ),
        (SMALL_RUN, "run:\n  steps: \x01\n", ": not YAML"),
        # in a mixture
        ("weight: 0.7", "fetch_gb: 1", ":10: data.mixture.web.fetch_gb is not a setting. data.mi"),
        ("weight: 0.7", "weight: -1", ":10: data.mixture.web.weight = -1: expected at least 0"),
        ("source: gs://tokens/web", "pad_id: 1", ":8: data.mixture.web.source is missing"),
        ("[draft*]", "[{a: 1}]", ":5: data.exclude = [{a: 1}]: expected text"),
        ("[val*]", "val", ":11: data.mixture.code.validation_files = 'val': expected a list"),
        ("web:", "we b:", ":8: data.mixture.we b: a source's name has at most 32 letters"),
        ("  mixture:", "  source: x\n  mixture:", ":4: data: source and mixture are both set"),
        ("web:", "web: &a\n      x: *a", ":8: not YAML: an alias contains itself, or its"),
        ("  exclude:", "  validation_files: [v]\n  exclude:", ":4: data: validation_files and val"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_line(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    text = SMALL_RUN if before in SMALL_RUN else MIXTURE
    file = written(tmp_path, text.replace(before, after, 1))
    assert [problem for problem in problems(file) if problem.startswith(f"{file}{message}")]


def test_all_problems_come_at_once_in_reading_order(tmp_path: Path) -> None:
    text = SMALL_RUN.replace("gpt2_tiny", "gpt2_tinu").replace(
        "micro_batch_size: 2", "batch_size: 2"
    )
    text = text.replace("precision: {}", "warmup: 3")
    file = written(tmp_path, text.replace("3e-4", "fast"))
    assert [line.partition(": ")[0] for line in problems(file, "log.every=2")] == [
        f"{file}:4",  # the preset
        f"{file}:7",  # batch_size
        f"{file}:12",  # lr
        f"{file}:13",  # warmup
        f"{file}",  # batch.micro_batch_size is missing
        "command line",
    ]


def test_a_misspelt_name_hides_no_problem_of_settings_that_must_fit(tmp_path: Path) -> None:
    text = SMALL_RUN.replace("global_batch_size: 8", "global_batch_size: 9\n  acumulation: 1")
    file = written(tmp_path, text.replace("length: 64", "length: 65"))
    assert [line.partition(": ")[2].partition(":")[0] for line in problems(file)] == [
        "model.sequence_length = 65",
        "batch.global_batch_size = 9",
        "batch.acumulation is not a setting. Did you mean batch.gradient_accumulation_steps?",
    ]


def test_missing_settings_are_named_even_of_a_missing_section(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL_RUN.partition("batch:")[0])
    assert problems(file) == [
        f"{file}: batch.micro_batch_size is missing",
        f"{file}: data: source is missing: set it, or a mixture of several sources",
        f"{file}: optimizer.lr is missing",
    ]
    file.write_bytes(b"run: \xff\xfe")
    assert problems(file) == [f"{file}: not UTF-8 text (byte 5). Is it a run file?"]
    file = written(tmp_path, name="no name.yaml")
    assert problems(file)[0].startswith(f"{file}: run.name = 'no name' (from the file's name): a ")


def test_what_a_fragment_may_not_hold_names_its_file(tmp_path: Path) -> None:
    fragment = tmp_path / "own.json"
    fragment.write_text('{"zero_optimization": {"stage": 2}}')
    file = written(tmp_path, SMALL_RUN.replace("# stage: 2", f"fragment: {fragment}"))
    assert problems(file) == [
        f"{fragment}: zero_optimization.stage belongs in the run file: set zero.stage there "
        "and remove it here."
    ]


@pytest.mark.parametrize(
    ("preset", "overrides", "messages"),
    [
        ("ten_tiny", "data.mask_documents=true; data.document_id=0", ["(ten) has no att"]),
        ("ten_tiny", "precision.fp8=tensorwise", ["needs blocks of attention"]),
        ("ten_tiny", "model.head=fused; model.z_loss=1e-4", ["neither a logit softcap nor a z"]),
        ("gpt2_tiny", "model.scan=kernel", ["(gpt2) has no scan. Set it to chunked."]),
        ("resonance_small", "model.scan=kernel", ["(resonance) has no scan. Set it to chunked."]),
        ("ten_tiny", "model.scan=kernel; model.sequence_parallel=2", ["ranks share sequences and"]),
        ("resonance_small", "model.sequence_parallel=2", ["(resonance) cannot share sequences"]),
        ("llama_1b", "model.sequence_parallel=12", ["32 heads, no", "8 heads of keys, no"]),
        ("odd", "model.sequence_parallel=8", ["length is 60, no", "odd has 1 heads, no"]),
        ("odd", "precision.fp8=rowwise", ["is 100 wide", "is 200 wide", "sequence_length is 60"]),
    ],
)
def test_settings_that_do_not_fit_the_shape_are_reported(
    tmp_path: Path, preset: str, overrides: str, messages: list[str]
) -> None:
    for name in ("models", "runs"):
        (tmp_path / name).mkdir()
    shape = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 100, "n_inner": 200, "n_layer": 1}
    odd = {**shape, "n_head": 1, "n_positions": 64}
    (tmp_path / "models" / "odd.json").write_text(json.dumps(odd))
    text = SMALL_RUN.replace("gpt2_tiny", preset).replace("length: 64", "length: 60")
    found = problems(written(tmp_path / "runs", text), *overrides.split("; "))
    for problem, message in zip(found, messages, strict=True):
        assert message in problem


@pytest.mark.slow
def test_what_an_error_quotes_has_a_bounded_length(tmp_path: Path) -> None:
    file = written(tmp_path)
    [problem] = problems(file, f"optimizer.lr={'x' * 100_000}")
    assert len(problem) < 2100
    assert problem.startswith("command line: optimizer.lr = 'xxx")
    assert problem.endswith("xxx': expected a number such as 1000 or 2.5e-4, without quotes")
    lines = problems(file, *(f"optimizer.key_{number}=1" for number in range(5000)))
    assert len(lines) == 201
    assert lines[-1] == "... and 4,800 more lines"
