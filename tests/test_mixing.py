"""Samples made of two images; test_invariance has whole runs."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from segtrain.config import AugmentConfig, DataConfig
from segtrain.data import open_dataset
from segtrain.data.read.image import ImageForm
from segtrain.data.sample.centroids import measure_centroids
from segtrain.data.sample.geometry import Placement, Span
from segtrain.data.sample.loader import TrainLoader
from segtrain.data.sample.stream import ClassUniform, TrainStream, draw_partner, paste_classes
from segtrain.data.sample.transforms import Crop, TrainTransform
from segtrain.distributed.layout import Layout, even
from segtrain.types import IGNORE_INDEX, Batch

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

CPU = torch.device("cpu")
WHERE = Placement(Span(6, 6, 6), Span(9, 9, 9))


def crops(seed, classes=(0, 1, 2, 5, IGNORE_INDEX)):
    rng = np.random.default_rng(seed)
    labels = rng.choice(np.array(classes, np.uint8), (2, 6, 9))
    images = rng.integers(256, size=(2, 6, 9, 3), dtype=np.uint8)
    return [Crop(image, label, WHERE) for image, label in zip(images, labels, strict=True)]


def test_half_of_the_partners_classes_are_pasted_with_their_labels():
    counts = Counter()
    for i in range(60):
        crop, partner = crops(i)
        mixed = paste_classes(crop, partner, np.random.default_rng(i))
        chosen = set(np.unique(partner.label[mixed.pasted]).tolist())
        counts.update(chosen)
        assert len(chosen) == 2
        assert IGNORE_INDEX not in chosen
        # generate_class_mask of the authors' utils/transformmasks.py
        mask = (partner.label[None] == np.array(list(chosen))[:, None, None]).sum(0).astype(bool)
        np.testing.assert_array_equal(mixed.pasted, mask)
        np.testing.assert_array_equal(mixed.label[mask], partner.label[mask])
        np.testing.assert_array_equal(mixed.label[~mask], crop.label[~mask])
        np.testing.assert_array_equal(mixed.image[mask], partner.image[mask])
        np.testing.assert_array_equal(mixed.image[~mask], crop.image[~mask])
    assert counts.keys() == {0, 1, 2, 5}
    assert min(counts.values()) > 15


@pytest.mark.parametrize(("classes", "pasted"), [((3, 255), 0), ((255,), 0), ((0, 1, 2), 1)])
def test_half_of_the_classes_is_rounded_down(classes, pasted):
    crop, partner = crops(0, classes)
    mixed = paste_classes(crop, partner, np.random.default_rng(0))
    assert len(np.unique(partner.label[mixed.pasted])) == pasted


def test_what_is_pasted_on_the_padding_stays_when_colours_change():
    augment = AugmentConfig(
        crop_size=(20, 20), scale_range=(1.0, 1.0), color_jitter=(1.0, 0.5, 0.5, 0.1), color_prob=1
    )
    transform = TrainTransform(augment, form=ImageForm(mean=(9, 9, 9)))
    crop = transform.crop(
        np.full((8, 8, 3), 90, np.uint8), np.zeros((8, 8), np.uint8), np.random.default_rng(0)
    )
    label = np.zeros((20, 20), np.uint8)
    label[:, 10:] = 1
    partner = Crop(np.full((20, 20, 3), 130, np.uint8), label, WHERE)
    mixed = paste_classes(crop, partner, np.random.default_rng(0))
    image = transform.recolored(mixed, np.random.default_rng(1))
    padding = (crop.label == IGNORE_INDEX) & ~mixed.pasted
    assert padding.any()
    assert (image[padding] == 9).all()
    assert (crop.label[mixed.pasted] == IGNORE_INDEX).any()
    assert len(np.unique(image[mixed.pasted], axis=0)) == 1
    assert (image[mixed.pasted] != 9).all()


def test_a_partner_is_any_other_image():
    rng = np.random.default_rng(0)
    drawn = [draw_partner(rng, 4, avoid=1, class_uniform=None).index for _ in range(3000)]
    counts = Counter(drawn)
    assert counts.keys() == {0, 2, 3}
    assert min(counts.values()) > 900
    assert draw_partner(rng, 1, avoid=0, class_uniform=None) == (0, None)


@pytest.fixture(scope="module")
def everything(data):
    """`everything(**options)`: a stream in which all is mixed that can be."""
    options = {"layout": "folders", "root": str(data), "classes": str(data / "classes.yaml")}
    dataset = open_dataset(DataConfig(**options), "train")
    centroids = measure_centroids(dataset, 32, data / "c.json", device=CPU, keep=lambda _: False)
    augment = AugmentConfig(
        crop_size=(25, 33), scale_range=(0.6, 1.5), rotate_deg=10.0, color_prob=0.5
    )
    defaults = {"class_mix_prob": 0.6, "class_uniform": ClassUniform(centroids, fraction=0.4)}

    def made(**changed):
        transform = TrainTransform(augment, form=ImageForm(mean=(120, 120, 120)))
        return TrainStream(dataset, transform, stream_seed=7, batch_size=5, **defaults | changed)

    return made


def batches(stream, rank=0, world_size=1, num_workers=0, start_step=0):
    return list(
        TrainLoader(
            stream,
            indices=Layout(5, 1, even(world_size)).positions(rank),
            start_step=start_step,
            steps=4,
            num_workers=num_workers,
            pin_memory=False,
            timeout_s=60,
        )
    )


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.names == other.names
        assert one.pixels == other.pixels
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def joined(parts):
    images, labels, names, _, pixels = zip(*parts, strict=True)
    names = list(chain.from_iterable(names))
    return Batch(torch.cat(images), torch.cat(labels), names, pixels=sum(pixels))


def test_neither_ranks_nor_workers_nor_a_resumption_change_a_batch(everything):
    stream = everything(hashes=True)
    whole = batches(stream)
    ranks = [batches(stream, rank, 3) for rank in range(3)]
    assert_same([joined(parts) for parts in zip(*ranks, strict=True)], whole)
    assert_same(batches(stream, 1, 2, num_workers=1), batches(stream, 1, 2))
    assert_same(batches(stream, num_workers=2, start_step=2), whole[2:])
    assert [batch.names for batch in whole] == [stream.names_of_step(step) for step in range(4)]
    assert any(name.count(" + ") == 1 for batch in whole for name in batch.names)


def test_mixing_changes_nothing_else(everything):
    plain = batches(everything(class_mix_prob=0.0))
    pasted = batches(everything(class_mix_prob=1.0))
    for one, other in zip(plain, pasted, strict=True):
        same = other.labels == one.labels
        assert 0.5 < same.double().mean() < 1
        # A pasted pixel can have the label that was there.
        assert (other.images == one.images).all(1)[same].double().mean() > 0.5
        assert not (other.images == one.images).all(1)[~same].all()
