"""`train.compile`: one graph for model, loss and backward pass, and nothing else changes.

Tracing is what can go wrong here, so most tests run the traced graphs as they are: generating code
for them takes minutes. One slow test goes all the way.
"""

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from experiments import experiment, losses, train, write_config
from processes import REPOSITORY
from replays import Stub, small_model
from stepping import train_steps

from segtrain.checkpoint.format import load
from segtrain.config import Config, load_config
from segtrain.distributed import collectives as dist
from segtrain.models import SegModel, build_model
from segtrain.models.blocks import AuxHead
from segtrain.models.norms import make_norm
from segtrain.training import step as step_module
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, Batch

CPU = torch.device("cpu")
COMPILE = torch.compile
SLOW = pytest.mark.slow("training", "norm", "models", "kernels", "distributed")


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
    """torch.compile without the generation of code; `traced.graphs` saw the newest graphs.

    Of several ranks: one alone sends nothing, and needs no graphs of the two passes.
    """
    traced.graphs = Graphs()
    backend = traced.graphs if dist.world_size() > 1 else "eager"
    return COMPILE(*args, **kwargs, backend=backend)


def resnet_model(config):
    return build_model(config.model, num_classes=4, norm=make_norm(config.norm))


class OutHead(AuxHead):
    """Of the last features."""

    def join(self, features):
        return features.out


def smallest_model(config):
    """Tracing takes time by the number of operations."""
    norm, options = make_norm(config.norm), {"align_corners": False}
    heads = (
        kind(config.model, Stub.channels, num_classes=4, norm=norm) for kind in (OutHead, AuxHead)
    )
    return SegModel(Stub(norm), *heads, dropout=config.model.dropout, **options)


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


class Case(NamedTuple):
    """What is trained: by how many ranks without and with compiling, how far apart it may be."""

    sections: dict[str, Any]
    build: Callable[[Config], SegModel] = small_model
    plain_ranks: int = 1
    ranks: int = 2
    tolerance: float = 1e-10
    graphs: tuple[int, int] = (1, 1)  # of each rank
    collectives: int | None = None  # forward and backward each


WEIGHTS = [1.0, 2.0, 0.5, 0.0]
CASES = {
    # With auxiliary loss and dropout, in float64.
    "a small model of one rank": Case({}, smallest_model, ranks=1),
    # Images 3 + 2, with auxiliary loss and dropout, in float64. The two heads share.
    "a small model": Case({}, smallest_model, collectives=3),
    # 16 layers: a shortcut, three grids of the PPM and the auxiliary head share.
    "PSPNet": Case({}, resnet_model, collectives=11),
    # A pass of 5 or 6 images is 3 + 2 or 3 + 3, so one rank has two sizes in the first step.
    "mining in two passes": Case(
        {
            "loss": {"kind": "ohem", "ohem_min_kept": 3000, "class_weights": WEIGHTS},
            "train": {"accumulate_steps": 2, "batch_size": 11},
        },
        graphs=(1, 2),
    ),
    "a sum of losses, cumulative average, no dropout": Case(
        {
            "loss": {
                "kind": "lovasz_batch",
                "also": [
                    {"kind": "ohem", "ohem_fraction": 0.2},
                    {"kind": "focal", "class_weights": WEIGHTS},
                ],
            },
            "norm": {"momentum": None},
            "model": {"dropout": 0.0},
        }
    ),
    "group norm": Case({"norm": {"kind": "group"}, "model": {"ppm_channels": 64}}),
    # Running statistics follow outside of the graph. 3 + 3 images: the second group has both.
    "groups of images": Case({"norm": {"images": 2}, "train": {"batch_size": 6}}, plain_ranks=2),
    # float32 would be 4e-3 away.
    "bfloat16": Case({"train": {"precision": "bfloat16"}}, plain_ranks=2, tolerance=2e-3),
}


@pytest.mark.parametrize(
    "name", [next(iter(CASES)), *(pytest.param(n, marks=SLOW) for n in [*CASES][1:])]
)
def test_compiled_steps_are_those_without_and_one_graph(run_ranks, tmp_path, data, name):
    """Beside eager ones of one rank, or of two where statistics are of groups."""
    case = CASES[name]
    sections = case.sections | {"train": {"steps": 3} | case.sections.get("train", {})}
    config = write_config(tmp_path / "c.yaml", experiment(data, **sections))
    plain = run_ranks(case.plain_ranks, trained, config, case.build)
    compiled = run_ranks(case.ranks, trained, config, case.build, "train.compile=true")
    for rank, found in enumerate(compiled):
        assert max(differences(found, plain[rank % case.plain_ranks])) <= case.tolerance
        graphs, breaks, collectives = found[3]
        assert (graphs, breaks) == ([case.graphs[rank]] * 3, {})
        if case.collectives is not None:
            assert collectives == {way: [case.collectives] for way in ("forward", "backward")}


@SLOW
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
