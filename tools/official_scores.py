"""Runs `segtrain eval` and the official Cityscapes evaluator on one run, and compares all scores.

    python tools/official_scores.py RUN ROOT [--split val] [--work DIR] [options of segtrain eval]

ROOT is the folder of Cityscapes. `segtrain eval` writes its predictions and scores into DIR. Then
the evaluator of cityscapesscripts scores the same files, and both are shown side by side, with the
largest difference at the end. Exit code 1: they differ by more than 1e-9.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-9
INSTALL = "pip install --no-deps cityscapesscripts pyquaternion"

# Keys of segtrain and of the official evaluator.
_CLASS_KEYS = (("IoU", "classScores", "categoryScores"),)
_CLASS_KEYS += (("iIoU", "classInstScores", "categoryInstScores"),)
_MEANS = {
    "mIoU": "averageScoreClasses",
    "miIoU": "averageScoreInstClasses",
    "category_mIoU": "averageScoreCategories",
    "category_miIoU": "averageScoreInstCategories",
}

Row = tuple[str, float | None, float | None]


def official_scores(
    root: Path, split: str, predictions: Path, *, quiet: bool = True
) -> dict[str, Any]:
    """What cityscapesscripts' own functions return for the label maps below `predictions`.

    The predictions are found by its own rule, and the instance maps of the labels are read if they
    exist. ImportError: cityscapesscripts is not installed.
    """
    from cityscapesscripts.evaluation import evalPixelLevelSemanticLabeling as official  # noqa: N813

    if not hasattr(np, "in1d"):
        # Version 2.3.0 calls it; NumPy 2.4 has removed it in favour of isin.
        np.in1d = np.isin
    args = official.args
    labels = sorted(root.glob(f"gtFine/{split}/*/*_gtFine_labelIds.png"))
    args.evalInstLevelScore = all(
        label.with_name(label.name.replace("labelIds", "instanceIds")).is_file() for label in labels
    )
    args.JSONOutput, args.quiet = False, quiet
    args.predictionPath, args.predictionWalk = str(predictions), None
    found = [official.getPrediction(args, str(label)) for label in labels]
    return official.evaluateImgLists(found, [str(label) for label in labels], args)


def rows(ours: dict[str, Any], official: dict[str, Any]) -> list[Row]:
    """Every score: its name, ours from `eval --json`, and the official one; None: not defined."""
    found = []
    for key, of_classes, of_categories in _CLASS_KEYS:
        for kind, theirs in (("classes", of_classes), ("categories", of_categories)):
            for one in ours[kind]:
                name = f"{key} {kind} {one['name']}"
                found.append((name, one[key], _or_none(official[theirs][one["name"]])))
    for key, theirs in _MEANS.items():
        found.append((key, ours[key], _or_none(official[theirs])))
    return found


def largest_difference(found: list[Row]) -> float:
    """The largest difference of a score; infinite where only one side has it."""
    both = [(a, b) for _, a, b in found if not (a is None and b is None)]
    return max((math.inf if None in (a, b) else abs(a - b) for a, b in both), default=0.0)


def main() -> int:
    """Runs both and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="run directory or checkpoint")
    parser.add_argument("root", type=Path, help="folder of Cityscapes, with gtFine")
    parser.add_argument("--split", default="val")
    parser.add_argument("--work", type=Path, help="where predictions and scores go")
    args, more = parser.parse_known_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="official_scores_"))
    predictions, scores = work / "predictions", work / "scores.json"
    command = [sys.executable, "-m", "segtrain", "eval", args.run, "--split", args.split]
    command += ["--set", f"data.root={args.root}"]
    command += ["--save-predictions", str(predictions), "--json", str(scores), *more]
    print("$ " + " ".join(command[1:]), flush=True)
    if code := subprocess.run(command).returncode:
        return code
    ours = json.loads(scores.read_text())
    print("\n$ cityscapesscripts/evaluation/evalPixelLevelSemanticLabeling.py")
    try:
        official = official_scores(args.root, args.split, predictions, quiet=False)
    except ImportError as error:
        print(f"official_scores: {error}; {INSTALL}", file=sys.stderr)
        return 2
    return _show(rows(ours, official))


def _show(found: list[Row]) -> int:
    width = max(len(name) for name, _, _ in found)
    print(f"\n{'':<{width}}  {'segtrain':>18}  {'cityscapesscripts':>18}  {'difference':>10}")
    for name, a, b in found:
        gap = "" if None in (a, b) else f"{abs(a - b):.1e}"
        print(f"{name:<{width}}  {_shown(a)}  {_shown(b)}  {gap:>10}")
    largest = largest_difference(found)
    compared = sum(None not in row for row in found)
    print(f"\n{compared} scores of {len(found)} are defined; largest difference {largest:.2e}")
    return int(largest > TOLERANCE)


def _shown(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.15f'):>18}"


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


if __name__ == "__main__":
    sys.exit(main())
