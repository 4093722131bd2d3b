"""Options of the training: how long, how large, how exact."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from segtrain.config.section import NonNegative, Positive, PositiveFloat, Section, option


class TrainConfig(Section):
    """The steps. A step is one update of the weights; sizes count over all ranks."""

    steps: Positive = option(40_000, "length of the training")
    batch_size: Positive = option(16, "images a step, over all ranks")
    accumulate_steps: Positive = option(
        1,
        "split each batch into this many microbatches; batch statistics are then those of one "
        "microbatch, so the result differs from a whole batch; virtual_ranks is exact",
    )
    virtual_ranks: Positive = option(
        1,
        "GPU memory for time: this many virtual ranks take turns on each rank's images; what their "
        "backward passes need waits in host memory, so that a CPU saves nothing; the result is "
        "that of as many times the ranks",
    )
    shares: Positive | None = option(
        None,
        "cut each microbatch into this many parts, computed apart and summed in a fixed order: "
        "equal bits on any number of ranks up to this one; null: equal to rounding only",
    )
    split: Literal["even"] | Annotated[tuple[NonNegative, ...], Field(min_length=1)] = option(
        "even",
        "how ranks divide the images, or shares, of a microbatch, which does not change the "
        "result; [5, 3]: in such proportions",
    )
    parallel: Literal["sync", "hogwild", "server"] = option(
        "sync",
        "hogwild: CPU processes change the same weights without waiting for each other; the "
        "result depends on their number and on chance. server: the first process holds the "
        "weights and updates them by the gradients of the others, on one machine or several",
    )
    staleness: NonNegative = option(
        16,
        "server: the most updates between the fetch of weights and the update by their gradient; "
        "a process that is too far ahead waits. 0: one update by the gradients of a whole batch",
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16", "float64"] = option(
        "tf32",
        "bfloat16 and float16: automatic mixed precision; tf32: float32, but a GPU that has TF32 "
        "rounds the factors in convolutions and matrix products to its 11 bits, as torch itself "
        "does in convolutions; float32 takes such a GPU up to 4.5 times as long",
    )
    compile: bool = option(
        False,
        "torch.compile the model with its loss, into one graph; the first step takes "
        "minutes, and a C++ compiler is needed, on CUDA one for C and Python's headers too",
    )
    graph: Literal["auto"] | bool = option(
        "auto",
        "on CUDA, replay steps as CUDA graphs after the first three: the same numbers, without "
        "waiting for Python; takes some memory. auto: not on several devices with versions where "
        "the first replay, which is compared with the step itself, failed before; true: try again",
    )
    init_from: str | None = option(
        None,
        "run or checkpoint whose weights training starts from, instead of model.pretrained; "
        "classes with the same name, but for case, _ and -, keep their rows of the classifiers; "
        "others start from random numbers, and the classifiers then count as new in optim",
    )
    deterministic: bool = option(
        False,
        "kernels that compute the same bits in every run, and an error where torch has none; on "
        "CUDA without it runs differ in the last bits, on CPUs they do not; slower",
    )
    timeout_s: PositiveFloat = option(
        600.0, "how long a rank waits for the others before it gives up"
    )

    @property
    def is_asynchronous(self) -> bool:
        """Whether processes do not compute their steps together."""
        return self.parallel != "sync"

    @property
    def num_servers(self) -> int:
        """Ranks, the first, that get no images."""
        return int(self.parallel == "server")

    def _mistakes(self) -> Iterator[str]:
        if not isinstance(self.split, str) and not any(self.split):
            yield "split: all numbers are 0"
        batch, images = self.batch_size, self.batch_size // self.accumulate_steps
        if images == 0:
            yield (
                f"accumulate_steps: {self.accumulate_steps} must not be larger than batch_size, "
                f"{batch}"
            )
        if self.shares is not None and images < self.shares:
            yield (
                f"shares: {self.shares} shares of a microbatch of {images} images "
                "(batch_size / accumulate_steps) would leave some empty; use fewer shares or a "
                "larger batch"
            )
