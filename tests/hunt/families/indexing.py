"""Indexing, sorting, scattering, spectra, and operators that only the CPU has."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats, is_float

_INDEXED = (
    "{0}[{1}]", "{0}.index_select(0, {1})", "{0}.index_add(0, {1}, {0}[: {1}.shape[0]])", "{0}.index_copy(0, {1}, {0}[: {1}.shape[0]] * 2)",
    "{0}.index_fill(0, {1}, 1.5)", "{0}[..., {1}]", "torch.take({0}, {1})", "{0}.index_put(({1},), {0}[{1}] * 2)", "{0}[{1}, 0]", "{0}[{1}][:, {1}]",
    "{0}.index_put(({1},), {0}[{1}] * 2, accumulate=True)", "{0}.index_reduce(0, {1}, {0}[: {1}.shape[0]], 'amax')", "{0}.index_select(-1, {1})",
    "F.embedding({1}, {0}.reshape(-1, {0}.shape[-1]))", "{0}[{1} - 1]", "{0}[{1}, {1}]", "{0}[1:][..., None][{1} - 1, :, {1} * 0]", "{0}.unsqueeze(-1).expand(*{0}.shape, 4)[..., 1:][{1}, ..., {1}]", "torch.zeros_like({0}).index_add_(0, {1}, {0}[: {1}.shape[0]])",
)  # fmt: skip


def indexed(draft: Draft) -> None:
    x = draft.pick(floats(1, 2, 3))
    if x is not None:
        index = draft.argument(
            (draft.choose(2, 3),), draft.choose("below 2", "below 3", "permutation"), "int64", name=draft.fresh("index")
        )
        draft.let(draft.choose(*_INDEXED).format(x, index))


_SORTED = (
    "{0}.sort({1}).values", "{0}.sort({1}, descending=True)[1]", "{0}.argsort({1})", "{0}.topk(2, {1}).values", "{0}.topk(2, {1})[1]", "{0}.cumsum({1})",
    "{0}.cumprod({1})", "{0}.max({1}).values", "{0}.min({1}).indices", "{0}.argmin({1})", "{0}.median({1}).values", "{0}.kthvalue(2, {1}).values", "{0}.flip({1})",
    "{0}.roll(2, {1})", "{0}.logcumsumexp({1})", "{0}.gather({1}, {0}.argsort({1}))", "{0}.scatter({1}, {0}.argsort({1}), {0})", "{0}.unbind({1})[0]",
    "{0}.scatter_add({1}, {0}.argsort({1}), {0})", "torch.zeros_like({0}).scatter({1}, {0}.argmax({1}, keepdim=True), 1.0)", "{0}.quantile(0.3, dim={1})",
    "{0}.scatter_reduce({1}, {0}.argsort({1}), {0}, 'amax')", "{0}.cummax({1}).values", "{0}.mode({1}).values", "torch.diff({0}, dim={1})", "{0}.renorm(2, {1}, 1.0)",
    "{0}.softmax({1}).cumsum({1})", "{0}.unique_consecutive(dim=0)", "{0}.select({1}, 0)", "{0}.narrow({1}, 0, 1)", "{0}.masked_scatter({0} > 0, {0}.flatten() * 2)", "{0}.scatter({1}, {0}.argsort({1}).repeat_interleave(2, {1}), 1.5)", "torch.aminmax({0}, dim={1})[1]", "{0}.round().sort({1}, stable=True)[1]", "({0} * 2).round().argsort({1}, stable=True, descending=True)",
    "torch.where({0} > 1, {0} / 0 - {0} / 0, {0}).nan_to_num(9.0).sort({1}).values", "torch.where({0} > 1, {0} - float('nan'), {0}).sort({1}, stable=True)[1]", "{0}.nanmedian({1}).values",
)  # fmt: skip


def ordered(draft: Draft) -> None:
    if (x := draft.pick(floats(1, 2, 3))) is not None:
        draft.let(draft.choose(*_SORTED).format(x, draft.choose("-1", "0", "1")))


_SPECTRA = (
    "torch.fft.rfft({0}).abs()", "torch.fft.irfft(torch.fft.rfft({0}))", "torch.fft.irfft(torch.fft.rfft({0}), n={0}.shape[-1])", "torch.fft.fft({0}).real",
    "torch.fft.fft2({0}).real", "torch.fft.fft(torch.fft.fft({0}, dim=-1), dim=0).real", "torch.fft.rfft({0}).imag", "torch.fft.fft({0}).conj().imag",
    "torch.view_as_real(torch.fft.fft({0}))", "torch.fft.fftshift({0})", "torch.fft.ifft(torch.fft.fft({0}) * 2).real", "torch.complex({0}, {0} * 2).abs()",
    "torch.view_as_real(torch.complex({0}, {0}) * torch.complex({0}, -{0}))", "torch.polar({0}.abs(), {0}).real", "torch.fft.rfft({0}).angle().cos()",
    "torch.view_as_complex({0}.unflatten(-1, (-1, 2)).contiguous()).abs()", "(torch.complex({0}, {0}).conj() * 2).imag", "torch.fft.rfft({0}).abs().square().sum(-1)",
    "torch.fft.rfft2({0}).real", "torch.fft.ihfft({0}).real", "torch.fft.hfft(torch.fft.ihfft({0}))", "torch.fft.irfft(torch.fft.rfft({0}, norm='ortho'), n={0}.shape[-1], norm='ortho')",
)  # fmt: skip


def spectrum(draft: Draft) -> None:
    if (x := draft.pick(floats(1, 2, 3))) is not None:
        draft.let(draft.choose(*_SPECTRA).format(x))


_OTHER = (
    "torch.histc({0}, 4, -2, 2)", "torch.special.bessel_j0({0})", "torch.igamma({0}.abs() + 1, {0}.abs())", "torch.special.i0e({0})", "torch.lgamma({0}.abs() + 1)", "torch.digamma({0}.abs() + 1)",
    "torch.linalg.solve({0}.mT @ {0} + torch.eye({0}.shape[-1], device={0}.device), {0}.mT)", "torch.linalg.inv({0}.mT @ {0} + torch.eye({0}.shape[-1], device={0}.device))",
    "torch.linalg.cholesky({0}.mT @ {0} + torch.eye({0}.shape[-1], device={0}.device))", "torch.linalg.det({0}.mT @ {0})", "torch.linalg.svdvals({0})", "torch.erfinv({0}.tanh() * 0.9)",
    "torch.linalg.qr({0})[1].abs()", "torch.special.ndtri({0}.sigmoid())", "torch.nextafter({0}, {0} + 1)", "torch.frexp({0})[0]", "torch.heaviside({0}, {0})", "torch.sinc({0})", "torch.bucketize({0}, torch.linspace(-1, 1, 5, device={0}.device))",
    "torch.polygamma(1, {0}.abs() + 1)", "torch.linalg.eigvalsh({0}.mT @ {0})", "torch.cross({0}[..., :3], {0}[..., 1:4], dim=-1)", "torch.cov({0})", "torch.corrcoef({0})", "torch.linalg.matrix_norm({0})", "torch.trace({0})", "torch.kron({0}, {0})",
    "torch.logdet({0}.mT @ {0} + torch.eye({0}.shape[-1], device={0}.device))", "F.grid_sample({0}[:, None], {0}[:, :2, None, :2].tanh(), align_corners=False)", "torch.cartesian_prod({0}, {0})", "torch.combinations({0})",
    "torch.block_diag({0}, {0})", "torch.tril_indices(3, 3, device={0}.device)", "torch.meshgrid({0}, {0}, indexing='ij')[0]", "torch.vander({0})", "torch.rot90({0})", "F.fold({0}, (3, 3), (2, 2))", "torch.linalg.vector_norm({0}, 3, dim=-1)",
    "torch.linalg.vector_norm({0}, float('inf'), dim=-1)", "torch.acosh({0}.abs() + 1.1)", "torch.asin({0}.tanh() * 0.9)", "torch.atanh({0}.tanh() * 0.9)", "torch.sinh({0}.tanh())", "torch.tan({0}.tanh())", "torch.log2({0}.abs() + 1)", "torch.log10({0}.abs() + 1)",
    "torch.ceil({0})", "torch.round({0} * 4)", "torch.trunc({0})", "torch.frac({0})", "torch.floor({0})", "torch.acos({0}.tanh() * 0.9)", "torch.asinh({0})", "torch.cosh({0}.tanh())", "F.glu({0})", "F.prelu({0}, {0}.new_full((1,), 0.2))",
    "F.logsigmoid({0})", "F.hardsigmoid({0})", "F.celu({0})", "F.selu({0})", "F.threshold({0}, 0.1, 2.0)", "F.hardshrink({0})", "F.softshrink({0})", "F.tanhshrink({0})", "F.softsign({0})", "F.relu6({0} * 4)", "F.rrelu({0}, 0.1, 0.1)", "F.pdist({0})", "F.cosine_similarity({0}, {0} + 1, dim=-1)",
)  # fmt: skip


def other(draft: Draft) -> None:
    if (x := draft.pick(is_float)) is not None:
        draft.let(draft.choose(*_OTHER).format(x))


_PICTURES = (
    "F.conv2d({0}, torch.linspace(-1, 1, 36, device={0}.device).view(2, 2, 3, 3), padding=1)", "F.max_pool2d({0}, 2)", "F.avg_pool2d({0}, 2)", "F.adaptive_avg_pool2d({0}, 1)", "F.adaptive_avg_pool2d({0}, (2, 3))",
    "F.interpolate({0}, scale_factor=2)", "F.interpolate({0}, size=(5, 5), mode='bilinear')", "F.pad({0}, (1, 1, 1, 1), mode='reflect')", "F.pad({0}, (1, 1, 1, 1), mode='replicate')", "F.pixel_unshuffle({0}, 2)",
    "F.conv_transpose2d({0}, torch.linspace(-1, 1, 16, device={0}.device).view(2, 2, 2, 2), stride=2)", "F.max_pool2d({0}, 3, 2, 1)", "F.avg_pool2d({0}, 3, 1, 1, count_include_pad=False)", "F.unfold({0}, 2)", "F.lp_pool2d({0}.abs() + 1, 2, 2)",
    "F.conv2d({0}, torch.ones(2, 1, 3, 3, device={0}.device), groups=2)", "F.local_response_norm({0}, 2)", "F.channel_shuffle({0}, 2)", "F.interpolate({0}, scale_factor=1.5, mode='bicubic')", "{0}.to(memory_format=torch.channels_last)", "F.adaptive_max_pool2d({0}, 2)",
)  # fmt: skip


def picture(draft: Draft) -> None:
    """[B, 2, H, W], and a convolution with weights of its own."""
    x = draft.pick(lambda v: floats(4)(v) and v.shape[1] == 2)
    if x is None or draft.chance(3):
        x = draft.argument(
            ("B", 2, 4, draft.choose(4, 6, "L")), requires_grad=draft.choose(True, False), name=draft.fresh("picture")
        )
    if draft.chance(3):
        more = draft.choose(
            ", padding=1",
            ", stride=2",
            ", dilation=2, padding=2",
            ", bias=False",
            ", padding=1, padding_mode='circular'",
            ", groups=2",
        )
        layer = draft.attribute(f"nn.Conv2d(2, 2, 3{more})", "conv")
        draft.let(f"{layer}({x})")
    else:
        draft.let(draft.choose(*_PICTURES).format(x))


STEPS = (indexed, indexed, ordered, ordered, spectrum, other, other, picture)
