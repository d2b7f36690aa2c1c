"""What every test relies on: XLA on the CPU, no network, one seed, and no compiled code of an earlier test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Before anything imports torch_xla, which reads it once and otherwise asks the network for a TPU.
os.environ.setdefault("PJRT_DEVICE", "CPU")
# A program of XLA:CPU takes 25 memory mappings or more, and Linux allows a process 65,530: with torch_xla's default of
# 2,048 programs, XLA's compiler then ends the process.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "512")
# Models come from configurations with random weights; a test that would download something must fail.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

# A failure must repeat, and a machine that is busy must not fail a test: no random examples, no deadline.
settings.register_profile("kp_dynamo", derandomize=True, deadline=None)
settings.load_profile("kp_dynamo")


_OF_DYNAMO = ("automatic_dynamic_shapes", "assume_static_by_default", "specialize_float", "recompile_limit")

# By an import, if there is no TPU. Lightning then fails in torch_xla 2.9, which wants further variables.
_SET_BY_JAX = "TPU_SKIP_MDS_QUERY"


@pytest.fixture(scope="session", autouse=True)
def _xla_client() -> None:
    """Starts the XLA client before any backward on the CPU, after which torch 2.9 has no XLA backward left."""
    from kp_dynamo.compat import xla

    torch.ones(1, device=xla.device())


@pytest.fixture(autouse=True)
def _fresh_start() -> Iterator[None]:
    """Seeds torch, and makes Dynamo forget: its recompile limit counts over all tests of a process."""
    torch.manual_seed(0)
    before = {name: getattr(torch._dynamo.config, name) for name in _OF_DYNAMO}
    was_set = _SET_BY_JAX in os.environ
    yield
    torch._dynamo.reset()
    if not was_set:
        os.environ.pop(_SET_BY_JAX, None)
    # What a test leaves changed fails another one, far away.
    assert before == {name: getattr(torch._dynamo.config, name) for name in _OF_DYNAMO}


def pytest_collection_finish() -> None:
    """Half a million objects of libraries and tests stay to the end: the collector need not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects the slow ones
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow the cases of a parametrized test that its marker `quick` does not name.

    Raises:
        pytest.UsageError: A marker names no case.
    """
    unused: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("quick")
        if marker is not None:
            names = _names_of_case(marker.args, item)
            unused.setdefault(item.nodeid.partition("[")[0], set(marker.args)).difference_update(names)
            if not names:
                item.add_marker(pytest.mark.slow)
    wrong = {test: names for test, names in unused.items() if names}
    has_all_cases = not config.getoption("lf", False) and not any("::" in arg for arg in config.args)
    if wrong and has_all_cases:
        raise pytest.UsageError(f"markers `quick` name cases that do not exist: {wrong}")


def _names_of_case(names: tuple[str, ...], item: pytest.Item) -> set[str]:
    """Those of the names that are the id of the case, or that of one of its parameters."""
    case = item.callspec.id  # type: ignore[attr-defined]
    return set(names) & {case, *case.split("-")}
