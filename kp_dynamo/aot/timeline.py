"""The time of a scheduled program on one chip of a slice: what of its communication waits for no computation.

A walk through the schedule with two clocks, of the chip and of the links. An instruction that computes advances the
chip's clock. A collective begins when the chip reaches it and the links are free, and takes its time on the links. The
chip waits for it at once, or where it ends if that is another instruction: the waiting is exposed, the rest overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kp_dynamo.aot.collectives import Collective, CollectiveReader, Part
from kp_dynamo.aot.hlo import Instruction, Module
from kp_dynamo.aot.links import Links
from kp_dynamo.aot.loops import trips_of


@dataclass(frozen=True)
class TimedCollective:
    """One collective of a schedule, and how long the chip waits for it.

    Attributes:
        collective: The collective.
        times: How often it runs in a run of the program.
        seconds: Its time on the links, once.
        exposed_s: The time that the chip waits for it, in all its runs.
    """

    collective: Collective
    times: int
    seconds: float
    exposed_s: float


@dataclass
class _Running:
    collective: Collective
    times: int
    seconds: float
    ends_at: float


class Timeline:
    """Walks a program.

    Args:
        module: The scheduled program.
        compute_s: Seconds of each instruction that computes, by name.
        links: The links of the slice.
    """

    def __init__(self, module: Module, compute_s: Mapping[str, float], links: Links) -> None:
        self._module, self._compute_s, self._links = module, compute_s, links
        self._reader = CollectiveReader(module, links.topology.num_devices)
        self._found: list[TimedCollective] = []
        self._running: dict[str, _Running] = {}
        self._now = self._links_free_at = 0.0

    def collectives(self) -> list[TimedCollective]:
        """The collectives of the program, in the order in which they end."""
        self._walk(self._module.entry, 1)
        for name in list(self._running):
            self._wait(name)
        return self._found

    def _walk(self, computation: str, times: int) -> None:
        """One run of a computation, which happens `times` times in the program."""
        body = self._module.computations.get(computation, [])
        for op in body:
            if op.opcode == "while":
                self._loop(computation, op, times)
            elif op.opcode == "call":
                self._walk(op.called("to_apply"), times)
            else:
                self._step(op, self._reader.read(op, body), times)

    def _loop(self, computation: str, op: Instruction, times: int) -> None:
        """All trips of a loop, 1 if their number is unknown; they take equal time."""
        known, begin = trips_of(self._module, computation, op), self._now
        trips = 1 if known is None else known
        self._walk(op.called("body"), times * trips)
        others = (trips - 1) * (self._now - begin)
        self._now, self._links_free_at = self._now + others, self._links_free_at + others

    def _step(self, op: Instruction, part: Part | None, times: int) -> None:
        if part is not None and part.role in ("run", "start") and part.collective is not None:
            seconds = part.collective.seconds(self._links)
            self._links_free_at = max(self._now, self._links_free_at) + seconds
            self._running[part.key] = _Running(part.collective, times, seconds, self._links_free_at)
        self._now += self._compute_s.get(op.name, 0.0)
        if part is not None and part.role in ("run", "end"):
            self._wait(part.key)

    def _wait(self, key: str) -> None:
        running = self._running.pop(key, None)
        if running is None:  # its start is in another computation
            return
        exposed = max(0.0, running.ends_at - self._now)
        self._now += exposed
        self._found.append(TimedCollective(running.collective, running.times, running.seconds, exposed * running.times))
