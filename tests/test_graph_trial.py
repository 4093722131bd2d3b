"""All ranks agree on recording, and a new stack proves itself before its replays are trusted."""

import math
import time

import pytest
import torch
from graphs_on_cpu import STACK
from replays import Graphs, Recorded, config_of
from test_graph import assert_as_eagerly
from test_graph_ending import begun, ended  # noqa: F401 - a fixture

from segtrain.distributed import collectives as dist
from segtrain.distributed import stack
from segtrain.training import graph, graph_trial
from segtrain.training.graph import GraphStep, plan_graphs
from segtrain.training.graph_trial import GraphTrial, compared, same_bits


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path))
    return tmp_path / "graphs"


@pytest.fixture
def graphs(monkeypatch):
    """Steps that are recorded on a stack that is new."""
    made, make = Graphs(), GraphStep.__init__
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(
        GraphStep, "__init__", lambda self, *about: make(self, *about, GraphTrial(STACK, 600.0))
    )
    return made


NAMES = [("float16", "adamw"), ("average", "microbatches", "muon")]


@pytest.mark.parametrize("names", NAMES, ids=" and ".join)
def test_a_replay_that_computes_the_step_is_kept_and_proven(graphs, names, capsys):
    assert_as_eagerly(names, watch=graphs.watch)
    assert len(graphs) == 1
    assert STACK.verdict() == "proven"
    assert "report" not in capsys.readouterr().out


@pytest.mark.parametrize("names", NAMES, ids=" and ".join)
def test_one_bit_that_differs_lets_the_run_go_on_without_graphs(graphs, names, monkeypatch, capsys):
    """With the numbers of the steps themselves, which the trial has taken more than once."""
    replay = Recorded.replay

    def wrong(recorded):
        replay(recorded)
        with torch.no_grad():
            weight = next(graphs.state.model.parameters())
            weight[0, 0, 0, 0] = torch.nextafter(weight[0, 0, 0, 0], torch.tensor(math.inf))

    monkeypatch.setattr(Recorded, "replay", wrong)
    assert_as_eagerly(names, watch=graphs.watch)
    assert not graphs.alive
    assert STACK.verdict() == "differs"
    said = capsys.readouterr().out
    assert said.count("warning: rank 0: a replay left 1 of ") == 1
    assert f"please report this line ({STACK})" in said


def changed(value, n=4):
    return [torch.full((16,), value + i, dtype=torch.float64) for i in range(n)]


@pytest.mark.parametrize(
    ("noise", "error", "verdict"),
    [
        (0.0, 0.0, "proven"),
        (0.0, 1e-15, "differs"),
        (1e-6, 5e-4, "proven"),
        (1e-6, 0.02, "differs"),
        (1e-6, math.nan, "differs"),
        (1e-4, 5e-3, "proven"),
        (1e-4, 0.5, "differs"),
        (1e-3, 0.06, "differs"),
        (0.02, 0.0, None),
        (math.nan, 0.0, None),
    ],
)
def test_steps_with_other_last_bits_are_compared_by_how_far_they_part(noise, error, verdict):
    before, one = changed(0.0), changed(1.0)
    other, replayed = changed(1.0 + noise), changed(1.0 + error)
    assert compared(before, (one, other), replayed)[0] == verdict


def test_only_a_verdict_is_kept(monkeypatch):
    before, one, other = changed(0.0), changed(1.0), changed(1.02)
    trial = GraphTrial(STACK, 600.0)
    assert "train.deterministic=true" in trial.settle(before, (one, other), one)
    assert STACK.verdict() is None
    worse = ["differs", "a replay left 1 of 4 tensors with other bits"]
    monkeypatch.setattr(dist, "all_gather_object", lambda value: [value, worse])
    assert trial.settle(before, (one, one), one).startswith("rank 1: a replay left 1 of 4")
    assert STACK.verdict() == "differs"


def test_bits_of_nan_and_of_signed_zeros_count():
    nan, zero = torch.tensor(math.nan), torch.zeros(2, 2).to(memory_format=torch.contiguous_format)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert same_bits(torch.tensor([True]), torch.tensor([True]))


def plan(monkeypatch, verdicts, graph_option="auto", ranks=2, *, started_again=False):
    config = config_of([])
    train = config.train.model_copy(update={"graph": graph_option})
    config = config.model_copy(update={"train": train})
    monkeypatch.setattr(graph, "stack_of_ranks", lambda: STACK)
    monkeypatch.setattr(dist, "world_size", lambda: ranks)

    def gathered(value):
        return [value, started_again] if isinstance(value, bool) else [value, *verdicts]

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    state = type("State", (), {"shares": None, "capturable": True})
    return plan_graphs(config, state, torch.device("cuda"))


def test_what_the_cache_says_decides(monkeypatch, cache):
    assert plan(monkeypatch, [None]).trial.stack == STACK
    STACK.keep("proven")
    assert plan(monkeypatch, ["proven"]) == (None, None)
    assert plan(monkeypatch, [None]).trial is not None  # another machine has not seen it
    for verdict, words in (("differs", "computed other numbers"), ("silent", "did not come back")):
        STACK.keep("proven")
        assert words in plan(monkeypatch, [verdict]).why_not
        STACK.keep(verdict)
        assert words in plan(monkeypatch, ["proven"]).why_not
        assert "train.graph=true tries again" in plan(monkeypatch, [None]).why_not
        assert plan(monkeypatch, [None], True).trial is not None
        assert plan(monkeypatch, [None], False) == ("", None)
        assert plan(monkeypatch, [], ranks=1) == (None, None)  # no sums of NCCL
    (file,) = cache.iterdir()
    file.write_text("{")
    assert plan(monkeypatch, [None]).trial is not None
    assert "started again" in plan(monkeypatch, [None], started_again=True).why_not  # elsewhere
    monkeypatch.setenv("SEGTRAIN_WITHOUT_GRAPHS", "1")
    assert "started again" in plan(monkeypatch, [None], True).why_not


def test_the_stack_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    others = [[0, "card"], [2, "other card"], [2, "card"]]
    monkeypatch.setattr(dist, "all_gather_object", lambda value: [list(value), *others])
    found = stack.stack_of_ranks()
    assert found.devices == ("card", "card", "other card", "card")
    assert (found.nccl, found.engine, found.machines) == ("2.30.7", "NCCL", 2)
    assert f"torch {torch.__version__}, CUDA 13.2, NCCL 2.30.7 (NCCL), driver " in str(found)
    assert str(found).endswith("3 x card, 1 x other card on 2 machines")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    assert stack.stack_of_ranks().engine == "NCCL2"


def test_another_stack_has_another_verdict(tmp_path, monkeypatch):
    STACK.keep("differs")
    fields = stack.asdict(STACK)
    for name, value in fields.items():
        other = ("card",) * 3 if name == "devices" else 2 if name == "machines" else f"{value}.1"
        assert stack.DeviceStack(**fields | {name: other}).verdict() is None
    assert stack.kept_verdicts() == [(STACK, "differs")]
    monkeypatch.setenv("SEGTRAIN_CACHE", "/proc/nowhere")
    STACK.keep("proven")  # a folder that cannot be written is no error
    assert STACK.verdict() is None


def test_a_verdict_that_is_known_counts_more_than_one_that_is_not(monkeypatch):
    unclear, worse = [None, "two runs differ"], ["differs", "a replay differs"]
    monkeypatch.setattr(dist, "all_gather_object", lambda value: [unclear, value, worse])
    one = changed(1.0)
    said = GraphTrial(STACK, 600.0).settle(changed(0.0), (one, one), one)
    assert said.startswith("rank 2: a replay differs")
    assert STACK.verdict() == "differs"


def test_silence_before_the_replay_is_no_verdict_on_the_stack(monkeypatch):
    """A rank may be stopped while the others wait for it to have recorded."""
    ended, said = [], []
    monkeypatch.setattr(graph_trial.os, "_exit", ended.append)
    monkeypatch.setattr(graph_trial, "say", said.append)
    trial = GraphTrial(STACK, 0.1)  # a limit of its own, before that of other waits
    with trial.limited():
        while not ended:
            time.sleep(0.01)
    assert (ended, STACK.verdict()) == ([6], None)
    assert "to record a step as a CUDA graph took all ranks 0 s" in said[0]


def test_the_cause_of_a_failed_recording_is_told_and_not_its_consequence():
    ended = RuntimeError("capturing stream has unjoined work")  # by the end of the capture
    ended.__context__ = RuntimeError("out of memory\nTraceback")
    assert graph._first_line(ended) == "out of memory"


# Whole commands; test_graph_agreement.py has the same among threads.
SLOW = pytest.mark.slow("training", "distributed", "commands", "trainer")
LAUNCHED = {"steps": 6, "batch_size": 4}


@SLOW
def test_a_replay_that_never_comes_back_starts_the_ranks_again(begun, tmp_path):  # noqa: F811
    """On rank 0; the other waits for it in the step. The next start does not try it again."""
    command = begun("--nproc", 2, environ={"GRAPHS_REPLAY": "hang"}, train=LAUNCHED)
    output = ended(command)
    assert output.count("did not come back within 3 s; please report this line") == 1
    assert "none: a replay did not come back, so the ranks were started again" in output
    (file,) = (tmp_path / "cache/graphs").iterdir()
    assert '"verdict": "silent"' in file.read_text()


@SLOW
def test_ranks_of_which_one_cannot_record_all_go_on_without(begun):  # noqa: F811
    command = begun("--nproc", 2, environ={"GRAPHS_FAIL": "1"}, train=LAUNCHED)
    output = ended(command)
    said = "warning: rank 1: a step cannot be recorded as a CUDA graph (no memory is left"
    assert output.count(said) == 1


@SLOW
def test_a_rank_whose_replay_differs_takes_all_back(begun):  # noqa: F811
    command = begun("--nproc", 2, environ={"GRAPHS_REPLAY": "wrong"}, train=LAUNCHED)
    assert ended(command).count("warning: rank 1: a replay left 1 of") == 1
