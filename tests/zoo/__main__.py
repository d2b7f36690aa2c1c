"""Measure the zoo and write docs/zoo.md: `python -m tests.zoo [--update] [model ...]`.

Each row is one model, in inference or in a training step: graphs and graph breaks of Dynamo, XLA programs,
operators that ran on the CPU, repeated blocks, and errors as norms over the whole output and over all gradients
together.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch_xla
from tqdm import tqdm

from tests.zoo.harness import AUTOCAST, EAGER, FLOAT64, RUNS, Result, Setting, counted, divided, over_seeds
from tests.zoo.ledger import PREAMBLE as LEDGER
from tests.zoo.ledger import TITLE, ledger_row, reports_of
from tests.zoo.models import BY_NAME, ZOO, ZooModel

Key = tuple[str, str]
LEVELS = ("conservative", "balanced", "aggressive")
FLOAT32 = Setting(backend="kp_tpu", options=(("precision", "float32"),))
_LIBRARIES = ("torch", "torch_xla", "transformers", "diffusers", "timm")
FILE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"

_PREAMBLE = """\
# The zoo

These models have random weights, two layers and a width of 64 to 128. Each is compiled with
`backend="kp_tpu"` and compared with eager, in inference and in one training step. The loss of the step is a
random projection of the outputs. `make zoo` wrote this page with
{versions}, on {platform}.

* *float32*: the error of `precision="float32"` against eager float32. The bound is 1e-5.
* *autocast*: the error of eager `torch.autocast("cpu", torch.bfloat16)` against eager float64.
* the levels: the error against eager float64, as a multiple of autocast's. The bound is 1.1.

An error is |difference| / |reference|, over all outputs and, in training, over all gradients together
(outputs / gradients). Dynamo counts graphs and graph breaks. XLA compiles the programs. Fallbacks are
operators that ran on the CPU. *blocks* says how many times each repeated block runs with `blocks="on"`. For
example, 2 + 3 means two layers of one kind and three of another. All counts are at `precision="float32"`.

Graph breaks come from the source of the models, which takes branches by value. Mixtral, Qwen3-MoE and DeepSeek-V2
loop over the experts that any token chose. No setting of Dynamo keeps such a loop in one graph: how often it turns is
a value. In training, Whisper and Wav2Vec2 skip layers at random.
DeepSeek-V3 is here without experts. With them, its own source raises an error in float64.
"""


def main() -> None:
    """Measure the models named on the command line, or all, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="model", help=f"among {', '.join(BY_NAME)}; default: all")
    parser.add_argument("--update", action="store_true", help="write the page, with the old rows of other models")
    arguments = parser.parse_args()
    names = arguments.models
    torch.ones(1, device=torch_xla.device())  # before any backward on the CPU, after which XLA has none
    models = [BY_NAME[name] for name in names] or list(ZOO)
    pairs = [(model, run) for model in models for run in RUNS]
    rows = {(model.name, run): _row(model, run) for model, run in tqdm(pairs, desc="zoo", file=sys.stderr)}
    of_ledger = {
        (model.name, run): ledger_row(model.name, run, reports_of(run, model))
        for model, run in tqdm(pairs, desc="ledger", file=sys.stderr)
    }
    if arguments.update:
        rows, of_ledger = _in_order(documented() | rows), _in_order(documented_ledger() | of_ledger)
    table = "\n".join([*_lines(list(rows.values())), "", LEDGER, *_lines(list(of_ledger.values()))])
    sys.stdout.write(table + "\n")
    if arguments.update or not names:
        versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
        FILE.write_text(_PREAMBLE.format(versions=versions, platform="XLA:CPU") + "\n" + table + "\n")


def documented() -> dict[Key, dict[str, str]]:
    """(model, run) -> the row of docs/zoo.md, by column."""
    return _table(FILE.read_text().partition(TITLE)[0])


def documented_ledger() -> dict[Key, dict[str, str]]:
    """(model, run) -> the row of the ledger in docs/zoo.md, by column."""
    return _table(FILE.read_text().partition(TITLE)[2])


def _table(text: str) -> dict[Key, dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0], row[1]): dict(zip(titles, row, strict=True)) for row in rows}


def _in_order(known: dict[Key, dict[str, str]]) -> dict[Key, dict[str, str]]:
    return {key: known[key] for key in ((model.name, run) for model in ZOO for run in RUNS) if key in known}


def _row(model: ZooModel, run: str) -> dict[str, str]:
    exact = over_seeds(run, model, FLOAT64)
    autocast = over_seeds(run, model, AUTOCAST).errors(exact)
    result, counts = counted(lambda: RUNS[run](model, FLOAT32))
    row = {
        "model": model.name,
        "run": run,
        "graphs": str(counts.graphs),
        "breaks": str(counts.graph_breaks),
        "programs": str(counts.programs),
        "fallbacks": ", ".join(counts.fallbacks) or "none",
        "blocks": blocks_cell(divided(RUNS[run], model)[1]),
        "float32": _cell(_parts(result, run, RUNS[run](model, EAGER)), ".1e"),
        "autocast": _cell([autocast[part] for part in _names(run)], ".1e"),
    }
    for level in LEVELS:
        leveled, _ = counted(lambda level=level: over_seeds(run, model, Setting("kp_tpu", (("level", level),))))
        shares = [e / autocast[p] for e, p in zip(_parts(leveled, run, exact), _names(run), strict=True)]
        row[level] = _cell(shares, ".2f")
    return row


def blocks_cell(found: Sequence[int]) -> str:
    """The cell of the column "blocks" for the numbers of runs that `divided` found."""
    return " + ".join(map(str, found)) or "none"


def _names(run: str) -> tuple[str, ...]:
    return ("outputs",) if run == "infer" else ("outputs", "gradients")


def _parts(result: Result, run: str, reference: Result) -> list[float]:
    errors = result.errors(reference)
    return [errors[name] for name in _names(run)]


def _cell(numbers: list[float], form: str) -> str:
    return " / ".join(format(number, form) for number in numbers)


def _lines(rows: list[dict[str, str]]) -> Iterator[str]:
    yield "| " + " | ".join(rows[0]) + " |"
    yield "|" + "---|" * len(rows[0])
    for row in rows:
        yield "| " + " | ".join(row.values()) + " |"


if __name__ == "__main__":
    main()
