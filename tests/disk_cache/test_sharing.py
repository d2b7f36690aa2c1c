"""Processes that share a folder: at once, killed, and with a bound that is too small for all."""

from __future__ import annotations

import random
import shutil
import signal
import time

import pytest

from tests.disk_cache.process import Machine, finish, misses

HEADER = 88


def _at_once(machine: Machine, num_processes: int, num_programs: int) -> None:
    plans = [{"program": number} for number in range(num_programs)]
    # Each begins elsewhere, so that some save what others load.
    orders = [plans[at:] + plans[:at] for at in range(0, num_programs, -(-num_programs // num_processes))]
    results = [finish(process) for process in [machine.start(order) for order in orders]]
    assert {reason for result in results for reason in misses(result)} == {"absent"}
    assert sum(result["not_saved"] for result in results) == 0
    assert len(machine.entries()) == num_programs
    assert machine.run(plans)["hits"] == num_programs


def test_processes_share_the_folder(machine):
    _at_once(machine, 3, 12)


@pytest.mark.slow
def test_two_hundred_programs_of_eight_processes(machine):
    _at_once(machine, 8, 200)


def test_a_process_killed_while_it_writes_leaves_no_broken_entry(machine):
    plans = [{"program": number} for number in range(40)]
    for wait in (0.05, 0.1, 0.2):
        process = machine.start(plans)
        deadline = time.monotonic() + 120
        while len(machine.entries()) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = machine.run(plans)
    assert found["damaged"] == 0 < found["hits"]
    assert found["hits"] + found["absent"] == 40


@pytest.mark.slow
def test_eight_processes_that_are_killed_at_any_time(machine):
    plans, generator = [{"program": number} for number in range(100)], random.Random(0)
    for _ in range(5):
        processes = [machine.start(generator.sample(plans, len(plans))) for _ in range(8)]
        time.sleep(generator.uniform(1, 4))
        for process in generator.sample(processes, 4):
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()
            assert process.returncode in (0, -signal.SIGKILL)
    found = machine.run(plans)
    assert (found["hits"], misses(found)) == (100, {})


@pytest.mark.slow
def test_a_bound_that_is_too_small_for_eight_processes(machine):
    """They evict each other's programs all the time; what is left fits, and is whole."""
    size = machine.compile(1)["saved_bytes"] + HEADER
    bound = 10 * size
    plans = [{"program": number} for number in range(60)]
    orders = [random.Random(seed).sample(plans, len(plans)) for seed in range(8)]
    started = [machine.start(order, KP_TPU_CACHE_MAX_BYTES=str(bound)) for order in orders]
    results = [finish(process) for process in started]
    assert {reason for result in results for reason in misses(result)} == {"absent"}
    assert sum(result["evicted"] for result in results) > 0
    assert sum(entry.stat().st_size for entry in machine.entries()) <= bound
    assert machine.compile(1)["state"] == "on"


def test_a_folder_that_is_deleted_while_a_process_uses_it(machine):
    process = machine.start([{"program": number} for number in range(30)])
    deadline = time.monotonic() + 120
    while len(machine.entries()) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(machine.folder, ignore_errors=True)
    found = finish(process)
    assert (len(found["seconds"]), misses(found)) == (30, {"absent": 30})
    assert found["saved"] + found["not_saved"] == 30
