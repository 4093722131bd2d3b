"""`segtrain suspects`: masks that the model does not believe."""

import functools
import re
import shutil
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments import COLORS, small, train, write_config, write_data

from segtrain.checkpoint import load_model
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.desk.commands import suspects as command
from segtrain.desk.results.cards import split_predictor
from segtrain.desk.results.suspects import (
    OUTLIER,
    best_shift,
    claims,
    class_sums,
    disputed,
    measure,
    modified_z,
    rank,
)
from segtrain.errors import CheckpointError
from segtrain.models.blocks import Normalize
from segtrain.types import IGNORE_INDEX

NAMES = ["ground", "plant", "water", "sand"]


def blobs(seed=0, size=(80, 120)):
    """A label of soft shapes of four classes, some of it ignored."""
    rng = np.random.default_rng(seed)
    fields = [cv2.GaussianBlur(rng.normal(size=size), (0, 0), 7) for _ in NAMES]
    label = np.argmax(fields, axis=0).astype(np.uint8)
    label[:6, :30] = IGNORE_INDEX
    return label


def test_the_score_is_the_modified_z_of_the_logarithm():
    from scipy import stats

    mean = np.random.default_rng(0).lognormal(size=(40, 2))
    mean[::7, 1] = np.nan
    usual, score = modified_z(mean, np.full(mean.shape, 0.3))
    for k in range(2):
        known = np.log(mean[np.isfinite(mean[:, k]), k] + 0.01)
        spread = stats.median_abs_deviation(known, scale="normal")
        expected = (known - np.median(known)) / spread
        assert score[np.isfinite(mean[:, k]), k] == pytest.approx(expected, rel=1e-3)
        assert usual[k] == np.nanmedian(mean[:, k])
    assert np.array_equal(np.isnan(score), np.isnan(mean))
    alike = np.array([[0.5], [0.5], [0.6]])
    assert modified_z(alike, np.ones((3, 1)))[1].max() < 2  # no deviation at all
    few, many = modified_z(mean[:2], np.array([[0.1, 0.1], [0.5, 0.5]]))[1][:, 0]
    assert abs(many) == pytest.approx(5 * abs(few))


def sums(images=20, classes=3):
    """Losses of about 0.1 a pixel, and pixels."""
    pixels = np.full((images, classes), 1000.0)
    return pixels * np.random.default_rng(1).uniform(0.05, 0.15, pixels.shape), pixels


def test_the_worst_class_of_an_image_decides():
    losses, pixels = sums()
    losses[7, 1], losses[3, 2] = 3000.0, 600.0
    found = rank(losses, pixels)
    first, second, *_, final = found.suspects
    assert (first.index, first.class_id, first.loss) == (7, 1, 3.0)
    assert first.usual == pytest.approx(0.1, abs=0.02)
    assert (second.index, second.class_id) == (3, 2)
    assert (first.stands_out, second.stands_out, final.stands_out) == (True, True, False)
    assert first.score > second.score > OUTLIER
    assert (len(found.suspects), found.unseen) == (20, 0)


def test_an_image_that_hardly_shows_a_class_is_not_judged_by_it():
    losses, pixels = sums()
    losses[7, 1], pixels[7, 1] = 300.0, 3.0
    losses[5], pixels[5] = 0.0, 0.0
    pixels[7:, 2], losses[4, 2] = 0.0, 9000.0  # a class of seven images
    found = rank(losses, pixels)
    assert found.unseen == 1
    assert not found.suspects[0].stands_out
    assert [one.class_id for one in found.suspects if one.index == 7] == [0]
    assert rank(*np.zeros((2, 20, 3))).suspects == []


def test_the_losses_of_a_class_are_the_cross_entropy_of_its_pixels():
    label = blobs()
    logits = 5 * torch.randn(4, *label.shape, generator=torch.Generator().manual_seed(0))
    classes = torch.from_numpy(label).long()
    found = class_sums(logits.softmax(0), label)
    for k in range(4):
        alone = torch.where(classes == k, k, IGNORE_INDEX).unsqueeze(0)
        options = {"ignore_index": IGNORE_INDEX, "reduction": "sum"}
        wanted = F.cross_entropy(logits.double().unsqueeze(0), alone, **options)
        assert found[0, k] == pytest.approx(wanted.item(), rel=1e-5)
        assert found[1, k] == (label == k).sum() > 0
    impossible = class_sums(torch.zeros(4, *label.shape), label)
    assert impossible[0] == pytest.approx(64.5 * found[1], rel=1e-3)


@pytest.mark.parametrize("shift", [(0, 0), (0, 8), (-5, 3), (7, -8)])
def test_a_shift_is_found_in_spite_of_errors(shift):
    true = blobs(size=(140, 190))
    moved, pred = true[20:100, 30:150], true[20 + shift[0] :, 30 + shift[1] :][:80, :120].copy()
    # The mask must move by `shift` the other way.
    noise = np.random.default_rng(3).random(pred.shape) < 0.05
    pred[noise] = 0
    found = best_shift(moved, pred)
    assert (found.down, found.right) == (-shift[0], -shift[1])
    assert found.explains == (shift != (0, 0))
    inner = (slice(8, -8), slice(8, -8))
    assert found.before == pytest.approx((moved == pred)[inner].mean(), abs=1e-12)
    assert best_shift(moved[:16], pred[:16]).explains is False  # all of it is border


def test_claims_name_what_is_swapped_missing_and_another_class():
    true = blobs()

    def said(label, pred=true, sure=0.95):
        probability = np.full(pred.shape, sure)
        return [claim.words for claim in claims(label, pred, probability, NAMES, 1)]

    swapped = true.copy()
    swapped[true == 1], swapped[true == 2] = 2, 1
    probability = np.ones(true.shape)
    both = disputed(swapped, true, probability).mean()  # slivers are left out
    assert both == pytest.approx(np.isin(true, (1, 2)).mean(), abs=0.002)
    assert said(swapped) == [f"plant and water are swapped ({both:.1%} of the image)"]
    unsure = "of plant the model predicts 0% as labelled, 100% as water (80% sure)"
    assert said(swapped, sure=0.8) == [unsure]
    assert said(true) == ["of plant the model predicts 100% as labelled"]

    missing = true.copy()
    missing[20:44, 40:80] = 0
    lines = said(missing)
    gone = {NAMES[k]: ((true == k) & (missing == 0)).mean() for k in (1, 2, 3)}
    assert f"{max(gone, key=gone.get)} is missing here (" in lines[0]
    assert lines[0].endswith("of the image, labelled ground)")

    renamed = np.where(true == 3, 0, true).astype(np.uint8)
    pred = np.where(true == 3, 2, renamed).astype(np.uint8)
    pred[true == 0] = 0
    label = np.where(true == 3, 3, renamed).astype(np.uint8)
    share = disputed(label, pred, probability).mean()
    assert said(label, pred) == [f"sand looks like water ({share:.1%} of the image)"]


def test_slivers_along_borders_are_not_in_dispute():
    label, pred = np.zeros((60, 80), np.uint8), np.zeros((60, 80), np.uint8)
    pred[:, 40:42] = 1
    pred[10:30, 5:25] = 1
    label[12:14, 8:10] = IGNORE_INDEX
    region = disputed(label, pred, np.ones(label.shape))
    assert not region[:, 40:42].any()
    assert 300 < region.sum() <= 400
    assert not region[12:14, 8:10].any()


OF_ONE_SIZE = [cv2.IMWRITE_PNG_COMPRESSION, 0]  # a file with another pixel has as many bytes


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The directory of a run on 24 images, of which two have wrong masks; and its config."""
    root = tmp_path_factory.mktemp("planted")
    write_data(root, 24)
    rng = np.random.default_rng(0)
    for i in range(24):
        label = np.kron(rng.permutation(4).reshape(2, 2), np.ones((20, 24), int))
        colors = COLORS[label % 4] + rng.normal(0, 10, (*label.shape, 3))
        cv2.imwrite(str(root / f"images/train/{i}.png"), colors.clip(0, 255).astype(np.uint8))
        wrong = {3: [2, 1, 0, 3], 17: [0, 2, 1, 3]}.get(i, [0, 1, 2, 3])
        table = np.array([*wrong, *range(4, 256)], np.uint8)
        cv2.imwrite(str(root / f"labels/train/{i}.png"), table[label], OF_ONE_SIZE)
    same = {"max_class_share": 1.0, "rotate_deg": 0.0, "blur_prob": 0.0, "color_prob": 0.0}
    augment = {"crop_size": [33, 41], "scale_range": [1.0, 1.0], **same}
    optim = {"lr": 0.07, "ema_decay": None}
    length = {"steps": 28, "batch_size": 4}
    options = small(root, augment=augment, train=length, optim=optim)
    config = write_config(root / "config.yaml", options)
    assert train(config, root / "run") == 0
    return root / "run", config


@pytest.fixture
def suspects(lab):
    """Runs the command on the CPU."""
    return functools.partial(lab.command, "suspects", "--device", "cpu")


def sources(page):
    """What it would load."""
    return re.findall(r'\b(?:src|href)\s*=\s*"?([^" >]*)', page.read_text())


def test_planted_masks_come_first_and_the_list_leaves_them_out(planted, tmp_path, suspects):
    run, config = planted
    page, listed = tmp_path / "page.html", tmp_path / "wrong.yaml"
    moved = shutil.copytree(config.parent / "images", tmp_path / "moved/images").parent
    words = ("--number", 2, "--output", page, "--exclude", listed, "--set", f"data.root={moved}")
    code, _, error = suspects(run, *words)
    assert (code, str(moved / "labels") in error) == (3, True)
    shutil.copytree(config.parent / "labels", moved / "labels")
    changed = cv2.imread(str(moved / "labels/train/0.png"), cv2.IMREAD_UNCHANGED)
    changed[0, 0] = IGNORE_INDEX
    cv2.imwrite(str(moved / "labels/train/0.png"), changed, OF_ONE_SIZE)
    code, out, _ = suspects(run, *words)
    assert code == 0
    assert "not the data of the training: split train: 1 labels hold something else" in out
    first, second = (line for line in out.splitlines() if "  score " in line)
    code, _, error = suspects(run, *words)  # the list may have been edited, the page not
    assert (code, f"--exclude {listed}: " in error) == (2, True)
    assert {tuple(line.split()[1:3]) for line in (first, second)} == {("*", "3"), ("*", "17")}
    assert "measured by one pass of best.pt, step 28; a wrong mask that" in out
    assert "swapped" in first + second or "looks like" in first + second
    assert all(source.startswith("data:image/webp;base64,") for source in sources(page))
    assert len(sources(page)) == 6
    assert page.read_text().count("stands out</b>") == 2
    expected = load_config(config, [f"data.root={moved}"])
    without = load_config(listed)
    assert set(without.data.train_exclude) == {"3", "17"}
    data = without.data.model_copy(update={"train_exclude": ()})
    assert without.model_copy(update={"data": data}) == expected


def test_each_image_is_measured_as_a_whole_by_the_model_of_the_run(planted):
    run, config = planted
    loaded, data = load_model(run), load_config(config).data
    dataset = open_dataset(data, "train")
    losses, pixels = measure(split_predictor(loaded, torch.device("cpu")), dataset, num_threads=2)
    normalize = Normalize(data.mean, data.std, data.value_range)
    for i in (0, 17):
        image, label = dataset[i]
        assert pixels[i].tolist() == np.bincount(label.ravel(), minlength=4).tolist()
        view = normalize(torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0))
        with torch.no_grad():
            logits = loaded.model(view).out.double()
        wanted = F.cross_entropy(logits, torch.from_numpy(label).long()[None], reduction="sum")
        assert losses[i].sum() == pytest.approx(wanted.item(), rel=1e-4)
    for weight in loaded.model.parameters():
        weight.detach().fill_(torch.inf)
    with pytest.raises(CheckpointError, match="image 0: the scores of the model are not finite"):
        measure(split_predictor(loaded, torch.device("cpu")), dataset, num_threads=2)


def test_where_no_mask_stands_out_no_list_is_written(planted, tmp_path, suspects):
    run, config = planted
    alike, listed = tmp_path / "alike", tmp_path / "wrong.yaml"
    for kind in ("images", "labels"):
        (alike / kind / "train").mkdir(parents=True)
        for i in range(8):
            shutil.copy(config.parent / f"{kind}/train/0.png", alike / f"{kind}/train/{i}.png")
    options = ("--set", f"data.root={alike}", "--exclude", listed)
    code, out, _ = suspects(run, "--number", 1, *options, "--output", tmp_path / "page.html")
    assert code == 0
    assert "0 of 8 images stand out" in out
    assert "wrong.yaml: not written: none stands out" in out
    assert not listed.exists()
    assert "next in rank</b>" in (tmp_path / "page.html").read_text()


def test_what_suspects_cannot_judge_is_refused(planted, tmp_path, suspects):
    run, config = planted
    page = ("--output", tmp_path / "page.html")
    classes = config.parent / "classes.yaml"
    before = classes.read_text()
    classes.write_text(before.replace("water", "lava"))
    found = suspects(run, *page)
    assert (found.code, "lava" in found.err) == (3, True)
    classes.write_text(before)

    for kind in ("images", "labels"):
        (tmp_path / kind / "train").mkdir(parents=True)
        for i in range(7):
            shutil.copy(config.parent / f"{kind}/train/{i}.png", tmp_path / kind / "train")
    found = suspects(run, *page, "--set", f"data.root={tmp_path}")
    assert (found.code, "no class has 8 that show it" in found.err) == (3, True)

    found = suspects(config)
    assert (found.code, "expected the directory of a run" in found.err) == (2, True)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/environment.json").touch()
    found = suspects(tmp_path / "run")
    assert (found.code, "no checkpoints/best.pt or checkpoints/last.pt" in found.err) == (4, True)


def test_new_masks_are_judged_before_anyone_trains_on_them(planted, tmp_path, suspects):
    """Of another folder: the evaluation split has one of them wrong, the other split is right."""
    run, config = planted
    new = tmp_path / "new"
    for kind in ("images", "labels"):
        (new / kind / "train").mkdir(parents=True)
        (new / kind / "val").mkdir()
        for i in (*range(3), *range(4, 17)):
            shutil.copy(config.parent / f"{kind}/train/{i}.png", new / kind / f"train/n{i}.png")
            shutil.copy(config.parent / f"{kind}/train/{i}.png", new / kind / f"val/n{i}.png")
    label = cv2.imread(str(new / "labels/val/n5.png"), cv2.IMREAD_UNCHANGED)
    exchanged = np.array([2, 1, 0, *range(3, 256)], np.uint8)[label]
    cv2.imwrite(str(new / "labels/val/n5.png"), exchanged)
    shutil.copy(config.parent / "classes.yaml", new)
    text = config.read_text().replace(str(config.parent), str(new))
    # How the model takes images is its own matter.
    said = []
    for mean in ("[1, 2, 3]", "[100, 100, 100]"):
        (tmp_path / "new.yaml").write_text(text.replace("data:", f"data:\n  mean: {mean}", 1))
        words = "--output", tmp_path / "page.html", "--data", tmp_path / "new.yaml"
        said.append([suspects(run, *words, *more).out for more in ((), ("--split", "val"))])
    assert said[0] == said[1]
    both, evaluated = said[0]
    assert "of 32 images stand out" in both
    assert "of 16 images stand out" in evaluated
    assert all("  1 * n5  score" in out for out in said[0])
    assert not any("not the data of the training" in out for out in said[0])
    # Where the run's own images are gone, it says so.
    (config.parent / "images/train").rename(config.parent / "gone")
    out = suspects(run, *words).out
    (config.parent / "gone").rename(config.parent / "images/train")
    assert "warning: judged beside each other alone, not beside images of the run: " in out
    found = suspects(run, *words, "--exclude", tmp_path / "x.yaml")
    assert (found.code, "--exclude: is about" in found.err) == (2, True)
    out = suspects(run, *words[:2], "--split", "train").out
    assert "  1 * 3  score" in out


def test_masks_that_are_mostly_wrong_stand_out_beside_those_of_the_run(monkeypatch):
    new, own = range(16), range(100, 130)
    rng = np.random.default_rng(0)

    def losses(_, dataset, num_threads):
        """11 of 16 new ones are wrong."""
        pixels = np.full((len(dataset), 2), 2000.0)
        mean = rng.uniform(0.1, 0.2, pixels.shape)
        mean[:11] += 3.0 * (dataset is new)
        return mean * pixels, pixels

    monkeypatch.setattr(command, "measure", losses)
    monkeypatch.setattr(command, "num_loader_workers", lambda data: 0)
    config = SimpleNamespace(data=None)
    for beside, found in (([own], 11), ([], 0)):
        ranking = command._ranked([new], beside, None, config)
        assert len(ranking.suspects) == len(new)
        assert sum(suspect.stands_out for suspect in ranking.suspects) == found
        assert ranking.unseen == 0
    assert {x.index for x in command._ranked([new], [own], None, config).suspects[:11]} == {
        *new[:11]
    }
