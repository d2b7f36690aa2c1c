"""What donation does to the memory of a real TPU program."""

from __future__ import annotations

import torch
from torch.optim._functional import adamw

import kp_dynamo
from kp_dynamo.aot.program_report import ProgramReport


def adamw_step(parameters, gradients, exp_avgs, exp_avg_sqs, steps):
    adamw(
        parameters, gradients, exp_avgs, exp_avg_sqs, [], steps, foreach=True, capturable=True, amsgrad=False,
        beta1=0.9, beta2=0.999, lr=1e-3, weight_decay=0.01, eps=1e-8, maximize=False,
    )  # fmt: skip


def program(donate: str) -> ProgramReport:
    def tensors():
        return [torch.empty(1024, 1024, device="meta") for _ in range(3)]

    args = (*(tensors() for _ in range(4)), [torch.empty((), device="meta") for _ in range(3)])
    [found] = kp_dynamo.aot_compile(adamw_step, args, options={"donate": donate}).programs
    return found


def test_an_optimizer_step_takes_the_place_of_its_state():
    without, donated = program("off"), program("mutated")
    assert without.alias_bytes == 0
    assert donated.alias_bytes >= 9 * 4 * 2**20  # parameters and both moments
    assert donated.peak_bytes <= 0.65 * without.peak_bytes
