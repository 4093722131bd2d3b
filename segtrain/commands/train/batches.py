"""The batches that this rank trains on."""

from collections.abc import Callable, Iterator

from segtrain.commands.train.auto_workers import MEASURED_STEPS, Measurement
from segtrain.commands.train.setup import Run
from segtrain.commands.train.stages import Training, train_stream
from segtrain.data.loader import first_workers, indices_of_rank, most_workers, train_loader
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


def num_workers(run: Training) -> int:
    """The loader processes of this rank."""
    return first_workers(run.config) if run.auto_workers is None else run.auto_workers


def until(run: Training, step: int) -> Iterator[Batch]:
    """This rank's batches from the current step to `step`."""
    return _between(run, run.state.step, step)


def with_chosen_workers(run: Training, step: int, tell: Callable[[str], None]) -> Iterator[Batch]:
    """As `until`; with data.num_workers auto, the number is chosen in the first steps.

    tell: gets a line about it.
    """
    start, most = run.state.step, most_workers(run.config)
    chosen = start + MEASURED_STEPS
    if run.config.data.num_workers != "auto" or most == 0 or chosen >= step:
        return until(run, step)
    return _measured(run, start, chosen, step, most, tell)


def _measured(
    run: Training, start: int, chosen: int, step: int, most: int, tell: Callable[[str], None]
) -> Iterator[Batch]:
    """The batches of the steps `start` to `step` - 1; those before `chosen` are measured."""
    measurement, before = Measurement(run.device), num_workers(run)
    batches = _between(run, start, step)
    try:
        for _ in range(start, chosen):
            made_s, images = 0.0, 0
            for positions in indices(run):
                batch = next(batches)
                made_s, images = made_s + batch.made_s, images + len(positions)
                # The step takes the batches of all passes, then computes.
                measurement.start()
                yield batch
            measurement.stop(made_s, images)
        choice = measurement.choice(most)
        tell(choice.line())
        run.auto_workers = choice.workers
        if choice.workers != before:
            batches.close()
            batches = _between(run, chosen, step)
        yield from batches
    finally:
        batches.close()


def _between(run: Training, start: int, stop: int) -> Iterator[Batch]:
    """This rank's batches of the steps `start` to `stop` - 1."""
    config = run.config
    return train_loader(
        train_stream(run),
        indices=indices(run),
        start_step=start,
        steps=stop,
        num_workers=num_workers(run),
        prefetch=config.data.prefetch,
        pin_memory=run.device.type == "cuda",
        # Time out before the other ranks do, so that the error names the loader.
        timeout_s=0.8 * config.train.timeout_s,
    )


def shown(run: Run) -> Iterator[Batch]:
    """This rank's batches from the current step to the last; TensorBoard shows the first one."""
    batches = with_chosen_workers(run, run.last_step, lambda line: run.log.lines([line]))
    for i, batch in enumerate(batches):
        if i == 0:
            # A wrong label file or augmentation is seen here within a minute.
            picture = training_picture(batch, run.train_set.classes, run.config.log.num_images)
            run.log.picture(run.state.step, "train/batch", picture)
        yield batch
