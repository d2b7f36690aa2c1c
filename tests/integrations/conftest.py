"""What the tests of other libraries share: they ignore their warnings, and leave the process as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kp_dynamo.integrations import disable_accelerate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of the libraries fail no test here; everywhere else each warning does."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Disables the integration, and restores the environment, into which a Trainer writes."""
    before = dict(os.environ)
    yield
    disable_accelerate()
    os.environ.clear()
    os.environ.update(before)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
