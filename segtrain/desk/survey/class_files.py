"""Labels in a file or a folder for each class: which class a file shows, and which are chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from segtrain.data.read import image_formats
from segtrain.data.read.classes import says_no_class
from segtrain.desk.survey import contents, file_names
from segtrain.desk.survey.file_names import words_of
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import ONE_CLASS, LabelSet
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError, names_option
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, refuse_unused
from segtrain.text import counted, first_of

BACKGROUND = "background"
# Words that tell no class: of roles, of splits, and of kinds of files.
_NO_CLASS = file_names.ROLE_WORDS | {suffix[1:] for suffix in image_formats.SUFFIXES}


def by_class(survey: Survey, labels: LabelSet, answers: Answers) -> LabelSet:
    """`labels` with the class of each file, where a file shows one.

    In this order:

    1. --instances makes one class of numbers of objects.
    2. --threshold says which grey levels show the class of a file.
    3. Last folders of masks may be classes: --names says so, or it is asked.
    4. --missing adds images without a label as background.
    5. --names chooses classes and orders them.
    6. --task multilabel lets a pixel have several classes.

    Raises:
        UndecidedError: folders that images and labels share may name classes, or places.
        ConfigError: --names names a class that no file is of, or --missing has no background.
    """
    labels = _as_objects(labels, answers)
    labels = _with_threshold(labels, answers)
    # masks/scratch/1.png and masks/dent/2.png: one mask an image, whose folder says the class.
    # Whoever has named several sets together has said that they are of one kind.
    is_said = answers.names is None and ", " in (answers.labels or "")
    if _shows_one_class(labels) and not is_said and (words := _place_words(labels)):
        labels = _divided(labels, words, answers)
    if answers.missing:
        labels = _with_missing(survey, labels, answers.empty_folders)
    # For one class --names is its name, which `choose_classes` takes.
    if answers.names is not None and labels.classes and not labels.is_one_class:
        labels = _chosen(labels, answers.names, answers)
    return labels if answers.task is None else _overlapping(labels)


def _as_objects(labels: LabelSet, answers: Answers) -> LabelSet:
    """`labels`, whose values number objects of one class if --instances says so."""
    if labels.classes or labels.kind not in ("ids", "colors"):
        refuse_unused(vars(answers), "instances", f"{labels.pattern}: no numbers of objects")
        return labels
    if answers.instances is None:
        return labels
    return replace(labels, classes=ONE_CLASS, class_of={}, values={}, numbered=True)


def _with_threshold(labels: LabelSet, answers: Answers) -> LabelSet:
    if answers.threshold is None:
        return labels
    if labels.kind != "two" and not labels.classes:
        held = f"{labels.pattern}: {contents.KINDS[labels.kind]}"
        refuse_unused(vars(answers), "threshold", held)
    return replace(labels, threshold=answers.threshold)


def _overlapping(labels: LabelSet) -> LabelSet:
    """`labels`, of which a pixel may have several classes; ConfigError: one file holds all."""
    if _shows_one_class(labels):
        labels = _as_one_class(labels)
    if not labels.classes:
        raise ConfigError(
            f"--task multilabel: {labels.pattern}: one label holds all classes, and a pixel has "
            "one; it is for a file or folder of masks a class, and for annotations; for labels "
            "with a band a class write the config by hand (data/README.md)"
        )
    return replace(labels, overlapping=True)


def _as_one_class(labels: LabelSet) -> LabelSet:
    """Masks with one file an image, in the form of those with several."""
    return replace(labels, kind="ids", classes=ONE_CLASS, values={})


def _shows_one_class(labels: LabelSet) -> bool:
    """Whether each image has one file, which shows one class beside 0."""
    is_binary = labels.kind in ("ids", "two") and len(labels.values.keys() - {0}) <= 1
    return is_binary and not labels.classes


def _place_words(labels: LabelSet) -> dict[str, str]:
    """The last folder of each file that says neither role nor split.

    Empty if all files have one such folder, or some have none. Classes whose folders images do not
    have are known already (`label_sets`).
    """
    found = {file: _last_folder(file) for files in labels.labels.values() for file in files}
    words = {word.lower() for word in found.values()}
    return found if len(words) > 1 and all(words) else {}


def _last_folder(file: str) -> str:
    folders = PurePosixPath(file).parts[:-1]
    # crack of masks/crack/train/1.png.
    return next((x for x in reversed(folders) if not _is_no_class(x)), "")


def _is_no_class(word: str) -> bool:
    """Whether it is a number, or says a role or a split."""
    parts = words_of(word)
    numbered = any(map(str.isdigit, word))
    return numbered or all(x in _NO_CLASS or file_names.split_of(x) for x in parts)


def _divided(labels: LabelSet, words: Mapping[str, str], answers: Answers) -> LabelSet:
    """`labels` with these words as classes, if --names says so.

    MVTec has images in test/hole/ and masks in ground_truth/hole/: the folder is a class there.
    Elsewhere it may be a place, or who drew the masks.

    UndecidedError: --names says nothing.
    """
    classes = tuple(sorted(set(words.values())))
    if answers.names is None:
        raise UndecidedError(
            f"{labels.pattern}: masks of one class each in {len(classes)} folders "
            f"({first_of(classes)}): classes, or places?",
            [
                Reading("classes", names_option(classes)),
                Reading("places, with one class", names_option((BACKGROUND, *ONE_CLASS))),
            ],
        )
    # Names of other classes answer that the folders are places.
    if not {*answers.names} <= {BACKGROUND, *classes}:
        return labels
    numbers = {word: number for number, word in enumerate(classes, start=1)}
    class_of = {file: numbers[word] for file, word in words.items()}
    return replace(labels, kind="ids", classes=classes, class_of=class_of, values={})


def _with_missing(survey: Survey, labels: LabelSet, in_folders: Sequence[str]) -> LabelSet:
    """`labels`, in which images without one show background alone.

    Images of a test split stay out, unless it has labels. So do copies of labelled images: of
    another suffix in other folders, or of the same name and nearly alike.

    in_folders: only images below one of these do, if there are any.

    ConfigError: labels have no background, or no image without a label is in these folders.
    """
    if _shows_one_class(labels):
        labels = _as_one_class(labels)
    elif not labels.classes and not (labels.kind == "ids" and 0 in labels.values):
        raise ConfigError(f"--missing background: {labels.pattern}: 0 is no class of these labels")
    labelled = [image for image in survey.images if image.path in labels.labels]
    splits = {image.split for image in labelled}
    suffixes = {PurePosixPath(image.path).suffix.lower() for image in labelled}
    folders = {PurePosixPath(image.path).parent for image in labelled}
    copies = copies_of_labelled(survey, labels)

    def is_like(image: Image) -> bool:
        place = PurePosixPath(image.path)
        is_kept = image.split != "test" or "test" in splits
        # Of the kind of images that have labels.
        is_beside = place.suffix.lower() in suffixes or place.parent in folders
        is_copy = image.path in copies
        is_meant = not in_folders or any(f"/{x}/" in f"/{image.path}" for x in in_folders)
        return is_meant and is_kept and is_beside and not is_copy

    for folder in in_folders:
        if not any(f"/{folder}/" in f"/{x.path}" for x in survey.images):
            without = {x.path for x in survey.images if x.path not in labels.labels}
            there = first_of(sorted({str(PurePosixPath(x).parent) for x in without}), 5) or "none"
            what = f"no folder {folder} has images; those of images without a label: {there}"
            raise ConfigError(f"--missing background:{','.join(in_folders)}: {what}")
    others = [x.path for x in survey.images if x.path not in labels.labels and is_like(x)]
    if in_folders and not others:
        shown = ",".join(in_folders)
        raise ConfigError(f"--missing background:{shown}: no image without a label is there")
    return replace(labels, labels={**labels.labels, **dict.fromkeys(others, ())})


def copies_of_labelled(survey: Survey, labels: LabelSet) -> set[str]:
    """Images of the name of a labelled one that look nearly as it."""
    return {
        other
        for pair in survey.similar
        for labelled, other in (pair, pair[::-1])
        if labelled in labels.labels and PurePosixPath(labelled).stem == PurePosixPath(other).stem
    }


def _chosen(labels: LabelSet, names: Sequence[str], answers: Answers) -> LabelSet:
    """The classes that --names names, in its order; files that show what is ignored stay.

    UndecidedError: the names are those of --like, and files show other classes.
    """
    wanted = _ordered(names)
    if unknown := [name for name in wanted if name not in labels.classes]:
        there = first_of(labels.classes, 20)
        raise ConfigError(
            f"--names: {first_of(unknown)}: no such class; the files show {there} (--names chooses "
            "and orders them; rename files or folders, or names in classes.yaml)"
        )
    # Masks of "void" and the like stay, whatever is chosen: their pixels must not become
    # background.
    kept = [*wanted, *(x for x in labels.classes if says_no_class(x) and x not in wanted)]
    new = [x for x in labels.classes if x not in kept and x.lower() != BACKGROUND]
    if new and "names" in answers.taken:
        raise UndecidedError(
            f"{labels.pattern}: files show {first_of(new)}, no class of --like {answers.like}",
            [
                Reading("classes, behind the others", names_option([*wanted, *new])),
                Reading("left out, and background", names_option(names)),
            ],
        )
    numbers = {labels.classes.index(name) + 1: i for i, name in enumerate(kept, start=1)}
    class_of = {file: numbers[k] for file, k in labels.class_of.items() if k in numbers}
    files = {
        image: tuple(file for file in of_image if file in class_of)
        for image, of_image in labels.labels.items()
    }
    return replace(labels, labels=files, classes=tuple(kept), class_of=class_of)


def _ordered(names: Sequence[str]) -> list[str]:
    """The names without the background, by their ids if these are given: `road=2,car=1`.

    ConfigError: only some have ids, they are not 1, 2 ..., or a name comes twice.
    """
    pairs = [name.partition("=") for name in names]
    if any(sign for _, sign, _ in pairs):
        return _by_ids([(name, id_text) for name, _, id_text in pairs], names)
    wanted = [name for i, name in enumerate(names) if not (i == 0 and name == BACKGROUND)]
    if len(set(wanted)) < len(wanted) or not wanted:
        what = counted(len(wanted), "class", "classes")
        raise ConfigError(f"--names {','.join(names)}: {what}, each must be named once")
    return wanted


def _by_ids(pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """As `_ordered`; pairs: each name and what stands for its id."""
    # Not isdigit: it takes ², which int() refuses.
    ids = {name: int(text) if text.isdecimal() else -1 for name, text in pairs}
    are_unique = len(ids) == len(pairs)
    background = ids.pop(BACKGROUND, 0)
    are_counted = bool(ids) and sorted(ids.values()) == [*range(1, len(ids) + 1)]
    if not (are_unique and background == 0 and are_counted):
        raise ConfigError(f"--names {','.join(names)}: expected an id for each name, from 1 on")
    return sorted(ids, key=ids.__getitem__)
