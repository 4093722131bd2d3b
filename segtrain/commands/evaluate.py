"""`segtrain eval`: a checkpoint scored on a split of its data set.

Every rank runs this on its part of the images and writes pictures of them; rank 0 reports.
"""

import argparse
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from segtrain import files, text
from segtrain.checkpoint import load_model
from segtrain.checkpoint.dataset_guard import eval_differences
from segtrain.checkpoint.trained import LoadedModel, resolve
from segtrain.config import Config, DataConfig
from segtrain.config.experiment import changed_normalization, window_warnings
from segtrain.config.loading import given_keys
from segtrain.data import open_dataset
from segtrain.data.read.classes import class_differences, default_palette
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.layouts import list_split
from segtrain.data.read.protect import check_pictures
from segtrain.data.sample.loader import num_loader_workers
from segtrain.distributed import collectives as dist
from segtrain.distributed.process_group import device_for, process_group
from segtrain.errors import (
    EXIT_OK,
    CheckpointError,
    ConfigError,
    DataError,
    ExecutionError,
    UserError,
)
from segtrain.files import os_errors_as
from segtrain.inference.predictor import for_scores
from segtrain.inference.settings import InferenceSettings, set_after_training
from segtrain.metrics import percent
from segtrain.models.memory import check_windows
from segtrain.models.norms import describe_norm
from segtrain.models.precision import (
    evaluation_warnings,
    for_evaluation,
    to_eval_precision,
)
from segtrain.one_vs_rest import CurveCounts
from segtrain.run.log import say
from segtrain.run.pictures import (
    as_rgb,
    panel,
    spread,
    write_indexed_png,
    write_png,
    write_stored,
)
from segtrain.score.answers import (
    Answer,
    answers_of,
    groups_by,
    instances_of,
    volumes_of,
    without_classes,
)
from segtrain.score.areas import area_lines
from segtrain.score.curves import CURVE_TITLES, CurveQuestion, curves_csv
from segtrain.score.image_calls import ImageCalls
from segtrain.score.plugin_metrics import PluginMetric
from segtrain.score.records import Records, load_records
from segtrain.score.scoring import Chosen, evaluate_dataset
from segtrain.score.surfaces import SurfaceScores
from segtrain.score.temperature import Temperature
from segtrain.score.volume_scores import VolumeScores
from segtrain.task.contract import Outcome, Report, Task
from segtrain.task.prediction import Prediction
from segtrain.task.score_table import InstanceCounts
from segtrain.task.tasks import task_of
from segtrain.text import counted, first_of, printable

# Everything else was decided when the model was trained.
_SETTABLE = ("data.", "eval.", "train.precision")


def run_eval(args: argparse.Namespace) -> int:
    """Evaluates as the command line says and returns the exit code (collective).

    args: checkpoint (run directory or file), others (of an ensemble), set, split, device, json,
        per_image, save_predictions, overlays, num_overlays, worst, no_labels, group (a pattern),
        surface (a tolerance in pixels); min_area (pixels); temperature; curves, class_name,
        precision and recall, those of CurveQuestion.
    """
    asked = _open(args)
    config, loaded = asked.config, asked.loaded
    with ExitStack() as stack:
        stack.enter_context(process_group(asked.device, timeout_s=config.train.timeout_s))
        # Only now can the ranks compare what each has opened.
        _check_same_step(args.checkpoint, loaded.steps)
        # What differs from the training; for labels that are still hashed, at the end.
        lines = _differences(loaded, config, asked.dataset, no_labels=args.no_labels)
        differences = stack.enter_context(closing(lines))
        if dist.is_main():
            for line in (*next(differences), *_warnings(asked)):
                text.say(line)
        result = _count(asked)
        # All that ranks do together is done. The labels that were hashed meanwhile are told last.
        if dist.is_main():
            report = result.outcome.report(
                loaded.classes.names,
                asked.dataset.classes,
                instances=asked.instances,
                layout=config.data.layout,
            )
            answers = _answers(asked, result)
            for line in _lines(asked, result, report, answers):
                say(line)
            for line in next(differences):
                text.say(line)
            _write_files(asked, result, report, answers)
    return EXIT_OK


class _Asked(NamedTuple):
    """What is to be evaluated, and what is result beside the scores.

    groups: the group of each image. instances: None, and `why_not` in lines, where labels have
    none. surfaces, groups (with them volumes), curves, calls, temperature: None if nobody asks.
    """

    args: argparse.Namespace
    device: torch.device
    loaded: LoadedModel
    config: Config
    dataset: SegDataset
    question: CurveQuestion
    curves: CurveCounts | None
    groups: list[str] | None
    writers: Sequence[Callable[[Prediction], None]]
    instances: InstanceCounts | None
    why_not: Sequence[str]
    surfaces: SurfaceScores | None
    volumes: VolumeScores | None
    metrics: Sequence[PluginMetric]
    calls: ImageCalls | None
    temperature: Temperature | None

    @property
    def task(self) -> Task:
        """That of the model."""
        return task_of(self.config.task)

    @property
    def settings(self) -> InferenceSettings:
        """How an image becomes a prediction."""
        return InferenceSettings.from_config(self.config)


def _open(args: argparse.Namespace) -> _Asked:
    """The model, the experiment and the data; what cannot work is refused at once."""
    _check_options(args)
    question = CurveQuestion(args.curves, args.class_name, args.precision, args.recall)
    question.check()
    device = device_for(args.device)
    loaded = load_model(args.checkpoint, *args.others, device=device)
    names = loaded.classes.names
    config = set_after_training(loaded.config, args.set, _SETTABLE, source=str(args.checkpoint))
    _check_task(args, task_of(config.task))
    split = args.split or config.data.eval_split
    dataset = open_dataset(config.data, split, labelled=not args.no_labels)
    _check_classes(loaded, dataset)
    if unknown := config.eval.unknown_classes(names):
        raise ConfigError("\n".join(unknown))
    curves = question.counts(names, device)
    check_windows(config, len(names), device, dist.local_world_size())
    groups = groups_by(args.group, dataset, config)
    writers = picture_writers(args, dataset, config, split)
    instances, why_not = (None, []) if args.no_labels else instances_of(dataset, config)
    surfaces = None if args.surface is None else SurfaceScores(names, args.surface)
    volumes = volumes_of(dataset, config, groups)
    of_class = args.recall and (names.index(args.class_name), args.class_name, args.recall)
    calls = ImageCalls(*of_class, args.min_area or 1) if of_class else None
    views = map(InferenceSettings.from_config, (config, loaded.config))
    temperature = Temperature(*views, len(dataset), device) if args.temperature else None
    chosen = () if args.no_labels else config.eval.metrics
    metrics = [PluginMetric(metric, names) for metric in chosen]
    # Before the evaluation: after it, it is too late to ask for another name.
    _check_files(args)
    return _Asked(
        args=args,
        device=device,
        loaded=loaded,
        config=config,
        dataset=dataset,
        question=question,
        curves=curves,
        groups=groups,
        writers=writers,
        instances=instances,
        why_not=why_not,
        surfaces=surfaces,
        volumes=volumes,
        metrics=metrics,
        calls=calls,
        temperature=temperature,
    )


def _warnings(asked: _Asked) -> list[str]:
    """Where this machine and these options are known to change scores."""
    odd = evaluation_warnings(asked.config, asked.device)
    if any(key.startswith("eval.") for key in given_keys(asked.args.set)):
        odd += window_warnings(asked.config)
    return [f"warning: {line}" for line in odd]


class _Result(NamedTuple):
    """What all ranks have found together. further: the scores of plug-ins, by their metrics."""

    outcome: Outcome
    records: Records | None
    further: Mapping[str, Mapping[str, float]]


def _count(asked: _Asked) -> _Result:
    """Predicts and counts, and draws the worst images (collective)."""
    args, config, loaded = asked.args, asked.config, asked.loaded
    predictor = for_scores(
        to_eval_precision(loaded.model, config, asked.device),
        asked.settings,
        asked.device,
        loaded.classes.num_classes,
        mode_is_given="eval.mode" in given_keys(args.set),
    )
    num_threads = max(1, num_loader_workers(config.data))
    evaluate = partial(evaluate_dataset, predictor, progress=True, num_threads=num_threads)
    measured = [x for x in (asked.instances, asked.surfaces, asked.volumes) if x is not None]
    callbacks = [*asked.writers, *(measure.add for measure in (*measured, *asked.metrics))]
    watched = [one for one in (asked.calls, asked.temperature) if one is not None]
    counting = {"callbacks": callbacks, "watchers": [one.add for one in watched]}
    outcome = evaluate(asked.dataset, curves=asked.curves, **counting)
    further = {measure.name: measure.scores() for measure in asked.metrics}
    # All ranks were asked for the same, so these sums match.
    for measure in (*measured, *watched):
        measure.sum_over_ranks()
    records = Records.of(outcome, asked.dataset, asked.settings, loaded.step)
    # On all ranks: the images are predicted once more, by all of them.
    if args.worst:
        _draw_worst(args, asked.task, asked.dataset, records, evaluate)
    return _Result(outcome, records, further)


def _answers(asked: _Asked, result: _Result) -> list[Answer]:
    """What was asked beside the scores."""
    answers, names = [], asked.loaded.classes.names
    if result.outcome.curves is not None:
        told = asked.question.answer(result.outcome.curves.counts, names, asked.task)
        answers.append(Answer("curves", *told))
    if asked.calls:
        answers.append(Answer("by_image", *asked.calls.answer(asked.dataset.names, asked.task)))
    if asked.temperature:
        trained = asked.dataset.split == asked.config.data.train_split
        about = {"trained": trained, "by_windows": result.outcome.num_by_windows}
        sources = asked.args.checkpoint, *asked.args.others
        answers.append(Answer("temperature", *asked.temperature.answer(sources, **about)))
    left_out = () if asked.args.no_labels else asked.config.eval.without
    if left_out:  # a task of a plugin has other scores
        answers.append(without_classes(result.outcome.scores, left_out, names))
    measured = {"by_volume": asked.volumes and asked.volumes.table, "surfaces": asked.surfaces}
    return answers + answers_of(result.records, asked.groups, measured, result.further)


def _lines(
    asked: _Asked, result: _Result, report: Report, answers: Sequence[Answer]
) -> Iterator[str]:
    """The scores, and what they are of."""
    args, loaded, config, dataset = asked.args, asked.loaded, asked.config, asked.dataset
    yield from (f"warning: {warning}" for warning in dataset.warnings)
    if not args.no_labels:
        yield from (*report.lines(), *asked.why_not)
        yield from result.outcome.warnings(loaded.classes.names, dataset.split)
        if asked.task.has_classes:
            yield from area_lines(result.outcome.scores, loaded.classes.names, config)
    for answer in answers:
        yield from answer.lines
    yield f"{args.checkpoint}, {loaded.about}, {len(dataset)} images of split {dataset.split}"
    if not args.no_labels:
        for name, score in _members_alone(loaded, result.records).items():
            yield f"{name} alone: mIoU {percent(score)}"
    yield f"{asked.settings.describe()}; trained with {describe_norm(config.norm)}"
    yield from _about_thresholds(args, loaded, config, dataset.split)
    yield from loaded.zeros()


def _write_files(asked: _Asked, result: _Result, report: Report, answers: Sequence[Answer]) -> None:
    args = asked.args
    if args.json:
        table = _json(
            args.checkpoint, asked.loaded, asked.config, asked.dataset, report, result.outcome
        )
        table |= {answer.key: answer.found for answer in answers}
        _write(args.json, json.dumps(table, indent=2, allow_nan=False) + "\n")
    if args.per_image:
        _write(args.per_image, result.records.table())
    if args.curves:
        _write(args.curves, curves_csv(result.outcome.curves.counts, asked.loaded.classes.names))


def _draw_worst(
    args: argparse.Namespace,
    task: Task,
    dataset: SegDataset,
    records: Records,
    evaluate: Callable[..., Outcome],
) -> None:
    """Predicts the worst images once more, and draws them (collective)."""
    chosen = Chosen(dataset, sorted(records.worst(args.worst)))
    draw = partial(_write_overlay, args.overlays, task, dataset, chosen.indices)
    evaluate(chosen, callbacks=[lambda sample: draw(chosen.original(sample))])
    if dist.is_main():
        what = f"{len(chosen.indices)} worst images (neighbours of a sequence count once)"
        say(f"overlays of the {what}: {args.overlays}")


def _about_thresholds(
    args: argparse.Namespace, loaded: LoadedModel, config: Config, split: str
) -> list[str]:
    """Where classes overlap, what each is predicted from; a note if the split has chosen that."""
    thresholds = task_of(config.task).thresholds(config.eval.thresholds)
    if thresholds is None:
        return []
    thresholds = thresholds * loaded.classes.num_classes if len(thresholds) == 1 else thresholds
    each = zip(loaded.classes.names, thresholds, strict=True)
    is_given = "eval.thresholds" in given_keys(args.set)
    of_members = loaded.members and not is_given
    words = "thresholds, means of the members'" if of_members else "thresholds"
    lines = [f"{words}: " + ", ".join(f"{printable(n)} {t:.3g}" for n, t in each)]
    if loaded.fits_thresholds and not is_given and split == loaded.config.data.eval_split:
        lines.append(f"note: training fitted them on split {split}, which flatters its scores")
    return lines


def _json(
    checkpoint: str | Path,
    loaded: LoadedModel,
    config: Config,
    dataset: SegDataset,
    report: Report,
    outcome: Outcome,
) -> dict[str, Any]:
    """What --json writes: the same bytes on any number of ranks."""
    ensemble = [{"checkpoint": x.source, "step": x.step} for x in loaded.members]
    return {
        "checkpoint": str(checkpoint),
        "step": loaded.step,
        **({"ensemble": ensemble} if ensemble else {}),
        "split": dataset.split,
        "num_images": len(dataset),
        **report.to_dict(),
        **outcome.table(),
        "inference": {
            **InferenceSettings.from_config(config).to_dict(),
            "precision": for_evaluation(config).precision,
            "images_by_windows": outcome.num_by_windows,  # although the mode is another
        },
        "norm": describe_norm(config.norm),
    }


def _members_alone(loaded: LoadedModel, records: Records | None) -> dict[str, float]:
    """The mIoU of each member of an ensemble whose run has kept that of the same evaluation."""
    scores = {}
    for member in loaded.members if records else ():
        with suppress(UserError):  # a damaged file; the score of the ensemble stands without it
            own = load_records(resolve(member.source).parent.parent)
            if own and own.is_like(records, step=member.step):
                scores[member.source] = own.scores.mean_iou
    return scores


def _write(file: Path, content: str) -> None:
    with os_errors_as(ExecutionError, file, "the scores cannot be written"):
        files.write_output(file, content)


def _check_options(args: argparse.Namespace) -> None:
    """ConfigError: options that do not serve each other."""
    if args.worst and not args.overlays:
        raise ConfigError("--worst: serves only --overlays DIR")
    if args.min_area and not args.recall:
        raise ConfigError("--min-area: serves only --recall X")
    if args.no_labels:
        scored = {"--json": args.json, "--per-image": args.per_image, "--overlays": args.overlays}
        scored |= {"--curves": args.curves, "--class": args.class_name, "--group": args.group}
        scored |= {"--surface": args.surface, "--temperature": args.temperature or None}
        for option, value in scored.items():
            if value is not None:
                raise ConfigError(f"{option}: needs labels; remove it, or --no-labels")
        if not args.save_predictions:
            raise ConfigError("--no-labels: there is nothing to score; add --save-predictions DIR")


def _check_task(args: argparse.Namespace, task: Task) -> None:
    """ConfigError: what is asked for is about classes, and the task has none."""
    asked = {"--per-image": args.per_image, "--worst": args.worst, "--group": args.group}
    asked |= {"--curves": args.curves, "--class": args.class_name, "--surface": args.surface}
    for option, value in asked.items():
        if value:
            task.check_classes(option)


def _check_files(args: argparse.Namespace) -> None:
    """ConfigError: a file of scores cannot be written; makes its folder."""
    begins = '{\n  "checkpoint": ', "image,IoU,accuracy,", ",".join(CURVE_TITLES)
    options = ("--json", args.json), ("--per-image", args.per_image), ("--curves", args.curves)
    for (option, file), begin in zip(options, begins, strict=True):
        if file:
            with os_errors_as(ConfigError, f"{option} {file}", "cannot be written"):
                file.parent.mkdir(parents=True, exist_ok=True)
                files.check_output(file, begin)


def _check_classes(loaded: LoadedModel, dataset: SegDataset) -> None:
    """DataError: the data set has other classes than the model."""
    if loaded.classes.names != dataset.classes.names:
        (difference,), _ = class_differences(loaded.classes, dataset.classes, "ids")
        raise DataError(
            f"{difference}; evaluate with the class file of the training, --set data.classes=..."
        )


def _differences(
    loaded: LoadedModel,
    config: Config,
    dataset: SegDataset,
    *,
    no_labels: bool,
) -> Iterator[list[str]]:
    """What to say before the evaluation; then, of labels that were hashed meanwhile, after it."""
    before = changed_normalization(loaded.config, config)
    if no_labels:
        yield before
        yield []
        return
    with closing(eval_differences(loaded, config.data, dataset)) as differences:
        before += next(differences, [])
        yield [*before, *_seen_in_training(loaded, config.data, dataset)]
        yield next(differences, [])


def _seen_in_training(loaded: LoadedModel, data: DataConfig, dataset: SegDataset) -> list[str]:
    """A warning if a member of an ensemble was trained on images of the split."""
    images = {os.path.realpath(pair.image) for pair in dataset.pairs}
    seen: set[str] = set()
    members = []
    for member in loaded.members:
        own = member.config.data
        root = data.root if own.root == loaded.config.data.root else own.root
        with suppress(UserError):  # its data are not here any more
            pairs = list_split(own.model_copy(update={"root": root}), own.train_split).pairs
            if common := images & {os.path.realpath(pair.image) for pair in pairs}:
                members.append(member.source)
                seen |= common
    if not seen:
        return []
    what = f"{len(seen)} of {counted(len(images), 'image', 'images')} of split {dataset.split}"
    return [
        f"warning: {what} trained a member of the ensemble ({first_of(members, 3)}): the score is "
        "too good; segtrain folds scores each image by a model that has not seen it"
    ]


def _check_same_step(checkpoint: str | Path, steps: str) -> None:
    """Refuses ranks with different models: each has opened the files by itself (collective)."""
    found = dict.fromkeys(dist.all_gather_object(steps))
    if len(found) > 1:
        raise CheckpointError(
            f"{checkpoint}: replaced while the ranks were loading it (steps {', '.join(found)}); "
            "start again, or name a checkpoint that stays as it is"
        )


Writer = Callable[[Prediction], None]


def picture_writers(
    args: argparse.Namespace, dataset: SegDataset, config: Config, split: str
) -> list[Writer]:
    """What writes the pictures of each prediction; their folders are made here."""
    folders = {"--save-predictions": args.save_predictions, "--overlays": args.overlays}
    folders = {option: Path(folder) for option, folder in folders.items() if folder}
    for option, folder in folders.items():
        check_pictures(option, folder, dataset.names, config.data, splits=[split])
    for option, folder in folders.items():
        with os_errors_as(ConfigError, f"{option} {folder}", "cannot make this folder"):
            folder.mkdir(parents=True, exist_ok=True)
    writers = []
    if folder := folders.get("--save-predictions"):
        writers.append(_prediction_writer(folder, dataset, config))
    if (folder := folders.get("--overlays")) and not args.worst:
        chosen = spread(len(dataset), args.num_overlays)  # whatever the number of ranks
        writers.append(partial(_write_overlay, folder, task_of(config.task), dataset, chosen))
    return writers


def _prediction_writer(folder: Path, dataset: SegDataset, config: Config) -> Writer:
    """Writes a PNG of raw class ids, at the size of the label, under the name of the image.

    Where classes overlap a TIFF with a band for each.
    The evaluation server of Cityscapes expects <city>_<sequence>_<frame>*.png anywhere below the
    folder; that of VOC indices into VOC's palette.
    """
    layout, task = config.data.layout, task_of(config.task)
    ending = "_pred_labelIds" if layout == "cityscapes" else ""

    def write(prediction: Prediction) -> None:
        path = folder / f"{dataset.name(prediction.index)}{ending}"
        stored = task.stored(dataset.classes, prediction.pred)
        if layout == "voc" and stored.dtype == np.uint8:
            write_indexed_png(path.with_name(f"{path.name}.png"), stored, default_palette(256))
        else:
            write_stored(path, stored)

    return write


def _write_overlay(
    folder: Path,
    task: Task,
    dataset: SegDataset,
    chosen: Collection[int],
    prediction: Prediction,
) -> None:
    """Writes image, label, prediction and errors side by side, for the `chosen` images."""
    if prediction.index not in chosen:
        return
    index, image, *pixels = prediction
    image = as_rgb(image, dataset.form.value_range)
    name, classes = dataset.name(index), dataset.classes
    names, palette = task.key(classes)
    picture = panel(image, *map(task.shown, pixels), palette=palette, names=names, title=name)
    write_png(folder / f"{name}.png", picture)
