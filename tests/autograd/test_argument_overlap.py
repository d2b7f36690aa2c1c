"""Arguments that overlap in memory: right for the overlap that was compiled, an error for another one."""

import pytest
import torch

import kp_dynamo.compat.xla as compat
from kp_dynamo.exceptions import TPUValidationError
from tests.spine import assert_same

FLOAT32 = {"precision": "float32"}


def write_then_read(x, y):
    x.add_(1)
    return y * 1


def compiled(fn=write_then_read, **options):
    return torch.compile(fn, backend="kp_tpu", options={**FLOAT32, **options})


@pytest.fixture(params=["cpu", "xla"])
def base(request):
    return torch.arange(12.0, device=compat.device() if request.param == "xla" else "cpu")


def test_another_overlap_than_at_the_first_call_is_an_error(base):
    run = compiled()
    run(base[:4].clone(), base[3:].clone())
    with pytest.raises(TPUValidationError, match=r"inputs 0 and 1 .* overlap in memory\. .* for inputs that do not\."):
        run(base[:4], base[3:])
    torch.testing.assert_close(base.cpu(), torch.arange(12.0))
    assert run(base[:4].clone(), base[3:].clone()).shape == (9,)


def test_arguments_that_lie_side_by_side_in_one_tensor_are_right(base):
    run = compiled()
    for _ in range(2):
        torch.testing.assert_close(run(base[:4], base[4:]).cpu(), torch.arange(4.0, 12.0))
    torch.testing.assert_close(base.cpu(), torch.cat([torch.arange(4.0) + 2, torch.arange(4.0, 12.0)]))


def test_halves_of_a_cache_may_both_be_written_to(base):
    def f(k, v, x):
        k.copy_(x)
        v.add_(x)
        return k + v

    keys, values = base.view(2, 6).unbind(0)
    seen = torch.compile(f, backend="kp_tpu")(keys, values, torch.ones(6, device=base.device))
    torch.testing.assert_close(seen.cpu(), 1 + torch.arange(6.0, 12.0) + 1)
    torch.testing.assert_close(base.cpu(), torch.cat([torch.ones(6), torch.arange(6.0, 12.0) + 1]))


def test_the_overlap_of_the_first_call_is_compiled_on_the_cpu_and_an_error_on_xla(base):
    run = compiled()
    if base.device.type == "xla":
        with pytest.raises(TPUValidationError, match="overlap in memory"):
            run(base[:4], base[3:])
        return
    torch.testing.assert_close(run(base[:4], base[3:]), torch.tensor([4.0, *range(4, 12)]))
    with pytest.raises(TPUValidationError, match=r"do not overlap in memory\. .* for inputs that do\."):
        run(torch.ones(4), torch.ones(9))


def test_overlap_is_no_matter_where_nothing_is_written(base):
    def f(x, y):
        return x.sum() + y.sum()

    run = torch.compile(f, backend="kp_tpu", options=FLOAT32)
    run(base[:4].clone(), base[3:].clone())
    torch.testing.assert_close(run(base[:4], base[3:]).cpu(), f(base[:4], base[3:]).cpu())


def shifted(x, y):
    y.mul_(2)
    return torch.cat([y, x])


@pytest.mark.parametrize("options", [{}, {"donate": "mutated"}, {"buckets": [8]}], ids=str)
def test_overlapping_parts_of_a_longer_tensor(options):
    """AOTAutograd traces for the memory that they need, and hands over all of it."""
    run = compiled(shifted, **options)
    for length in (8, 9, 30, 7, 8):
        mine, eager = torch.arange(float(length)), torch.arange(float(length))
        assert_same((run(mine[1:7], mine[:6]), mine), (shifted(eager[1:7], eager[:6]), eager))


def test_the_same_overlap_at_another_place_is_an_error():
    run, x = compiled(shifted), torch.arange(12.0)
    run(x[1:7], x[:6])
    with pytest.raises(TPUValidationError, match="overlap at other offsets in their storage"):
        run(x[3:9], x[2:8])
