"""What surrounds a run that is observed."""

import torch

from kp_dynamo.explanation.run_once import fresh_dynamo


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
