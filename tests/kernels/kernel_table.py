"""The kernels of segtrain/kernels, compiled for devices that need not be there.

    python tests/kernels/kernel_table.py                      for sm_80, sm_90 and gfx942
    python tests/kernels/kernel_table.py --only loss norm

Each case calls what training calls, with tensors that have no content, and compiles what it would
launch. Prints, for each kernel and target, registers of a thread, spills and shared memory; and for
each case the bytes that its launches read and write, beside the least: its inputs and outputs once.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Before Triton is imported: with the interpreter nothing is compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_NVIDIA = Path(triton.__file__).parent / "backends/nvidia/bin"
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
# What is not an argument of a kernel.
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch(NamedTuple):
    """One launch: the kernel, its arguments by name, and its options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of all its tensors, each once."""
        tensors = [x for x in self.arguments.values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in {id(x): x for x in tensors}.values())


class Compiled(NamedTuple):
    """What a compiler has made of a launch."""

    registers: int
    spills: int  # bytes on CUDA, registers on AMD
    shared_bytes: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, kernels are not launched but put on the list."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def compiled(launch: Launch, target: GPUTarget) -> Compiled:
    """As Triton would compile it for this launch, whose pointers are aligned."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        may_specialize = not parameter.do_not_specialize
        is_one = isinstance(value, int) and value == 1 and may_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        else:
            wide = isinstance(value, int) and abs(value) >= 2**31
            signature[parameter.name] = (
                "fp32" if isinstance(value, float) else "i64" if wide else "i32"
            )
        even = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if even and may_specialize:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=target, options=launch.options)
    usage = _on_amd(made) if "amdgcn" in made.asm else _on_nvidia(made)
    return Compiled(*usage, made.metadata.shared)


def _on_amd(made: Any) -> tuple[int, int]:
    text = made.asm["amdgcn"]
    counts = {
        name: int(number) for name, number in re.findall(r"\.([vs]gpr_\w*count):\s*(\d+)", text)
    }
    return counts["vgpr_count"], counts["vgpr_spill_count"] + counts["sgpr_spill_count"]


def _on_nvidia(made: Any) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [_NVIDIA / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


# A case is called inside of `recorded`, and returns its inputs and outputs.
Case = Callable[[], Sequence[Tensor]]


def image(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(N, C, H, W), channels-last, without content."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last)


def resizing(size: tuple[int, int], *, align_corners: bool = False) -> Case:
    """512 channels of a pyramid of 8 images, to 64x128 and back."""

    def call() -> Sequence[Tensor]:
        from segtrain.kernels.bilinear import resize_gradient, resized

        x, options = image(8, 512, *size), {"align_corners": align_corners}
        y = resized(x, (64, 128), **options)
        return x, y, y, resize_gradient(y, size, y.dtype, **options)

    return call


def loss(
    shape: tuple[int, int, int, int], size: tuple[int, int], stride: int | None, **options: Any
) -> Case:
    """Cross entropy of logits of `shape` at `size`, forward and backward.

    options: class_weights, label_smoothing; or by_pixel, for OHEM and focal.
    """

    def call() -> Sequence[Tensor]:
        from segtrain.kernels import small_logits

        small = image(*shape).requires_grad_()
        labels = torch.empty(shape[0], *size, dtype=torch.int64, device="meta")
        axes = small_logits.axes_of(small, size, stride)
        if options.get("by_pixel"):
            found = small_logits.losses(small, labels, axes)
        else:
            found = small_logits.sums(small, labels, axes, **options)
        (grad,) = torch.autograd.grad(found, small, torch.empty_like(found))
        return small, labels, grad

    return call


def labels(shape: tuple[int, int, int, int], size: tuple[int, int], stride: int) -> Case:
    """The label map and probabilities of logits of `shape` at `size`."""

    def call() -> Sequence[Tensor]:
        from segtrain.kernels import small_logits

        small = image(*shape)
        axes = small_logits.axes_of(small, size, stride)
        return [small, *small_logits.labels_of(small, size, axes)]

    return call


def norm(
    shape: tuple[int, int, int, int],
    activation: str = "relu",
    *,
    shortcut: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """A batch norm and what follows it, forward and backward."""

    def call() -> Sequence[Tensor]:
        from segtrain.norm.cuda_kernels import NormInput
        from segtrain.norm.fused import fused_norms

        x, other, grad = (image(*shape, dtype=dtype) for _ in range(3))
        weight, bias = torch.empty(2, shape[1], device="meta")
        inputs = [x, other, weight, bias] if shortcut else [x, weight, bias]
        layer = NormInput(x, weight, bias, 1e-5)
        for one in inputs:
            one.requires_grad_()
        options = {"shortcut": other if shortcut else None}
        (y,), _ = fused_norms([layer], None, activation, **options)
        return [*inputs, y, grad, *torch.autograd.grad(y, inputs, grad)]

    return call


_WEIGHTS = torch.empty(19, device="meta")
CASES: dict[str, Case] = {
    "loss, 19 classes, stride 8": loss((8, 19, 64, 128), (512, 1024), 8),
    "loss, weights, smoothing": loss(
        (8, 19, 64, 128), (512, 1024), 8, class_weights=_WEIGHTS, label_smoothing=0.1
    ),
    "loss, of pixels": loss((8, 19, 64, 128), (512, 1024), 8, by_pixel=True),
    "loss, aligned corners": loss((2, 19, 90, 90), (713, 713), None),
    "loss, 11 classes, stride 4": loss((8, 11, 72, 96), (288, 384), 4),
    "loss, 150 classes, stride 8": loss((8, 150, 64, 64), (512, 512), 8),
    "labels, 19 classes, stride 8": labels((2, 19, 128, 256), (1024, 2048), 8),
    "norm, ReLU": norm((8, 256, 128, 256)),
    "norm, ReLU, shortcut": norm((8, 256, 128, 256), shortcut=True),
    "norm, ReLU6, 24 channels": norm((8, 24, 128, 256), "relu6"),
    "norm, float32": norm((8, 64, 72, 96), "none", dtype=torch.float32),
    "resizing, 1 bin": resizing((1, 1)),
    "resizing, 6 bins": resizing((6, 6)),
    "resizing, 6 bins, aligned": resizing((6, 6), align_corners=True),
}


def main() -> int:
    """The command line; returns 1 if a kernel spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="compile cases with one of these")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    rows = []
    print(f"Triton {triton.__version__}; registers, spills, KB of shared memory for each target")
    for name, case in CASES.items():
        with recorded() as launches:
            least = sum(x.nbytes for x in case())
        if not any(words in name for words in args.only):
            rows += [{"case": name, "kernel": launch.kernel.__name__} for launch in launches]
            continue
        moved = sum(launch.num_bytes for launch in launches)
        print(f"{name}: {moved / 2**20:.1f} MiB, {moved / least:.2f} times the least")
        for launch in launches:
            found = {name: compiled(launch, TARGETS[name]) for name in args.targets}
            kernel = launch.kernel.__name__
            rows.append(
                {"case": name, "kernel": kernel} | {t: c._asdict() for t, c in found.items()}
            )
            columns = (
                f"{c.registers:>4} {c.spills:>3} {c.shared_bytes / 1024:>5.1f}"
                for c in found.values()
            )
            print(f"  {kernel:24}" + "   ".join(columns), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row[t]["spills"] for row in rows for t in args.targets if t in row))


if __name__ == "__main__":
    sys.exit(main())
