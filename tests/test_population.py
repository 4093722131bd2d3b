"""`segtrain population`: who takes over from whom, interruptions, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from experiments import bits, last, losses, sections, small, train_member, unread, write_config

from segtrain.checkpoint.format import Checkpoint, config_field, load
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.config import load_config
from segtrain.desk.commands import programs as children
from segtrain.desk.commands.population import history
from segtrain.desk.commands.population import members as population_members
from segtrain.desk.commands.population.history import History, Row
from segtrain.desk.commands.population.members import score, take_over
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.run.division import read_record, write_record

LR, DECAY = "optim.lr", "optim.weight_decay"


pytestmark = pytest.mark.usefixtures("handlers")


def config(**train):
    return unread(**sections(**{"steps": 40, "lr": 0.01, "weight_decay": 1e-4} | train))


def population(scores, *, alone=False, **train):
    """A population at the end of its first rounds, whose members have these scores there."""
    options = config(**{"steps": 10 * len(scores) + 10} | train)
    found = History(
        members=len(scores[0]), every=10, perturb=[LR, DECAY], alone=alone, config=options
    )
    for number, values in enumerate(scores):
        this = found.rounds[number]
        for i, value in reversed([*enumerate(values)]):  # the last member comes first
            this.rows[i] = Row(options=found.options_of(i, number), score=value)
        this.exchange = history.decide(found, number)
    return found


def takeovers(found):
    last = [past for past in found.rounds if past.rows][-1]
    return [(one.member, one.source) for one in last.exchange]


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([0.3, 0.1], [(1, 0)]),
        ([0.2, 0.2, 0.2, 0.1], [(3, 0)]),  # ties: the earlier member is the better
        ([0.2, 0.2, 0.2, 0.2], []),
        ([0.2, None, 0.4, None], [(1, 2), (3, 2)]),
        ([None, None, None, None], []),
    ],
)
def test_the_worst_quarter_takes_over_from_the_best(scores, wanted):
    assert takeovers(population([scores])) == wanted


def test_of_eight_members_two_take_over_from_one_of_the_best_two():
    found = {tuple(takeovers(population([[*range(8)]], lr=lr / 100))) for lr in (1, 2)}
    assert len(found) == 1  # a matter of the seed, not of the options
    ((first, second),) = found
    assert (first[0], second[0]) == (0, 1)
    assert {first[1], second[1]} <= {6, 7}
    sources = set()
    for seed in range(20):
        other = population([[*range(8)]])
        other.config = other.config.model_copy(update={"seed": seed})
        sources |= {one.source for one in history.decide(other, 0)}
    assert sources == {6, 7}


def test_options_are_those_of_the_source_times_a_factor():
    found = population([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    first = found.rounds[0].rows
    assert first[0].options == {LR: 0.01, DECAY: 1e-4}  # the file's
    for row in (first[1], first[2], first[3]):
        assert row.options[LR] in (0.008, 0.012)
        assert row.options[DECAY] in (8e-5, 1.2e-4)
    winner, new = found.rounds[0].rows[1].options, found.rounds[1].rows[0].options
    assert {round(new[key] / winner[key], 6) for key in (LR, DECAY)} <= {0.8, 1.2}
    assert found.rounds[1].rows[1].options == winner
    again = population([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    assert again.rounds == found.rounds
    # Every round and every member draws anew.
    found = population([[0.4, 0.1]] * 12)
    assert {past.exchange[0].options[LR] for past in found.rounds[:12]} == {0.008, 0.012}
    first = population([[0.1] * 12]).rounds[0].rows
    assert {first[i].options[LR] for i in range(1, 12)} == {0.008, 0.012}


def test_an_option_stays_where_the_config_refuses_the_product():
    momentum = {"optim.momentum": 0.9}
    rngs = map(np.random.default_rng, range(20))
    found = {history.perturbed(config(), momentum, rng)["optim.momentum"] for rng in rngs}
    assert found == {0.9, 0.72}  # 1.08 is no momentum


def test_the_best_is_that_of_the_weights_and_goes_with_them():
    found = population([[0.5, 0.1], [0.3, 0.4]])
    assert takeovers(found) == [(0, 1)]
    assert found.best() == (0, 0.5, 10)  # best.pt of member 0 went to member 1 after step 10 ...
    found.rounds[1].exchange = []
    assert found.best()[1:] == (0.5, 10)  # ... which keeps it


def checkpoint(step, value):
    import torch

    weights = {"w": torch.full((3,), float(value))}
    return Checkpoint(
        step, "{}", "{}", weights, None, {}, {}, {"step": step, "by": "mIoU", "score": 0.5}
    )


def run_with(directory, *values, keep=()):
    """A run that saved checkpoints of steps 1, 2 ... with these values, and kept some."""
    manager = CheckpointManager(directory / "checkpoints", keep_limit=5)
    for step, value in enumerate(values, start=1):
        manager.save_last(checkpoint(step, value))
        if step in keep:
            manager.keep(checkpoint(step, value))
    manager.save_best(checkpoint(1, values[0]))
    (directory / "train.log").write_text("")
    return directory


def files_of(run):
    paths = (run / "checkpoints").iterdir()
    return {path.name: path.read_bytes() for path in paths if path.name[0] != "."}


def assert_goes_on_from_last(run):
    manager = CheckpointManager(run / "checkpoints", keep_limit=5)
    manager.clean_up()
    assert manager.newest() == (run / "checkpoints/last.pt", [])


def test_an_exchange_makes_the_checkpoints_those_of_the_winner(tmp_path):
    loser = run_with(tmp_path / "loser", 1, 2, keep=(1, 2))
    winner = run_with(tmp_path / "winner", 5, 6, 7, keep=(3,))
    (loser / "checkpoints/mine.txt").write_text("not of a run")
    before, own = files_of(winner), files_of(loser)
    with pytest.raises(CheckpointError, match=r"last.pt: expected the checkpoint of step 4"):
        take_over(loser, winner, config(lr=0.5), step=4)
    assert files_of(loser) == own
    take_over(loser, winner, config(lr=0.5), step=3)
    assert files_of(winner) == before
    after = files_of(loser)
    assert after.pop("mine.txt") == b"not of a run"
    assert after.keys() == before.keys()
    assert before["best.pt"] == after["best.pt"]
    for name in ("last.pt", "previous.pt", "step_0000003.pt"):
        there, here = (load(run / "checkpoints" / name) for run in (winner, loser))
        assert (here.config, here.step) == (config_field(config(lr=0.5)), there.step)
        assert here.model["w"].equal(there.model["w"])
    assert_goes_on_from_last(loser)
    assert load_config(loser / "config.yaml") == config(lr=0.5)
    said = "changed    all weights: those of winner at step 3\n"
    assert said in (loser / "train.log").read_text()
    assert not (loser / ".lock").exists()


def test_an_exchange_that_was_cut_short_anywhere_is_completed_by_another(tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    # The lock of a process that dies goes with it.
    monkeypatch.setattr(population_members, "RunLock", nullcontext)
    template = run_with(tmp_path / "template", 1, 2, keep=(1, 2))
    winner = run_with(tmp_path / "winner", 5, 6, 7, keep=(3,))
    whole = shutil.copytree(template, tmp_path / "whole")
    take_over(whole, winner, config(lr=0.5), step=3)
    wanted, replace, unlink = files_of(whole), Path.replace, Path.unlink
    for deaths in range(1, 50):
        loser, left = shutil.copytree(template, tmp_path / str(deaths)), [deaths]

        def dying(function, left=left):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    raise KilledError
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dying(replace))
            patch.setattr(Path, "unlink", dying(unlink))
            died = True
            with suppress(KilledError):
                take_over(loser, winner, config(lr=0.5), step=3)
                died = False
        take_over(loser, winner, config(lr=0.5), step=3)
        assert files_of(loser) == wanted, deaths
        assert_goes_on_from_last(loser)
        if not died:
            break
    assert 12 < deaths < 49


def test_the_score_is_that_of_the_step(tmp_path):
    lines = [{"step": 4, "train/loss": 1.0}, {"step": 4, "eval/mIoU": 0.5}]
    lines += [{"step": 6, "eval/mIoU": 0.6}, {"step": 8, "eval/mIoU": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert score(tmp_path, 4) == 0.5
    assert score(tmp_path, 8) is None
    with pytest.raises(ExecutionError, match="has no eval/mIoU of step 5"):
        score(tmp_path, 5)


# Whole populations. Members train in processes that have imported torch already.

BONUS = 0.5


@pytest.fixture
def members(monkeypatch, run_ranks):
    """Lets members train quickly; a number n in the list stops the n-th piece after step 5."""
    stop = []

    def run_segtrain(arguments, show):
        if stop:
            stop[0] -= 1
        return run_ranks(1, train_member, arguments, 5 if stop == [0] else None)[0]

    programs(monkeypatch, run_segtrain)
    # After two steps, both may predict one class everywhere.
    monkeypatch.setattr(population_members, "score", score_with_bonus)
    return stop


def programs(monkeypatch, run_segtrain):
    """Has this function run the commands of a population, which has the arguments and `show`."""
    monkeypatch.setattr(
        population_members.Programs, "run", lambda _, arguments, show: run_segtrain(arguments, show)
    )


def score_with_bonus(run, step, tag):
    return score(run, step, tag) + (BONUS if run.name == "member_1" else 0)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, data):
    sections = {"train": {"steps": 4, "batch_size": 2}, "augment": {"crop_size": [25, 33]}}
    options = small(data, optim={"ema_decay": None}, **sections)
    return write_config(tmp_path_factory.mktemp("experiment") / "own.yaml", options)


@pytest.fixture
def begin(lab, experiment):
    """Runs a population of two members, with an exchange after two steps."""

    def command(directory, *arguments):
        words = ("population", experiment, "--output", directory, "--device", "cpu")
        return lab.command(*words, "--members", 2, "--every", 2, *arguments)

    return command


def read(directory):
    return read_record(directory / history.FILE, History)


def rows_of(directory):
    """(step, member, mIoU, options) of each member and round, in order."""
    return [
        (past.step, member, row.score, row.options)
        for past in read(directory).rounds
        for member, row in sorted(past.rows.items())
    ]


def exchanges_of(directory):
    """{step: (member, source) of each takeover}."""
    return {
        past.step: [(one.member, one.source) for one in past.exchange]
        for past in read(directory).rounds
        if past.exchange is not None
    }


def test_a_population_interrupted_anywhere_ends_with_the_same_bits(
    tmp_path, begin, members, monkeypatch, lab
):
    """Between decision and exchange, and in the midst of a piece of the second round."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    longer = ["--set", "train.steps=8", "--every", "4"]

    def copy_before(*args, **kwargs):
        """The copy is what a process that is killed here leaves."""
        shutil.copytree(alone, killed)
        take_over(*args, **kwargs)

    monkeypatch.setattr(population_members, "take_over", copy_before)
    code, out, _ = begin(alone, *longer)
    assert code == 0
    assert out.split()[:7] == ["round", "step", "member", "mIoU", LR, DECAY, "takes_from"]
    assert f"segtrain eval {alone}/member_" in out

    assert exchanges_of(killed) == {}
    monkeypatch.setattr(population_members, "take_over", take_over)
    members.append(1)
    assert begin(killed, *longer, "--resume").code == 143
    assert list(exchanges_of(killed)) == [4]
    assert 4 < last(killed / "member_0").step < 8
    members.clear()
    lab.done("population", killed, "--resume", "--device", "cpu")

    assert read(killed) == read(alone)
    for name in ("member_0", "member_1"):
        assert bits(last(killed / name)) == bits(last(alone / name))
        assert losses(killed / name) == losses(alone / name)
        assert len(losses(alone / name)) == 8
    check_history(alone, every=4, bonus=BONUS)
    assert exchanges_of(alone) == {4: [(0, 1)], 8: []}
    # Its weights are the other's, with other data and another rate since.
    assert losses(alone / "member_0")[:4] != losses(alone / "member_1")[:4]
    log = (alone / "member_0/train.log").read_text()
    assert "changed    all weights: those of member_1 at step 4" in log


def check_history(directory, every=2, bonus=0.0):
    """The history says what the runs did."""
    rows = rows_of(directory)
    assert [row[:2] for row in rows] == [(every * number, i) for number in (1, 2) for i in (0, 1)]
    for step, i, mean_iou, options in rows:
        run = directory / f"member_{i}"
        value = losses(run, "eval/mIoU")[step // every - 1]
        assert mean_iou == value + (bonus if i == 1 else 0)
        if step == 2 * every:
            used = load_config(run / "config.yaml")
            assert used.seed == i
            assert {LR: used.optim.lr, DECAY: used.optim.weight_decay} == options


def stand_in(calls, diverging=()):
    """A `run_segtrain` without training; some pieces end with the code of a loss that is NaN."""

    def run_segtrain(arguments, show):
        run = Path(arguments[arguments.index("--output") + 1])
        step = int(arguments[arguments.index("--until") + 1])
        calls.append((run.name, step, "--resume" in arguments))
        run.mkdir(exist_ok=True)
        for name in ("config.yaml", "environment.json"):
            (run / name).write_text("{}")
        if (run.name, step) in diverging:
            return 5
        manager = CheckpointManager(run / "checkpoints", keep_limit=5)
        manager.clean_up()
        manager.save_last(checkpoint(step, 1))
        value = {"step": step, "eval/mIoU": step / 16 + int(run.name[-1]) / 64}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(value) + "\n")
        return 0

    return run_segtrain


def test_a_diverged_member_takes_over_unless_all_are_left_alone(tmp_path, begin, monkeypatch):
    calls, directory = [], tmp_path / "alone"
    programs(monkeypatch, stand_in(calls, [("member_0", 2)]))
    code, said, _ = begin(directory, "--alone")
    assert code == 0
    assert calls == [("member_0", 2, False), ("member_1", 2, False), ("member_1", 4, True)]
    assert exchanges_of(directory) == {2: [], 4: []}
    rows = rows_of(directory)
    assert [row[2] for row in rows] == [None, 9 / 64, None, 17 / 64]
    assert [row[3] for row in rows[:2]] == [row[3] for row in rows[2:]]
    assert "best: member_1, mIoU 0.2656 at step 4" in said
    assert begin(directory, "--resume").code == 0
    assert exchanges_of(directory) == {2: [], 4: []}
    # With an exchange it counts as the worst, and goes on with the weights of the other.
    calls.clear()
    assert begin(tmp_path / "run").code == 0
    assert calls[2:] == [("member_0", 4, True), ("member_1", 4, True)]
    assert rows_of(tmp_path / "run")[0][2] is None
    assert exchanges_of(tmp_path / "run")[2] == [(0, 1)]


def test_members_train_at_the_same_time_with_the_same_exchanges(tmp_path, begin, monkeypatch):
    """Each waits for all others, and the last one comes to its end first."""
    train, everybody = stand_in([]), threading.Barrier(4)

    def wait(arguments, show):
        everybody.wait(10)
        time.sleep(0.05 * (3 - int(arguments[3][-1])))
        return train(arguments, show)

    for name, function, at_once in (("alone", train, "1"), ("together", wait, "4")):
        programs(monkeypatch, function)
        arguments = ("--members", "4", "--at-once", at_once)
        assert begin(tmp_path / name, *arguments).code == 0
    assert rows_of(tmp_path / "together") == rows_of(tmp_path / "alone")
    assert exchanges_of(tmp_path / "together") == exchanges_of(tmp_path / "alone")


def test_no_member_begins_after_another_failed_and_those_beside_it_count(
    tmp_path, begin, monkeypatch
):
    calls, directory = [], tmp_path / "run"
    train, both = stand_in(calls), threading.Barrier(2)

    def fail(arguments, show):
        both.wait(10)
        if arguments[3].endswith("member_0"):
            return 3
        time.sleep(0.1)
        return train(arguments, show)

    programs(monkeypatch, fail)
    arguments = ("--members", "4", "--at-once", "2")
    code, _, err = begin(directory, *arguments)
    assert code == 3
    assert [row[:2] for row in rows_of(directory)] == [(2, 1)]
    said = "member_0: ended with exit code 3 before step 2; to go on: segtrain population"
    assert (err.count(said), err.count("ended with")) == (1, 1)
    programs(monkeypatch, train)
    assert begin(directory, *arguments, "--resume").code == 0
    assert calls.count(("member_1", 2, False)) == 1


def test_a_damaged_history_is_refused(tmp_path):
    found = population([[0.1, 0.4]])
    write_record(tmp_path / history.FILE, found)
    path = tmp_path / "population.json"
    whole = path.read_bytes()
    assert read(tmp_path) == found
    for content, said in ((whole[:-9], "Invalid JSON"), (whole.replace(b"10,", b"-,"), "Invalid")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"json: damaged: .*{said}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("visible", "count", "at_once", "wanted"),
    [
        ("", 0, 2, [None, None]),
        ("", 4, 1, [None]),
        ("", 4, 2, ["0,2", "1,3"]),
        ("5,7", 2, 2, ["5", "7"]),
        ("", 1, 3, ["0", "0", "0"]),
    ],
)
def test_members_share_the_gpus(monkeypatch, visible, count, at_once, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not visible:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(children.torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(children.torch.cuda, "is_available", lambda: True)
    assert children.gpus_of_slots(at_once, "auto") == wanted
    assert children.gpus_of_slots(at_once, "cpu") == [None] * at_once


def test_a_member_whose_checkpoints_were_removed_is_not_trained_anew(tmp_path, begin, monkeypatch):
    calls, directory = [], tmp_path / "run"
    train = stand_in(calls)
    programs(monkeypatch, lambda *a: 143 if len(calls) > 1 else train(*a))
    assert begin(directory).code == 143
    shutil.rmtree(directory / "member_1")
    programs(monkeypatch, train)
    code, _, error = begin(directory, "--resume")
    assert (code, len(calls)) == (4, 2)
    assert "member_1: its checkpoints have been removed; put them" in error


def test_a_resumption_must_be_of_the_same_population(tmp_path, experiment, begin, monkeypatch, lab):
    calls, directory = [], tmp_path / "run"
    train = stand_in(calls)
    programs(monkeypatch, lambda *a: 143 if calls else train(*a))
    assert begin(directory).code == 143
    for arguments, said in (
        ([], "is not empty; go on by --resume"),
        (["--resume", "--members", "3"], "--members: 2 there, 3 now"),
        (["--resume", "--perturb", LR], "--perturb: "),
        (["--resume", "--set", "optim.lr=1.0"], "optim.lr: 0.02 there, 1.0 now"),
    ):
        code, _, error = begin(directory, *arguments)
        assert code == 2
        assert said in error
    edited = directory / "experiment.yaml"
    before = edited.read_text()
    edited.write_text(before.replace("lr: 0.02\n", "lr: 0.5\n"))
    assert "optim.lr: 0.02 there, 0.5 now" in lab.refused("population", directory, "--resume")
    edited.write_text(before)
    # Where the data lie is no matter, and is taken from the new command line.
    assert begin(directory, "--resume", "--set", "log.every_steps=2").code == 143
    assert load_config(directory / "experiment.yaml").log.every_steps == 2
    # An experiment of `init` is a folder.
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(experiment, folder / "config.yaml")
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path)
        assert lab.command("population mine --members 2 --every 2").code == 143
    assert (tmp_path / "runs/mine_population/experiment.yaml").exists()
    new = tmp_path / "new"
    code, _, error = begin(new, "--resume")
    assert code == 143
    assert f"{new}: nothing to resume; a new population starts" in error


STAND_IN = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("warning: ready", flush=True)
time.sleep(60)
"""


def test_stop_signals_reach_the_member_and_are_waited_for(monkeypatch):
    """The second one comes while the first is passed on."""
    monkeypatch.setattr(children, "PROGRAM", STAND_IN)
    sent, send_signal = [], subprocess.Popen.send_signal

    def send_another(process, number):
        sent.append(number)
        if len(sent) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        send_signal(process, number)

    monkeypatch.setattr(subprocess.Popen, "send_signal", send_another)
    programs = children.Programs([None])
    with ThreadPoolExecutor() as pool:
        shown = []
        future = pool.submit(programs.run, [], shown.append)
        while not shown:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert future.result(20) == 143
    assert shown == ["warning: ready"]
    assert len(sent) == 2
    assert programs.run([], shown.append) == 143  # no further one begins


def test_a_member_that_fails_shows_its_last_words_and_gives_its_gpus_back(monkeypatch):
    programs, shown = children.Programs(["0"]), []
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES']); raise SystemExit('no folder')"
    monkeypatch.setattr(children, "PROGRAM", program)
    assert [programs.run([], shown.append) for _ in range(2)] == [1, 1]
    assert sorted(shown) == ["0", "0", "no folder", "no folder"]


@pytest.mark.slow
def test_the_command_as_processes(tmp_path, experiment):
    directory = tmp_path / "run"
    words = [sys.executable, "-m", "segtrain", "population", experiment, "--output", directory]
    words += ["--members", "2", "--every", "2", "--device", "cpu", "--at-once", "2"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_history(directory)
