"""Image and label have nothing but a number in common; each label has an image of its own.

    photos/DSC_0007.jpg     drawn/label7.png
    photos/DSC_0008.jpg     drawn/label8.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
drawn/label7.png: photos/DSC_0007.jpg
drawn/label8.png: photos/DSC_0008.jpg
"""

from collections import defaultdict
from collections.abc import Sequence

from segtrain.desk.survey.conventions.claims import OwnerClaim, number_of
from segtrain.desk.survey.file_names import FileName


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """All or none: a number that no image has, or several, shows that numbers do not pair here."""
    by_number: dict[tuple[str | None, int], list[str]] = defaultdict(list)
    for image in images:
        if (number := number_of(image)) is not None:
            by_number[image.split, number].append(image.path)
    owners: dict[str, str] = {}
    for label in labels:
        number = number_of(label)
        candidates = [] if number is None else by_number.get((label.split, number), [])
        if len(candidates) != 1:
            return OwnerClaim({})
        owners[label.path] = candidates[0]
    # 00007_hair and 00007_skin, in one folder, are two patterns; two labels of one pattern would
    # be a mistake.
    of_images = {(owners[label.path], label.pattern) for label in labels}
    places = {(owners[label.path], label.folder) for label in labels}
    is_one_each = len(of_images) == len(labels) and len(places) == len(set(owners.values()))
    return OwnerClaim(owners if is_one_each else {})
