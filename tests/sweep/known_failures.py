"""Operators whose samples the backend refuses, each with its reason. None of them may give a wrong result.

A listed operator that works fails the test, so that the list only says what is true.
"""

from __future__ import annotations

from dataclasses import dataclass

# A third of the 48 operators on which torch_xla's own backend is wrong, raises or dies.
LONGEST = 16


@dataclass(frozen=True)
class Refusal:
    """Why an operator is refused, and a piece of the message that says so."""

    reason: str
    message: str


KNOWN_FAILURES: dict[str, Refusal] = {
    "chalf": Refusal("XLA has no complex numbers of half precision", "complex32"),
    "to_sparse": Refusal("XLA has dense tensors only", "sparse"),
}
