"""eval.best: which evaluation is the best one, and that all who ask agree on it."""

import argparse
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments import last, losses, refusal, segtrain, small, train, write_config, write_data

from segtrain.checkpoint.format import BEST, load
from segtrain.config import load_config, override_config
from segtrain.desk.commands.population.history import History, table
from segtrain.desk.commands.population.members import Population, score
from segtrain.desk.results.report import evaluated, report_page
from segtrain.desk.results.runs import read_run, summarize
from segtrain.metrics import ConfusionMatrix
from segtrain.run.console import ProgressBar
from segtrain.run.trackers import Trackers

CLASSES = ["water", "sand"]
# What the evaluations after steps 1, 2 and 3 find: each score is highest at another step.
IOU = [(0.9, 0.9, 0.1, 0.1), (0.1, 0.1, 0.3, 0.5), (0.2, 0.2, 0.2, 0.2)]
DICE = [0.1, 0.2, 0.3]
TOLD = {}  # to trackers, at the end of each run
SHOWN = []  # by the progress of the run that is chosen by mIoU
BEST_OF = {  # eval.best: the step, the score and its name
    "miou": (1, 0.5, "mIoU"),
    "mdice": (3, 0.3, "mDice"),
    "classes": (2, 0.4, "IoU of water, sand"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training, three times, with each way to choose."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    write_data(home / "data")
    scores, describe, patch = ConfusionMatrix.scores, ProgressBar.describe, pytest.MonkeyPatch()

    def describe_and_keep(bar, *words):
        SHOWN.append(" ".join(words))
        describe(bar, *words)

    for name in BEST_OF:
        found = iter(zip(IOU, DICE, strict=True))

        def scripted(matrix, found=found):
            iou, dice = next(found)
            return replace(scores(matrix), iou=iou, mean_iou=sum(iou) / 4, mean_dice=dice)

        best = CLASSES if name == "classes" else name
        evaluation = {"every_steps": 1, "best": best, "without": ["ground"]}
        options = small(home / "data", train={"steps": 3}, eval=evaluation)
        with patch.context() as context:
            context.setattr(ConfusionMatrix, "scores", scripted)
            context.setattr(
                Trackers, "finish", lambda _, *told, name=name: TOLD.update({name: told})
            )
            if name == "miou":
                context.setattr(ProgressBar, "describe", describe_and_keep)
            config = write_config(home / f"{name}.yaml", options)
            assert train(config, home / name) == 0
    return home


@pytest.mark.parametrize("name", BEST_OF)
def test_the_score_of_the_config_chooses_and_all_agree(runs, name):
    step, value, by = BEST_OF[name]
    run = runs / name
    found = last(run).best
    assert found == {"step": step, "by": by, "score": pytest.approx(value)}
    assert load(run / "checkpoints" / BEST).step == step
    assert read_run(run).best == summarize(run).best == (step, pytest.approx(value))
    assert repr(read_run(run)).endswith(f", best {by} {value:.4f} at step {step})")
    assert summarize(run).best_by == by
    assert score(run, step, read_run(run).config.eval.best_tag) == pytest.approx(value)
    log = (run / "train.log").read_text()
    assert log.count(f"  best {by} {value:.4f} at step {step}\n") == 4 - step
    assert f"step 1  mIoU 0.5000  {'' if name == 'miou' else by}" in log
    assert "eval.best" not in log  # all classes are labelled
    tag = {"miou": "mIoU", "mdice": "mDice", "classes": "IoU_of_best"}[name]
    rest = [sum(iou[1:]) / 3 for iou in IOU]  # of eval.without
    assert losses(run, "eval/mIoU_without") == pytest.approx(rest)
    assert TOLD[name][1] == {f"best/{tag}": pytest.approx(value), "best/step": step}
    assert re.search(rf"train 3/3  loss .*  best {by} 0\.\d\d\d  lr ", log)


def test_runs_compare_and_report_name_the_score(runs, lab):
    listed = lab.done("runs", runs).out
    for step, value, by in BEST_OF.values():
        assert re.search(rf"  {by} {value:.4f} +{step} +3/3  ", listed)
    said = lab.done("compare", runs / "mdice", runs / "classes", "--device", "cpu").out
    a, b, *lines = said.splitlines()
    assert a.endswith("; best.pt chosen by mDice")
    assert b.endswith("; best.pt chosen by IoU of water, sand")
    assert "config      eval.best: mdice in A, [water, sand] in B" in lines
    page = report_page([evaluated(runs / "mdice", torch.device("cpu"))], torch.device("cpu"))
    assert "of 3 steps, the best by mDice</div>" in page


def test_a_population_goes_by_the_score(runs, tmp_path, capsys):
    config = load_config(runs / "mdice.yaml")
    history = History(members=2, every=2, perturb=[], alone=False, config=config)
    shutil.copytree(runs / "mdice", tmp_path / "member_1")
    args = argparse.Namespace(nproc=1, device="cpu", at_once=1)
    Population(tmp_path, history, args)._record(1, 0, 0)
    assert history.rounds[0].rows[1].score == DICE[1]
    assert capsys.readouterr().err == "segtrain: step 2  member_1  mDice 0.2000  \n"
    assert table(history)[0].split() == ["round", "step", "member", "mDice", "takes_from"]


def test_a_config_that_says_no_score_is_of_miou(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {steps: 4}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "eval/mIoU": 0.5, "eval/mDice": 0.7}\n')
    assert summarize(tmp_path).best == (4, 0.5)
    assert summarize(tmp_path).steps == 4


def test_a_run_cannot_go_on_with_another_score(runs, tmp_path):
    """Whether an earlier evaluation would have been the best is lost."""
    config = override_config(load_config(runs / "miou.yaml"), ["eval.best=mdice"], source="c")
    written = write_config(tmp_path / "c.yaml", json.loads(config.model_dump_json()))
    (kind, _, said) = refusal(lambda: train(written, runs / "miou", True, accept_changes=True))
    assert kind == "CheckpointError"
    assert "does not hold the state that these changes need\n  eval.best: miou there, mdice" in said


def test_a_class_that_does_not_exist_is_refused_with_those_that_do(runs, tmp_path):
    options = small(runs / "data", eval={"best": ["water", "sands"]})
    config = write_config(tmp_path / "c.yaml", options)
    said = "eval.best: no class sands; did you mean sand?; the classes are ground, plant, water, "
    kind, _, found = refusal(train, config, tmp_path / "run")
    assert kind == "ConfigError"
    assert said in found
    assert segtrain("data", "check", config, "--json", tmp_path / "x.json") == 3
    assert said in (tmp_path / "x.json").read_text()


@pytest.mark.parametrize(
    ("best", "said", "tag"),
    [
        (["mud", "sand"], "left out of this score", "eval/IoU/sand"),
        (["mud"], "best.pt is chosen by mIoU instead", "eval/mIoU"),
    ],
)
def test_classes_that_no_label_shows_choose_nothing(runs, tmp_path, best, said, tag):
    """Their IoU is 0 or missing by whether a pixel is predicted so."""
    data = Path(runs / "data")
    options = small(data, train={"steps": 1}, eval={"best": best})
    options["data"]["classes"] = str(tmp_path / "classes.yaml")
    text = (data / "classes.yaml").read_text().replace("sand]", "sand, mud]")
    (tmp_path / "classes.yaml").write_text(text)
    assert train(write_config(tmp_path / "c.yaml", options), tmp_path / "run") == 0
    log = (tmp_path / "run/train.log").read_text()
    assert f"warning: eval.best: no label of val shows mud: {said}" in log
    assert last(tmp_path / "run").best["score"] == losses(tmp_path / "run", tag)[0]


def test_the_progress_shows_the_best_score_of_the_evaluation_that_has_just_been(runs):
    logged, evaluated, *_ = (words for words in SHOWN if words.startswith("loss"))
    assert "best" not in logged
    assert f"best mIoU {losses(runs / 'miou', 'eval/mIoU')[0]:.3f}" in evaluated
