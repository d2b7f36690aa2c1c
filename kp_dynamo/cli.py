"""The command line: `python -m kp_dynamo doctor | explain SPEC | bench`. Exits with 0, 1 (failed) or 2 (bad usage)."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError

OK, FAILED, BAD_USAGE = 0, 1, 2
REPOSITORY = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not _bench:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        return int(args.run(args))
    except Exception as raised:
        # torch wraps what a backend raises; what is not ours keeps its traceback.
        problem = getattr(raised, "inner_exception", raised)
        if not isinstance(problem, TPUBackendError):
            raise
        print(f"error: {problem}", file=sys.stderr)
        return BAD_USAGE if isinstance(problem, TPUConfigurationError) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kp_dynamo", description="kp_tpu, a torch.compile backend for TPUs")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_doctor(commands)
    _add_explain(commands)
    _add_bench(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="versions, device, a self-test, and what is known wrong")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds for the device (default: 300)"
    )
    doctor.set_defaults(run=_doctor)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="what the backend makes of a model, from one run of it")
    explain.add_argument("spec", metavar="SPEC", help="module_or_file:callable, which returns (model, args)")
    explain.add_argument("--options", type=_options, metavar="JSON", help="""as in '{"level": "aggressive"}'""")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--train", action="store_true", help="in training mode with a backward (default: inference)")
    explain.set_defaults(run=_explain)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", add_help=False, help="benchmarks of the repository; what follows goes to them")
    bench.set_defaults(run=_bench)


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {problem}") from problem
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return options


def _doctor(args: argparse.Namespace) -> int:
    from kp_dynamo.doctor import diagnose

    diagnosis = diagnose(args.timeout)
    _show(diagnosis, args.json)
    return OK if diagnosis.is_healthy else FAILED


def _explain(args: argparse.Namespace) -> int:
    import torch

    from kp_dynamo.explanation import explain
    from kp_dynamo.spec import load_spec

    # What a model prints is not the answer.
    with contextlib.redirect_stdout(sys.stderr), torch.set_grad_enabled(args.train):
        model, inputs = load_spec(args.spec)
        if isinstance(model, torch.nn.Module):
            model.train(args.train)
        explanation = explain(model, *inputs, options=args.options)
    _show(explanation, args.json)
    return OK


def _show(found: Any, as_json: bool) -> None:
    print(json.dumps(found.to_dict(), indent=1) if as_json else found)


def _bench(args: argparse.Namespace) -> int:
    if not (REPOSITORY / "bench" / "__main__.py").is_file():
        raise TPUConfigurationError(
            "the benchmarks are not part of the installed package; clone the repository and call it from there"
        )
    return subprocess.run([sys.executable, "-m", "bench", *args.rest], cwd=REPOSITORY, check=False).returncode
