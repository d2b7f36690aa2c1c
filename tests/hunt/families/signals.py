"""Signals: transforms over windows, convolutions by their spectra, overlapping windows, sorted tables."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

# {0} is a signal [..., T], {1} a window of {2} numbers, {3} the step between windows.
_SPECTRA = (
    "torch.stft({0}, {2}, {3}, window={1}, return_complex=True).abs()", "torch.stft({0}, {2}, {3}, window={1}, center=False, return_complex=True).abs().square()",
    "torch.view_as_real(torch.stft({0}, {2}, {3}, {2}, {1}, return_complex=True))", "torch.stft({0}, {2}, {3}, window={1}, onesided=False, return_complex=True).imag",
    "torch.stft({0}, {2}, {3}, window={1}, normalized=True, pad_mode='constant', return_complex=True).real", "torch.stft({0}, {2}, return_complex=True).abs().clamp(min=1e-2).log()",
    "torch.istft(torch.stft({0}, {2}, {2} // 2, window={1}, return_complex=True), {2}, {2} // 2, window={1})", "torch.istft(torch.stft({0}, {2}, 1, return_complex=True) * 2, {2}, 1, length={0}.shape[-1])",
    "torch.fft.rfft({0}.unfold(-1, {2}, {3}) * {1}).abs()", "torch.fft.irfft(torch.fft.rfft({0}) * torch.fft.rfft({1}, n={0}.shape[-1]), n={0}.shape[-1])",
    "torch.fft.irfft(torch.fft.rfft({0}, n=16) * torch.fft.rfft({1}, n=16), n=16)[..., :{0}.shape[-1]]", "torch.fft.rfft({0}, norm='forward').abs() ** 2", "torch.fft.fftn({0}).real",
    "torch.fft.ifft(torch.fft.fft({0}, norm='ortho') * 1j, norm='ortho').imag", "torch.fft.rfft({0}, n=5).real", "torch.fft.fft({0}, n=12, dim=0).imag", "torch.fft.irfft2(torch.fft.rfft2({0}), s={0}.shape[-2:])",
    "torch.fft.fft({0}.flip(-1)).angle().cos()", "torch.fft.ifftshift(torch.fft.fft2({0}).abs())",
)  # fmt: skip
_WINDOWS = (
    "{0}.unfold(-1, {2}, {3})", "{0}.unfold(-1, {2}, {3}).mean(-1)", "({0}.unfold(-1, {2}, {3}) * {1}).sum(-1)", "{0}.unfold(-1, {2}, {3}).amax(-1)", "{0}.unfold(0, 2, 1).square()",
    "F.unfold({0}.reshape(1, 1, -1, {0}.shape[-1]), (1, {2}), stride=(1, {3}))", "F.pad({0}, ({2} - 1, 0)).unfold(-1, {2}, 1) @ {1}", "{0}.unfold(-1, {2}, {2}).flatten(-2)",
    "F.fold({0}.reshape(1, -1, 1)[:, :4], (2, 2), (2, 2))", "F.fold(F.unfold({0}.reshape(1, 1, -1, {0}.shape[-1]), 2), ({0}.numel() // {0}.shape[-1], {0}.shape[-1]), 2)",
    "F.conv1d({0}.reshape(1, 1, -1), {1}.reshape(1, 1, -1), stride={3})", "F.avg_pool1d({0}.reshape(1, 1, -1), {2}, {3})",
)  # fmt: skip
# {0} is what is searched for, {1} sorted numbers.
_SEARCHED = (
    "torch.searchsorted({1}, {0})", "torch.searchsorted({1}, {0}, right=True)", "torch.bucketize({0}, {1})", "torch.bucketize({0}, {1}, right=True, out_int32=True)",
    "torch.searchsorted({1}, {0}.flatten(), side='right')", "torch.searchsorted({0}.sort(-1).values, {0})", "torch.searchsorted({0}, {0} + 0.1, sorter={0}.argsort(-1))",
    "{1}[torch.bucketize({0}, {1}).clamp(max={1}.shape[0] - 1)] * {0}", "torch.searchsorted({1}, {0} / 0)",
)  # fmt: skip
_WEIGHTS = (
    "nn.utils.parametrizations.weight_norm(nn.Linear({0}, 4))", "nn.utils.parametrizations.weight_norm(nn.Linear({0}, 4), dim=1)", "nn.utils.weight_norm(nn.Linear({0}, 4))", "nn.utils.weight_norm(nn.Linear({0}, 4, bias=False), dim=None)",
)  # fmt: skip


def spectrum(draft: Draft) -> None:
    _signal(draft, _SPECTRA)


def windows(draft: Draft) -> None:
    _signal(draft, _WINDOWS)


def _signal(draft: Draft, ways: tuple[str, ...]) -> None:
    # Along a padded dimension these are refused by name.
    if draft.has_buckets and not draft.chance(8):
        return
    x = draft.pick(floats(1, 2, 3))
    if x is None:
        return
    size = draft.choose(4, 3, 2)
    window = draft.choose(
        f"torch.hann_window({size}, device={x}.device) + 0.1", f"torch.linspace(0.5, 1.5, {size}, device={x}.device)"
    )
    window = draft.let(window, "window")
    if window is not None:
        draft.let(draft.choose(*ways).format(x, window, size, draft.choose(1, 2, 3)), "signal")


def searched(draft: Draft) -> None:
    if (x := draft.pick(floats(1, 2, 3))) is not None:
        table = draft.choose(
            f"torch.linspace(-1, 1, {draft.choose(5, 1, 8)}, device={x}.device)",
            f"torch.tensor([-1.0, 0.0, 0.0, 0.5, float('inf')], device={x}.device)",
        )
        if (table := draft.let(table, "table")) is not None:
            draft.let(draft.choose(*_SEARCHED).format(x, table))


def rotated(draft: Draft) -> None:
    """Rotary positions by complex numbers, on [..., L, D]."""
    x = draft.pick(lambda v: floats(2, 3, 4)(v) and v.shape[-1] % 2 == 0)
    if x is None:
        return
    half, on = draft.value(x).shape[-1] // 2, f"device={x}.device"
    angles = f"torch.outer(torch.arange({x}.shape[-2], {on}).float(), 0.1 ** torch.arange({half}, {on}))"
    turn = draft.let(f"torch.polar(torch.ones_like({angles}), {angles})", "turn")
    if turn is not None:
        pairs = draft.choose(
            f"torch.view_as_complex({x}.reshape(*{x}.shape[:-1], -1, 2))",
            f"torch.view_as_complex({x}.float().unflatten(-1, (-1, 2)).contiguous())",
            f"torch.complex({x}[..., :{half}], {x}[..., {half}:])",
        )
        draft.let(f"torch.view_as_real({pairs} * {turn}).flatten(-2)")


def normed_weight(draft: Draft) -> None:
    """A layer whose weight is a direction and a length."""
    if (x := draft.pick(floats(2, 3))) is not None:
        layer = draft.attribute(draft.choose(*_WEIGHTS).format(draft.value(x).shape[-1]), "normed")
        if layer is not None:
            draft.let(f"{layer}({x})")


STEPS = (spectrum, spectrum, windows, searched, rotated, normed_weight)
