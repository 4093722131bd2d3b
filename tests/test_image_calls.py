"""Recall and false alarms by image, beside every threshold of every image by SciPy."""

import cv2
import numpy as np
import pytest
import torch
from scipy import ndimage
from test_evaluate import ColorModel, cityscapes, command, know_the_colors, scene

from segtrain.data.read.classes import load_class_file
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.score.image_calls import ImageCalls
from segtrain.task.tasks import task_of
from segtrain.types import IGNORE_INDEX

__all__ = ["cityscapes", "command", "know_the_colors"]  # fixtures
NAMES, SIZE = ["good", "crack"], (23, 31)
IMAGES = [f"part{i}" for i in range(24)]
ALL = range(24)


def part(index):
    """Probabilities (2, h, w) and the label (h, w) of a part, of which half show a crack."""
    rng = np.random.default_rng(index)
    label = np.zeros(SIZE, np.uint8)
    if index % 2:
        size = int(rng.integers(1, 6))
        y, x = (int(rng.integers(side - size)) for side in SIZE)
        label[y : y + size, x : x + size] = 1
    noise = cv2.GaussianBlur(rng.random(SIZE) + 0.45 * label, (0, 0), 0.8)
    p = np.clip(noise, 0, 1).astype(np.float32)
    label[rng.random(SIZE) < 0.03] = IGNORE_INDEX
    if index == 6:
        label[:] = IGNORE_INDEX  # is in no count
    return np.stack([1 - p, p]), label


def largest(mask):
    numbers, count = ndimage.label(mask, np.ones((3, 3)))
    return max(np.bincount(numbers.ravel())[1:], default=0) if count else 0


def truth(least_px):
    """Whether each part shows a crack, and whether it is called so at the thresholds i / 1024."""
    found = {}
    for i, name in enumerate(IMAGES):
        (_, p), label = part(i)
        valid = label != IGNORE_INDEX
        if valid.any():
            levels = [(p >= np.float32(t / 1024)) & valid for t in range(1, 1024)]
            is_called = [largest(level) >= least_px for level in levels]
            found[name] = largest(label == 1) >= least_px, np.array(is_called)
    return found


def answer(least_px, *, recall, is_multilabel=False, images=ALL):
    calls = ImageCalls(1, "crack", recall, least_px)
    for i in images:
        p, label = part(i)
        if is_multilabel:
            label = np.where(label == IGNORE_INDEX, label, label == 1)
            label = np.stack([np.zeros_like(label), label], -1).astype(np.uint8)
        calls.add(i, torch.from_numpy(p), torch.from_numpy(label))
    calls.sum_over_ranks()
    return calls.answer(IMAGES, task_of("multilabel" if is_multilabel else "semantic"))


@pytest.mark.parametrize("is_multilabel", [False, True])
@pytest.mark.parametrize("least_px", [1, 6])
@pytest.mark.parametrize("recall", [0.7, 1.0])
def test_the_threshold_and_the_wrong_images_are_those_of_a_try_of_all(
    least_px, recall, is_multilabel
):
    lines, found = answer(least_px, recall=recall, is_multilabel=is_multilabel)
    images = truth(least_px)
    shows, called = (np.array(x) for x in zip(*images.values(), strict=True))
    recalls = called[shows].mean(0)  # at 1/1024, 2/1024 ...
    best = np.flatnonzero(recalls >= recall).max()
    assert found["threshold"] == (best + 1) / 1024
    assert found["recall"] == recalls[best]
    assert found["false_alarm_share"] == called[~shows].mean(0)[best]
    assert found["missed"] == [x for x, (is_, by) in images.items() if is_ and not by[best]]
    assert found["false_alarms"] == [x for x, (is_, by) in images.items() if by[best] and not is_]
    assert (found["images_with"], found["images_without"]) == (shows.sum(), (~shows).sum())
    assert len(images) == len(IMAGES) - 1
    assert lines[1] == "warning: crack by image: fewer than 20 tell little about a share"
    wrong = f"false alarms {found['false_alarm_share']:.2%} ({len(found['false_alarms'])})"
    right = f"recall {found['recall']:.2%} ({called[shows][:, best].sum()})"
    assert f"crack by image: {right}, {wrong} by " in lines[2]
    option = "{} in eval.thresholds" if is_multilabel else "predict --threshold crack={}"
    assert lines[2].endswith("by " + option.format(found["threshold"]))


def test_pixels_touch_at_corners_as_in_tables_of_predict():
    label = np.eye(5, dtype=np.uint8)
    p = torch.from_numpy(np.stack([1 - 0.5 * label, 0.5 * label]).astype(np.float32))
    for least_px, found in ((5, 1), (6, 0)):
        calls = ImageCalls(1, "crack", 1.0, least_px)
        calls.add(0, p, torch.from_numpy(label))
        _, json = calls.answer(IMAGES, task_of("semantic"))
        assert (json["images_with"], json["threshold"]) == (found, 0.5 if found else None)


def test_what_no_threshold_has_and_images_of_one_kind_are_said():
    lines, found = answer(6, recall=0.5, images=ALL[::2])
    assert (found["images_with"], found["threshold"]) == (0, None)
    assert lines[-1] == "crack by image: no threshold has a recall of 50.00%"
    lines, found = answer(1, recall=1.0, images=ALL[1::2])
    assert found["false_alarm_share"] is None
    assert "false alarms unknown by predict" in lines[2]


def of_rank():
    return answer(6, recall=0.7, images=ALL[dist.rank() :: 2])


def test_all_ranks_have_the_answer_of_one(run_ranks):
    assert run_ranks(2, of_rank) == [answer(6, recall=0.7)] * 2


def test_eval_tells_of_images_beside_pixels(command, cityscapes, capsys):
    """The model is a softmax of colours: probabilities are computed anew from the images."""
    found = command(class_name="bus", recall=0.01, min_area=2)["by_image"]
    assert found["images_with"] == 0  # no label shows one
    found = command(class_name="person", recall=1.0, min_area=3)["by_image"]
    assert "person by image, objects from 3 px on: 3 show it, 0 do not" in capsys.readouterr().out
    classes = load_class_file("cityscapes")
    person, highest = classes.names.index("person"), []
    for i in range(3):
        image, label = scene(i, classes)
        with torch.no_grad():
            logits = ColorModel(classes)(torch.from_numpy(image).permute(2, 0, 1)[None] / 255)
        p = logits.out.softmax(1)[0, person].numpy()
        p[~np.isin(label, [x for one in classes.classes for x in one.ids])] = 0
        levels = [largest(p >= t / 1024) >= 3 for t in range(1, 1024)]
        highest.append(np.flatnonzero(levels).max() + 1)
    assert found["threshold"] == pytest.approx(min(highest) / 1024, abs=1 / 1024)
    assert found["missed"] == []
    assert "by_image" not in command()
    with pytest.raises(ConfigError, match="--min-area: serves only --recall X"):
        command(min_area=3)
