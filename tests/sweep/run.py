"""Sweep all operators through a backend and count: `python -m tests.sweep.run kp_tpu --json FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from tests.sweep.check import SUBJECTS, Outcome
from tests.sweep.samples import ops
from tests.sweep.worker import CHECKS, Worker


def sweep(subject: str, names: list[str]) -> Iterator[Outcome]:
    """The outcome of each operator, one process serving them all while it lives."""
    worker = Worker(subject)
    try:
        for name in tqdm(names, desc=subject, file=sys.stderr, mininterval=10):
            yield worker.check(name)
    finally:
        worker.close()


def main() -> None:
    """Write a summary to the standard output and every outcome to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=sorted(SUBJECTS))
    parser.add_argument("--ops", nargs="*", help="operators by name; default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth operator")
    parser.add_argument("--extremes", choices=sorted(CHECKS), nargs="?", const="floats", help="samples, changed")
    parser.add_argument("--json", type=Path, help="file for all outcomes")
    arguments = parser.parse_args()
    outcomes = []
    names = (arguments.ops or list(ops()))[:: arguments.every]
    asked = f"{arguments.extremes} of " if arguments.extremes else ""
    for outcome in sweep(arguments.backend, [asked + name for name in names]):
        outcomes.append(outcome)
        if outcome.status != "right":
            sys.stdout.write(f"{outcome.status:7}{outcome.name}: {outcome.text}\n")
            sys.stdout.flush()
    counted = dict(Counter(outcome.status for outcome in outcomes))
    seconds = round(sum(outcome.seconds for outcome in outcomes))
    no_graph = sum(outcome.graphs == 0 for outcome in outcomes)
    summary = {"backend": arguments.backend, **counted, "without a graph": no_graph, "seconds": seconds}
    sys.stdout.write(json.dumps(summary) + "\n")
    if arguments.json:
        rows = [asdict(outcome) for outcome in outcomes]
        arguments.json.write_text(json.dumps({"summary": summary, "outcomes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
