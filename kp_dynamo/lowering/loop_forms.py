"""Recurrent layers as one loop of the program, whose time step is compiled once.

Under SPMD the steps are unrolled: the computation of a loop would hide shardings from XLA's partitioner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kp_dynamo.lowering.while_loop import scan
from kp_dynamo.ops import recurrence

kp = torch.ops.kp


def _with_scan(loop: recurrence.Scan) -> dict[Any, Callable[..., Any]]:
    return {
        kp.recurrence.default: partial(recurrence.forward, loop),
        kp.recurrence_backward.default: partial(recurrence.backward, loop),
    }


LOOP_FORMS = _with_scan(scan)
SHARDED_LOOP_FORMS = _with_scan(recurrence.scan_in_python)
