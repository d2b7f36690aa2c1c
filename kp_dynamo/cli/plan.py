"""The command `plan SPEC`: which chips, mesh, sharding, batch and checkpoint mode train a model best."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys

from kp_dynamo.cli.argument_types import options
from kp_dynamo.cli.files import check_folder, today, write

_UNIT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    plan.add_argument("spec", metavar="SPEC", help="module_or_file:callable, which returns (model, args)")
    plan.add_argument("--train", action="store_true", help="training with an optimizer (default: inference)")
    plan.add_argument("--targets", default="v5e,v6e,v5p", help="v4, v5e, v5p, v6e, v7 (default: v5e,v6e,v5p)")
    plan.add_argument("--max-chips", type=int, default=256, metavar="N", help="most chips of a slice (default: 256)")
    plan.add_argument("--tokens-per-step", type=_count, metavar="N", help="such as 1M (default: the batch of SPEC)")
    plan.add_argument("--objective", default="cost", help="cost or time (default: cost)")
    plan.add_argument("--tokens", type=_count, metavar="N", help="tokens of the whole training, such as 15T")
    plan.add_argument("--deadline-hours", type=float, metavar="H", help="the most hours for them")
    plan.add_argument("--options", type=options, metavar="JSON", help="""as in '{"level": "aggressive"}'""")
    plan.add_argument("--compile", type=int, default=3, metavar="N", help="ways to compile; 0: bounds (default: 3)")
    plan.add_argument("--results", metavar="DIR", help="folder for the compiler's results, which are reused")
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page")


def planned(args: argparse.Namespace) -> str:
    """Plan, write the JSON form and the page, and return the text."""
    for path in filter(None, (args.json, args.html)):
        check_folder(path)  # before a search of minutes
    from kp_dynamo.cli.model_spec import load_spec
    from kp_dynamo.planner.planning import plan

    with contextlib.redirect_stdout(sys.stderr):
        model, inputs = load_spec(args.spec)
        found = plan(
            model,
            inputs,
            train=args.train,
            targets=[name.strip() for name in args.targets.split(",") if name.strip()],
            max_chips=args.max_chips,
            tokens_per_step=args.tokens_per_step,
            objective=args.objective,
            deadline_hours=args.deadline_hours,
            tokens=args.tokens,
            options=args.options,
            num_compiled=args.compile,
            folder=args.results,
            progress=True,
        )
    if args.json:
        write(args.json, json.dumps(found.to_dict(), indent=1) + "\n")
    if args.html:
        write(args.html, found.to_html(today()))
    return found.text()


def _count(text: str) -> float:
    """A number such as "1M", "250K", "15T" or "1e12"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\+?\d{1,2})?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number > 0, such as 250K, 1M or 15T")
    return float(found[1]) * _UNIT[found[2].upper()]
