"""The sum of gradients over ranks: right, in fixed order, while the backward pass runs."""

import pytest
import torch
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.training import gradients
from segtrain.training.gradients import GradientSum
from segtrain.training.state import share_weights

SAME, OTHER = 0, 1  # steps with other images


class Net(nn.Module):
    """Two dtypes, channels-last weights, a layer used twice, a frozen one and an unused one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 10, 3, padding=1)
        self.twice = nn.Conv2d(10, 10, 3, padding=1)
        self.point = nn.Conv2d(10, 7, 1)
        self.unused = nn.Linear(5, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 300)
        self.wide = nn.Parameter(torch.randn(11, dtype=torch.float64))
        self.to(memory_format=torch.channels_last)
        self.events = []
        self.use_unused = False

    def forward(self, images):
        y = torch.tanh(self.first(images))
        if y.requires_grad:
            y.register_hook(lambda _: self.event("backward in first"))
        y = torch.tanh(self.twice(torch.tanh(self.twice(y))))
        y = self.last(self.frozen(self.point(y).mean((2, 3))))
        loss = y.square().sum() * self.wide.square().sum()
        return loss + self.unused.weight.square().sum() if self.use_unused else loss

    def event(self, name):
        self.events.append(name)


def images_of(rank, step):
    """More images on later ranks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(1 + rank, 3, 6, 5, generator=generator)


def small_buckets():
    """Six of them for 30 KB."""
    gradients.FIRST_BUCKET_BYTES, gradients.BUCKET_BYTES = 400, 4000


def local_gradients(net, step):
    return torch.autograd.grad(net(images_of(dist.rank(), step)), used(net))


def used(net):
    return [p for name, p in net.named_parameters() if not name.startswith(("unused", "frozen"))]


def summed(net, sums, *steps):
    """The gradients summed over the ranks and the steps, all but the last step outside of it."""
    net.zero_grad(set_to_none=True)
    for step in steps[:-1]:
        net(images_of(dist.rank(), step)).backward()
    with sums.collected(last=True):
        net(images_of(dist.rank(), steps[-1])).backward()
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def rank_sums():
    small_buckets()
    net = Net()
    parts = {step: local_gradients(net, step) for step in (SAME, OTHER)}
    sums = GradientSum(net.named_parameters())
    found = {
        "first": summed(net, sums, SAME),
        "second": summed(net, sums, SAME),
        "other": summed(net, sums, OTHER),
        "accumulated": summed(net, sums, OTHER, SAME),
        "at the end": summed(net, GradientSum(net.named_parameters(), overlap=False), SAME),
        "new process": summed(net, GradientSum(net.named_parameters()), SAME),
    }
    strides = [(p.grad.stride(), p.stride()) for p in used(net)]
    return parts, found, strides


def bits(tensors):
    return [None if t is None else t.numpy().tobytes() for t in tensors]


def test_sums_have_the_same_bits_in_every_step_and_are_right(run_ranks):
    """The oracle adds the gradients of the ranks in float64."""
    ranks = run_ranks(3, rank_sums)
    found = ranks[0][1]
    for _, other, strides in ranks:
        assert {k: bits(v) for k, v in other.items()} == {k: bits(v) for k, v in found.items()}
        assert all(a == b for a, b in strides)
    for name in ("second", "at the end", "new process"):
        assert bits(found[name]) == bits(found["first"]), name
    wanted = {
        step: [sum(g.double() for g in of_rank) for of_rank in zip(*parts, strict=True)]
        for step in (SAME, OTHER)
        for parts in [[rank[0][step] for rank in ranks]]
    }
    both = [a + b for a, b in zip(wanted[SAME], wanted[OTHER], strict=True)]
    expected = {"first": wanted[SAME], "other": wanted[OTHER], "accumulated": both}
    for name, values in expected.items():
        got = [value for value in found[name] if value is not None]
        assert len(got) == 9
        assert len(found[name]) == 13
        for value, expected in zip(got, values, strict=True):
            assert (value - expected).norm() <= 1e-6 * expected.norm()


def rank_events():
    """The sums of three steps in the order in which they begin, between marks of the model."""
    small_buckets()
    net = Net()
    start_sum = dist.start_sum

    def record(tensor):
        net.event((str(tensor.dtype), tensor.numel()))
        return start_sum(tensor)

    dist.start_sum = record
    during, at_the_end = (GradientSum(net.named_parameters(), overlap=o) for o in (True, False))
    steps = []
    for sums in (during, during, at_the_end, at_the_end):
        net.zero_grad()
        with sums.collected(last=True):
            net(images_of(dist.rank(), SAME)).backward()
            net.event("backward pass over")
        steps.append(list(net.events))
        net.events.clear()
    return steps


def test_buckets_are_sent_during_the_backward_pass_in_one_order(run_ranks):
    """Not in the first step of a process, in which the ranks compare their parameters; the last
    bucket waits for a check in every step. Sizes are multiples of 16, at most 4000 bytes if a
    bucket holds several parameters, and in the order of `named_parameters` from the end."""
    early = [("torch.float32", size) for size in (304, 2112, 16 + 16 + 16 + 80 + 16)]
    late = [("torch.float32", size) for size in (912 + 16, 272)]
    wide = [("torch.float64", 16)]
    begins, ends = ["backward in first"], ["backward pass over"]
    at_the_end = [*begins, *ends, *early, *late, *wide]
    wanted = [at_the_end, [*early, *begins, *late, *ends, *wide], at_the_end, at_the_end]
    assert run_ranks(3, rank_events) == [wanted] * 3


def rank_deviations():
    """What happens where rank 1 alone has a gradient for the unused layer or none at all."""
    small_buckets()
    said = {}

    def step(name, net, sums, times=1):
        net.zero_grad()
        try:
            with sums.collected(last=True):
                for _ in range(times):
                    net(images_of(dist.rank(), SAME)).backward()
        except RuntimeError as error:
            said[name] = str(error)
        else:
            said[name] = [p.grad.clone() for p in used(net)]

    net = Net()
    net.use_unused = dist.rank() == 1
    step("at first", net, GradientSum(net.named_parameters()))

    for name, start, later in (("one more", False, True), ("one less", True, False)):
        net = Net()
        net.use_unused = start
        sums = GradientSum(net.named_parameters())
        step("before", net, sums)
        net.use_unused = later if dist.rank() == 1 else start
        step(name, net, sums)

    net = Net()
    sums = GradientSum(net.named_parameters())
    step("right", net, sums)
    step("twice", net, sums, times=2)
    return said


def test_ranks_with_other_parameters_are_told(run_ranks):
    """Nobody waits for ever, and nobody goes on with a wrong sum."""
    ranks = run_ranks(3, rank_deviations)
    for said in ranks:
        assert said["at first"] == "unused.weight: got a gradient on some ranks only"
        assert "got a second gradient" in said["twice"]
    for name in ("one more", "one less"):
        assert ranks[1][name] == "rank 1: unused.weight: got a gradient in some steps only"
        for rank in (0, 2):
            assert any(value.isnan().any() for value in ranks[rank][name])


def rank_weights():
    torch.manual_seed(dist.rank())
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last if dist.rank() else torch.contiguous_format
    )
    net[1].running_mean.fill_(dist.rank())
    share_weights(net)
    with pytest.raises(ConfigError, match="the ranks have different models"):
        share_weights(nn.Conv2d(3, 4, 1 + dist.rank() // 2))
    return net.state_dict()


def test_all_ranks_begin_with_the_weights_of_rank_0(run_ranks):
    torch.manual_seed(0)
    drawn = nn.Conv2d(3, 4, 3)
    for state in run_ranks(3, rank_weights):
        assert torch.equal(state["0.weight"], drawn.weight)
        assert torch.equal(state["1.running_mean"], torch.zeros(4))
