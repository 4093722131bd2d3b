"""`train.compile`: one graph for model, loss and backward pass, and nothing else changes.

Tracing is what can go wrong here, so most tests run the traced graphs as they are: generating code
for them takes minutes. One slow test goes all the way.
"""

import copy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from experiments import experiment, losses, train, write_config
from processes import REPOSITORY
from replays import small_model
from stepping import train_steps

from segtrain.checkpoint.format import load
from segtrain.config import load_config
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.training import step as step_module
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, Batch

CPU = torch.device("cpu")
COMPILE = torch.compile


class Graphs:
    """A backend that runs the forward and backward graphs it gets and counts what is in them."""

    def __init__(self):
        self.collectives = {"forward": [], "backward": []}

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        backend = aot_autograd(
            fw_compiler=self._counted("forward"),
            bw_compiler=self._counted("backward"),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return backend(graph, inputs)

    def _counted(self, direction):
        from torch._functorch.aot_autograd import make_boxed_func

        def compiler(graph, inputs):
            reduces = [node for node in graph.graph.nodes if "all_reduce" in str(node.target)]
            self.collectives[direction].append(len(reduces))
            return make_boxed_func(graph.forward)

        return compiler


def traced(*args, **kwargs):
    """torch.compile without the generation of code; `traced.graphs` saw the newest graphs."""
    traced.graphs = Graphs()
    return COMPILE(*args, **kwargs, backend=traced.graphs)


def resnet_model(config):
    return build_model(config.model, num_classes=4, norm=make_norm(config.norm))


def batches(config, rows):
    """Labels with all classes, and more and more of them ignored."""
    size = config.train.batch_size
    for step in range(config.train.steps):
        generator = torch.Generator().manual_seed(step)
        images = torch.randint(256, (size, 3, 41, 57), generator=generator, dtype=torch.uint8)
        labels = (images.sum(1) % 4).to(torch.uint8)
        for i in range(size):
            labels[i, : 3 * i] = IGNORE_INDEX
        for mine in map(list, rows):
            yield Batch(images[mine], labels[mine], [str(i) for i in mine])


def trained(config_file, build, *overrides):
    """The numbers of all steps, the gradients of the first, the state dict at the end; and of a
    compiled run the graphs after each step, the breaks, and the collectives in every graph."""
    from torch._dynamo.utils import counters

    torch.compile = traced
    config = load_config(config_file, overrides)
    torch.manual_seed(0)
    state = make_state(build(config), config, CPU)
    rows = state.layout.positions(dist.rank())
    numbers, gradients, graphs = [], {}, []
    update = step_module.update

    def keep_gradients(state, *args):
        if state.step == 0:
            gradients.update({k: p.grad.clone() for k, p in state.model.named_parameters()})
        return update(state, *args)

    step_module.update = keep_gradients
    counters.clear()
    step_sync = StepSync(lambda: False)
    steps = train_steps(state, batches(config, rows), config, device=CPU, step_sync=step_sync)
    for result in steps:
        numbers.append([float(result.loss), float(result.aux_loss), float(result.grad_norm)])
        graphs.append(counters["stats"]["unique_graphs"])
        torch._dynamo.config.error_on_recompile = result.step >= 2
    seen = None
    if config.train.compile:
        seen = graphs, dict(counters["graph_break"]), traced.graphs.collectives
    return np.array(numbers), gradients, copy.deepcopy(state.model.state_dict()), seen


def differences(found, wanted):
    """The largest difference of losses and norms, of gradients, and of weights and statistics,
    each relative to the largest of its kind."""
    apart = [np.abs(found[0] / wanted[0] - 1).max()]
    for part in (1, 2):
        assert list(found[part]) == list(wanted[part])
        pairs = [(found[part][name].double(), v.double()) for name, v in wanted[part].items()]
        largest = max(b.abs().max() for _, b in pairs)
        apart.append(float(max((a - b).abs().max() for a, b in pairs) / largest))
    return apart


def assert_same_training(found, wanted, *, tolerance=1e-10):
    assert max(differences(found, wanted)) <= tolerance


def test_a_step_of_pspnet_is_one_graph_and_that_of_the_whole_batch(run_ranks, tmp_path, data):
    """Images 3 + 2, with auxiliary loss and dropout, in float64."""
    options = experiment(data, train={"steps": 3})
    config = write_config(tmp_path / "c.yaml", options)
    (wanted,) = run_ranks(1, trained, config, resnet_model)
    for found in run_ranks(2, trained, config, resnet_model, "train.compile=true"):
        assert_same_training(found, wanted)
        graphs, breaks, collectives = found[3]
        assert graphs == [1, 1, 1]
        assert breaks == {}
        # 16 layers: a shortcut, three grids of the PPM and the auxiliary head share.
        assert collectives == {"forward": [11], "backward": [11]}


VARIANTS = {
    "mining in two passes": {
        "loss": {"kind": "ohem", "ohem_min_kept": 3000, "class_weights": [1.0, 2.0, 0.5, 0.0]},
        "train": {"accumulate_steps": 2, "batch_size": 11},
    },
    "a sum of losses, cumulative average, no dropout": {
        "loss": {
            "kind": "lovasz_batch",
            "also": [
                {"kind": "ohem", "ohem_fraction": 0.2},
                {"kind": "focal", "class_weights": [1.0, 2.0, 0.5, 0.0]},
            ],
        },
        "norm": {"momentum": None},
        "model": {"dropout": 0.0},
    },
    "group norm": {"norm": {"kind": "group"}, "model": {"ppm_channels": 64}},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "mining" in name else pytest.mark.slow) for name in VARIANTS],
)
def test_variants_are_those_of_the_whole_batch(run_ranks, tmp_path, data, name):
    """A pass of 5 or 6 images is 3 + 2 or 3 + 3, so one rank has two sizes in the first step."""
    sections = VARIANTS[name] | {"train": {"steps": 3} | VARIANTS[name].get("train", {})}
    config = write_config(tmp_path / "c.yaml", experiment(data, **sections))
    (wanted,) = run_ranks(1, trained, config, small_model)
    compiled = run_ranks(2, trained, config, small_model, "train.compile=true")
    for rank, found in enumerate(compiled):
        assert_same_training(found, wanted)
        sizes = 2 if name == "mining in two passes" and rank == 1 else 1
        assert found[3][:2] == ([sizes] * 3, {})


@pytest.mark.parametrize(
    ("sections", "tolerance"),
    [
        # Running statistics follow outside of the graph. 3 + 3 images: the second group has both.
        ({"norm": {"images": 2}, "train": {"batch_size": 6}}, 1e-10),
        # float32 would be 4e-3 away.
        pytest.param({"train": {"precision": "bfloat16"}}, 2e-3, marks=pytest.mark.slow),
    ],
    ids=["groups of images", "bfloat16"],
)
def test_a_compiled_step_is_the_uncompiled_one(run_ranks, tmp_path, data, sections, tolerance):
    options = experiment(data, **sections | {"train": {"steps": 3} | sections["train"]})
    config = write_config(tmp_path / "c.yaml", options)
    wanted = run_ranks(2, trained, config, small_model)
    compiled = run_ranks(2, trained, config, small_model, "train.compile=true")
    for found, one in zip(compiled, wanted, strict=True):
        assert_same_training(found, one, tolerance=tolerance)
        assert found[3][:2] == ([1] * 3, {})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_run_may_be_compiled_in_one_part_and_not_in_the_other(run_ranks, tmp_path, data):
    """`segtrain train` with generated code, all the way; no key shows what is around the model."""
    sections = {"train": {"steps": 6}, "optim": {"ema_decay": 0.9}, "eval": {"every_steps": 3}}
    config = write_config(tmp_path / "c.yaml", experiment(data, **sections))
    plain, run = tmp_path / "plain", tmp_path / "run"
    assert run_ranks(1, train, config, plain) == [0]
    compiled = ["--set", "train.compile=true", "--until", 4, "--output", run]
    command = [sys.executable, "-m", "segtrain", "train", config, "--nproc", 2, *compiled]
    done = subprocess.run([*map(str, command)], cwd=REPOSITORY, timeout=1800)
    assert done.returncode == 0
    assert "compiled" in (run / "train.log").read_text()
    assert run_ranks(1, train, config, run, resume=True) == [0]
    np.testing.assert_allclose(losses(run), losses(plain), rtol=1e-9, atol=0)
    found, wanted = (load(path / "checkpoints/last.pt") for path in (run, plain))
    assert found.step == 6
    assert found.best["score"] == pytest.approx(wanted.best["score"], abs=1e-9)
    for ours, theirs in ((found.model, wanted.model), (found.average, wanted.average)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
