"""Make a failing program small: hypothesis draws a smaller one, then statements, inputs and options go one by one.

Each candidate is checked in a worker process, as it may kill it. It is taken where it fails in the same way.
"""

from __future__ import annotations

import ast
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hunt.drawing import BACKEND
from tests.hunt.program import Input, Program

Fails = Callable[[Program], bool]


def drawn_smaller(strategy: st.SearchStrategy[Program], seed: int, fails: Fails, seconds: float) -> Program | None:
    """The smallest program that hypothesis draws around the one of `seed` and that fails, found within the time."""
    deadline, failing = time.monotonic() + seconds, []

    @hypothesis.seed(seed)
    @settings(
        max_examples=2, phases=[Phase.generate, Phase.shrink], database=None, deadline=None, derandomize=False,
        backend=BACKEND, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(strategy)
    def attempt(program: Program) -> None:
        if failing and program == failing[-1]:
            raise AssertionError
        if time.monotonic() < deadline and fails(program):
            failing.append(program)
            raise AssertionError

    with contextlib.suppress(AssertionError, hypothesis.errors.Flaky):
        attempt()
    return failing[-1] if failing else None


def shrunk(program: Program, fails: Fails, seconds: float = 120.0) -> Program:
    """A smaller program that still fails, found within the time."""
    deadline = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > deadline:
                return program
            if fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are one step simpler, large steps first."""
    yield from _fewer_results(program)
    yield from _fewer_calls(program)
    yield from _fewer_statements(program)
    yield from _fewer_inputs(program)
    yield from _plainer_configuration(program)
    yield from _plainer_inputs(program)


def _fewer_calls(program: Program) -> Iterator[Program]:
    for gone in range(len(program.modes)) if len(program.modes) > 1 else ():
        kept = [i for i in range(len(program.modes)) if i != gone]
        inputs = tuple(replace(i, shapes=tuple(i.shapes[k] for k in kept)) for i in program.inputs)
        yield replace(program, modes=tuple(program.modes[k] for k in kept), inputs=inputs)


def _fewer_results(program: Program) -> Iterator[Program]:
    """One result only, or one fewer, without the statements that led to the others."""
    head, _, returned = program.source.rpartition("return ")
    names = [n for n in returned.strip().rstrip(",").split(", ") if n]
    free = len(names) - program.num_random
    if free < 2:
        return
    random = names[free:]
    for kept in (
        *([name] for name in names[:free]),
        *([n for n in names[:free] if n != gone] for gone in names[:free]),
    ):
        source = head + "return " + ", ".join([*kept, *random]) + ("," if len(kept) == 1 and random else "") + "\n"
        yield program.with_source(without_dead(source))


def without_dead(source: str) -> str:
    """Without assignments to names that nothing reads, unless they may write in place."""
    lines = source.splitlines()
    for start, end in _statements(source):
        text = "\n".join(lines[start - 1 : end])
        assigned = re.match(r"\s*([\w, .]+?) = ", text)
        if assigned is None or re.search(r"\w_\(|\[.*\] [-+*]?= ", text) or "def " in text:
            continue
        names = [name.strip().removeprefix("self.") for name in assigned.group(1).split(",")]
        rest = "\n".join(lines[: start - 1] + lines[end:])
        if not any(re.search(rf"\b{name}\b", rest) for name in names):
            return without_dead(rest + "\n")
    return source


def _fewer_statements(program: Program) -> Iterator[Program]:
    lines = program.source.splitlines()
    for start, end in sorted(_statements(program.source), key=lambda span: span[0] - span[1]):
        rest = lines[: start - 1] + lines[end:]
        text = "\n".join(rest) + "\n"
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        yield program.with_source(text)


def _statements(source: str) -> Iterator[tuple[int, int]]:
    """First and last line of each statement that may go; from the last on, as it may use the earlier ones."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Return)
    ]
    return reversed(spans)


def _fewer_inputs(program: Program) -> Iterator[Program]:
    for spec in program.inputs:
        if len(re.findall(rf"\b{spec.name}\b", program.source)) == 1 and len(program.inputs) > 1:
            source = re.sub(rf"(, )?\b{spec.name}\b", "", program.source, count=1).replace("(self, , ", "(self, ")
            kept = tuple(i for i in program.inputs if i.name != spec.name)
            yield replace(program, source=source, inputs=kept)


def _plainer_configuration(program: Program) -> Iterator[Program]:
    configuration = program.configuration
    for name in configuration.options:
        options = {k: v for k, v in configuration.options.items() if k != name}
        if name == "level":
            options = {**options, "precision": "float32"}
        if name != "precision":
            yield replace(program, configuration=replace(configuration, options=options))
    for change in (
        {"device": "cpu"}, {"is_poisoned": False}, {"dynamic": None}, {"is_marked": False},
    ):  # fmt: skip
        if any(getattr(configuration, k) != v for k, v in change.items()) and not configuration.is_sharded:
            yield replace(program, configuration=replace(configuration, **change))
    if program.optimizer is not None:
        yield replace(program, optimizer=None)
    if any(mode != "no_grad" for mode in program.modes):
        yield replace(program, modes=("no_grad",) * len(program.modes))
    if any(mode not in ("no_grad", "train") for mode in program.modes):
        yield replace(program, modes=("train",) * len(program.modes))


def _plainer_inputs(program: Program) -> Iterator[Program]:
    for number, spec in enumerate(program.inputs):
        for plainer in _plainer(spec):
            inputs = (*program.inputs[:number], plainer, *program.inputs[number + 1 :])
            yield replace(program, inputs=inputs)


def _plainer(spec: Input) -> Iterator[Input]:
    if spec.layout != "contiguous":
        yield replace(spec, layout="contiguous")
    if spec.requires_grad:
        yield replace(spec, requires_grad=False)
    if spec.varying:
        yield replace(spec, varying=())
    if spec.is_kept:
        yield replace(spec, is_kept=False)
