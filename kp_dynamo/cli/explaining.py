"""The command `explain SPEC`, and `explain --diff A B`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from kp_dynamo.cli.argument_types import options, share
from kp_dynamo.cli.files import check_folder, today, write
from kp_dynamo.exceptions import TPUConfigurationError

_STDOUT = "-"


def add_arguments(explain: argparse.ArgumentParser, verbose: str) -> None:
    """The arguments of the command; `verbose` is what --verbose shows."""
    explain.add_argument("spec", metavar="SPEC", nargs="?", help="module_or_file:callable, which returns (model, args)")
    explain.add_argument("--options", type=options, metavar="JSON", help="""as in '{"level": "aggressive"}'""")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--json", nargs="?", const=_STDOUT, metavar="FILE", help="print JSON, or write it to a file")
    form.add_argument("--verbose", action="store_true", help=verbose)
    explain.add_argument("--html", metavar="FILE", help="write the report as a page")
    explain.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two JSON files; exit code 1: B is worse")
    explain.add_argument(
        "--tolerance", type=share, default=0.05, metavar="T", help="growth past which B is worse (default: 0.05)"
    )
    explain.add_argument("--ledger", action="store_true", help="what each pass does to the numbers, on these inputs")
    explain.add_argument("--train", action="store_true", help="in training mode with a backward (default: inference)")


def explained(args: argparse.Namespace) -> tuple[str, bool]:
    """Explain a model, or compare two explanations: what to print, and whether all is well."""
    if (args.diff is None) == (args.spec is None):
        raise TPUConfigurationError("give either SPEC, to explain a model, or --diff A B, to compare two JSON files")
    for path in (args.html, args.json):
        if path not in (None, _STDOUT):
            check_folder(path)
    return _difference(args) if args.diff else _explanation(args)


def _explanation(args: argparse.Namespace) -> tuple[str, bool]:
    import torch

    from kp_dynamo.cli.model_spec import load_spec
    from kp_dynamo.explanation.explain import explain

    # Keep what the model prints off the standard output.
    with contextlib.redirect_stdout(sys.stderr), torch.set_grad_enabled(args.train):
        model, inputs = load_spec(args.spec)
        if isinstance(model, torch.nn.Module):
            model.train(args.train)
        chosen = {**(args.options or {}), "ledger": True} if args.ledger else args.options
        found = explain(model, *inputs, options=chosen)
    if args.html:
        write(args.html, found.to_html(args.verbose, today()))
    return _shown(args, found.to_dict(), found.text(args.verbose)), True


def _difference(args: argparse.Namespace) -> tuple[str, bool]:
    from kp_dynamo.explanation.difference import compare_explanations, read_explanation
    from kp_dynamo.explanation.difference_page import difference_html

    before, after = map(read_explanation, args.diff)
    found = compare_explanations(before, after, args.tolerance, tuple(args.diff))
    if args.html:
        write(args.html, difference_html(found, today()))
    return _shown(args, found.to_dict(), found.text()), not found.is_worse


def _shown(args: argparse.Namespace, content: dict[str, Any], text: str) -> str:
    """What to print, after the JSON form is written if a file is named."""
    form = json.dumps(content, indent=1)
    if args.json == _STDOUT:
        return form
    if args.json is not None:
        write(args.json, f"{form}\n")
    return text
