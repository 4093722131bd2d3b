"""Training steps and evaluation of the contenders of bench_against.py, on images in memory.

Each function makes what a program has before its first step and returns a function that does so
many steps, or evaluates so many images. All train with SGD with momentum and weight decay, and with
cross entropy over the pixels that are not 255.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from against_models import CASES, MMSEG, SEGTRAIN, SMP, TORCHVISION, Case, build
from stepping import NUM_CLASSES, config_of, random_batch, state_of, steps_of
from torch import Tensor, nn

from segtrain.config import DataConfig
from segtrain.distributed.machine import keep_freed_memory
from segtrain.evaluation.predictor import for_scores
from segtrain.evaluation.scoring import evaluate_dataset
from segtrain.evaluation.settings import InferenceSettings
from segtrain.models import build_model
from segtrain.models.blocks import normalize
from segtrain.types import IGNORE_INDEX

Size = tuple[int, int]
Run = Callable[[int], object]
CPU = torch.device("cpu")


def training(
    contender: str, case_name: str, *, size: Size, batch: int, bfloat16: bool = False
) -> Run:
    """So many training steps of a contender; in bfloat16: segtrain and torchvision's loop."""
    case = CASES[case_name]
    torch.manual_seed(0)
    if contender == SEGTRAIN:
        return _train_segtrain(case, size, batch, bfloat16)
    images, labels, *_ = random_batch(size, batch, CPU)
    if contender == MMSEG:
        return _train_mmseg(case, images, labels)
    return _train_plain(contender, case, images, labels, bfloat16)


def evaluation(contender: str, case_name: str, *, size: Size) -> Run:
    """The confusion matrix of so many images, each whole, by a contender."""
    case = CASES[case_name]
    torch.manual_seed(0)
    make = {
        SEGTRAIN: _evaluate_segtrain,
        TORCHVISION: _evaluate_torchvision,
        SMP: _evaluate_smp,
        MMSEG: _evaluate_mmseg,
    }
    return make[contender](case, *random_batch(size, 1, CPU)[:2])


def _train_segtrain(case: Case, size: Size, batch: int, bfloat16: bool) -> Run:
    """As `segtrain train` does, with what its loader delivers: uint8, channels last."""
    keep_freed_memory()
    precision = "bfloat16" if bfloat16 else "tf32"
    config = config_of(size, batch, model=case.model, precision=precision)
    steps = steps_of(state_of(config, CPU), config, CPU)
    return lambda count: list(islice(steps, count))


def _train_plain(contender: str, case: Case, images: Tensor, labels: Tensor, bfloat16: bool) -> Run:
    """The loop of torchvision's reference, and that of segmentation_models.pytorch's examples.

    torchvision, references/segmentation/train.py: model to loss to zero_grad, backward, step, and
    the learning rate after each step; the auxiliary loss counts half; the loss is read each step
    for its log. With --amp, model and loss are in autocast. The loop of smp's examples has the
    same order and one output. Their loaders deliver normalized floats.
    """
    model = build(contender, case).train()
    optimizer, schedule = _sgd(model)
    images, labels = _normalized(images), labels.long()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            outputs = model(images)
            if contender == TORCHVISION:
                loss = _loss(outputs["out"], labels)
                if "aux" in outputs:
                    loss = loss + 0.5 * _loss(outputs["aux"], labels)
            else:
                loss = _loss(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    return lambda count: [step() for _ in range(count)]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)


def _sgd(model: nn.Module) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.PolynomialLR]:
    """The optimizer and the schedule of all peers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10**6, power=0.9)
    return optimizer, schedule


def _train_mmseg(case: Case, images: Tensor, labels: Tensor) -> Run:
    """mmengine's `train_step`, with what PackSegInputs delivers: a list of uint8 images."""
    from mmengine.optim import OptimWrapper

    model = case.build().train()
    model.data_preprocessor.size = tuple(labels.shape[1:])  # as its configs say, the crop
    optimizer, schedule = _sgd(model)
    wrapper = OptimWrapper(optimizer)
    data = _mmseg_data(images, labels.long())

    def step() -> None:
        model.train_step(data, optim_wrapper=wrapper)
        schedule.step()

    return lambda count: [step() for _ in range(count)]


def _mmseg_data(images: Tensor, labels: Tensor) -> dict[str, list[Any]]:
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    shape = tuple(labels.shape[1:])
    meta = {"img_shape": shape, "ori_shape": shape}
    samples = [SegDataSample(metainfo=meta) for _ in labels]
    for sample, label in zip(samples, labels, strict=True):
        sample.gt_sem_seg = PixelData(data=label[None])
    return {"inputs": list(images), "data_samples": samples}


def _normalized(images: Tensor) -> Tensor:
    data = DataConfig(layout="folders", root="unused", classes="unused")
    return normalize(images, data.mean, data.std)


def _evaluate_segtrain(case: Case, images: Tensor, labels: Tensor) -> Run:
    keep_freed_memory()
    config = config_of(tuple(labels.shape[1:]), 2, model=case.model)
    model = build_model(config.model, num_classes=NUM_CLASSES).eval()
    settings = InferenceSettings.from_config(config)
    image = np.ascontiguousarray(images[0].permute(1, 2, 0).numpy())
    predictor = for_scores(model, settings, CPU, NUM_CLASSES)

    sample = (image, labels[0].numpy())
    return lambda count: int(evaluate_dataset(predictor, [sample] * count).matrix.counts.sum())


def _evaluate_torchvision(case: Case, images: Tensor, labels: Tensor) -> Run:
    """As `evaluate` of the reference: argmax, and one bincount an image."""
    model = build(TORCHVISION, case).eval()
    images, target = _normalized(images), labels.long().flatten()

    @torch.inference_mode()
    def run(count: int) -> int:
        matrix = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.int64)
        for _ in range(count):
            pred = model(images)["out"].argmax(1).flatten()
            valid = (target >= 0) & (target < NUM_CLASSES)
            places = NUM_CLASSES * target[valid] + pred[valid]
            matrix += places.bincount(minlength=NUM_CLASSES**2).view(NUM_CLASSES, NUM_CLASSES)
        return int(matrix.sum())

    return run


def _evaluate_smp(case: Case, images: Tensor, labels: Tensor) -> Run:
    """As its example of several classes: softmax, argmax and `get_stats`."""
    from segmentation_models_pytorch.metrics import get_stats

    model: nn.Module = case.build().eval()
    images, labels = _normalized(images), labels.long()
    options = {"mode": "multiclass", "num_classes": NUM_CLASSES, "ignore_index": IGNORE_INDEX}

    @torch.inference_mode()
    def run(count: int) -> int:
        total = 0
        for _ in range(count):
            pred = model(images).softmax(dim=1).argmax(dim=1)
            hits, _, misses, _ = get_stats(pred, labels, **options)
            total += int(hits.sum() + misses.sum())
        return total

    return run


def _evaluate_mmseg(case: Case, images: Tensor, labels: Tensor) -> Run:
    """mmengine's `val_step` and IoUMetric."""
    from mmseg.evaluation import IoUMetric

    model = case.build().eval()
    data = _mmseg_data(images, labels.long())

    @torch.no_grad()
    def run(count: int) -> int:
        metric = IoUMetric(ignore_index=IGNORE_INDEX)
        metric.dataset_meta = {"classes": [str(i) for i in range(NUM_CLASSES)]}
        for _ in range(count):
            outputs = model.val_step(data)
            metric.process(data, [output.to_dict() for output in outputs])
        return int(sum(areas[3].sum() for areas in metric.results))

    return run
