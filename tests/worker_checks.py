"""Checks that a worker process runs, because they need a property of a whole process: the answers as JSON, a line each.

A check returns what JSON has, or raises: then its answer is the error as text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Check = Callable[[], Any]


class Checks:
    """The checks of one worker by name; by default it runs the quick ones."""

    def __init__(self) -> None:
        self.quick: dict[str, Check] = {}
        self.slow: dict[str, Check] = {}

    def check(self, function: Check) -> Check:
        self.quick[function.__name__] = function
        return function

    def slow_check(self, function: Check) -> Check:
        self.slow[function.__name__] = function
        return function

    def run(self, names: Sequence[str]) -> None:
        for name in names or self.quick:
            sys.stdout.write(json.dumps({name: _answer((self.quick | self.slow)[name])}) + "\n")
            sys.stdout.flush()


def _answer(check: Check) -> Any:
    torch._dynamo.reset()
    try:
        return check()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
