"""Write graphs, reports of passes and cache keys to `dump_dir`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.passes.base import PassReport


def dump_graph(gm: fx.GraphModule, options: CompileOptions, stem: str) -> None:
    if options.dump_dir is not None:
        _write(options.dump_dir, f"{stem}.py", gm.print_readable(print_output=False))


def dump_reports(reports: list[PassReport], options: CompileOptions, graph_name: str) -> None:
    if options.dump_dir is not None:
        rows = []
        for report in reports:
            fields = report.to_dict()
            rows.append({"pass": fields.pop("name"), **fields})
        _write(options.dump_dir, f"{graph_name}.report.json", json.dumps(rows, indent=1))


def dump_key(key: Sequence[tuple[str, object]] | None, options: CompileOptions, graph_name: str) -> None:
    """Write the named parts of a graph's cache key."""
    if options.dump_dir is not None:
        parts = (("shared with", "no other graph: a part of it has no stable identity"),) if key is None else key
        _write(options.dump_dir, f"{graph_name}.key.txt", "".join(f"{name}: {part}\n" for name, part in parts))


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    except OSError as cause:
        raise TPUConfigurationError(
            f"dump_dir={str(folder)!r} is invalid: {cause.strerror}. Allowed: a folder that this user can write to."
        ) from cause
