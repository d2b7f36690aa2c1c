"""What surrounds a run that is observed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kp_dynamo.explanation.run_once import fresh_dynamo, run_backward, uncompiled_call


def test_a_fresh_dynamo_captures_again_and_restores_the_random_state():
    captures = []

    def backend(gm, inputs):
        captures.append(gm)
        return gm.forward

    compiled, x = torch.compile(lambda x: x + torch.rand(()), backend=backend), torch.ones(3)
    compiled(x)
    before = torch.random.get_rng_state()
    with fresh_dynamo():
        compiled(x)
        assert len(captures) == 2, "inside, nothing is known of the capture before"
    assert torch.equal(torch.random.get_rng_state(), before)
    compiled(x)
    assert len(captures) == 3, "nor of the one inside, afterwards"


def test_a_module_of_torch_that_was_compiled_in_place_is_captured():
    model, captures = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    model.compile(backend="eager")
    torch.compile(uncompiled_call(model), backend=lambda gm, _: captures.append(gm) or gm.forward)(torch.ones(2, 4))
    assert len(captures) == 1


def test_the_backward_of_a_reentrant_checkpoint_changes_no_gradient():
    linear, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    run_backward(checkpoint(linear, x, use_reentrant=True), linear)
    assert [t.grad for t in (x, *linear.parameters())] == [None, None, None]
