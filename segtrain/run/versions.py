"""The libraries that segtrain stands on, and their versions."""

from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("torch", "torchvision", "albumentations", "opencv-python-headless", "numpy", "pillow")
"""Those on which the numbers of a run depend."""


def library_version(package: str) -> str | None:
    """The version of an installed package, without importing it; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
