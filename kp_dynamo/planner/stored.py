"""Results of the compiler as files, so that an interrupted or repeated search compiles nothing twice."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.step_graphs import StepGraphs
from kp_dynamo.aot.worker_process import libtpu_flags, separate_versions
from kp_dynamo.compat.own_source import is_newer_than_this_process, source_digest
from kp_dynamo.compat.versions import check_versions, version_of
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.planner.candidates import Candidate
from kp_dynamo.planner.request import PlanRequest
from kp_dynamo.planner.rows import Outcome
from kp_dynamo.sharding.rules import own_plan


def default_folder() -> Path:
    """Where results are kept if the user names no folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kp_tpu" / "plan"


def fingerprint(capture: StepGraphs) -> str:
    """Identifies the graphs of a step, their inputs, and the order in which they run."""
    texts: dict[int, str] = {}
    parts = []
    for call in capture.calls:
        if id(call.gm) not in texts:
            texts[id(call.gm)] = _hashed("\n".join(_graph_text(gm) for gm in call.gm.modules() if _is_graph(gm)))
        parts.append(f"{call.spec.name} {call.spec.num_returned} {call.spec.overwritten} {texts[id(call.gm)]}")
    parts += [f"{name} {t.dtype} {list(t.shape)} {t.requires_grad}" for name, t in capture.model.named_parameters()]
    return _hashed("\n".join(parts))


def _is_graph(module: Any) -> bool:
    return isinstance(module, fx.GraphModule)


def _graph_text(gm: Any) -> str:
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    inputs = [f"{v.dtype}{list(v.shape)}{list(v.stride())}" if isinstance(v, torch.Tensor) else repr(v) for v in values]
    return f"{inputs}\n{gm.graph}"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class StoredOutcomes:
    """One file for each candidate that was compiled.

    Attributes:
        folder: Where they are.
        request: What is planned.
        fingerprints: Of the graphs of each checkpoint mode.
        source: Of this package, which makes the programs of the graphs.
    """

    folder: Path
    request: PlanRequest
    fingerprints: dict[Any, str]
    source: str = field(default_factory=lambda: source_digest())

    def read(self, candidate: Candidate) -> Outcome | None:
        """The outcome of a candidate; None if it was not compiled yet, or its file is damaged."""
        try:
            content = json.loads(self._path(candidate).read_text())
            if "problem" in content:
                return Outcome(problem=str(content["problem"]), is_too_large=True)
            return Outcome(AotReport.from_dict(content["report"]))
        except (OSError, ValueError, KeyError, TypeError, TPUConfigurationError):
            return None

    def write(self, candidate: Candidate, outcome: Outcome) -> None:
        """Keep a report, or that a candidate is too large; the file appears whole or not at all.

        Nothing is kept if the source of this package changed meanwhile.

        Raises:
            TPUConfigurationError: The folder cannot be written.
        """
        if is_newer_than_this_process():
            return
        path = self._path(candidate)
        report = outcome.report
        content = {"problem": outcome.problem} if report is None else {"report": report.to_dict()}
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({**content, "what": self._what(candidate)}))
            part.replace(path)
        except OSError as cause:
            raise TPUConfigurationError(
                f"folder={str(self.folder)!r} cannot be written: {cause.strerror}. Try: another folder for the results."
            ) from cause

    def _path(self, candidate: Candidate) -> Path:
        return self.folder / f"{_hashed(json.dumps(self._what(candidate), sort_keys=True))[:32]}.json"

    def _what(self, candidate: Candidate) -> dict[str, Any]:
        """All that the compiled programs depend on."""
        layout = candidate.layout
        return {
            "graphs": self.fingerprints[candidate.checkpoint],
            "options": repr(sorted(self.request.options.items())),
            "train": self.request.train,
            "precision": torch.get_float32_matmul_precision(),
            "target": layout.topology.target,
            "topology": str(layout.topology),
            "mesh": layout.axes,
            "sharding": layout.sharding,
            "plan": own_plan(self.request.model) if "tensor" in layout.sharding else None,
            "batch": candidate.batch,
            "checkpoint": candidate.checkpoint,
            "flags": libtpu_flags(),
            "source": self.source,
            "versions": {
                **check_versions(),
                **{n: version_of(n) for n in ("libtpu", "jax", "kp_dynamo")},
                **separate_versions(layout.topology.target),
            },
        }
