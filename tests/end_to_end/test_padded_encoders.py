"""`nn.TransformerEncoder` with a padding mask: one graph, and eager's result, also at padded positions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kp_dynamo import explain
from kp_dynamo.telemetry import snapshot
from tests.spine import compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but self.use_nested_tensor is False"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]
B, S, D = 3, 6, 8
LAST = torch.arange(S) >= torch.tensor([[6], [2], [4]])
FIRST = LAST.flip(1)
EMPTY = torch.arange(S) >= torch.tensor([[6], [0], [4]])
ADDED = torch.zeros(B, S).masked_fill(LAST, -torch.inf)
SOFT = torch.zeros(B, S).masked_fill(LAST, -0.5)


def encoder(norm=False, layers=2, dropout=0.1, **how):
    torch.manual_seed(0)
    which = {name: how.pop(name) for name in ("enable_nested_tensor", "mask_check") if name in how}
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout, batch_first=True, **how)
    model = nn.TransformerEncoder(layer, layers, nn.LayerNorm(D) if norm else None, **which).eval()
    for parameter in model.parameters():  # all layers start equal, with biases of 0
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


X = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))
CASES = {
    "last": ({}, LAST),
    "not last": ({}, FIRST),
    "an empty row": ({}, EMPTY),
    "added": ({}, ADDED),
    "any number is padding": ({}, SOFT),
    "with a norm": ({"norm": True}, LAST),
    "unchecked": ({"mask_check": False}, LAST),
    "unchecked and not last": ({"mask_check": False}, FIRST),
    "no nested tensors": ({"enable_nested_tensor": False}, LAST),
    "norm first": ({"norm_first": True}, LAST),
    "gelu": ({"activation": "gelu"}, LAST),
}


@pytest.mark.quick(
    "last", "not last", "an empty row", "added", "any number is padding", "unchecked and not last", "no nested tensors",
    "norm first",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_one_graph_and_eager_s_result(name):
    how, mask = CASES[name]
    model = encoder(**how)
    run = compiled(model, fullgraph=True, strict=True)
    with torch.no_grad():
        for x in (X, 2 * X):
            mine, eager = run(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask)
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
    if name == "last":
        assert (mine[LAST] == 0).all()


def test_masks_and_lengths_of_later_calls():
    """One program serves masks that eager packs, and those that it does not."""
    model = encoder()
    run = compiled(model, fullgraph=True)
    with torch.no_grad():
        before = snapshot()["programs"]
        for mask in (LAST, FIRST, LAST.roll(1, 0), torch.zeros_like(LAST)):
            mine, eager = run(X, src_key_padding_mask=mask), model(X, src_key_padding_mask=mask)
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
        assert snapshot()["programs"] - before == 1
        for length in (4, 3, 5):
            mine, eager = (m(X[:, :length], src_key_padding_mask=LAST[:, :length]) for m in (run, model))
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_larger_model():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.encoder, self.head = nn.Embedding(9, D), encoder(norm=True), nn.Linear(D, 3)

        def forward(self, ids):
            return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0))

    torch.manual_seed(0)
    model, ids = Tagger().eval(), torch.randint(1, 9, (B, S)).masked_fill(LAST, 0)
    with torch.no_grad():
        found = explain(model, ids, options={"precision": "float32"})
        assert (len(found.graphs), list(found.graph_breaks)) == (1, [])
        torch.testing.assert_close(compiled(model, fullgraph=True)(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_padded_rows():
    """Eager packs nothing if a gradient is wanted, in training or evaluation mode."""
    for train in (False, True):
        model, other = (encoder(dropout=0.0, norm=True).train(train) for _ in range(2))
        mine = compiled(model, fullgraph=True)(X, src_key_padding_mask=LAST)
        eager = other(X, src_key_padding_mask=LAST)
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
        (mine * X).sum().backward(), (eager * X).sum().backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_on_the_device_nothing_is_packed():
    """Eager has nested tensors on the CPU only: results at padded positions are those of the layers."""
    model = encoder()
    run = compiled(encoder().to("xla"), fullgraph=True)
    with torch.no_grad():
        mine = run(X.to("xla"), src_key_padding_mask=LAST.to("xla")).cpu()
        eager = model(X, src_key_padding_mask=LAST)
        assert not (mine[LAST] == 0).any()
        torch.testing.assert_close(mine[~LAST], eager[~LAST], rtol=1e-5, atol=1e-5)


def test_autocast_and_levels():
    model = encoder()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine = compiled(model, fullgraph=True)(X, src_key_padding_mask=LAST)
    with torch.no_grad():
        default = torch.compile(model, backend="kp_tpu", fullgraph=True)(X, src_key_padding_mask=LAST)
        exact = model(X, src_key_padding_mask=LAST)
    for found in (mine, default):  # a few roundings of bfloat16
        torch.testing.assert_close(found.float()[~LAST], exact[~LAST], rtol=0.05, atol=0.05)
    assert (default[LAST] == 0).all()


@pytest.mark.slow
def test_a_mask_that_is_causal_is_not_compared():
    """In the decoder, too: torch compares it with a causal mask, which breaks the graph."""
    causal = nn.Transformer.generate_square_subsequent_mask(S)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 16, batch_first=True), 2).eval()
    model = encoder()
    with torch.no_grad():
        mine = compiled(model, fullgraph=True)(X, mask=causal)
        torch.testing.assert_close(mine, model(X, mask=causal), rtol=1e-5, atol=1e-5)
        mine = compiled(model, fullgraph=True)(X, mask=causal, src_key_padding_mask=ADDED)
        torch.testing.assert_close(mine, model(X, mask=causal, src_key_padding_mask=ADDED), rtol=1e-5, atol=1e-5)
        mine = compiled(decoder, fullgraph=True)(X, X, tgt_mask=causal)
        torch.testing.assert_close(mine, decoder(X, X, tgt_mask=causal), rtol=1e-5, atol=1e-5)


def test_under_buckets():
    model = encoder()
    run = compiled(model, buckets=[8])
    with torch.no_grad():
        for length in (5, 6, 4):
            x, mask = X[:, :length].clone(), LAST[:, :length].clone()
            for tensor in (x, mask):
                torch._dynamo.mark_dynamic(tensor, 1)
            eager = model(x, src_key_padding_mask=mask)
            torch.testing.assert_close(run(x, src_key_padding_mask=mask), eager, rtol=1e-5, atol=1e-5)


def test_other_backends_trace_torch_s_own():
    seen = []

    def backend(gm, _):
        seen.append(gm)
        return gm.forward

    model = encoder()
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend=backend, fullgraph=True)(X, src_key_padding_mask=LAST)
    assert not seen
