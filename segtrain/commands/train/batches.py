"""The batches that this rank trains on."""

from collections.abc import Iterable, Iterator

from segtrain.commands.train.setup import Run
from segtrain.commands.train.stages import Training, train_stream
from segtrain.data.loader import indices_of_rank, num_loader_workers, train_loader
from segtrain.distributed import collectives as dist
from segtrain.run.pictures import training_picture
from segtrain.types import Batch


def indices(run: Training) -> list[range]:
    """For each pass of a step, the positions in the whole batch that this rank trains on."""
    train = run.config.train
    return indices_of_rank(
        train.batch_size,
        train.accumulate_steps,
        dist.rank(),
        dist.world_size(),
        train.shares,
    )


def until(run: Training, step: int) -> Iterable[Batch]:
    """This rank's batches from the current step to `step`."""
    config = run.config
    return train_loader(
        train_stream(run),
        indices=indices(run),
        start_step=run.state.step,
        steps=step,
        num_workers=num_loader_workers(config.data),
        prefetch=config.data.prefetch,
        pin_memory=run.device.type == "cuda",
        # Time out before the other ranks do, so that the error names the loader.
        timeout_s=0.8 * config.train.timeout_s,
    )


def shown(run: Run) -> Iterator[Batch]:
    """This rank's batches from the current step to the last; TensorBoard shows the first one."""
    for i, batch in enumerate(until(run, run.last_step)):
        if i == 0:
            # A wrong label file or augmentation is seen here within a minute.
            picture = training_picture(batch, run.train_set.classes, run.config.log.num_images)
            run.log.picture(run.state.step, "train/batch", picture)
        yield batch
