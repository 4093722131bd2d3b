"""The fixed-point sum of gradients: exact, and the same for any ranks, passes and layouts."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import even, partition, shares_of_ranks
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
        counts = shares_of_ranks(shares, even(dist.world_size()))
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


def expected(grads, exponents):
    """The oracle, with Python's integers: trunc(g * 2**e), added up, rounded to the type of g."""
    sums = {}
    for name, exponent in exponents.items():
        tensors = [share[name] for shares in grads for share in shares]
        scale = Fraction(2) ** exponent
        columns = zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)
        totals = [sum(math.trunc(Fraction(g) * scale) for g in column) for column in columns]
        # NumPy rounds an integer once, half to even.
        values = np.array(totals, np.int64).astype(tensors[0].numpy().dtype)
        sums[name] = torch.from_numpy(np.ldexp(values, -exponent)).view(tensors[0].shape)
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
    one, *many = three_steps(), *run_ranks(3, three_steps)
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


def test_a_gradient_that_becomes_zero_is_no_reason_to_compute_a_step_again():
    """As where all pixels are ignored; it would be one forever."""
    here = Sums(Given())
    here.step(random_grads(0, scale=2.0**-20))
    before = here.sums.exponents
    assert min(before.values()) > 62
    tries, sums = here.step(random_grads(1, scale=-0.0))
    assert tries == 1
    assert not any(sums[name].any() for name in sums)
    assert here.sums.exponents == before


POWERS = {4: 1, 12: 2, -6: 1, -14: 2}  # how often the step is computed


def growing():
    found = {}
    for power in POWERS:
        here = Sums(Given())
        here.step(random_grads(0))
        found[power] = here.sums.exponents, *here.step(random_grads(1, scale=2.0**power))
    return found


def test_a_step_out_of_range_is_computed_once_more(run_ranks):
    """A largest value may grow by 2**8 and fall by 2**10; those of the two seeds differ too."""
    for found in [growing(), *run_ranks(2, growing)]:
        for power, (before, tries, sums) in found.items():
            assert tries == POWERS[power]
            grads = random_grads(1, scale=2.0**power)
            wanted = expected(grads, before if tries == 1 else fitting(grads))
            assert all(torch.equal(sums[name], wanted[name]) for name in wanted)


BAD = [("plain", math.nan), ("plain", math.inf), ("plain", -math.inf), ("wide", -1e60)]


def with_bad_values():
    """In the last share; as the first step, or after a good one."""
    found = []
    for (name, value), first in product(BAD, (True, False)):
        here = Sums(Given())
        if not first:
            here.step(random_grads(0))
        before, grads = here.sums.exponents, random_grads(1)
        grads[0][-1][name].flatten()[1] = value
        tries, sums = here.step(grads)
        kept = here.sums.exponents == before
        found.append((name, first, tries, kept, sums, here.step(random_grads(2))))
    return found


def test_what_is_not_finite_in_a_share_is_nan_on_all_ranks(run_ranks):
    """And no exponent helps, so nothing is computed again: not a float64 beyond them either."""
    for found in run_ranks(2, with_bad_values):
        for name, first, tries, kept, sums, (tries_after, after) in found:
            assert (tries, kept) == (1, True)
            assert tries_after == 1 or first
            assert sums[name].isnan().all()
            assert all(other.isfinite().all() for key, other in sums.items() if key != name)
            assert all(other.isfinite().all() for other in after.values())


def odd_one_out():
    """The last rank gives one parameter less: in the first step or in a later one."""
    said, grads = [], random_grads(0)
    for later in (False, True):
        here, mine = Sums(Given()), grads
        if later:
            here.step(grads)
        if dist.rank() == dist.world_size() - 1:
            mine = [[{k: g for k, g in share.items() if k != "plain"} for share in grads[0]]]
        try:
            said.append(here.step(mine))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_parameter_without_gradient_spoils_the_step_everywhere(run_ranks):
    """All see it in the first step. Later its rank says so, and the others get NaN."""
    (first, (tries, sums)), (also_first, later) = run_ranks(2, odd_one_out)
    assert first == also_first == "plain: got a gradient on some ranks only"
    assert later == "rank 1: plain: got a gradient in some steps only"
    assert tries == 1
    assert any(value.isnan().all() for value in sums.values())
