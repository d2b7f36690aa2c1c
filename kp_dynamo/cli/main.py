"""The command line: `python -m kp_dynamo doctor | explain SPEC | aot SPEC | plan SPEC | cache ... FOLDER | bench`.

Exits with 0, 1 (failed, or a comparison that got worse) or 2 (bad usage).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kp_dynamo.cli import explaining, plan
from kp_dynamo.cli.argument_types import numbers, options, ratio, seconds, sharding
from kp_dynamo.cli.files import today, write
from kp_dynamo.cli.limited_process import run_limited
from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError

OK, FAILED, BAD_USAGE = 0, 1, 2
REPOSITORY = Path(__file__).resolve().parents[2]
_VERBOSE = "every pass on every graph, every refusal, and the files of libraries beside their modules"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not _bench:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        if getattr(args, "limit", None) is not None:
            return run_limited(_without_limit(sys.argv[1:] if argv is None else argv), args.limit)
        return int(args.run(args))
    except Exception as raised:
        # torch wraps exceptions of a backend; exceptions that are not ours keep their traceback.
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
    _add_aot(commands)
    _add_plan(commands)
    _add_cache(commands)
    _add_bench(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="versions, device, a self-test, and what is known wrong")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="seconds for the device (default: 300)"
    )
    doctor.add_argument("--cache", action="store_true", help="also save programs, and load them in another process")
    doctor.set_defaults(run=_doctor)


def _add_explain(commands: Any) -> None:
    command = commands.add_parser("explain", help="what the backend does with a model, from one run of it")
    explaining.add_arguments(command, _VERBOSE)
    _add_limit(command)
    command.set_defaults(run=_explain)


def _add_aot(commands: Any) -> None:
    aot = commands.add_parser("aot", help="compile a model with a TPU's compiler, without a TPU")
    aot.add_argument("spec", metavar="SPEC", nargs="?", help="module_or_file:callable, which returns (model, args)")
    aot.add_argument("--target", help="v4, v5e, v5p, v6e or v7 (default: v5e)")
    aot.add_argument(
        "--chips",
        metavar="N",
        help="several chips: a number, a shape such as 4x4, or 4,16,64 to compare (default: one)",
    )
    aot.add_argument("--mesh", metavar="AXES", help="their axes, as in data=4,model=4 (default: all along data)")
    aot.add_argument(
        "--sharding",
        type=sharding,
        metavar="WORD",
        help="data, fsdp, tensor, fsdp+tensor or JSON; several devices need it (default for a list of chips: fsdp)",
    )
    aot.add_argument("--train", action="store_true", help="in training mode with the backward (default: inference)")
    aot.add_argument("--backend", help="kp_tpu, or openxla to compare with (default: kp_tpu)")
    aot.add_argument("--options", type=options, metavar="JSON", help="""as in '{"level": "aggressive"}'""")
    _add_limit(aot)
    aot.add_argument("--verbose", action="store_true", help=_VERBOSE)
    aot.add_argument("--json", metavar="FILE", help="write the report as JSON")
    aot.add_argument("--html", metavar="FILE", help="write the report as a page with pictures")
    aot.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two JSON reports; exit code 1 if B is worse")
    aot.add_argument("--threshold", type=ratio, metavar="R", help="growth past which B is worse (default: 1.02)")
    aot.set_defaults(run=_aot)


def _add_plan(commands: Any) -> None:
    command = commands.add_parser("plan", help="the chips, mesh, sharding, batch and checkpoint mode that train best")
    plan.add_arguments(command)
    _add_limit(command)
    command.set_defaults(run=_plan)


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser("cache", help="the folder of enable_disk_cache: its files, their checksums")
    cache.add_argument(
        "action", choices=("list", "stats", "verify", "clear"), help="verify exits with 1 if one is damaged"
    )
    cache.add_argument("folder", metavar="FOLDER")
    cache.set_defaults(run=_cache)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", add_help=False, help="benchmarks of the repository; what follows goes to them")
    bench.set_defaults(run=_bench)


def _add_limit(command: argparse.ArgumentParser) -> None:
    text = "seconds for all of it, in a process that is then killed (default: no limit)"
    command.add_argument("--timeout", dest="limit", type=seconds, metavar="S", help=text)


def _without_limit(argv: Sequence[str]) -> list[str]:
    """The same command without a limit, to run as a child process."""
    limit = argparse.ArgumentParser(add_help=False)
    limit.add_argument("--timeout")
    return [sys.executable, "-m", "kp_dynamo", *limit.parse_known_args(argv)[1]]


def _doctor(args: argparse.Namespace) -> int:
    from kp_dynamo.cli.doctor import diagnose

    diagnosis = diagnose(args.timeout, disk_cache=args.cache)
    print(json.dumps(diagnosis.to_dict(), indent=1) if args.json else diagnosis)
    return OK if diagnosis.is_healthy else FAILED


def _explain(args: argparse.Namespace) -> int:
    text, is_well = explaining.explained(args)
    print(text)
    return OK if is_well else FAILED


_OF_SPEC = ("target", "chips", "mesh", "sharding", "train", "backend", "options", "verbose")
"""Arguments of `aot SPEC` that `aot --diff` does not have."""
_THRESHOLD = 1.02


def _aot(args: argparse.Namespace) -> int:
    if (args.diff is None) == (args.spec is None):
        raise TPUConfigurationError("give either SPEC, to compile a model, or --diff A B, to compare two reports")
    of_spec = next((name for name in _OF_SPEC if getattr(args, name) not in (None, False)), None)
    if args.diff and of_spec:
        raise TPUConfigurationError(f"--{of_spec} is invalid with --diff, which compiles nothing. Try: leave it out.")
    if args.spec and args.threshold is not None:
        raise TPUConfigurationError("--threshold is invalid without --diff. Try: leave it out.")
    args.target, args.backend = args.target or "v5e", args.backend or "kp_tpu"
    if args.chips and "," in args.chips:
        return _aot_scaling(args)
    return _aot_diff(args) if args.diff else _aot_compile(args)


def _aot_compile(args: argparse.Namespace) -> int:
    from kp_dynamo.aot.compiling import aot_compile
    from kp_dynamo.cli.model_spec import load_spec
    from kp_dynamo.sharding.mesh import NamedMesh

    mesh = None if args.mesh is None else NamedMesh.parse(args.mesh)
    machine = {"target": args.target, "chips": args.chips, "mesh": mesh, "sharding": args.sharding}
    with contextlib.redirect_stdout(sys.stderr):
        model, inputs = load_spec(args.spec)
        report = aot_compile(
            model, inputs, **machine, options=args.options, train=args.train, backend=args.backend
        )  # fmt: skip
    print(report.text(args.verbose))
    if args.json:
        write(args.json, json.dumps(report.to_dict(), indent=1) + "\n")
    if args.html:
        write(args.html, report.to_html(args.verbose, today()))
    return OK


def _aot_scaling(args: argparse.Namespace) -> int:
    from kp_dynamo.aot.scaling import scaling
    from kp_dynamo.cli.model_spec import load_spec
    from kp_dynamo.sharding.mesh import NamedMesh

    if args.backend != "kp_tpu":
        raise TPUConfigurationError(f"--backend {args.backend} is invalid with several chips. Try: leave it out.")
    if args.verbose:
        raise TPUConfigurationError(
            "--verbose is invalid with several numbers of chips: their table has one form. Try: one number."
        )
    mesh = None if args.mesh is None else NamedMesh.parse(args.mesh)
    axes = None if mesh is None else dict(zip(mesh.names, mesh.sizes, strict=True))
    sharding = "fsdp" if args.sharding is None else args.sharding
    how = {"target": args.target, "sharding": sharding, "options": args.options, "train": args.train}
    with contextlib.redirect_stdout(sys.stderr):
        model, inputs = load_spec(args.spec)
        found = scaling(model, inputs, numbers(args.chips), mesh=axes, **how)
    print(found)
    if args.json:
        write(args.json, json.dumps(found.to_dict(), indent=1) + "\n")
    if args.html:
        write(args.html, found.to_html(today()))
    return OK


def _aot_diff(args: argparse.Namespace) -> int:
    from kp_dynamo.aot.difference import compare, read_report
    from kp_dynamo.aot.difference_page import comparison_html

    before, after = map(read_report, args.diff)
    comparison = compare(before, after, args.threshold or _THRESHOLD, tuple(args.diff))
    print(comparison)
    if args.json:
        write(args.json, json.dumps(comparison.to_dict(), indent=1) + "\n")
    if args.html:
        write(args.html, comparison_html(comparison, today()))
    return FAILED if comparison.is_worse else OK


def _plan(args: argparse.Namespace) -> int:
    print(plan.planned(args))
    return OK


def _cache(args: argparse.Namespace) -> int:
    from kp_dynamo.cli import disk_cache

    if args.action == "verify":
        text, is_whole = disk_cache.verify(args.folder)
        print(text)
        return OK if is_whole else FAILED
    shown = {"list": disk_cache.list_programs, "stats": disk_cache.stats, "clear": disk_cache.clear}
    print(shown[args.action](args.folder))
    return OK


def _bench(args: argparse.Namespace) -> int:
    if not (REPOSITORY / "bench" / "__main__.py").is_file():
        raise TPUConfigurationError(
            "the benchmarks are not part of the installed package; clone the repository and call it from there"
        )
    return subprocess.run([sys.executable, "-m", "bench", *args.rest], cwd=REPOSITORY, check=False).returncode
