"""The evaluation of a run: scores, pictures, and whether the model is the best so far."""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from segtrain.config import EvalConfig
from segtrain.data.read.concurrent import IO_THREADS, prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.loader import num_loader_workers
from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness
from segtrain.errors import ConfigError
from segtrain.inference.predictor import Predictor, for_scores
from segtrain.inference.settings import InferenceSettings, view_sizes
from segtrain.models.blocks import Normalize
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.norm import placed, precise_statistics
from segtrain.run.console import score_text
from segtrain.run.directory import EVALUATION, OF_EVALUATIONS
from segtrain.run.pictures import NUM_IMAGES, as_rgb, panel, spread, to_png
from segtrain.score.plugin_metrics import PluginMetric
from segtrain.score.records import Records
from segtrain.score.scoring import Sample, StoppedError, evaluate_dataset
from segtrain.task.contract import Best, Outcome
from segtrain.task.prediction import Prediction
from segtrain.task.tasks import task_of
from segtrain.text import MAX_NAME, first_of, printable
from segtrain.trainer import save
from segtrain.trainer.setup import TrainRun
from segtrain.trainer.training import Training
from segtrain.training.step_sync import LateVote


def evaluate(run: TrainRun) -> bool:
    """Scores the model on the evaluation split, logs it, and saves it if it is the best so far.

    A signal to stop ends the evaluation at once: then it has told nothing, the run stops, and its
    resumption evaluates again. Returns whether the evaluation came to its end. Collective.
    """
    # Weights that are not known to be finite must not be scored, and perhaps kept as the best.
    save.settle(run)
    config, step, log = run.config, run.state.step, run.log
    liveness.beat("evaluation", step)
    pictures: dict[int, str] = {}
    try:
        outcome, further = _evaluate_split(run, pictures)
    except StoppedError:
        run.step_sync.ask(stop=True)
        log.lines([f"the evaluation after step {step} was stopped; --resume repeats it"])
        return False
    outcome, run.thresholds = outcome.fitted(config.eval.thresholds)
    names, split = run.eval_set.classes.names, run.eval_set.split
    # Before `save_best`: the checkpoint is to say that this step has been evaluated.
    is_first, run.evaluated = run.evaluated == 0, step
    scalars = outcome.scalars(names) | further
    by, score, lines = _chosen_score(config.eval, outcome, scalars, names, split)
    if is_first:
        log.lines([*outcome.warnings(names, split), *lines])
    scalars[config.eval.best_tag] = score
    if left_out := config.eval.without:  # refused where the task has no scores of classes
        scalars["eval/mIoU_without"] = outcome.scores.mean_iou_without(left_out, names)
    # A line of metrics.jsonl is known as an evaluation by one of these tags.
    if OF_EVALUATIONS[0] not in scalars:
        scalars[OF_EVALUATIONS[1]] = score
    log.scalars(step, scalars)
    if log.enabled and config.log.charts and (chart := outcome.chart(names)) is not None:
        log.picture(step, "eval/confusion", chart)
    # All ranks come here: each has drawn some of the pictures.
    _show(run, pictures)
    better = is_better(score, run.best)
    if better:  # on all ranks, which have the same score and keep the same best one
        run.best = {"step": step, "by": by, "score": score}
        if dist.is_main():
            run.checkpoints.save_best(save.checkpoint_of(run))
            _keep_records(run, outcome)
    precision = "" if config.eval.precision is None else f" ({config.eval.precision})"
    words = outcome.words()
    if config.eval.best != "miou":
        words += f"  {printable(by, MAX_NAME)} {score:.4f}"
    if run.thresholds:
        from_each = " ".join(f"{threshold:.2f}" for threshold in run.thresholds)
        words += f" with thresholds {printable(from_each, MAX_NAME)}"
    log.lines([f"step {step}  {words}{precision}  {score_text(run.best)}"])
    return True


def _chosen_score(
    by: EvalConfig,
    outcome: Outcome,
    scalars: Mapping[str, float],
    names: Sequence[str],
    split: str,
) -> Best:
    """The score that chooses best.pt (eval.best). scalars: all, by their tags."""
    if by.best_metric is None:
        return outcome.best(by, names, split)
    if by.best_tag not in scalars:
        tags = (tag.partition("/") for tag in scalars)
        known = first_of(name for kind, _, name in tags if kind == "metric")
        others = f"{first_of(scalars)}, whose tags are not metric/{by.best_metric}/SCORE"
        what = f"no score {printable(by.best, MAX_NAME)} was found, only {known or others}"
        raise ConfigError(f"eval.best: {what}")
    score = scalars[by.best_tag]
    return Best(by.best_name, score if math.isfinite(score) else math.nan)


def _keep_records(run: TrainRun, outcome: Outcome) -> None:
    """Writes the scores of each image, for `segtrain report` and `compare`."""
    settings = InferenceSettings.from_config(run.config)
    settings = replace(settings, thresholds=run.thresholds or settings.thresholds)
    try:
        if records := Records.of(outcome, run.eval_set, settings, run.state.step):
            records.save(run.directory)
    except OSError as error:  # they can be computed again
        run.log.lines([f"warning: {EVALUATION} cannot be written: {error}"])


def _evaluate_split(run: TrainRun, pictures: dict[int, str]) -> tuple[Outcome, dict[str, float]]:
    """What the evaluation split says, and the scores of plugins by tag (collective).

    Adds the pictures to show.

    Raises:
        StoppedError: a rank was asked to stop.
    """
    config, asked = run.config, run.signal_flags.stop_requested
    if config.norm.precise_batches is not None:
        take_precise_statistics(run, config.norm.precise_batches, stop=asked)
    metrics = [PluginMetric(one, run.eval_set.classes.names) for one in config.eval.metrics]
    outcome = _evaluated(
        run,
        run.eval_set,
        progress=True,
        callbacks=[lambda one: _keep(run, one, pictures), *(metric.add for metric in metrics)],
        stop=dist.StopNews(asked),
    )
    return outcome, {
        f"metric/{metric.name}/{key}": value
        for metric in metrics
        for key, value in metric.scores().items()
    }


def evaluate_largest(run: Training, eval_set: SegDataset) -> None:
    """Evaluates the images that take most memory, at the same time on every rank (collective).

    These are the largest of all and the largest of those that do not go by windows.
    """
    by_size = _predictor(run).settings
    settings = by_size.usual

    def largest() -> list[int]:
        indices = range(len(eval_set))
        with closing(prefetch(eval_set.size, indices, IO_THREADS)) as read:
            sizes = list(read)

        def work(index: int) -> tuple[int, int]:
            size = sizes[index]
            return max(map(math.prod, view_sizes(size, settings))), math.prod(size)

        whole = [i for i in indices if by_size.of(sizes[i]) == settings]
        return sorted({max(group, key=work) for group in (indices, whole) if group})

    # So many copies that every rank computes as many at a time as it ever will.
    copies = dist.world_size() * run.state.passes.at_once * (settings.batch_size or 1)
    samples = [eval_set[i] for i in dist.run_on_rank0(largest)]
    _evaluated(run, [sample for sample in samples for _ in range(copies)])


def _evaluated(run: Training, samples: Sequence[Sample], **options: Any) -> Outcome:
    """`evaluate_dataset` as a run calls it."""
    num_threads = max(1, num_loader_workers(run.config.data))
    how = {"num_threads": num_threads, "at_once": run.state.passes.at_once}
    return evaluate_dataset(_predictor(run), samples, **how, **options)


def _predictor(run: Training) -> Predictor:
    usual, classes = InferenceSettings.from_config(run.config), run.train_set.classes
    which = run.state.eval_model, usual, run.device, classes.num_classes
    return for_scores(*which, at_once=run.state.passes.at_once)


def is_better(score: float, best: dict[str, Any] | None) -> bool:
    """Whether a score is above the best one; NaN never is."""
    # Older versions have kept NaN as the best.
    is_first = best is None or math.isnan(best["score"])
    return not math.isnan(score) if is_first else score > best["score"]


def _show(run: TrainRun, pictures: dict[int, str]) -> None:
    """Logs the pictures of all ranks in the order of the data set (collective)."""
    drawn = [pair for each in dist.all_gather_object(list(pictures.items())) for pair in each]
    for index, text in sorted(drawn) if run.log.enabled else ():
        picture = np.array(Image.open(BytesIO(b64decode(text))))
        run.log.picture(run.state.step, f"eval/{index}", picture)


def _keep(run: TrainRun, prediction: Prediction, pictures: dict[int, str]) -> None:
    """Draws image, label and prediction if it is one to show; as text, which ranks can exchange."""
    if prediction.index not in spread(len(run.eval_set), NUM_IMAGES):
        return
    index, image, *pixels = prediction
    image = as_rgb(image, run.eval_set.form.value_range)
    task = task_of(run.config.task)
    names, palette = task.key(run.eval_set.classes)
    shown = map(task.shown, pixels)
    picture = panel(image, *shown, palette=palette, names=names, title=run.eval_set.name(index))
    pictures[index] = b64encode(to_png(picture)).decode()


def take_precise_statistics(
    run: Training, num_batches: int, *, stop: Callable[[], bool] = lambda: False
) -> None:
    """Takes the running statistics of the model to evaluate from `num_batches` (collective).

    These are the batches of the coming steps, whichever ranks train on them. So the result depends
    only on the config and the step.

    stop: asked before each batch, on each rank.

    Raises:
        StoppedError: `stop` was true on a rank; the statistics are as before.
    """
    train, data = run.config.train, run.config.data
    passes = run.state.passes
    normalize = Normalize(data.mean, data.std, data.value_range, clip=data.clip)
    normalize.to(run.device, dtype_of(train))
    model = run.state.eval_model
    vote, step = LateVote(run.device, train.timeout_s), run.state.step

    def forward(images: Tensor) -> None:
        with autocast(autocast_dtype(train), run.device):
            model(normalize(images))

    def images_of_batches() -> Iterator[Any]:
        """Those of each microbatch, as `precise_statistics` takes them."""
        for i, batch in enumerate(run.loader(step, step + num_batches)):
            # All ranks have as many batches, and stop before the same one.
            if vote(stop()):
                raise StoppedError
            yield passes.batch(batch.images.to(run.device), i % train.accumulate_steps)

    with placed(passes.images):
        precise_statistics(model, images_of_batches(), forward, parts=passes.sums)
