"""Collectives between two processes, `tests/api/processes.py`, that torch.distributed's gloo joins."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.api.processes import batches, model


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    command = [sys.executable, "-W", "ignore", "-m", "tests.api.processes", str(file)]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    processes = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [stderr[-3000:] for _, stderr in done]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in done]


def test_the_processes_know_of_each_other(answers):
    assert [answer["world"] for answer in answers] == [[2, 0, True], [2, 1, True]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sum", [3, 5]), ("mean", [1.5, 2.5]), ("min", [1, 2]), ("max", [2, 3]), ("product", [2, 6]),
        ("gathered", [1, 2, 2, 3]), ("devices", ["xla:0", "cpu"]),
    ],
)  # fmt: skip
def test_collectives(answers, name, expected):
    assert [answer[name] for answer in answers] == [expected, expected]


def test_what_is_given_stays_as_it_is(answers):
    assert [answer["kept"] for answer in answers] == [[1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mean of ints", "op='mean' requires a floating-point tensor, got torch.int64"),
        ("unlike", "0: torch.float32 [2], 1: torch.float32 [3]). Allowed: one shape and dtype"),
        ("complex maximum", "cannot send a tensor torch.complex64[2]"),
    ],
)
def test_what_is_refused_is_refused_by_all(answers, name, words):
    assert [words in answer[name] for answer in answers] == [True, True], answers


def test_training_on_halves_of_a_batch_is_training_on_the_whole(answers):
    torch.manual_seed(0)  # the model of process 0
    eager = model()
    sgd = torch.optim.SGD(eager.parameters(), lr=0.1)
    for x, y in batches():
        sgd.zero_grad()
        nn.functional.mse_loss(eager(x), y).backward()
        sgd.step()
    for answer in answers:
        for mine, parameter in zip(answer["weights"], eager.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), parameter.detach().flatten(), rtol=1e-5, atol=1e-6)
