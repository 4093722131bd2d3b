"""Statistics from the images to score: torch's own batch norm over whole batches is the oracle."""

import json

import cv2
import numpy as np
import pytest
import torch
from experiments import refusal, small, train, write_config, write_data
from test_evaluate import arguments
from torch import nn

from segtrain.cli import main
from segtrain.commands import evaluate
from segtrain.commands.evaluate import run_eval
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.evaluation.calibration import chosen_images, take_statistics
from segtrain.evaluation.dataset import evaluate_dataset
from segtrain.evaluation.settings import InferenceSettings
from segtrain.types import SegLogits


class Images:
    """Sizes differ; the number of channels is that of photos."""

    def __init__(self, num, gain=1.0):
        rng = np.random.default_rng(0)
        sizes = [(4 + i % 3, 5 + i % 2) for i in range(num)]
        low = [rng.integers(100 + i % 7, size=(*size, 3)) for i, size in enumerate(sizes)]
        self.images = [(image * gain).astype(np.uint8) for image in low]

    def __len__(self):
        return len(self.images)

    def image(self, index):
        return self.images[index]


class Net(nn.Module):
    """Pointwise, so that images may be laid side by side; global pooling is one value an image."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.second, self.bn2 = nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)
        self.unused = nn.BatchNorm2d(2)
        for layer in (self.bn1, self.bn2, self.unused):
            nn.init.uniform_(layer.running_mean)

    def forward(self, images):
        x = torch.tanh(self.bn1(self.first(images)))
        return SegLogits(self.bn2(self.second(x)))


SETTINGS = InferenceSettings(mean=(50.0, 40.0, 60.0), std=(20.0, 30.0, 40.0))


def statistics(model):
    return {k: v.clone() for k, v in model.state_dict().items() if "running" in k}


def naive(num, wanted, prior):
    """Batches of at most 8 as even as can be, torch's own batch norm, moments pooled over all."""
    model, images = Net().double().train(), Images(num)
    trained = statistics(model)
    chosen = [images.image(i) for i in chosen_images(num, wanted)]
    mean, std = (torch.tensor(v).double().view(1, 3, 1, 1) for v in (SETTINGS.mean, SETTINGS.std))
    seen = {"bn1": [], "bn2": []}
    hooks = [
        getattr(model, name).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].transpose(0, 1).flatten(1))
        )
        for name in seen
    ]
    for batch in np.array_split(np.arange(len(chosen)), -(-len(chosen) // 8)):
        pixels = np.concatenate([chosen[i].reshape(-1, 3) for i in batch])
        model((torch.from_numpy(pixels).double().T.reshape(1, 3, 1, -1) - mean) / std)
    for hook in hooks:
        hook.remove()
    found = dict(trained)
    for name, parts in seen.items():
        values = torch.cat(parts, 1)
        weight = prior / (prior + len(chosen))
        for key, new in (("mean", values.mean(1)), ("var", values.var(1))):
            old = trained[f"{name}.running_{key}"]
            found[f"{name}.running_{key}"] = weight * old + (1 - weight) * new
    return found


CASES = [(5, 9, 0), (11, 11, 3), (30, 20, 100)]


def taken(cases):
    results = []
    for num, wanted, prior in cases:
        model = Net().double().eval()
        used = take_statistics(model, Images(num), SETTINGS, num_images=wanted, prior=prior)
        kinds = {type(m) for m in model.modules() if "BatchNorm" in type(m).__name__}
        counts = [m.num_batches_tracked.item() for m in model.modules() if type(m) in kinds]
        assert not any(m.training for m in model.modules())
        results.append((used, statistics(model), kinds, counts))
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_statistics_are_those_of_the_whole_batches_on_any_number_of_ranks(run_ranks, ranks):
    """5 images are one batch, so that one of two ranks has none; 20 are three batches."""
    for results in run_ranks(ranks, taken, CASES):
        for (num, wanted, prior), (used, found, kinds, counts) in zip(CASES, results, strict=True):
            assert used == min(num, wanted)
            assert (kinds, counts) == ({nn.BatchNorm2d}, [0, 0, 0])
            expected = naive(num, wanted, prior)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_predictions_do_not_see_that_all_images_became_brighter():
    """Which is what the statistics of the images are for."""
    logits = []
    for gain, calibrated in ((1, True), (2, True), (1, False), (2, False)):
        model, images = Net().double().eval(), Images(6, gain)
        if calibrated:
            take_statistics(model, images, SETTINGS, num_images=6)
        pixels = torch.from_numpy(images.image(3)).double().permute(2, 0, 1)[None]
        mean = torch.tensor(SETTINGS.mean).view(1, 3, 1, 1)
        logits.append(model((pixels - mean) / torch.tensor(SETTINGS.std).view(1, 3, 1, 1)).out)
    assert (logits[0] - logits[1]).abs().max() < 1e-3  # eps of batch norm
    assert (logits[2] - logits[3]).abs().max() > 0.3


def test_images_are_spread_over_the_split():
    assert chosen_images(10, 4) == [0, 3, 6, 9]
    assert chosen_images(3, 64) == [0, 1, 2]


@pytest.fixture(scope="module")
def trained_run(run_ranks, tmp_path_factory):
    """A short training, and its data."""
    root = tmp_path_factory.mktemp("calibration")
    (root / "data").mkdir()
    write_data(root / "data")
    options = small(root / "data", train={"steps": 2})
    assert run_ranks(1, train, write_config(root / "c.yaml", options), root / "run") == [0]
    return root


def scored(run, *overrides):
    """What rank 0 wrote, None on others; and the statistics of the model that was scored."""
    path, main_rank, whole, seen = run / "scores.json", dist.is_main(), evaluate_dataset, {}

    def evaluate_and_keep(model, *args, **options):
        seen.update(statistics(model))
        return whole(model, *args, **options)

    evaluate.evaluate_dataset = evaluate_and_keep
    try:
        assert run_eval(arguments(str(run / "run"), set=list(overrides), json=str(path))) == 0
    finally:
        evaluate.evaluate_dataset = whole
    return json.loads(path.read_text()) if main_rank else None, seen


@pytest.mark.parametrize("mode", [pytest.param("whole", marks=pytest.mark.slow), "slide"])
def test_the_command_says_what_its_scores_were_made_with(run_ranks, trained_run, mode):
    """On two ranks too; a PSPNet, which has layers with one value an image."""
    new = ("eval.statistics=split", "eval.statistics_prior=2", f"eval.mode={mode}")
    ((one, seen),) = run_ranks(1, scored, trained_run, "train.precision=float64", *new)
    ranks = run_ranks(2, scored, trained_run, "train.precision=float64", *new)
    assert ranks[0][0] == one
    for _, other in ranks:
        torch.testing.assert_close(other, seen, rtol=1e-12, atol=1e-12)
    assert one["statistics"] == {"split": "val", "num_images": 3, "prior": 2}
    plain, trained = scored(trained_run, f"eval.mode={mode}")
    assert plain["statistics"] is None
    moved = [k for k, v in trained.items() if not torch.equal(v.double(), seen[k])]
    assert len(moved) > 50
    # In evaluation nothing goes through the auxiliary head.
    assert len(moved) == sum("aux" not in name for name in trained)


def test_the_training_split_may_give_the_statistics_and_labels_are_not_opened(trained_run, capsys):
    for path in (trained_run / "data" / "labels" / "train").iterdir():
        cv2.imwrite(str(path), np.full((5, 5), 77, np.uint8))
    new = ("eval.statistics=train_split", "eval.statistics_images=5")
    found, _ = scored(trained_run, *new)
    assert found["statistics"] == {"split": "train", "num_images": 5, "prior": 0}
    said = "with batch norm statistics of 5 images of split train, without their labels"
    assert said in capsys.readouterr().out


def test_where_statistics_have_no_place_they_are_refused(run_ranks, trained_run, tmp_path, capsys):
    new = {"statistics": "split"}
    config = write_config(tmp_path / "c.yaml", small(trained_run / "data", eval=new))
    ((kind, _, said),) = run_ranks(1, refusal, train, config, tmp_path / "run")
    assert kind == "ConfigError"
    assert "eval.statistics: split would change the model in training" in said
    photo = str(trained_run / "data" / "images" / "val" / "0.png")
    command = ["predict", str(trained_run / "run"), photo, "--output", str(tmp_path / "p")]
    assert main([*command, "--set", "eval.statistics=split"]) == 2
    assert "eval.statistics=split: no effect on predictions" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="statistics_prior: has no effect with statistics train"):
        scored(trained_run, "eval.statistics_prior=2")


def test_a_model_without_batch_norm_has_no_statistics(run_ranks, tmp_path, data):
    options = small(data, train={"steps": 1}, norm={"kind": "group", "num_groups": 4})
    config = write_config(tmp_path / "c.yaml", options)
    assert run_ranks(1, train, config, tmp_path / "run") == [0]
    with pytest.raises(ConfigError, match=r"the model has no batch norm \(norm.kind group\)"):
        scored(tmp_path, "eval.statistics=split")
