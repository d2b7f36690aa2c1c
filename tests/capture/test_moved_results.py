"""Results that a graph moves to another device share memory exactly where eager's do."""

import pytest
import torch

from tests.spine import compiled


def the_copy_and_a_part(x):
    y = (x * 2).cpu()
    return y, y[0]


def an_input_s_copy_and_a_part(x):
    y = x.cpu()
    return y, y[0]


def two_copies(x):
    y = x * 2
    return y.cpu(), y.cpu()


def both_devices(x):
    y = x * 2
    copy = y.cpu()
    return y, copy, copy[0], y[0]


def there_and_back(x):
    y = x.cpu()
    return y, y.to("xla"), y.view(-1)


def to_xla(x):
    y = (x * 2).to("xla")
    return y, y[0], x


CASES = [
    (the_copy_and_a_part, "xla"),
    (an_input_s_copy_and_a_part, "xla"),
    (two_copies, "xla"),
    (both_devices, "xla"),
    (there_and_back, "xla"),
    (to_xla, "cpu"),
]


@pytest.mark.quick(
    "the_copy_and_a_part-xla-False", "an_input_s_copy_and_a_part-xla-True", "both_devices-xla-False", "to_xla-cpu-True",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of the input, which is no leaf
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("function", "device"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_write_to_a_result_shows_where_it_does_in_eager(function, device, requires_grad):
    found = []
    for run in (function, compiled(function)):
        x = torch.arange(6.0).reshape(2, 3).to(device).requires_grad_(requires_grad)
        results = [r.detach() for r in run(x * 1)]
        seen = [[r.cpu().clone() for r in results]]
        for number, result in enumerate(results, 1):
            result.add_(100.0 * number)
            seen.append([r.cpu().clone() for r in results])
        found.append([[r.device.type for r in results], *([r.tolist() for r in values] for values in seen)])
    assert found[1] == found[0]
