"""The folder in the docstring of a convention, and what the convention makes of it as text."""

from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import FileName


def example(docstring: str) -> tuple[list[FileName], list[FileName]]:
    """The images (.jpg, .tif) and labels (.png) that its indented lines name."""
    lines = [x for x in docstring.splitlines() if x.startswith("    ")]
    names = parse_names([path for line in lines for path in line.split()])
    images = [name for name in names if not name.path.endswith(".png")]
    return images, [name for name in names if name.path.endswith(".png")]


def lines_of(claim: OwnerClaim) -> str:
    """A line `label: image` for each label, with the further files of the image."""
    return "\n".join(
        ", ".join([f"{label}: {image}", *claim.bands.get(image, ())])
        for label, image in claim.owners.items()
    )
