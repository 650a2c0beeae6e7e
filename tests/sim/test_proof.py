"""What is taken for the same gradient, where precision is coarse."""

from __future__ import annotations

import pytest
import torch

from paceline.lab.tasks.networks import make_network
from paceline.sim.batching import proof
from paceline.sim.batching.joint import Arguments, Cannot, Joint, Place, Program


def coarse_program():
    """A network of many layers with autocast, and what three workers give to it."""
    torch.manual_seed(0)
    net, images = make_network("resnet20"), torch.randn(3, 2, 3, 16, 16)
    places, start = {}, 0
    for number, (name, parameter) in enumerate(net.named_parameters()):
        places[name] = Place(number, start, parameter.shape, parameter.stride())
        start += parameter.numel()
    x = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    rest = dict(net.named_buffers())
    program = Program(net, places, Arguments.of((images[0],), {})[0], torch.bfloat16)
    return program, [proof.Case(x, rest, [images[rank]]) for rank in range(3)]


@pytest.mark.parametrize(("times", "same"), [(0, True), (2, True), (4, False)])
def test_gradients_may_differ_by_what_a_precision_rounds(times, same):
    program, (case, *_) = coarse_program()
    own, exact = proof.alone(program, case), proof.in_double(program, case)
    away = [e + times * (e - o) for o, e in zip(own.gradients, exact.gradients, strict=True)]
    other = own._replace(gradients=[each.to(own.gradients[0].dtype) for each in away])
    if same:
        proof.refuse_another(other, own, 1e-6, program, case)
    else:
        with pytest.raises(Cannot, match="the gradient is another one"):
            proof.refuse_another(other, own, 1e-6, program, case)


def test_another_gradient_is_another_one_in_a_coarse_precision_too(monkeypatch):
    backward = Joint.backward

    def of_the_next(joint, rows, grads, again):
        found = backward(joint, range(3), [grads[0]] * 3, again)
        return [found[(row + 1) % 3] for row in rows]

    program, cases = coarse_program()
    monkeypatch.setattr(Joint, "backward", of_the_next)
    with pytest.raises(Cannot, match="the gradient is another one"):
        proof.prove(program, cases)


def test_a_model_that_insists_on_its_precision_is_not_computed_in_double():
    class Narrow(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x.float(), self.weight)

    net = Narrow(2, 2, bias=False)
    place = {"weight": Place(0, 0, net.weight.shape, net.weight.stride())}
    program = Program(net, place, Arguments.of((torch.ones(1, 2),), {})[0], None)
    case = proof.Case(net.weight.detach().flatten(), {}, [torch.ones(1, 2)])
    assert proof.in_double(program, case) is None
