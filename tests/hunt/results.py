"""What hunts found, counted: `results.json`, by seed with the commit, operators met, refusals and excuses."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("results.json")
STATUSES = ("right", "refused", "wrong", "raised", "crashed", "torch", "uncaptured", "invalid", "broken")
# What says nothing about the backend is not counted as a program.
COUNTED = ("right", "refused", "wrong", "raised", "crashed")
COUNTERS = ("operators", "refusals", "excused")


@dataclass
class Results:
    """Counts of one or many hunts.

    Attributes:
        batches: By seed: the commit, the families of which each program has one if not any, and how many programs have
            which status.
        operators: ATen operators and how many programs ran them.
        refusals: Reasons and how many programs met them.
        excused: What was wrong or raised also with torch's own `aot_eager`, or is no single graph, and how often.
        with_buckets: Programs with buckets by status; `batches` has all.
    """

    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    operators: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def load(path: Path = FILE) -> Results:
        if not path.exists():
            return Results()
        read = json.loads(path.read_text())
        counters = (Counter(read.get(name, {})) for name in COUNTERS)
        return Results(read["batches"], *counters)

    def save(self, path: Path = FILE) -> None:
        rows = [f'  "{seed}": {json.dumps(self.batches[seed])}' for seed in sorted(self.batches, key=int)]
        parts = [
            '"batches": {\n' + ",\n".join(rows) + "\n }",
            *(f'"{name}": {json.dumps(dict(sorted(getattr(self, name).items())), indent=2)}' for name in COUNTERS),
        ]
        path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")

    def add(
        self, seed: int, outcome: dict[str, Any], *, has_buckets: bool, commit: str, each: tuple[str, ...] = ()
    ) -> None:
        drawn = {"each": " ".join(each)} if each else {}
        row = self.batches.setdefault(str(seed), {"commit": commit, **drawn})
        status = outcome["status"]
        row[status] = row.get(status, 0) + 1
        if has_buckets and status in COUNTED:
            row["with buckets"] = row.get("with buckets", 0) + 1
            if status == "refused":
                row["refused with buckets"] = row.get("refused with buckets", 0) + 1
        if status in ("torch", "uncaptured"):
            self.excused[plain_reason(outcome["text"].split("\n")[0])] += 1
        if status in COUNTED:
            self.operators.update(outcome.get("ops", ()))
            self.refusals.update({plain_reason(reason) for reason in outcome.get("refusals", ())})

    def with_batches(self, other: Results) -> Results:
        """Both, with the batches of `other` in place of those of the same seed."""
        batches = {**self.batches, **other.batches}
        return Results(batches, *(getattr(self, name) + getattr(other, name) for name in COUNTERS))

    def total(self, *names: str, commit: str | None = None) -> int:
        rows = [r for r in self.batches.values() if commit is None or r["commit"] == commit]
        return sum(row.get(name, 0) for row in rows for name in names)

    def summary(self, commit: str | None = None) -> str:
        programs = self.total(*COUNTED, commit=commit)
        counts = ", ".join(f"{status} {self.total(status, commit=commit)}" for status in STATUSES)
        buckets, refused = (self.total(n, commit=commit) for n in ("with buckets", "refused with buckets"))
        others = self.total("refused", commit=commit) - refused
        return (
            f"{programs} programs: {counts}\n"
            f"refused: {refused} of {buckets} with buckets ({refused / max(buckets, 1):.1%}), "
            f"{others} of {programs - buckets} others ({others / max(programs - buckets, 1):.1%})"
        )

    def table(self) -> dict[str, tuple[str, str]]:
        """The rows of the report in docs/correctness.md: of all programs, and of those on the last commit."""
        core, last = core_operators(), self.last_commit()
        columns = [self._column(None), self._column(last)]
        rows = {name: (columns[0][name], columns[1][name]) for name in columns[0]}
        return {
            **rows,
            "ATen operators covered": (f"{len(self.operators)}", ""),
            "of ATen's core operators": (f"{len(core & set(self.operators))} of {len(core)}", ""),
        }

    def _column(self, commit: str | None) -> dict[str, str]:
        def total(*names: str) -> int:
            return self.total(*names, commit=commit)

        programs, buckets, refused = total(*COUNTED), total("with buckets"), total("refused with buckets")
        return {
            "programs": f"{programs:,}",
            "with buckets": f"{buckets:,}",
            "refused by name, with buckets": f"{refused / max(buckets, 1):.1%}",
            "refused by name, without buckets": f"{(total('refused') - refused) / max(programs - buckets, 1):.1%}",
            "wrong": f"{total('wrong') or 'none'}",
            "raised an unexpected error": f"{total('raised') or 'none'}",
            "crashed": f"{total('crashed') or 'none'}",
        }

    def last_commit(self) -> str:
        """That of the largest seed: seeds only grow."""
        return self.batches[max(self.batches, key=int)]["commit"] if self.batches else ""

    def never_met(self) -> list[str]:
        """torch's core ATen operators that no program has run."""
        return sorted(core_operators() - set(self.operators))


def core_operators() -> set[str]:
    """ATen's core operators, by name."""
    found = set()
    # `dir(torch.ops.aten)` lists what this process has used so far.
    names = {
        schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas() if "aten::" in schema.name
    }
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name, None)
        for overload in getattr(packet, "overloads", list)():
            if torch.Tag.core in getattr(packet, overload).tags:
                found.add(f"aten.{name}")
    return found


def plain_reason(text: str) -> str:
    """A reason without names of nodes, lines and numbers, so that equal ones count as one."""
    text = (
        text.split(". Write that line")[0]
        .split(". Mark the sizes")[0]
        .removeprefix("a graph is compiled for each length, not padded to buckets: ")
    )
    text = re.sub(r" \(at .*?\)(?=: )", "", text)
    text = re.sub(r"\b(primals|tangents|view|clone|getitem|full|where|arange|add|mul)(_\w+)?\b(?=:)", "a value", text)
    return re.sub(r"\bs\d+\b|\d+", "N", text)[:160]


def commit_now() -> str:
    """The last commit that changes the package, marked where its files differ from it."""
    package = FILE.parents[2] / "kp_dynamo"

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words, "--", "."], capture_output=True, text=True, cwd=package, check=False)
        return done.stdout.strip()

    return ask("log", "-1", "--format=%h", "--abbrev=12") + ("+" if ask("status", "--porcelain") else "")
