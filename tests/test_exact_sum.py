"""The fixed-point sum of gradients: exact, and the same for any ranks, passes and layouts."""

import math
from contextlib import suppress
from fractions import Fraction

import pytest
import torch
from test_gradients import Net, small_buckets
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.partition import partition, shares_of_ranks
from segtrain.training.exact_sum import ExactGradientSum, replica

SHARES = 5


class Given(nn.Module):
    """Parameters whose gradients a test chooses: of several layouts, and one in float64."""

    def __init__(self):
        super().__init__()
        channels_last = torch.zeros(4, 3, 3, 2).to(memory_format=torch.channels_last)
        values = {
            "plain": torch.zeros(7, 3),
            "channels_last": channels_last,
            "transposed": torch.zeros(5, 4).t(),
            "gaps": torch.zeros(6, 8)[:, ::2],
            "wide": torch.zeros(11, dtype=torch.float64),
            "scalar": torch.zeros(()),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


class Sums:
    """The shares of this rank, and what they get."""

    def __init__(self, net, *, microbatches=1, shares=SHARES):
        counts = shares_of_ranks(shares, dist.world_size())
        self.net, self.mine = net, partition(shares, dist.world_size(), dist.rank())
        self.replicas = [replica(net) for _ in self.mine]
        self.sums = ExactGradientSum(net, self.replicas, shares=counts, microbatches=microbatches)

    def step(self, grads):
        """Gives every share its gradients, `grads[i][share][name]` in pass i.

        Returns how often the step was computed, and the sums.
        """
        for tries in range(1, 4):
            for i, shares in enumerate(grads):
                with self.sums.collected(last=i + 1 == len(grads)):
                    for one, share in zip(self.replicas, self.mine, strict=True):
                        give(one, shares[share])
            if self.sums.finish():
                return tries, {name: p.grad for name, p in self.net.named_parameters()}
        raise AssertionError("the step is computed again and again")


def give(net, grads):
    parameters = dict(net.named_parameters())
    sum((parameters[name] * grad).sum().double() for name, grad in grads.items()).backward()


def random_grads(seed, microbatches=1, scale=1.0):
    """Values of very different sizes, which float32 adds up differently in any other order."""
    generator = torch.Generator().manual_seed(seed)

    def grad(p):
        values = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        return values * 10 ** (-8 * torch.rand(p.shape, generator=generator)) * scale

    def of_share():
        return {name: grad(p.detach()) for name, p in Given().named_parameters()}

    return [[of_share() for _ in range(SHARES)] for _ in range(microbatches)]


def rounded(value, digits):
    """An integer rounded to so many binary digits, half to even."""
    shift = max(abs(value).bit_length() - digits, 0)
    whole, rest = divmod(abs(value), 1 << shift)
    half = (1 << shift) // 2
    up = rest > half or (rest == half and shift and whole % 2)
    return int(math.copysign(1, value)) * (whole + bool(up)) << shift


def expected(grads, exponents):
    """The oracle, with Python's integers: trunc(g * 2**e), added up, rounded to the type of g."""
    sums = {}
    for name, exponent in exponents.items():
        tensors = [share[name] for shares in grads for share in shares]
        scale = Fraction(2) ** exponent
        columns = zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)
        totals = [sum(math.trunc(Fraction(g) * scale) for g in column) for column in columns]
        digits = 53 if tensors[0].dtype == torch.float64 else 24
        values = [float(rounded(total, digits) / scale) for total in totals]
        sums[name] = torch.tensor(values, dtype=tensors[0].dtype).view(tensors[0].shape)
    return sums


def fitting(grads):
    """The exponents that follow these gradients."""
    found = {}
    for name in grads[0][0]:
        largest = max(share[name].abs().max().item() for shares in grads for share in shares)
        found[name] = 54 - (SHARES * len(grads) - 1).bit_length() - math.frexp(largest)[1]
    return found


def three_steps():
    """Of each: how often it was computed, the sums, exponents before and after."""
    here, found = Sums(Given(), microbatches=2), []
    for seed in range(3):
        before = here.sums.exponents
        tries, sums = here.step(random_grads(seed, microbatches=2))
        layouts = [(sums[name].stride(), p.stride()) for name, p in here.net.named_parameters()]
        found.append((tries, sums, before, here.sums.exponents, layouts))
    return found


def test_sums_are_those_of_integers_on_any_number_of_ranks(run_ranks):
    one, *many = three_steps(), *run_ranks(2, three_steps), *run_ranks(3, three_steps)
    for step, (tries, sums, before, after, layouts) in enumerate(one):
        grads = random_grads(step, microbatches=2)
        assert tries == (2 if step == 0 else 1)
        wanted = expected(grads, fitting(grads) if step == 0 else before)
        assert sums.keys() == wanted.keys()
        for name, value in sums.items():
            assert torch.equal(value, wanted[name]), name
            exact = sum(share[name].double() for shares in grads for share in shares)
            largest = max(share[name].abs().max() for shares in grads for share in shares)
            torch.testing.assert_close(value.double(), exact, rtol=1e-7, atol=1e-9 * largest)
        assert after == fitting(grads)
        dense = [own for name, own in zip(sums, layouts, strict=True) if name != "gaps"]
        assert all(a == b for a, b in dense)
    for other in many:
        for (*_, sums, before, after, _), (_, wanted, *exponents, _) in zip(
            other, one, strict=True
        ):
            assert [before, after] == exponents
            assert all(torch.equal(sums[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("scale", [2.0**60, 2.0**-40])
def test_the_first_step_finds_its_exponents_and_a_resumed_run_has_them(scale):
    here, resumed = Sums(Given()), Sums(Given())
    grads = random_grads(0, scale=scale)
    tries, sums = here.step(grads)
    assert tries == 2
    wanted = expected(grads, fitting(grads))
    assert all(torch.equal(sums[name], value) for name, value in wanted.items())
    resumed.sums.exponents = here.sums.exponents
    (again, wanted), (_, sums) = (one.step(random_grads(1, scale=scale)) for one in (here, resumed))
    assert again == 1
    assert all(torch.equal(sums[name], value) for name, value in wanted.items())


def growing(factor):
    here, grads = Sums(Given()), random_grads(1, scale=factor)
    here.step(random_grads(0))
    before = here.sums.exponents
    tries, sums = here.step(grads)
    return tries, sums, before


@pytest.mark.parametrize(("power", "tries"), [(4, 1), (12, 2), (-6, 1), (-14, 2)])
def test_a_step_out_of_range_is_computed_once_more(run_ranks, power, tries):
    """A largest value may grow by 2**8 and fall by 2**10; those of the two seeds differ too."""
    grads = random_grads(1, scale=2.0**power)
    for found, sums, before in [growing(2.0**power), *run_ranks(2, growing, 2.0**power)]:
        assert found == tries
        wanted = expected(grads, before if tries == 1 else fitting(grads))
        assert all(torch.equal(sums[name], wanted[name]) for name in wanted)


def test_zeros_give_zeros_and_leave_the_exponents_alone():
    here = Sums(Given())
    here.step(random_grads(0))
    before = here.sums.exponents
    zeros = [[{name: -0.0 * g for name, g in share.items()} for share in random_grads(0)[0]]]
    tries, sums = here.step(zeros)
    assert tries == 1
    assert all((value == 0).all() for value in sums.values())
    assert here.sums.exponents == before


def with_a_bad_value(name, value, first):
    """In the last share; as the first step, or after a good one."""
    here = Sums(Given())
    if not first:
        here.step(random_grads(0))
    before, grads = here.sums.exponents, random_grads(1)
    grads[0][-1][name].flatten()[1] = value
    tries, sums = here.step(grads)
    kept = here.sums.exponents == before
    return tries, kept, sums, here.step(random_grads(2))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [("plain", math.nan), ("plain", math.inf), ("plain", -math.inf), ("wide", -1e60)],
)
def test_what_is_not_finite_in_a_share_is_nan_on_all_ranks(run_ranks, name, value, first):
    """And no exponent helps, so nothing is computed again: not a float64 beyond them either."""
    for tries, kept, sums, (tries_after, after) in run_ranks(
        2, with_a_bad_value, name, value, first
    ):
        assert (tries, kept) == (1, True)
        assert tries_after == 1 or first
        assert sums[name].isnan().all()
        assert all(other.isfinite().all() for key, other in sums.items() if key != name)
        assert all(other.isfinite().all() for other in after.values())


def odd_one_out(when):
    """The last rank gives one parameter less: in the first step or in a later one."""
    here, grads = Sums(Given()), random_grads(0)
    if when == "later":
        here.step(grads)
    if dist.rank() == dist.world_size() - 1:
        grads = [[{k: g for k, g in share.items() if k != "plain"} for share in grads[0]]]
    try:
        return here.step(grads)
    except RuntimeError as error:
        return str(error)


def test_a_parameter_without_gradient_on_some_ranks_is_an_error_on_all(run_ranks):
    said = run_ranks(2, odd_one_out, "at first")
    assert said[0] == said[1]
    assert said[0].startswith("parameter plain: no gradient on some ranks (1);")


def test_a_parameter_without_gradient_in_some_steps_spoils_the_step_everywhere(run_ranks):
    """Its rank says so; the others cannot go on or save, for their gradients are NaN."""
    (tries, sums), said = run_ranks(2, odd_one_out, "later")
    assert said.startswith("rank 1: parameter plain: got a gradient in some steps only")
    assert tries == 1
    assert any(value.isnan().all() for value in sums.values())


def net_step():
    """A layer used twice, one without gradient, a frozen one: images by share."""
    net, count = Net(), [0]
    here = Sums(net)

    def images(share):
        generator = torch.Generator().manual_seed(share)
        return torch.randn(1 + share % 2, 3, 6, 5, generator=generator)

    wanted = None
    if dist.world_size() == 1:
        for share in here.mine:
            net(images(share)).backward()
        wanted = {name: p.grad for name, p in net.named_parameters()}
        net.zero_grad(set_to_none=True)
    while True:
        with here.sums.collected(last=True):
            for one, share in zip(here.replicas, here.mine, strict=True):
                one(images(share)).backward()
        if here.sums.finish():
            break
        count[0] += 1
    left = [p.grad for one in here.replicas for p in one.parameters() if p.grad is not None]
    assert left == []
    return wanted, {name: p.grad for name, p in net.named_parameters()}


def test_the_layers_of_a_net_get_what_autograd_gives_them(run_ranks):
    wanted, found = net_step()
    for name, grad in wanted.items():
        if grad is None:
            assert found[name] is None
        else:
            assert (found[name] - grad).norm() <= 1e-6 * grad.norm(), name
    assert sum(grad is not None for grad in found.values()) == 9
    for _, other in run_ranks(3, net_step):
        for name, grad in found.items():
            assert grad is None or torch.equal(other[name], grad)


def test_replicas_have_the_weights_and_buffers_of_the_model_but_gradients_of_their_own():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    model[0].bias.requires_grad_(False)
    one, other = replica(model), replica(model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model[1].running_mean.fill_(2.0)
    for copy in (one, other):
        assert (copy[0].weight == 3).all()
        assert (copy[1].running_mean == 2).all()
        assert copy[0].weight.stride() == model[0].weight.stride()
        assert not copy[0].bias.requires_grad
    one(torch.ones(2, 3, 1, 1)).sum().backward()
    assert one[0].weight.grad is not None
    assert other[0].weight.grad is None
    assert model[0].weight.grad is None
    assert other[1].num_batches_tracked == 1


def interrupted():
    """An error after all gradients have been taken and, on several ranks, some have been sent."""
    small_buckets()
    here, start_sum, sent = Sums(Given()), dist.start_sum, []
    here.step(random_grads(1))
    before = here.sums.exponents

    def record(tensor):
        sent.append(tensor)
        return start_sum(tensor)

    dist.start_sum = record
    try:
        with suppress(ZeroDivisionError), here.sums.collected(last=True):
            for one, share in zip(here.replicas, here.mine, strict=True):
                give(one, random_grads(2, scale=16.0)[0][share])
            raise ZeroDivisionError
        hooks = [p for one in here.replicas for p in one.parameters() if hooks_of(p)]
        under_way = list(sent)
        sent.clear()
        result = here.step(random_grads(0))
        reused = [tensor for tensor in under_way if any(tensor is other for other in sent)]
    finally:
        dist.start_sum = start_sum
    return len(under_way), len(reused), len(hooks), before, here.sums.exponents, result


def hooks_of(parameter):
    return parameter._post_accumulate_grad_hooks


def test_an_error_in_a_pass_leaves_the_sums_usable(run_ranks):
    for sent, reused, hooks, before, after, (tries, sums) in run_ranks(2, interrupted):
        assert sent > 1
        assert (reused, hooks, tries) == (0, 0, 1)
        wanted = expected(random_grads(0), before)
        assert all(torch.equal(sums[name], wanted[name]) for name in wanted)
        assert after == fitting(random_grads(0))


def test_a_second_gradient_in_a_pass_is_an_error():
    here = Sums(Given(), shares=1)

    def twice():
        with here.sums.collected(last=True):
            for _ in range(2):
                here.replicas[0].plain.square().sum().backward()

    with pytest.raises(RuntimeError, match="got a second gradient"):
        twice()
