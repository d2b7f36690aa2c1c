"""Square matrices, as they are and transposed: determinants, inverses, solves, factors that are unique."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats

_MADE = (
    "({0}.mT @ {0}) * 0.3 + torch.eye({0}.shape[-1], device={0}.device) * 2",
    "({0} @ {0}.mT) * 0.3 + torch.eye({0}.shape[-2], device={0}.device) * 2",
    "{0}.mT @ {0}.tanh() * 0.2 + torch.eye({0}.shape[-1], device={0}.device) * 3",
    "{0}[..., :2, :2] + torch.eye(2, device={0}.device) * 3",
)
# A parameter that lies by columns, as `torch.linalg.qr` leaves it.
_PARAMETER = "nn.Parameter((torch.eye({0}) * 2 + torch.arange({0} * {0}).view({0}, {0}).remainder(5) * 0.1).T)"
_LAID_OUT = ("{0}", "{0}.mT", "({0} * 2).mT", "{0}.mT.clone()", "{0}.transpose(-1, -2).contiguous()", "{0}.flip(-1)")
_USED = (
    "torch.linalg.det({0})", "torch.linalg.slogdet({0})[1]", "torch.linalg.slogdet({0}).sign", "torch.logdet({0} @ {0}.mT)", "torch.linalg.inv({0})",
    "torch.linalg.solve({0}, {0}.mT)", "torch.linalg.solve({0}, {0}[..., 0])", "torch.linalg.solve({0}, {0}, left=False)", "torch.linalg.matrix_power({0}, -2)",
    "torch.linalg.solve_triangular({0}.tril(), {0}, upper=False)", "torch.linalg.cholesky({0} @ {0}.mT)", "torch.cholesky_solve({0}, torch.linalg.cholesky({0} @ {0}.mT))",
    "torch.linalg.matrix_exp({0} * 0.1)", "torch.linalg.qr({0})[1].abs()", "torch.linalg.eigvalsh({0} + {0}.mT)", "torch.linalg.svdvals({0})", "torch.linalg.pinv({0})",
    "torch.linalg.lu_solve(*torch.linalg.lu_factor({0}), {0}.mT)", "torch.linalg.multi_dot([{0}, {0}.mT, {0}])", "torch.linalg.norm({0}, 'nuc')", "torch.linalg.cond({0}, 'fro')",
    "torch.linalg.inv_ex({0})[0]", "torch.linalg.matrix_norm({0}, 2)", "torch.linalg.diagonal({0})", "torch.triangular_solve({0}, {0}.triu())[0]", "torch.einsum('...ij,...kj->...ik', {0}, {0})",
)  # fmt: skip


def matrix(draft: Draft) -> None:
    # With buckets few factors of what varies, which are refused by name.
    is_fixed = draft.has_buckets and not draft.chance(8)
    x = draft.pick(floats(2, 3))
    if x is None or is_fixed or draft.chance(4):
        made = draft.attribute(_PARAMETER.format(draft.choose(2, 3, 4)), "matrix")
    else:
        made = draft.let(draft.choose(*_MADE).format(x), "square")
    if made is not None and (used := draft.let(draft.choose(*_USED).format(draft.choose(*_LAID_OUT).format(made)))):
        draft.let(f"{used} * 0.5")


STEPS = (matrix,)
