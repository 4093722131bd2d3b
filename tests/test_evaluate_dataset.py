import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.errors import DataError
from segtrain.evaluation.dataset import evaluate_dataset, shard
from segtrain.evaluation.settings import InferenceSettings
from segtrain.metrics import ConfusionMatrix
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


def evaluate(dataset, model=None, **options):
    return evaluate_dataset(
        model or RedModel(), dataset, SETTINGS, device=CPU, num_classes=CLASSES, **options
    )


@pytest.mark.fault(71)
@pytest.mark.parametrize("num_images", [0, 1, 3, 10, 11])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_image_falls_to_exactly_one_rank(num_images, world_size):
    shares = [shard(num_images, rank, world_size) for rank in range(world_size)]
    assert sorted(i for share in shares for i in share) == list(range(num_images))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_matrix_counts_the_pixels_of_all_images():
    expected = ConfusionMatrix(CLASSES)
    for image, label in (RedImages(5)[i] for i in range(5)):
        expected.update(torch.from_numpy(image[..., 0].copy()), torch.from_numpy(label))
    assert torch.equal(evaluate(RedImages(5)).counts, expected.counts)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shares_of_the_ranks_add_up_to_the_whole(world_size, monkeypatch):
    whole = evaluate(RedImages(7))
    total, seen = ConfusionMatrix(CLASSES), []
    monkeypatch.setattr(dist, "world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        matrix = evaluate(RedImages(7), callbacks=[lambda p: seen.append(p.index)])
        total.counts += matrix.counts
    assert sorted(seen) == list(range(7))
    assert torch.equal(total.counts, whole.counts)


def test_a_rank_without_images_counts_nothing(monkeypatch):
    monkeypatch.setattr(dist, "world_size", lambda: 3)
    monkeypatch.setattr(dist, "rank", lambda: 2)
    assert evaluate(RedImages(2)).counts.sum() == 0


def test_the_sum_over_ranks_is_taken_once(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "all_reduce_sum", lambda tensor: calls.append(tensor) or tensor)
    matrix = evaluate(RedImages(3))
    assert len(calls) == 1
    assert calls[0] is matrix.counts


@pytest.mark.parametrize("num_threads", [1, 3])
def test_predictions_come_in_order_with_their_image(num_threads):
    seen = []
    evaluate(RedImages(6), num_threads=num_threads, callbacks=[seen.append])
    assert [p.index for p in seen] == list(range(6))
    for p in seen:
        image, label = RedImages(6)[p.index]
        assert np.array_equal(p.image, image)
        assert np.array_equal(p.label, label)
        assert p.pred.dtype == np.uint8
        assert np.array_equal(p.pred, image[..., 0])


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
        gc.collect()
        most.append(len(alive))

    evaluate(Tracked(20), num_threads=2, callbacks=[count])
    assert len(most) == 20
    assert max(most) <= 5


def test_the_next_image_is_decoded_while_one_is_still_decoding():
    second = threading.Event()

    class Waiting(RedImages):
        def __getitem__(self, index):
            if index == 1:
                second.set()
            assert index != 0 or second.wait(timeout=20)
            return super().__getitem__(index)

    assert evaluate(Waiting(3), num_threads=2).counts.sum() > 0


def test_model_is_evaluated_and_gets_its_modes_back():
    model = RedModel()
    evaluate(RedImages(2), model)
    assert model.modes == [False, False]
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training


def test_modes_come_back_after_an_error_which_is_passed_on_as_it_is():
    class Broken(RedImages):
        def __getitem__(self, index):
            if index == 3:
                raise DataError("3.png: damaged")
            return super().__getitem__(index)

    model, seen = RedModel(), []
    with pytest.raises(DataError, match=r"3\.png: damaged"):
        evaluate(Broken(9), model, callbacks=[lambda p: seen.append(p.index)])
    assert seen == [0, 1, 2]
    assert model.training


def test_no_thread_is_left_behind():
    before = threading.active_count()

    def fail(_):
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        evaluate(RedImages(9), num_threads=4, callbacks=[fail])
    assert threading.active_count() == before


def test_a_label_smaller_than_the_image_is_compared_at_its_own_size():
    class Halved(RedImages):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image.repeat(2, axis=0).repeat(2, axis=1), label

    seen = []
    evaluate(Halved(2), callbacks=[seen.append])
    assert all(p.pred.shape == p.label.shape for p in seen)
