"""`python -m bench.chips`: the gain of rewriting attention and folding views, by the compiler of each chip.

No time here is measured on a chip, see `bench.compared`. Level balanced, B x S = 2048. A row is a case on a chip:
without both passes, with `rewrite_attention`, and with both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.unit_workloads import workload
from kp_dynamo.exceptions import XLACompilationError

CHIPS = ("v5e", "v5p", "v6e")
MODELS = ("gpt", "llama", "bert")
DISABLED = {"neither": ["rewrite_attention", "fold_views"], "attention": ["fold_views"], "both": []}
FIGURES = ("cycles ms", "modelled ms", "peak MiB")
TITLE = "Rewriting attention, and folding views, by each chip's compiler (estimates; no chip ran this)"


def cases(chips: list[str], models: list[str], modes: list[str], length: int) -> Iterator[dict[str, Any]]:
    """The rows to measure, without figures."""
    for chip in chips:
        for model in models:
            for mode in modes:
                yield {"chip": chip, "model": model, "S": length, "mode": mode}


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """A row with its figures."""
    row = dict(case)
    for variant, disabled in DISABLED.items():
        made = workload(case["model"], case["S"])
        options = {"level": "balanced", "disable_passes": disabled}
        train = case["mode"] == "train"
        try:
            found = kp_dynamo.aot_compile(made.model, made.inputs, target=case["chip"], train=train, options=options)
        except XLACompilationError as error:  # libtpu's own failures are a result as well
            row |= {f"{variant}: {name}": None for name in FIGURES}
            row["failed"] = str(error).splitlines()[0][:200]
            continue
        values = found.estimated_ms, found.modelled_ms, found.peak_bytes / 2**20
        row |= {f"{variant}: {name}": value for name, value in zip(FIGURES, values, strict=True)}
    return row


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the rows, and keep the existing rows of other cases."""
    file = report.RESULTS / "chips.json"
    done = {_case(row) for row in rows}
    together = sorted([r for r in report.last_rows("chips") if _case(r) not in done] + rows, key=_case)
    report.RESULTS.mkdir(exist_ok=True)
    content = {"name": "chips", "title": TITLE, "rows": together, "environment": report.environment()}
    file.write_text(json.dumps(content, indent=1) + "\n")


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["S"], row["chip"], row["model"], row["mode"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.chips", description=__doc__)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("infer", "train"), default=["infer", "train"])
    parser.add_argument("--length", type=int, default=512, metavar="S")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in tqdm(list(cases(args.chips, args.models, args.modes, args.length)), unit="case"):
        rows.append(measured(case))
        keep(rows)
    print(f"\n{TITLE}\n\n{report.table(rows)}\n")


if __name__ == "__main__":
    main()
