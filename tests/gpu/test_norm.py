"""The layer on the device, which several ranks share over gloo.

Over NCCL whole steps ask it (test_steps.py, test_graph.py), and `make test-gpus` several devices.
"""

import pytest
import torch

# What the layer does on a CPU it does on the device.
from test_norm import (  # noqa: F401
    MOST,
    NARROW,
    C,
    Case,
    by_name,
    errors_of_all,
    far_variances,
    odd_calls,
    results_of,
    test_a_batch_empty_on_all_ranks_leaves_no_trace,
    test_a_half_precision_module_counts_beyond_the_range_of_float16,
    test_any_split_layout_option_and_type_equals_the_full_batch,
    test_one_value_in_the_group_gives_the_bias_and_finite_buffers,
    test_slices_and_gradients_of_another_layout_give_the_same_numbers,
)

pytestmark = pytest.mark.gpu(limit_s=120)


@pytest.fixture(scope="session")
def either_ranks(gloo_ranks):
    return gloo_ranks


@pytest.fixture(scope="session")
def where(device):
    return device.type


@pytest.fixture(scope="module")
def odd_inputs(gloo_ranks, where):
    return by_name(gloo_ranks(2, results_of, odd_calls(where)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_inputs_of_many_blocks_are_near_the_full_batch(gloo_ranks, device, figures, layout):
    shapes = [(3, C, 129, 65), (1, C, 129, 65)]
    cases = [Case(shapes, dtype, layout, {"momentum": 1.0}) for dtype in NARROW]
    for rank, errors_of_rank in enumerate(gloo_ranks(2, errors_of_all, cases, device.type)):
        for dtype, (outputs, _, _, variance) in zip(NARROW, errors_of_rank, strict=True):
            figures[f"rank {rank}, {dtype}: errors of outputs, variances"] = outputs, variance
            assert outputs <= MOST[dtype][0]
            # Of channels-last bfloat16 a CPU has 1.4e-5; its inputs are rounded to 4e-3.
            assert variance <= (1e-5 if dtype == torch.float32 else 1e-4)


def test_variance_survives_a_mean_far_from_zero(gloo_ranks, device, figures):
    for ratio, error in gloo_ranks(2, far_variances, device.type)[0].items():
        figures[f"mean / deviation {ratio:g}: relative error"] = error
        # torch's kernel adds up differences from a float32 mean; by its formula, the error
        # at a ratio of 10,000 is 2.2e-5 in the median and at most 1.4e-4.
        assert error <= max(1e-5, 4e-8 * ratio)
