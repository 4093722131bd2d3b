"""ONNX files of 8 bits: calibrated on images, and scored beside the float file they are made of.

Calibration and scores show a file the images as `segtrain eval` shows them to the model: the file
stands in the place of the model of a Predictor.
"""

import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain.checkpoint.trained import LoadedModel
from segtrain.data.read.dataset import SegDataset
from segtrain.distributed.machine import num_cores
from segtrain.errors import ExecutionError, UserError
from segtrain.export.export_model import ExportModel
from segtrain.export.formats import FORMATS, Run, quiet
from segtrain.export.write import cases, compare
from segtrain.inference.class_scores import InferenceSettings
from segtrain.inference.predictor import Predictor, for_scores
from segtrain.metrics import ratio
from segtrain.run.console import ProgressBar
from segtrain.task.tasks import task_of
from segtrain.types import IGNORE_INDEX, SegLogits

# Of a convolutional network. Shapes, the normalization, a final enlargement of the logits and the
# argmax stay in float: 256 levels of a logit would make neighbouring classes equal.
_OPERATORS = ("Conv", "Relu", "Clip", "Add", "MaxPool", "AveragePool", "GlobalAveragePool")

NUM_RUNS = 20  # of which the median is the latency
_WARM_UP = 3
# Two files took 0.86 to 1.01 times as long in ten such measurements on a busy machine of two cores.
_CLOSE = 0.08


class FileModel(nn.Module):
    """A graph's file in the place of the model: from normalized images to logits.

    run: the file, which takes and gives what `graph` does. size: (height, width) of all its images;
        other views are resized to it, and their logits back; None: any.
    Of a file with argmax, a pixel's class has the logit 1 and all others 0.
    """

    def __init__(
        self, run: Run, graph: ExportModel, num_classes: int, size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.run, self.num_classes, self.size = run, num_classes, size
        # No submodule: evaluation would count its weights as memory of the device.
        self.graph = SimpleNamespace(normalization=graph.normalization, options=graph.options)

    def forward(self, images: Tensor) -> SegLogits:
        """Logits (N, K, H, W) float32 of normalized images (N, C, H, W)."""
        size = images.shape[-2:]
        result = self.run(self._as_stored(_resized(images, self.size or size)))
        result = result[0] if isinstance(result, tuple) else result
        if self.graph.options.argmax:
            result = functional.one_hot(result.long(), self.num_classes).movedim(-1, 1).float()
        return SegLogits(_resized(result, size))

    def _as_stored(self, images: Tensor) -> Tensor:
        """Normalized images in the form that the file takes."""
        dtype, normalization = self.graph.options.normalize, self.graph.normalization
        if dtype is None:
            return images.contiguous()
        images = images * normalization.std + normalization.mean
        if normalization.value_range is not None:
            low, high = normalization.value_range
            images = low + images * ((high - low) / 255)
        if dtype == "uint8":
            images = images.round().clamp(0, 255)
        return images.to(getattr(torch, dtype)).contiguous()


def _resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    if maps.shape[-2:] == tuple(size):
        return maps
    return functional.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)


class Figures(NamedTuple):
    """What an int8 file costs and gains. Each pair is of the float file and of the int8 file.

    agreement: the share of the labelled pixels with the same class in both; where classes overlap
        of pixels and classes. size: (height, width) of the image that took `milliseconds`.
    """

    mean_iou: tuple[float, float]
    agreement: float
    milliseconds: tuple[float, float]
    size: tuple[int, int]
    mebibytes: tuple[float, float]

    def speed(self, where: str) -> str:
        """Whether int8 is faster, for people."""
        times = self.milliseconds[1] / self.milliseconds[0]
        line = f"int8 takes {times:.2f} times as long as float ({where})"
        if abs(times - 1) < _CLOSE:
            return f"{line}: too close for {NUM_RUNS} runs; time both where they are to run"
        slower = "slower here; keep the float file, or time both where they are to run"
        return line if times <= 1 else f"warning: {line}: {slower}"

    @property
    def loss(self) -> float:
        """By how many points the mIoU falls; NaN if no pixel is labelled."""
        return 100 * (self.mean_iou[0] - self.mean_iou[1])


class Quantizer:
    """Makes int8 files of one model's float files, and scores both.

    graph: as the float file was made of. settings: of evaluation. size: see `FileModel`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        graph: ExportModel,
        settings: InferenceSettings,
        size: tuple[int, int] | None,
    ) -> None:
        whole = {"mode": "whole", "scales": (1.0,), "flip": False}
        # A file of one size takes whole images, resized to it: no windows, scales or mirror images.
        # One that resizes them itself, too.
        self.is_whole = size is not None or graph.options.view is not None
        if self.is_whole:
            settings = replace(settings, **whole, short_side_px=None)
        # The files compute in float32 and int8, whatever the training did.
        self.settings = replace(settings, autocast=None, tf32=False)
        self.graph, self.size, self.num_classes = graph, size, loaded.classes.num_classes
        self.task = task_of(loaded.config.task)

    def write(
        self, source: Path, output: Path, dataset: SegDataset, indices: Sequence[int]
    ) -> None:
        """Writes the int8 file of the float file `source`, calibrated on these images.

        Activations and kernels are symmetric, as TensorRT needs them; kernels by channel, and of 7
        bits: without instructions for int8 (VNNI), a processor adds pairs of products in 16 bits,
        which 8 bits overflow without a word. It took 9 points of mIoU; the bit takes 0.1.

        Raises:
            ExecutionError: onnxruntime cannot quantize the graph, or the file does not run.
        """
        import onnx
        from onnxruntime import quantization

        # A generator: images are decoded as the calibration asks for them.
        inputs = ({"images": images.numpy()} for images in self._inputs(dataset, indices))
        with TemporaryDirectory() as folder, quiet():
            prepared = Path(folder) / "prepared.onnx"
            try:
                # Its symbolic inference of shapes gives up on sizes that are free.
                quantization.quant_pre_process(source, prepared, skip_symbolic_shape=True)
                quantization.quantize_static(
                    prepared,
                    output,
                    # All that onnxruntime calls of a CalibrationDataReader; None is the end.
                    SimpleNamespace(get_next=lambda: next(inputs, None)),
                    quant_format=quantization.QuantFormat.QDQ,
                    op_types_to_quantize=_OPERATORS,
                    per_channel=True,
                    reduce_range=True,
                    activation_type=quantization.QuantType.QInt8,
                    weight_type=quantization.QuantType.QInt8,
                    extra_options={
                        "ActivationSymmetric": True,
                        "WeightSymmetric": True,
                        "QuantizeBias": False,  # TensorRT reads no int32 of DequantizeLinear
                    },
                )
            except UserError:  # of an image
                raise
            except Exception as error:  # any runtime, any reason
                reason = str(error).strip().partition("\n")[0]
                raise ExecutionError(f"--quantize: onnxruntime failed: {reason}") from error
            proto = onnx.load_model(output)
            about = {one.key: one.value for one in onnx.load_model(source).metadata_props}
            about["quantization"] = f"int8 (QDQ), calibrated on {len(indices)} images"
            onnx.helper.set_model_props(proto, about)
            onnx.save_model(proto, output)
            run = FORMATS["onnx"].read(output)
            # It must run at every size; how much 8 bits cost is for `figures` to say.
            batches = cases(self.size, view=self.graph.options.view)
            compared = [compare(run, self.graph, case) for case in batches]
        for one in compared:
            problem = one.problem or (
                "" if one.difference < np.inf else "its scores are not finite"
            )
            if problem:
                size = f"{one.case.height}x{one.case.width}"
                raise ExecutionError(f"--quantize: the int8 file at {size}: {problem}")

    def figures(
        self, files: tuple[Path, Path], dataset: SegDataset, indices: Sequence[int]
    ) -> Figures:
        """What the two files, float and int8, give for these images."""
        runs = [FORMATS["onnx"].read(file) for file in files]
        predictors = [self._predictor(run) for run in runs]
        about = self.num_classes, torch.device("cpu")
        counts, same, labelled = [self.task.matrix(*about) for _ in files], 0, 0
        with ProgressBar(len(indices), 0, "score", enabled=True, unit="image") as bar:
            for image, label, place in _images(dataset, indices):
                predictions = [
                    one.label_maps([image], [label.shape[:2]], place=place) for one in predictors
                ]
                a, b = (labels[0].label for labels in predictions)
                for count, one in zip(counts, (a, b), strict=True):
                    count.update(one, label)
                valid = label != IGNORE_INDEX
                same, labelled = same + int((valid & (a == b)).sum()), labelled + int(valid.sum())
                bar.update()
        # The time is that of a single image, in the form in which the file gets it.
        images = next(self._inputs(dataset, indices))[:1]
        return Figures(
            mean_iou=tuple(count.scores().mean_iou for count in counts),
            agreement=ratio(same, labelled),
            milliseconds=_milliseconds(runs, images),
            size=tuple(images.shape[-2:]),
            mebibytes=tuple(file.stat().st_size / 2**20 for file in files),
        )

    def _predictor(self, run: Run) -> Predictor:
        model = FileModel(run, self.graph, self.num_classes, self.size)
        device = torch.device("cpu")
        given = self.is_whole  # then it takes no windows
        return for_scores(model, self.settings, device, self.num_classes, mode_is_given=given)

    def _inputs(self, dataset: SegDataset, indices: Sequence[int]) -> Iterator[Tensor]:
        """What a file is given for these images, batch by batch."""
        seen: list[Tensor] = []

        # In the place of a file: keeps what it is given, and returns zeros of the right shape.
        def keep(images: Tensor) -> Tensor:
            seen.append(images)
            num, _, *size = images.shape
            argmax = self.graph.options.argmax
            return torch.zeros((num, *size) if argmax else (num, self.num_classes, *size))

        predictor = self._predictor(keep)
        for image, _, place in _images(dataset, indices):
            predictor.label_maps([image], place=place)
            yield from seen
            seen.clear()


def processor() -> str:
    """What onnxruntime computes with here, for people."""
    about = Path("/proc/cpuinfo")  # of Linux; elsewhere Python may know more
    named = about.is_file() and re.search(r"model name\s*: (.+)", about.read_text())
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{name}, {num_cores()} cores, onnxruntime's own number of threads"


def _images(dataset: SegDataset, indices: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, str]]:
    for index in indices:
        image, label = map(torch.from_numpy, map(np.ascontiguousarray, dataset[index]))
        yield image, label, dataset.name(index)


def _milliseconds(
    runs: Sequence[Callable[[Tensor], object]],
    images: Tensor,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """The median time of each, in turns, so that what else the machine does meets both."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_WARM_UP + NUM_RUNS):
        for run, taken in zip(runs, times, strict=True):
            start = clock()
            run(images)
            taken.append(1000 * (clock() - start))
    return tuple(median(taken[_WARM_UP:]) for taken in times)
