"""Compare our tokenizing rate per process with tiktoken's, and its growth with processes.

    .venv/bin/python benchmarks/tokenizing.py --bpe-folder DIR [--text FILE ...] [--json FILE]

Every case is a process of its own over the same documents, in turns. tiktoken's case has its text
in memory and throws its ids away; ours reads `.jsonl` and writes checked files of ids. The name of
this file is not that of the standard library's module, which would be hidden by it.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import ROOT, Case, Column, Record, measure, medians, parser_of, table, write_report

DOCUMENT_CHARACTERS = 3000
Rows = dict[str, Record]
RATES = (
    Column("tokens_per_second", "M tokens/s", scale=1e-6),
    Column("tokens_per_cpu_second", "M a CPU-second", scale=1e-6),
    Column("ratio", "of tiktoken's", "{:.3f}"),
    Column("cpu_ratio", "the same a CPU-second", "{:.3f}"),
)
SCALES = (
    Column("tokens_per_second", "M tokens/s", scale=1e-6),
    Column("seconds", "seconds, start included"),
    Column("ratio", "of one process", "{:.2f}"),
    Column("tokens_per_cpu_second", "M a CPU-second, start included", scale=1e-6),
)


def main() -> None:
    """Run all cases, or the one of a child process."""
    chosen = _parser().parse_args()
    if chosen.case:
        print(json.dumps(_measure_case(chosen)))
        return
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as folder:
        work = Path(folder)
        _write_documents(work / "text.jsonl", chosen.text, megabytes=chosen.megabytes)
        kinds = {
            "tiktoken, encode_ordinary_batch": ["tiktoken"],
            "ours, .jsonl to ids on disk": ["ours"],
        }
        rates = _compared(chosen, work, kinds)
        counts = chosen.processes or [
            2**n for n in range(len(os.sched_getaffinity(0)).bit_length())
        ]
        kinds = {str(n): ["command", "--processes", str(n)] for n in counts}
        scales = _compared(chosen, work, kinds)
    print(table(rates, RATES, title="One process"))
    print(table(scales, SCALES, title="The whole command, by processes"))
    write_report(chosen, {"rates": rates, "scales": scales})


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__file__, __doc__, repeats=3)
    add = parser.add_argument
    add("--bpe-folder", type=Path, required=True, help="vocab.bpe and encoder.json of GPT-2")
    add("--text", type=Path, nargs="*", help="text files (the source of Python's library)")
    add("--megabytes", type=int, default=64, help="of text (64)")
    add("--processes", type=int, nargs="*", help="(1, 2, 4 ... up to the cores)")
    add("--case", choices=("tiktoken", "ours", "command"), help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    return parser


def _compared(chosen: argparse.Namespace, work: Path, kinds: dict[str, list[str]]) -> Rows:
    """Measure cases, named with their arguments; return their medians, relative to the first."""
    common = [__file__, "--bpe-folder", str(chosen.bpe_folder), "--work", str(work)]
    cases = [Case(name, [*common, "--case", *options]) for name, options in kinds.items()]
    found = measure(cases, repeats=chosen.repeats, timeout_s=600)
    rows = {name: medians(records) for name, records in found.items()}
    first = next(iter(rows.values()))
    for row in rows.values():
        row["ratio"] = row["tokens_per_second"] / first["tokens_per_second"]
        row["cpu_ratio"] = row["tokens_per_cpu_second"] / first["tokens_per_cpu_second"]
    return rows


def _measure_case(chosen: argparse.Namespace) -> Record:
    path = chosen.work / "text.jsonl"
    if chosen.case == "tiktoken":
        return _measure_tiktoken(path, chosen.bpe_folder)
    if chosen.case == "ours":
        return _measure_ours(path, chosen.bpe_folder)
    return _measure_command(path, chosen.bpe_folder, chosen.processes[0])


def _measure_tiktoken(path: Path, folder: Path) -> Record:
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # read the files themselves
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )
    with path.open() as file:
        texts = [json.loads(line)["text"] for line in file]
    encoding.encode_ordinary_batch(texts[:100], num_threads=1)
    began, cpu = time.perf_counter(), time.process_time()
    tokens = 0
    for start in range(0, len(texts), 1000):
        batch = texts[start : start + 1000]
        tokens += sum(map(len, encoding.encode_ordinary_batch(batch, num_threads=1)))
    return _rate(tokens, time.perf_counter() - began, time.process_time() - cpu)


def _measure_ours(path: Path, folder: Path) -> Record:
    from refocused.prepare.texts.text_inputs import find_inputs, plan_tasks
    from refocused.prepare.texts.tokenize_worker import TokenizeRequest, Worker
    from refocused.tokenizers.encoders import TokenizerChoice

    choice = TokenizerChoice("gpt2", bpe_folder=folder)
    with tempfile.TemporaryDirectory() as results:
        worker = Worker(TokenizeRequest(choice, 10**8, 0.01), Path(results))
        tasks = plan_tasks(find_inputs([str(path)]))
        worker.run(0, ())  # the first calls
        began, cpu = time.perf_counter(), time.process_time()
        done = [worker.run(number, task.spans) for number, task in enumerate(tasks)]
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
    documents = sum(1 for _ in path.open())
    return _rate(sum(split.tokens for r in done for split in r.values()) - documents, seconds, used)


def _measure_command(path: Path, folder: Path, processes: int) -> Record:
    with tempfile.TemporaryDirectory() as out:
        command = ["tokenize", str(path), "--out", f"{out}/shards", "--tokenizer", "gpt2"]
        options = ["--bpe-folder", str(folder), "--workers", str(processes), "--json"]
        program = [sys.executable, str(ROOT / "launch" / "prepare_data.py")]
        began = time.perf_counter()
        done = subprocess.run(
            [*program, *command, *options], capture_output=True, text=True, check=True
        )
        seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime
    return {"seconds": seconds, **_rate(json.loads(done.stdout)["tokens"], seconds, cpu_seconds)}


def _rate(tokens: int, seconds: float, cpu_seconds: float) -> Record:
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
    }


def _write_documents(path: Path, files: Sequence[Path] | None, *, megabytes: int) -> None:
    """Write text as `.jsonl` documents of about 3,000 characters, repeating it if it is short."""
    left = megabytes * 1_000_000
    with path.open("w") as out:
        for text in itertools.cycle(_texts(files)):
            line = json.dumps({"text": text}) + "\n"
            out.write(line)
            left -= len(line)
            if left <= 0:
                return


def _texts(files: Sequence[Path] | None) -> list[str]:
    if not files:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [
        text[start : start + DOCUMENT_CHARACTERS]
        for text in texts
        for start in range(0, len(text), DOCUMENT_CHARACTERS)
    ]


if __name__ == "__main__":
    main()
