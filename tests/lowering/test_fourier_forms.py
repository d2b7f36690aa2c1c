"""Fourier transforms run on the device: every length, norm and dimension, gradients, `stft` and `istft`."""

import itertools
import math

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from kp_dynamo import clear_cache, mark_sequence
from tests.spine import DEVICES, assert_same, compiled, counted, on

# `strict`: an operator that runs on the CPU raises.
STRICT = {"strict": True, "matmul_precision": "highest"}
REAL = ("rfft", "ihfft", "rfft2", "ihfft2", "rfftn", "ihfftn")
OF_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
OF_MANY = ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn", "hfft2", "ihfft2", "hfftn", "ihfftn")


def values(*shape, dtype=torch.complex64):
    """Random numbers; XLA tensors are fetched without the imaginary part of complex128, so only the CPU has those."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(math.prod(shape)))


def assert_close(mine, eager, length):
    """Each stage of an FFT rounds once: eps * log2(length), of the norm; twice for two algorithms, and 4 for luck."""
    eps = torch.finfo(eager.dtype).eps
    assert mine.dtype == eager.dtype
    assert mine.shape == eager.shape
    error = (mine.cpu() - eager).abs().max().item() if eager.numel() else 0.0
    largest = torch.linalg.vector_norm(eager).item() + 1e-30
    assert error <= 8 * eps * max(1.0, math.log2(max(length, 2))) * largest


@pytest.mark.quick("fft", "irfft", "ihfft")
@pytest.mark.parametrize("name", OF_ONE)
def test_of_one_dimension(name):
    transform = getattr(torch.fft, name)
    dtypes = (torch.float32, torch.float64) if name in REAL else (torch.complex64, torch.complex128)

    def fn(xs):
        found = [transform(x, dim=d, norm=norm) for x in xs for d, norm in ((-1, None), (0, "ortho"), (1, "forward"))]
        return found + [transform(x, n=n) for x in xs for n in (1, 3, 8, 11)]

    xs = [values(*shape, dtype=dtype) for dtype in dtypes for shape in ((4, 7), (1, 8), (3, 2))]
    if name in ("irfft", "hfft"):  # whose length without n is 0 for one frequency
        xs = [x for x in xs if 1 not in x.shape]
    for mine, eager in zip(compiled(fn, **STRICT)(xs), fn(xs), strict=True):
        assert_close(mine, eager, 11)


@pytest.mark.quick("ifft2", "irfft2", "fftn", "rfftn", "ihfft2", "hfftn")
@pytest.mark.parametrize("name", OF_MANY)
def test_of_several_dimensions(name):
    transform = getattr(torch.fft, name)
    x = values(3, 4, 5, dtype=torch.float32 if name in REAL else torch.complex64)
    many = ({"dim": (2, 0)}, {"dim": (-2, -1), "norm": "forward"}, {"s": (6, 3), "dim": (0, 1), "norm": "ortho"})

    def fn(x):
        return [transform(x), *(transform(x.mT, **how) for how in many)]

    for device in DEVICES:
        for mine, eager in zip(compiled(fn, **STRICT)(x.to(device)), fn(x), strict=True):
            assert_close(mine, eager, 60)


@pytest.mark.parametrize("length", [1, 2, 97, 128, 400, 1009, 3000])
def test_long_ones_and_primes(length):
    x, reals = values(2, length), values(2, length, dtype=torch.float32)

    def fn(x, reals):
        return (
            torch.fft.fft(x),
            torch.fft.ifft(x),
            torch.fft.rfft(reals),
            torch.fft.irfft(torch.fft.rfft(reals), length),
        )

    for mine, eager in zip(compiled(fn, **STRICT)(x, reals), fn(x, reals), strict=True):
        assert_close(mine, eager, length)


def test_of_nothing():
    """Eager has an empty batch for some transforms, and an error of MKL for others."""
    fns = (torch.fft.fft, torch.fft.irfft, lambda x: torch.fft.rfft(x.real), torch.fft.fft2)
    run = compiled(lambda x: [fn(x[:0]) for fn in fns], **STRICT)
    assert [tuple(y.shape) for y in run(values(2, 3, 6))] == [(0, 3, 6), (0, 3, 10), (0, 3, 4), (0, 3, 6)]


def test_of_views_and_of_conjugates():
    x = values(2, 3, 6)

    def fn(x):
        found = [torch.fft.fft(x[:, ::2]), torch.fft.ifft(x.conj().mT), torch.fft.fftn(x, dim=())]
        found += [torch.fft.hfft(x.conj()), torch.fft.fft(x.real), torch.fft.rfft(x.conj().imag)]
        return [*found, torch.fft.rfft(x.imag.expand(2, 3, 6)), torch.fft.fft(x.to(torch.complex64).imag.neg())]

    for device in DEVICES:
        for mine, eager in zip(compiled(fn, **STRICT)(x.to(device)), fn(x), strict=True):
            assert_close(mine, eager, 6)


def test_of_integers_of_bytes_and_of_booleans():
    xs = [torch.arange(6), torch.arange(6, dtype=torch.uint8), torch.arange(6) > 2]
    assert_same(compiled(lambda xs: [torch.fft.rfft(x) for x in xs], **STRICT)(xs), [torch.fft.rfft(x) for x in xs])


GRADIENTS = {
    "rfft": lambda x: torch.fft.rfft(x, dim=1, norm="ortho").abs(),
    "rfft odd": lambda x: torch.fft.rfft(x, n=7).abs(),
    "irfft": lambda x: torch.fft.irfft(torch.complex(x, x.flip(1)), n=9),
    "irfft even": lambda x: torch.fft.irfft(torch.complex(x, x.flip(1)), dim=0),
    "fft": lambda x: torch.fft.fft(x, norm="forward").real,
    "ifft2": lambda x: torch.fft.ifft2(torch.complex(x, x * 2)).imag,
    "rfft2": lambda x: torch.view_as_real(torch.fft.rfft2(x)),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x * 2)),
    "convolution": lambda x: torch.fft.irfft(torch.fft.rfft(x, n=11) * torch.fft.rfft(x.sin(), n=11), n=11),
}


@pytest.mark.quick("rfft odd", "irfft even", "ifft2", "hfft", "convolution")
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    fn = GRADIENTS[name]
    x = values(4, 6, dtype=torch.float32)
    expected = _gradient(fn, x)
    for device in DEVICES:
        for mine, eager in zip(_gradient(compiled(fn, **STRICT), x.to(device)), expected, strict=True):
            assert_close(mine, eager, 11)


def _gradient(fn, x):
    leaf = x.detach().requires_grad_()
    result = fn(leaf)
    ramp = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.device)
    return result.detach(), torch.autograd.grad((result * ramp).sum(), leaf)[0]


STFT = [
    dict(n_fft=8, hop_length=2, center=center, pad_mode=mode, normalized=normalized, onesided=onesided, win_length=win)
    for center, mode, normalized, onesided, win in (
        (True, "reflect", False, True, 8),
        (True, "constant", True, True, 6),
        (False, "reflect", False, False, 8),
        (True, "circular", True, False, 7),
        (True, "replicate", False, None, 8),
    )
]


@pytest.mark.quick("constant-True-True", "reflect-False-False", "replicate-True-None")
@pytest.mark.parametrize("how", STFT, ids=lambda how: f"{how['pad_mode']}-{how['center']}-{how['onesided']}")
def test_short_time_transforms_and_their_gradients(how):
    def on_device(device):
        window = (torch.hann_window(how["win_length"]) + 0.1).to(device)
        return lambda x: torch.stft(x, window=window, return_complex=True, **how).abs()

    x = values(2, 30, dtype=torch.float32)
    expected = _gradient(on_device("cpu"), x)
    for device in DEVICES:
        for mine, eager in zip(_gradient(compiled(on_device(device), **STRICT), x.to(device)), expected, strict=True):
            assert_close(mine, eager, 8)


@pytest.mark.quick("6-4-20")
@pytest.mark.parametrize(("n_fft", "hop", "length"), [(8, 2, None), (8, 3, 25), (6, 4, 20)])
def test_inverse_short_time_transforms_and_their_gradients(n_fft, hop, length):
    def on_device(device):
        window = (torch.hann_window(n_fft) + 0.1).to(device)

        def fn(x):
            there = torch.stft(x, n_fft, hop, window=window, return_complex=True)
            return torch.istft(there * 2, n_fft, hop, window=window, length=length)

        return fn

    x = values(2, 30, dtype=torch.float32)
    expected = _gradient(on_device("cpu"), x)
    for device in DEVICES:
        for mine, eager in zip(_gradient(compiled(on_device(device), **STRICT), x.to(device)), expected, strict=True):
            assert_close(mine, eager, 64)


def test_another_length_at_the_second_call():
    run = compiled(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]), dynamic=True, **STRICT)
    for length in (6, 9, 6, 16):
        x = values(3, length, dtype=torch.float32)
        assert_close(run(x), 2 * x, length)


def test_in_place_updates_of_what_is_transformed():
    def fn(x, spectrum):
        spectrum.add_(torch.fft.fft(x))
        x.mul_(2)
        return torch.fft.rfft(x) + spectrum[..., : x.shape[-1] // 2 + 1]

    for device in DEVICES:
        run = compiled(fn, **STRICT)
        mine, eager = (on(d, (values(2, 6, dtype=torch.float32), values(2, 6))) for d in (device, "cpu"))
        for _ in range(3):
            assert_close(run(*mine), fn(*eager), 6)
            assert_close(mine[1], eager[1], 6)


def test_a_padded_batch_stays_on_the_device_and_a_padded_length_does_not():
    clear_cache()
    run = compiled(lambda x: torch.fft.rfft(x, dim=2).abs() + torch.fft.irfft(torch.fft.rfft(x), n=4), buckets=[8])
    alone = compiled(lambda x: torch.fft.rfft(x, dim=1).abs(), buckets=[8])
    with counted() as along_batch:
        for size in (5, 6, 8):
            x = values(2, size, 6, dtype=torch.float32)
            eager = torch.fft.rfft(x, dim=2).abs() + torch.fft.irfft(torch.fft.rfft(x), n=4)
            assert_close(run(mark_sequence(x.clone(), 1)), eager, 6)
    assert (along_batch.fallbacks, along_batch.programs) == (0, 1)
    with counted() as along_length:
        for size in (5, 6):
            x = values(2, size, 6, dtype=torch.float32)
            assert_close(alone(mark_sequence(x.clone(), 1)), torch.fft.rfft(x, dim=1).abs(), 6)
    assert along_length.fallbacks == 2


OPERATORS = [op for op in op_db if op.name.startswith("fft.") or op.name in ("stft", "istft", "polar")]


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.full_name)
def test_samples_of_torch_on_the_device(op):
    """The first samples of `op_db`, more than the sweep takes, and never on the CPU."""
    dtype = torch.float32 if op.supports_dtype(torch.float32, "cpu") else torch.complex64
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), 6):
        torch._dynamo.reset()
        args = (sample.input, *sample.args)
        mine = compiled(lambda *args, **kwargs: op.op(*args, **kwargs), dynamic=False, **STRICT)(*args, **sample.kwargs)
        eager = op.op(*args, **sample.kwargs)
        assert_close(mine, eager, 4096)
