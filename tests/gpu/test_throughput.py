"""Images a second in training and evaluation, beside torchvision's loops; how long steps wait."""

import json
import statistics
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from commands import DEMO, ROOT, draw_scenes, segtrain, settings
from rounds import estimate, measure, ratios
from stepping import NUM_CLASSES, config_of, random_batch

from gpu.watching import LOCAL, REPLAYED, SYNC, TINY, contenders, one_rank, without_kernels
from segtrain.distributed.machine import num_cores
from segtrain.inference.predictor import for_scores
from segtrain.inference.settings import InferenceSettings
from segtrain.models import build_model
from segtrain.models.precision import autocast
from segtrain.score.scoring import evaluate_dataset
from segtrain.training.measure import matmul_peak, training_flops
from segtrain.types import IGNORE_INDEX

pytestmark = pytest.mark.gpu(limit_s=240)

# What is promised of a CUDA device: of a step as training replays it, with its layers synchronized.
TIMES_REFERENCE, OF_PEAK, MOST_WAIT = 2.0, 0.4, 0.02
SMALL_IMAGES_S = 1500  # of a small network, end to end


cross_entropy = partial(F.cross_entropy, ignore_index=IGNORE_INDEX)


class ReferenceLoop:
    """torchvision's references/segmentation/train.py: a step at each call, which returns the loss.

    amp: as its option, in float16. Cross entropy of both heads, the auxiliary one with weight 0.5;
    SGD; blocking copies of normalized float32 images; cudnn.benchmark; the loss read in every step.
    Its model is segtrain's with torch's batch norm and without kernels of our own.
    """

    def __init__(self, config, device, *, amp):
        torch.manual_seed(0)
        model = build_model(config.model, num_classes=NUM_CLASSES, norm=torch.nn.BatchNorm2d)
        self.model, self.device = model.to(device).train(), device
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp)
        batch = random_batch(config.augment.crop_size, config.train.batch_size, torch.device("cpu"))
        self.images = (batch.images.float() / 128 - 1).contiguous()
        self.labels = batch.labels.long()

    def __call__(self):
        with without_kernels(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            images, labels = self.images.to(self.device), self.labels.to(self.device)
            with torch.autocast(self.device.type, torch.float16, self.scaler.is_enabled()):
                out, aux = self.model(images)
                loss = cross_entropy(out, labels) + 0.5 * cross_entropy(aux, labels)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.item()


@pytest.mark.parametrize("images", [2, 4, 8, 16])
def test_steps_are_fast(device, figures, images):
    is_cuda = device.type == "cuda"
    model, size = ({"backbone": "resnet50"}, (512, 1024)) if is_cuda else (TINY, (64, 128))
    if not is_cuda and images > 2:
        pytest.skip("one batch tells enough on a CPU")
    # Without instructions for it, a CPU takes minutes for the peak of bfloat16.
    precision = "bfloat16" if is_cuda else "float32"
    config = config_of(size, images, model=model, precision=precision)
    rounds = {"rounds": 6, "warmup": 5, "block_ms": 200} if is_cuda else {"rounds": 1}
    with one_rank(device):
        peak_s = images * training_flops(config, NUM_CLASSES) / matmul_peak(device, config.train)
        times = measure(contenders(config, device), device=device, **rounds)
        for name, values in times.items():
            keep(figures, name, statistics.median(values), images, peak_s)
        if is_cuda:
            torch.cuda.empty_cache()
        # A CPU has no float16 to speak of.
        loop = ReferenceLoop(config, device, amp=is_cuda)
        (values,) = measure({"torchvision": loop}, device=device, **rounds).values()
        keep(figures, "torchvision", statistics.median(values), images, peak_s)
    # Alone on a device, segtrain's layer is nn.BatchNorm2d.
    figures["synchronized / not, eager"] = estimate(ratios(times[SYNC], times[LOCAL])).median
    if is_cuda:
        reference = figures["torchvision: ms"] / figures[f"{REPLAYED}: ms"]
        figures["torchvision / segtrain"] = reference
        assert reference >= TIMES_REFERENCE
        assert figures[f"{REPLAYED}: of the peak"] >= OF_PEAK


def keep(figures, name, ms, images, peak_s):
    figures[f"{name}: ms"], figures[f"{name}: images/s"] = ms, 1e3 * images / ms
    figures[f"{name}: of the peak"] = 1e3 * peak_s / ms


# Model, size of the images and of windows.
EVALUATED = {
    "PSPNet-R50": ({"backbone": "resnet50"}, (1024, 2048), (713, 713)),
    "V3+ R18": (
        {"backbone": "resnet18", "arch": "deeplabv3plus", "output_stride": 16},
        (360, 480),
        (288, 384),
    ),
}


def reference_evaluation(model, dataset, settings, device):
    """torchvision's references/segmentation/train.py, `evaluate`: one image after the other."""
    counts = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.int64, device=device)
    with without_kernels(), torch.inference_mode(), autocast(settings.autocast, device):
        for image, label in dataset:
            normalized = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 128 - 1
            image, target = normalized.to(device), torch.from_numpy(label).to(device).flatten()
            found = model(image).out.argmax(1).flatten()
            valid = target < NUM_CLASSES
            cells = NUM_CLASSES * target[valid].long() + found[valid]
            counts += torch.bincount(cells, minlength=counts.numel()).view_as(counts)
    return counts.cpu()


def replayed(model, images):
    """`model(images)` as a CUDA graph: what a graph could gain."""
    for _ in range(2):
        model(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(images)
    return graph.replay


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_fast(device, figures, name):
    is_cuda = device.type == "cuda"
    model, size, crop = EVALUATED[name] if is_cuda else (TINY, (64, 128), (48, 64))
    config = config_of(crop, 2, model=model, precision="bfloat16" if is_cuda else "float32")
    torch.manual_seed(0)
    network = build_model(config.model, num_classes=NUM_CLASSES).to(device).eval()
    network = network.to(memory_format=torch.channels_last)
    rng, num_images = np.random.default_rng(0), 64 if is_cuda else 2
    images = rng.integers(256, size=(8, *size, 3), dtype=np.uint8)
    labels = rng.integers(NUM_CLASSES, size=(8, *size), dtype=np.uint8)
    dataset = [(images[i % 8], labels[i % 8]) for i in range(num_images)]
    whole = InferenceSettings.from_config(config)
    ways = {}
    for mode in ("whole", "slide"):
        how = network, replace(whole, mode=mode), device, NUM_CLASSES
        predictor = for_scores(*how, mode_is_given=True)
        ways[mode] = partial(evaluate_dataset, predictor, dataset, num_threads=8)
    ways["torchvision"] = partial(reference_evaluation, network, dataset, whole, device)
    # Both count every pixel once.
    pixels = num_images * size[0] * size[1]
    assert ways["whole"]().matrix.counts.sum() == ways["torchvision"]().sum() == pixels
    rounds = {"rounds": 3 if is_cuda else 1, "warmup": 1}
    for way, times in measure(ways, device=device, **rounds).items():
        figures[f"{way}: images/s"] = 1e3 * num_images / statistics.median(times)
    figures["whole / torchvision"] = figures["whole: images/s"] / figures["torchvision: images/s"]
    for number in (1, 8) if is_cuda else ():
        batch = torch.zeros(number, 3, *size, device=device)
        batch = batch.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), autocast(whole.autocast, device):
            calls = {"eager": partial(network, batch), "graph": replayed(network, batch)}
            for way, times in measure(calls, device=device, rounds=10, warmup=2).items():
                figures[f"forward pass of {number}, {way}: ms"] = statistics.median(times)
    if is_cuda:
        assert figures["whole / torchvision"] >= 1


def test_a_step_does_not_wait_for_data_from_a_pack(device, figures, tmp_path):
    """`segtrain bench` of PSPNet-R50 on 1024x2048 scenes, crops of 512x1024, bfloat16, batch 8."""
    is_cuda = device.type == "cuda"
    size = (1024, 2048) if is_cuda else (64, 128)
    options = settings(
        data__root=draw_scenes(tmp_path / "scenes", 32 if is_cuda else 4, 2, size),
        data__num_workers=8 if is_cuda else 1,
        augment__crop_size=[side // 2 for side in size],
        augment__scale_range=[0.5, 2.0],
        model__backbone="resnet50" if is_cuda else "resnet18",
        model__output_stride=8 if is_cuda else 16,
        model__head_channels=512 if is_cuda else 16,
        train__batch_size=8 if is_cuda else 2,
        train__precision="bfloat16" if is_cuda else "float32",
    )
    segtrain("data", "pack", DEMO, "--output", tmp_path / "pack", *options)
    where = ["--device", device.type, "--nproc", 1, "--steps", 30 if is_cuda else 3]
    for name, more in {"files": [], "pack": settings(data__pack=tmp_path / "pack")}.items():
        file = tmp_path / f"{name}.json"
        segtrain("bench", DEMO, *where, "--json", file, *options, *more)
        figures[name] = json.loads(file.read_text())
        figures[f"{name}: wait of a step"] = figures[name]["data_s"] / figures[name]["step_s"]
    if is_cuda:
        assert figures["pack: wait of a step"] <= MOST_WAIT


def test_a_small_network_is_fed(device, figures, tmp_path):
    """`segtrain bench` of the recipe camvid_deeplabv3plus_r18 as a user runs it, from a pack.

    On drawn scenes of the size of CamVid's images.
    """
    is_cuda = device.type == "cuda"
    recipe = yaml.safe_load((ROOT / "configs/camvid_deeplabv3plus_r18.yaml").read_text())
    recipe["data"] = {
        "layout": "cityscapes",
        "root": str(draw_scenes(tmp_path / "scenes", 64 if is_cuda else 4, 2, (360, 480))),
        "classes": "cityscapes",
        "num_workers": max(1, num_cores() - 4) if is_cuda else 0,
    }
    del recipe["loss"]["class_weights"], recipe["loss"]["logit_adjustment"]  # of other classes
    if not is_cuda:
        recipe["train"] |= {"batch_size": 2, "precision": "float32"}
        recipe["augment"]["crop_size"] = [48, 64]
    config, pack, file = tmp_path / "c.yaml", tmp_path / "pack", tmp_path / "bench.json"
    config.write_text(yaml.safe_dump(recipe))
    segtrain("data", "pack", config, "--output", pack)
    where = ["--device", device.type, "--nproc", 1, "--steps", 100 if is_cuda else 2]
    segtrain("bench", config, *where, "--json", file, *settings(data__pack=pack))
    found = json.loads(file.read_text())
    figures["bench"] = found
    figures["images/s"] = recipe["train"]["batch_size"] / found["step_s"]
    if is_cuda:
        assert figures["images/s"] >= SMALL_IMAGES_S
