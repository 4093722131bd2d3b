"""What `segtrain bench` prints, and what it concludes."""

from collections.abc import Iterator
from typing import NamedTuple

# From here on a part of the step is worth a remedy.
_MUCH_DATA, _MUCH_COMMUNICATION, _MUCH_ARITHMETIC, _LITTLE_BUSY = 0.05, 0.15, 0.5, 0.85


class Report(NamedTuple):
    """The figures of a training step, over all ranks; JSON can hold them."""

    device: str
    ranks: int
    precision: str
    batch_size: int
    crop_size: tuple[int, int]
    steps: int  # measured, twice
    step_s: float
    data_s: float  # of these, waiting for the loader
    parted_step_s: float  # a step while its parts were timed
    parts_s: dict[str, float]
    sample_s: float  # one sample in one process
    workers: int  # of the loader, for each rank
    flops_of_image: float  # forward and backward, convolutions and matrix products
    peak_flops: float  # a second, of all ranks together, in matrix products
    peak_bytes: int  # of the rank with the most
    device_busy: float | None  # the part of the time with kernels; None on a CPU

    @property
    def images_per_s(self) -> float:
        """Images that all ranks train on in a second."""
        return self.batch_size / self.step_s

    @property
    def flops(self) -> float:
        """Operations a second of all ranks."""
        return self.images_per_s * self.flops_of_image


def lines_of(report: Report) -> Iterator[str]:
    """The report for people."""
    height, width = report.crop_size
    yield (
        f"device     {report.ranks} x {report.device}, {report.precision}, batch "
        f"{report.batch_size} of {height}x{width}"
    )
    yield (
        f"step       {_ms(report.step_s)}, {report.images_per_s:.1f} images/s, mean of "
        f"{report.steps} steps"
    )
    yield f"parts      of steps in which they were timed, {_ms(report.parted_step_s)} each"
    for name, seconds in report.parts_s.items():
        yield f"  {name:<15}{_ms(seconds):>9} {seconds / report.parted_step_s:>6.1%}"
    yield (
        f"sample     {_ms(report.sample_s)} in one process; {report.workers} loader workers a rank"
    )
    yield (
        f"arithmetic {report.flops_of_image / 1e9:.1f} GFLOP an image, {report.flops / 1e12:.3f} "
        f"TFLOP/s: {report.flops / report.peak_flops:.0%} of the {report.peak_flops / 1e12:.3f} "
        "of large matrix products"
    )
    yield f"memory     {report.peak_bytes / 2**30:.2f} GiB at most in a process"
    if report.device_busy is not None:
        yield f"kernels    run {report.device_busy:.0%} of the time"
    yield f"limit      {limit_of(report)}"


def limit_of(report: Report) -> str:
    """What to change first, in words."""
    data = report.data_s / report.step_s
    communication = report.parts_s["communication"] / report.parted_step_s
    if data > max(_MUCH_DATA, communication):
        return (
            f"the loader: {data:.0%} of the step is spent waiting for it; more data.num_workers, "
            "or auto, if cores are idle, a pack (segtrain data pack), smaller images, or "
            "fewer changes of colour"
        )
    if communication > _MUCH_COMMUNICATION:
        return (
            f"communication: {communication:.0%} of the step where nothing overlaps; more images a "
            "rank, or a faster connection"
        )
    arithmetic = report.flops / report.peak_flops
    if arithmetic > _MUCH_ARITHMETIC:
        return (
            f"arithmetic: {arithmetic:.0%} of what large matrix products reach; lower precision, "
            "a smaller model or crop, or more devices"
        )
    if report.device_busy is not None and report.device_busy < _LITTLE_BUSY:
        return (
            f"the host: kernels run only {report.device_busy:.0%} of the time, the device waits "
            "for the next; larger crops or batches, or train.compile"
        )
    return (
        f"memory traffic, small operations or other programs: arithmetic is at {arithmetic:.0%} of "
        "what large matrix products reach, and nothing waits; bfloat16, larger crops or "
        "batches, or train.compile"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
