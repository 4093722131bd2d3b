"""The formats that hold a graph, written and read back: ONNX, torch.export and TorchScript."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from segtrain.errors import ConfigError
from segtrain.export.export_model import ExportModel
from segtrain.text import install_line

Run = Callable[[Tensor], Tensor | tuple[Tensor, ...]]

# What torch's exporter writes without a version converter; onnxruntime has it since 1.14, TensorRT
# since 8.6.
ONNX_OPSET = 18

# Name of the metadata entry (JSON) inside .pt2 and TorchScript archives.
METADATA_FILE = "segtrain.json"

_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class ExportFormat(NamedTuple):
    """One way to store a graph.

    write(graph, example, fixed, metadata, file): traces the images `example`. `fixed`: the file
        takes images of their height and width only. The batch size is always free.
    read(file): the file's graph as a function, on the CPU, in the runtime that it is meant for; a
        single result may come as a tuple of one.
    """

    write: Callable[[ExportModel, Tensor, bool, dict[str, str], Path], None]
    read: Callable[[Path], Run]


def require_onnx() -> None:
    """Raises ConfigError, with the command that installs it, if an ONNX package is missing."""
    if missing := [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"--format onnx: needs {', '.join(missing)}; {install_line('onnx')}")


def _write_onnx(
    graph: ExportModel, example: Tensor, fixed: bool, metadata: dict[str, str], file: Path
) -> None:
    import onnx

    axes = {0: "batch"} if fixed else {0: "batch", 2: "height", 3: "width"}
    names = ["labels" if graph.options.argmax else "logits", "confidence"]
    program = torch.onnx.export(
        graph,
        (example,),
        dynamo=True,
        dynamic_shapes=(axes,),
        input_names=["images"],
        output_names=names[: 1 + graph.options.confidence],
        opset_version=ONNX_OPSET,
        verbose=False,
    )
    proto = program.model_proto
    # The exporter stores paths and lines of the source code in every node.
    for part in (*proto.graph.node, *proto.graph.value_info, *proto.graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto)
    onnx.save_model(proto, file, save_as_external_data=False)


def _read_onnx(file: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # a failure is raised too
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    give = partial(session.run, None)
    return lambda images: tuple(map(torch.from_numpy, give({"images": images.numpy()})))


def _write_pt2(
    graph: ExportModel, example: Tensor, fixed: bool, metadata: dict[str, str], file: Path
) -> None:
    # DYNAMIC, unlike AUTO, fails where the graph would hold for the traced size alone.
    free = torch.export.Dim.DYNAMIC
    axes = {0: free} if fixed else {0: free, 2: free, 3: free}
    program = torch.export.export(graph, (example,), dynamic_shapes=(axes,))
    with file.open("wb") as stream:
        torch.export.save(program, stream, extra_files={METADATA_FILE: json.dumps(metadata)})


def _read_pt2(file: Path) -> Run:
    with file.open("rb") as stream:
        return torch.export.load(stream).module()


def _write_torchscript(
    graph: ExportModel, example: Tensor, fixed: bool, metadata: dict[str, str], file: Path
) -> None:
    # Tracing keeps sizes as tensors, so the graph takes every size, `fixed` or not. check_trace is
    # off: it compares at the traced size only, and compare() does more.
    del fixed
    traced = torch.jit.trace(_OnAnyDevice(graph), (example,), check_trace=False)
    with file.open("wb") as stream:
        torch.jit.save(traced, stream, _extra_files={METADATA_FILE: json.dumps(metadata)})


def _read_torchscript(file: Path) -> Run:
    with file.open("rb") as stream:
        return torch.jit.load(stream, map_location="cpu")


FORMATS = {
    "onnx": ExportFormat(_write_onnx, _read_onnx),
    "pt2": ExportFormat(_write_pt2, _read_pt2),
    "torchscript": ExportFormat(_write_torchscript, _read_torchscript),
}


class _OnAnyDevice(nn.Module):
    """`graph` with every `arange` on the images' device; the tracer would make it a constant."""

    def __init__(self, graph: ExportModel) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, images: Tensor) -> Tensor:
        """As ExportModel's."""
        with _ArangeFrom(images):
            return self.graph(images)


class _ArangeFrom(TorchFunctionMode):
    """Replaces `torch.arange(n, device=...)` by an equal count made from `like`."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.like = like

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Only counts from 0, as the models make them; all other calls stay as they are.
        if function is torch.arange and len(args) == 1 and kwargs.keys() <= {"device"}:
            return self.like.new_ones(args[0], dtype=torch.int64).cumsum(0) - 1
        return function(*args, **kwargs)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides what exporters print; the comparison finds what matters, and failures are raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # Exporters warn, print and log: each of these needs its own end.
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
