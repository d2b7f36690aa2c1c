"""What a step holds beside the arguments of a program."""

import torch

from kp_dynamo.lowering.step_memory import Owner, StepMemory


def test_results_count_until_they_are_dropped_and_arguments_when_all_are_known():
    memory, x, weight = StepMemory(), torch.zeros(10), torch.zeros(100)
    assert memory.beside([x]) == -40
    y = torch.zeros(20)
    memory.add([y, x])
    assert memory.beside([weight]) == 80 - 400
    assert memory.given_bytes == 440
    assert memory.beside([y.view(4, 5), weight]) == -400
    del y
    assert memory.beside([x]) == -40


def test_views_of_one_tensor_count_once():
    memory, y = StepMemory(), torch.zeros(20)
    memory.add([y, y[:5], y.view(4, 5)])
    assert memory.beside([]) == 80


def test_every_live_tensor_is_told_with_its_bytes_and_what_it_is():
    memory, x, weight, y = StepMemory(), torch.zeros(10), torch.zeros(100), torch.zeros(20)
    memory.own(weight, Owner("parameters", "layers.0"))
    memory.beside([x, weight])
    memory.add([y, 3], [Owner("activations", "layers.0.attn", None, 2), Owner("activations")])
    memory.beside([x])
    assert set(memory.given) == {(Owner("inputs"), 40), (Owner("parameters", "layers.0"), 400)}
    assert memory.computed == ((Owner("activations", "layers.0.attn", None, 2), 80),)
    del y
    memory.beside([x])
    assert memory.computed == ()
