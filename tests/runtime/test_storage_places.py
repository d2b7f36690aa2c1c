"""Views of XLA's kinds at the places of strided views."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kp_dynamo.runtime.storage_places import Base, StoragePlace, overlap


def place_of(tensor):
    return StoragePlace(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


@st.composite
def views(draw):
    """A contiguous tensor of different numbers, permuted, and views of it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    base = (
        torch.arange(float(torch.Size(shape).numel())).reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    )
    made = [base]
    for _ in range(draw(st.integers(1, 3))):
        view = draw(st.sampled_from(made))
        for _ in range(draw(st.integers(0, 3))):
            dim = draw(st.integers(0, max(view.dim() - 1, 0)))
            kind = draw(st.sampled_from(["narrow", "transpose", "flatten", "select", "unsqueeze", "step"]))
            if kind == "unsqueeze" or not view.dim():
                view = view.unsqueeze(0)
            elif kind == "narrow":
                start = draw(st.integers(0, view.shape[dim] - 1))
                view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
            elif kind == "select":
                view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
            elif kind == "transpose":
                view = view.transpose(dim, 0)
            elif kind == "flatten" and view.is_contiguous():
                view = view.view(-1)
            elif kind == "step":
                view = view[::2]
        made.append(view)
    return made


@given(views())
@settings(max_examples=300, deadline=None)
def test_views_have_the_values_of_strided_ones_and_share_memory(tensors):
    places = [place_of(t) for t in tensors]
    base = Base.of(places)
    if base is None:
        assert any(t.numel() and not t.is_contiguous() for t in tensors)
        return
    copies = base.views_in_copy_of(tensors, places)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert place_of(copy).shape == tuple(tensor.shape)
        assert copy.untyped_storage().data_ptr() == copies[0].untyped_storage().data_ptr()
    copies[-1].fill_(-1)
    tensors[-1].fill_(-1)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


@pytest.mark.parametrize(("parts", "expected"), [([(0, 3), (3, 6)], False), ([(0, 4), (3, 6)], True)])
def test_places_overlap(parts, expected):
    assert overlap([StoragePlace((end - start,), (1,), start) for start, end in parts]) == expected
