"""The temperature that eval fits, beside a search by SciPy in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from test_evaluate import arguments, cityscapes, command, know_the_colors, scene
from test_export import Tiny, loaded_model, onnx_session

from segtrain.commands import evaluate
from segtrain.data.read.classes import load_class_file
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.export.write import export_graph
from segtrain.inference.settings import InferenceSettings
from segtrain.score.temperature import Temperature
from segtrain.types import IGNORE_INDEX

__all__ = ["cityscapes", "command", "know_the_colors"]  # fixtures
SIZES = (23, 31), (40, 17), (9, 55), (31, 31), (12, 70)
USUAL = InferenceSettings(mean=(0,), std=(1,))


def drawn(index, *, factor=2.0, num_classes=5):
    """Logits (K, h, w) float64, `factor` times those from whose softmax the label is drawn."""
    rng = np.random.default_rng(index)
    logits = 2.5 * rng.normal(size=(num_classes, *SIZES[index]))
    label = (logits + rng.gumbel(size=logits.shape)).argmax(0).astype(np.uint8)
    label[rng.random(label.shape) < 0.1] = IGNORE_INDEX
    logits[:, label == IGNORE_INDEX] *= -3  # what counts them finds another temperature
    return factor * logits, label


def nll(pairs, temperature):
    """The mean over the labelled pixels of all (logits, label)."""
    parts = []
    for logits, label in pairs:
        known = label != IGNORE_INDEX
        log_p = log_softmax(logits / temperature, axis=0)[:, known]
        parts.append(-log_p[label[known], np.arange(known.sum())])
    return np.concatenate(parts).mean()


def best(pairs):
    """(T, NLL) by SciPy."""
    found = minimize_scalar(
        lambda x: nll(pairs, np.exp(x)),
        bounds=(np.log(0.1), np.log(20)),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return np.exp(found.x), found.fun


def fitted(pairs, indices=None, *, settings=USUAL, **about):
    seeker = Temperature(settings, USUAL, len(pairs), "cpu")
    for i in range(len(pairs)) if indices is None else indices:
        logits, label = pairs[i]
        p = torch.from_numpy(np.asarray(logits)).float().softmax(0)
        seeker.add(i, p, torch.from_numpy(label))
    seeker.sum_over_ranks()
    return seeker.answer(["runs/mine"], **{"trained": False, "by_windows": 0} | about)


def all_of(**how):
    return [drawn(i, **how) for i in range(len(SIZES))]


@pytest.mark.parametrize("factor", [0.28, 0.6, 1.0, 2.0, 3.3, 7.5])
@pytest.mark.parametrize("num_classes", [2, 19])
def test_it_is_that_of_a_search_by_scipy(factor, num_classes):
    pairs = all_of(factor=factor, num_classes=num_classes)
    (line, way), found = fitted(pairs)
    wanted, least = best(pairs)
    assert found["temperature"] == pytest.approx(wanted, rel=1e-3)
    assert found["temperature"] == pytest.approx(factor, rel=0.08)  # of so few pixels
    assert found["nll_before"] == pytest.approx(nll(pairs, 1), rel=1e-5)
    assert found["nll_after"] == pytest.approx(least, rel=1e-4)
    assert found["pixels"] == sum((label != IGNORE_INDEX).sum() for _, label in pairs)
    assert not found["at_end"]
    told = [found[key] for key in ("temperature", "nll_before", "nll_after")]
    assert line == "temperature {:.3g}: NLL {:.4g} -> {:.4g}".format(*told)
    assert way.endswith(f"--output FILE.onnx --temperature {found['temperature']:.3g}")


def of_rank():
    return fitted(all_of(), range(dist.rank(), len(SIZES), dist.world_size()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_have_the_answer_of_one(run_ranks, world_size):
    assert run_ranks(world_size, of_rank) == [fitted(all_of())] * world_size


@pytest.mark.parametrize(("factor", "end"), [(0.1, 0.25), (20.0, 8.0)])
def test_an_end_of_the_range_is_said_and_no_command(factor, end):
    lines, found = fitted(all_of(factor=factor))
    assert (found["temperature"], found["at_end"]) == (end, True)
    assert lines[1] == "warning: temperature: the best is beyond 0.25 to 8, which are tried"
    assert not any("export" in line for line in lines)


def test_probabilities_of_zero_count_as_the_floor():
    pairs = all_of()
    logits, label = pairs[0]
    label[0, :4], logits[:, 0, :4] = 0, np.array([-300, 0, 0, 5, 0])[:, None]
    lines, found = fitted(pairs)
    logits[0, 0, :4] = np.log(2.0**-126) + 5 + np.log1p(4 * np.exp(-5) * 0.75)  # p is the floor
    assert found["pixels_at_floor"] == 4
    assert "4 labels have a probability below 1e-38, and count as that" in lines[1]
    assert found["temperature"] == pytest.approx(best(pairs)[0], rel=2e-3)


def test_nothing_is_fitted_to_what_is_not_finite_or_not_labelled():
    logits, label = drawn(0)
    nothing = [(logits, np.full_like(label, IGNORE_INDEX))]
    assert fitted(nothing) == (["temperature: none, no pixel is labelled"], {"temperature": None})
    holes = logits.copy()
    holes[:, label == IGNORE_INDEX] = np.nan
    assert fitted([(holes, label)]) == fitted([(logits, label)])
    holes[:] = np.nan
    assert fitted([(holes, label)])[0] == ["temperature: none, the scores are not finite numbers"]


def test_what_flatters_it_is_said():
    lines, _ = fitted(all_of(), trained=True, by_windows=3)
    assert "3 images went by windows, of which export writes none" in lines[1]
    assert "fitted on images of the training" in lines[2]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"flip": True}, "export writes no mean of views; add --set eval.mode=whole"),
        ({"scales": (0.5, 1.0)}, "export writes no mean of views"),
        ({"mode": "slide"}, "export writes no mean of views"),
        ({"task": "multilabel", "thresholds": (0.5,)}, "is for one class a pixel"),
        ({"short_side_px": 90}, "export goes by the run's data.short_side_px"),
    ],
)
def test_what_no_file_of_export_computes_is_refused(changed, said):
    with pytest.raises(ConfigError, match=said):
        fitted(all_of(), settings=replace(USUAL, **changed))


def test_a_file_gets_the_scale_of_the_evaluation():
    lines, _ = fitted(all_of(), settings=replace(USUAL, scales=(1.5,)))
    assert "--output FILE.onnx --scale 1.5 --temperature" in lines[-1]


def test_eval_fits_it_and_moves_no_score(command, cityscapes, capsys, monkeypatch):
    """The model is a softmax of colours, made surer than it is right."""
    loaded = evaluate.load_model("run", device="cpu")
    for parameter in loaded.model.parameters():
        parameter.data *= 20
    monkeypatch.setattr(evaluate, "load_model", lambda *paths, device: loaded)
    found = command("eval.mode=whole", temperature=True)
    usual = command("eval.mode=whole")
    classes, pairs = load_class_file("cityscapes"), []
    by_raw = np.full(256, IGNORE_INDEX, np.uint8)
    for k, one in enumerate(classes.classes):
        by_raw[list(one.ids)] = k
    for i in range(3):
        image, label = scene(i, classes)
        with torch.no_grad():
            logits = loaded.model(torch.from_numpy(image).permute(2, 0, 1)[None] / 255).out
        pairs.append((logits[0].double().numpy(), by_raw[label]))
    wanted, least = best(pairs)
    told = found.pop("temperature")
    assert found == usual
    assert told["temperature"] == pytest.approx(wanted, rel=2e-3)
    assert told["nll_after"] == pytest.approx(least, rel=1e-4)
    assert told["nll_before"] == pytest.approx(nll(pairs, 1), rel=1e-4)
    assert f"temperature {told['temperature']:.3g}: NLL" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--temperature: needs labels"):
        evaluate.run_eval(arguments("run", no_labels=True, temperature=True))


def test_an_exported_file_has_the_lower_nll(tmp_path):
    loaded = loaded_model(Tiny())
    images = [np.random.default_rng(i).integers(0, 256, (1, 3, 40, 57), np.uint8) for i in range(3)]

    def logits_by(name, **options):
        export_graph(loaded, tmp_path / name, format="onnx", normalize="uint8", **options)
        session = onnx_session(tmp_path / name)
        return [session.run(None, {"images": image})[0][0] for image in images]

    plain, rng = logits_by("plain.onnx"), np.random.default_rng(0)
    labels = [(x / 2.5 + rng.gumbel(size=x.shape)).argmax(0).astype(np.uint8) for x in plain]
    _, found = fitted(list(zip(plain, labels, strict=True)))
    scaled = logits_by("scaled.onnx", temperature=found["temperature"])
    before, after = (nll(list(zip(x, labels, strict=True)), 1) for x in (plain, scaled))
    assert after < before
    assert (before, after) == pytest.approx((found["nll_before"], found["nll_after"]), rel=1e-4)
