"""The repeated layers of a report: each is compiled once and runs many times in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.explanation.text_layout import first_of

_NUM_LISTED = 3


@dataclass(frozen=True)
class Block:
    """A repeated layer, or several; its figures are for all its runs in a step.

    Attributes:
        runs: How many times a step runs it.
        layers: The number of equal layers in a run.
        modules: The modules that it computes, such as "layers.0 to layers.31".
        programs: Names of its programs: a forward and a backward in training.
        cycles: The compiler's cycles.
        estimated_ms: `cycles` at the chip's clock.
        modelled_ms: Modelled time.
        step_peak_bytes: Peak memory of the step while it runs.
        compile_s: CPU seconds of its compile, which do not depend on the runs.
    """

    runs: int
    layers: int
    modules: str
    programs: tuple[str, ...]
    cycles: int
    estimated_ms: float
    modelled_ms: float
    step_peak_bytes: int
    compile_s: float


def blocks_of(programs: Sequence[ProgramReport]) -> tuple[Block, ...]:
    """The repeated layers among the programs, in their order."""
    found: defaultdict[str, list[ProgramReport]] = defaultdict(list)
    for program in programs:
        if program.is_block:
            found[program.name.split(".")[0]].append(program)
    return tuple(_block(of_capture) for of_capture in found.values())


def _block(programs: Sequence[ProgramReport]) -> Block:
    return Block(
        runs=max(p.runs for p in programs),
        layers=programs[0].layers,
        modules=modules_text(programs[0]),
        programs=tuple(p.name for p in programs),
        cycles=sum(p.runs * p.cycles for p in programs),
        estimated_ms=sum(p.runs * p.estimated_ms for p in programs),
        modelled_ms=sum(p.runs * p.modelled_ms for p in programs),
        step_peak_bytes=max(p.held_bytes + p.peak_bytes for p in programs),
        compile_s=sum(p.compile_s for p in programs),
    )


def runs_text(found: Block | ProgramReport) -> str:
    """ "block x 32", or "4 layers x 8" where a run computes several."""
    return f"{'block' if found.layers == 1 else f'{found.layers} layers'} x {found.runs}"


def modules_text(program: ProgramReport) -> str:
    """ "layers.0 to layers.31", "encoder.*.mlp" or "head"; runs without a known module are counted."""
    modules = list(dict.fromkeys(module for module in program.modules if module))
    text = _joined(modules) if modules else "the model"
    # An equal layer of another graph runs the same program.
    others = program.runs * program.layers - len(program.modules)
    return f"{text}, and {others} more" if others > 0 else text


def _joined(modules: Sequence[str]) -> str:
    columns = list(_columns(modules))
    varying = [column for column in columns if len(set(column)) > 1]
    if not varying:
        return ", ".join(first_of(modules, _NUM_LISTED))
    if len(varying) == 1 and _counts_up(varying[0]):
        return f"{modules[0]} to {modules[-1]}"
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def _columns(modules: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The parts of the paths at each depth; nothing if the depths differ."""
    parts = [module.split(".") for module in modules]
    if len(set(map(len, parts))) == 1:
        yield from zip(*parts, strict=True)


def _counts_up(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names) and [int(name) for name in names] == list(
        range(int(names[0]), int(names[0]) + len(names))
    )
