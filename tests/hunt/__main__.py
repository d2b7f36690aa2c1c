"""Hunt for programs that go wrong: `python -m tests.hunt --minutes 10 --workers 2 [--seeds 0-99] [--record]`.

`--each dropout losses` hunts with programs that begin with a statement of one of these families.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from tests.hunt.families import FAMILIES
from tests.hunt.program import Program
from tests.hunt.results import Results
from tests.hunt.run import OUT, Hunt
from tests.hunt.worker import Worker


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--seeds", default="", help="as 3, 0-99 or 100- ; default: on from the largest that is recorded"
    )
    parser.add_argument("--shrink", type=float, default=120.0, metavar="SECONDS", help="for each failure")
    parser.add_argument("--record", action="store_true", help="merge the counts into tests/hunt/results.json")
    parser.add_argument(
        "--each", nargs="+", choices=FAMILIES, default=[], help="families of a program's first statement"
    )
    parser.add_argument("--again", type=Path, nargs="*", help="JSON files of programs: check these only")
    arguments = parser.parse_args()
    if arguments.again:
        sys.exit(again(arguments.again))
    recorded = Results.load()

    def record(found: Results) -> None:
        if arguments.record:
            recorded.with_batches(found).save()

    seeds = _seeds(arguments.seeds, 1 + max(map(int, recorded.batches), default=-1))
    deadline = time.monotonic() + 60 * arguments.minutes
    each = tuple(sorted(arguments.each))
    hunt = Hunt(seeds, arguments.workers, deadline, shrink_s=arguments.shrink, record=record, each=each)
    found = hunt.run()
    sys.stdout.write(f"{found.summary()}\n")
    for reason, count in found.refusals.most_common(20):
        sys.stdout.write(f"{count:6} {reason}\n")
    sys.stdout.write("excused, because aot_eager does the same or Dynamo makes no single graph:\n")
    for reason, count in found.excused.most_common(20):
        sys.stdout.write(f"{count:6} {reason}\n")
    record(found)
    sys.stdout.write(f"never met: {', '.join(recorded.with_batches(found).never_met())}\n")
    if hunt.failures:
        sys.stdout.write(f"{len(hunt.failures)} failures, as scripts in {OUT}\n")
    sys.exit(bool(hunt.failures))


def again(paths: list[Path]) -> bool:
    """Check programs that were written down; whether one fails."""
    is_bad = False
    for path in paths:
        program = Program.from_json(path.with_suffix(".json").read_text())
        worker = Worker(is_sharded=program.configuration.is_sharded)
        outcome = worker.ask({"program": program.to_json()})["outcome"]
        worker.close()
        is_bad |= outcome["status"] not in ("right", "refused")
        sys.stdout.write(f"{path.name}: {outcome['status']} {outcome['text']}\n")
    return is_bad


def _seeds(text: str, following: int) -> itertools.chain[int] | itertools.count[int]:
    if not text:
        return itertools.count(following)
    first, dash, last = text.partition("-")
    if dash and not last:
        return itertools.count(int(first))
    return itertools.chain(range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    main()
