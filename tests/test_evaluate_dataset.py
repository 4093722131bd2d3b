import threading
import time
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from segtrain.data.read.classes import load_class_file
from segtrain.distributed import collectives as dist
from segtrain.errors import DataError
from segtrain.inference import predictor as predictor_module
from segtrain.inference.predictor import for_scores
from segtrain.inference.settings import InferenceSettings
from segtrain.metrics import ConfusionMatrix
from segtrain.one_vs_rest import CurveCounts
from segtrain.run.console import ProgressBar
from segtrain.score import scoring as dataset_module
from segtrain.score.scoring import evaluate_dataset, shard
from segtrain.score.surfaces import SurfaceScores
from segtrain.task.score_table import InstanceCounts, group_scores
from segtrain.types import IGNORE_INDEX, SegLogits

CLASSES = 4
CPU = torch.device("cpu")
SETTINGS = InferenceSettings(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


class RedModel(nn.Module):
    """Takes the red channel for the class, and remembers in which modes it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.frozen = nn.BatchNorm2d(3).eval()
        self.modes: list[bool] = []

    def forward(self, images):
        self.modes.append(self.training or self.dropout.training)
        classes = torch.arange(CLASSES, device=images.device).view(1, -1, 1, 1)
        return SegLogits(-(images[:, :1] - classes).abs())


class RedImages:
    """Images whose red channel is the label plus some errors, made when they are asked for."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int):
        rng = np.random.default_rng(index)
        height, width = 7 + index % 3, 11 + index % 2
        label = rng.integers(0, CLASSES, (height, width), dtype=np.uint8)
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image[..., 0] = np.where(rng.random(label.shape) < 0.7, label, CLASSES - 1 - label)
        label[rng.random(label.shape) < 0.1] = IGNORE_INDEX
        return image, label


def evaluate(dataset, model=None, settings=SETTINGS, **options):
    return outcome_of(dataset, model, settings, **options).matrix


def outcome_of(dataset, model=None, settings=SETTINGS, **options):
    how = {key: options.pop(key) for key in ("at_once", "mode_is_given") if key in options}
    predictor = for_scores(model or RedModel(), settings, CPU, CLASSES, **how)
    return evaluate_dataset(predictor, dataset, at_once=how.get("at_once", 1), **options)


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_images_are_counted_alone_and_with_their_probabilities(mode):
    """Pixel by pixel against softmax in float64."""
    settings = replace(SETTINGS, mode=mode, crop_size=(6, 8))
    outcome = outcome_of(RedImages(5), settings=settings)
    expected = np.zeros((5, CLASSES, 3), np.int64)
    known, right = [], []
    for i in range(5):
        image, label = RedImages(5)[i]
        valid = label != IGNORE_INDEX
        for k in range(CLASSES):
            masks = (label == k) & valid, (image[..., 0] == k) & valid
            expected[i, k] = [(masks[0] & masks[1]).sum(), masks[0].sum(), masks[1].sum()]
        scores = np.exp(-np.abs(image[..., :1].astype(float) - np.arange(CLASSES)))
        known.append((scores.max(2) / scores.sum(2))[valid])
        right.append((image[..., 0] == label)[valid])
    assert np.array_equal(outcome.images.numpy(), expected)
    bins = np.minimum(np.concatenate(known) * 960, 959).astype(int)
    cells = np.bincount(bins + 960 * np.concatenate(right), minlength=1920).reshape(2, 960)
    assert np.array_equal(outcome.calibration.counts.numpy(), cells)


@pytest.mark.parametrize("mode_is_given", [False, True])
def test_images_that_do_not_fit_as_a_whole_go_by_windows(monkeypatch, capsys, mode_is_given):
    """Those of 9 rows. The windows are those of mode slide, and a warning counts the images."""
    settings = replace(SETTINGS, crop_size=(5, 6))
    monkeypatch.setattr(predictor_module, "fitting_pixels", lambda *_: 8 * 12)
    seen, model = [], RedModel()
    model.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape[2:])))
    outcome = outcome_of(RedImages(9), model, settings, mode_is_given=mode_is_given)
    assert outcome.num_by_windows == (0 if mode_is_given else 3)
    whole = {(7, 11), (7, 12), (8, 11), (8, 12)}
    large = {(9, 11), (9, 12)} if mode_is_given else {(5, 6)}
    assert set(seen) == whole | large
    said = "".join(capsys.readouterr())
    assert ("3 images did not fit into memory as a whole" in said) is not mode_is_given
    assert ("sliding window 5x6" in said) is not mode_is_given


@pytest.mark.fault(71)
def test_every_image_falls_to_exactly_one_rank():
    for num_images, world_size, group in product((0, 1, 3, 10, 11), (1, 2, 3, 4), (1, 2, 4)):
        shares = [shard(num_images, rank, world_size, group=group) for rank in range(world_size)]
        groups = [indices for share in shares for indices in share]
        assert sorted(i for indices in groups for i in indices) == list(range(num_images))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert sorted(groups, key=min) == shard(num_images, 0, 1, group=group)


def test_batches_are_the_same_on_any_number_of_ranks(monkeypatch):
    """A kernel may compute an image in another way where others are beside it."""
    settings = replace(SETTINGS, mode="whole", batch_size=2)

    class Equal(RedImages):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image[:7, :11].copy(), label[:7, :11].copy()

    def batches(world_size):
        model, seen = RedModel(), []
        model.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numpy().tolist()))
        monkeypatch.setattr(dist, "world_size", lambda: world_size)
        for rank in range(world_size):
            monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
            evaluate(Equal(10), model, settings)
        return sorted(seen)

    sizes = [len(batch) for batch in batches(1)]
    assert set(sizes) == {2}
    assert batches(1) == batches(2) == batches(4)


def test_two_images_are_decoded_and_one_written_while_one_is_predicted():
    """Each of the four waits for the others, which one thread could not answer."""
    meeting = threading.Barrier(4)

    class Meeting(RedImages):
        def __getitem__(self, index):
            if index in (2, 3):
                meeting.wait(timeout=20)
            return super().__getitem__(index)

    class Model(RedModel):
        def forward(self, images):
            if len(self.modes) == 1:  # of image 1
                meeting.wait(timeout=20)
            return super().forward(images)

    def write(prediction):
        if prediction.index == 0:
            meeting.wait(timeout=20)

    assert evaluate(Meeting(4), Model(), num_threads=2, callbacks=[write]).counts.sum() > 0


def test_scores_that_are_not_finite_are_warned_of(capsys):
    class Overflowing(RedModel):
        def forward(self, images):
            logits = super().forward(images).out
            return SegLogits(torch.where(images[:, :1].sum() % 2 == 0, logits, logits / 0))

    odd = sum(int(RedImages(9)[i][0][..., 0].sum()) % 2 for i in range(9))
    evaluate(RedImages(9), Overflowing())
    assert 0 < odd < 9
    said = f"the scores of {odd} images are not finite numbers: the weights, or"
    assert said in capsys.readouterr().out
    evaluate(RedImages(9))
    assert "finite" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_threads", "mode", "batch_size"),
    [(1, "whole", None), (3, "whole", 4), (2, "slide", 100)],
)
def test_predictions_come_in_order_with_their_image(num_threads, mode, batch_size):
    seen, expected = [], ConfusionMatrix(CLASSES)
    settings = replace(SETTINGS, mode=mode, crop_size=(6, 8), batch_size=batch_size)
    options = {"num_threads": num_threads, "callbacks": [seen.append]}
    matrix = evaluate(RedImages(6), settings=settings, **options)
    assert [p.index for p in seen] == list(range(6))
    for p in seen:
        image, label = RedImages(6)[p.index]
        assert np.array_equal(p.image, image)
        assert np.array_equal(p.label, label)
        assert p.pred.dtype == np.uint8
        assert np.array_equal(p.pred, image[..., 0])
        expected.update(torch.from_numpy(p.pred), torch.from_numpy(label))
    assert torch.equal(matrix.counts, expected.counts)


def test_memory_does_not_grow_with_the_number_of_images():
    alive, most = weakref.WeakSet(), []

    class Array(np.ndarray):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    class Tracked(RedImages):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            kept = image.view(Array)
            alive.add(kept)
            return kept, label

    def count(_):
        time.sleep(0.005)  # the model is faster
        most.append(len(alive))

    evaluate(Tracked(40), num_threads=2, callbacks=[count])
    assert len(most) == 40
    assert 4 <= max(most) <= 8


def test_after_an_error_the_model_has_its_modes_back_and_no_thread_is_left():
    class Broken(RedImages):
        def __getitem__(self, index):
            if index == 3:
                raise DataError("3.png: damaged")
            return super().__getitem__(index)

    def fail(_):
        raise RuntimeError("the disk is full")

    model, seen, before = RedModel(), [], threading.active_count()
    with pytest.raises(RuntimeError, match="disk"):
        evaluate(RedImages(9), model, num_threads=4, callbacks=[fail])
    with pytest.raises(DataError, match=r"3\.png: damaged"):
        evaluate(Broken(9), model, callbacks=[lambda p: seen.append(p.index)])
    assert seen == [0, 1, 2]
    assert set(model.modes) == {False}
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    assert threading.active_count() == before


def test_a_label_smaller_than_the_image_is_compared_at_its_own_size():
    class Halved(RedImages):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image.repeat(2, axis=0).repeat(2, axis=1), label

    seen = []
    evaluate(Halved(2), callbacks=[seen.append])
    assert all(p.pred.shape == p.label.shape for p in seen)


def counted(num_images):
    """All that an evaluation counts; and of the progress the total and what the updates come to."""
    progress, curves, classes = [], CurveCounts(CLASSES), load_class_file("cityscapes")
    surfaces, instances = SurfaceScores("abcd", 1.0), InstanceCounts(classes, [])

    class Bar(ProgressBar):
        def __init__(self, total, *args, **how):
            progress.append(total)
            super().__init__(total, *args, **how)

        def update(self, count=1):
            progress.append(count)

    def add(prediction):
        """Of an instance in each column, of the classes 11 to 14 of Cityscapes."""
        surfaces.add(prediction)
        label = prediction.label
        ids = 1000 * (24 + label.astype(np.uint16)) + np.arange(label.shape[1])
        ids[label == IGNORE_INDEX] = 0
        instances.update(prediction.pred + 11, ids.astype(np.uint16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_module, "ProgressBar", Bar)
        options = {"callbacks": [add], "curves": curves, "progress": True}
        outcome = outcome_of(RedImages(num_images), **options)
    surfaces.sum_over_ranks()
    instances.sum_over_ranks()
    matrix = ConfusionMatrix(19)
    matrix.counts[11:15, 11:15] = outcome.matrix.counts
    counts = outcome.matrix.counts, outcome.calibration.counts, outcome.images, curves.counts
    scores = group_scores(matrix, classes, instances), surfaces.to_dict()
    return repr([*(x.tolist() for x in counts), *scores]), (progress[0], sum(progress[1:]))


def counted_of_each(*numbers):
    return [counted(number) for number in numbers]


def test_ranks_count_to_the_bit_what_one_counts_and_show_the_progress_of_all(run_ranks):
    """Of two images the third rank has none."""
    alone = counted_of_each(2, 5)
    assert [progress for _, progress in alone] == [(2, 2), (5, 5)]
    first, *others = run_ranks(3, counted_of_each, 2, 5)
    assert first == alone
    for of_rank in others:
        assert [counts for counts, _ in of_rank] == [counts for counts, _ in alone]
