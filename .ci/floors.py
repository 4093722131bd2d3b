#!/usr/bin/env python3
"""Whether the lowest versions that pyproject.toml allows work: `.ci/floors.py CACHE` (of .ci/run).

An environment of its own gets exactly these versions, of all extras; the rest is what pip finds.
All modules are imported, and a small part of the tests trains, evaluates, exports and reads files
of each library. This happens once for each set of versions: a stamp in CACHE says that they
passed. It takes gigabytes and minutes, and leaves neither behind.

An index that cannot be reached says nothing about versions: that is told, and not an error, since
the next run asks again. A version that the index does not have, that does not go with the others,
or that fails a test is an error: raise it in pyproject.toml.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of a library or two each, minutes together: training, evaluation and export; labels and masks;
# volumes; maps. Tests of what is not installed (an S3 server) skip themselves.
TESTS = ("trial", "timm", "annotations", "volumes", "georeference")
ONNX = "test_export.py::test_onnx_gives_the_logits_of_the_model_at_every_size"
IMPORTS = """
import importlib, pkgutil, aiohttp, mlflow, s3fs, segtrain, wandb
for module in pkgutil.walk_packages(segtrain.__path__, "segtrain."):
    if not module.name.endswith("__main__") and not module.name.startswith("segtrain.kernels."):
        importlib.import_module(module.name)  # Triton comes with torch for CUDA alone
"""
# What pip says where it reached no index. "(from versions: none)" alone may be a misspelt name.
NO_INDEX = r"NewConnectionError|ReadTimeout|Temporary failure|ConnectionError"
LIMIT_S = 1800


def floors(pyproject: Path) -> list[str]:
    """The requirements of the package and all its extras but dev, each at its lowest version.

    >>> floors(ROOT / "pyproject.toml")[0].startswith("torch==")
    True
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = [v for k, v in project["optional-dependencies"].items() if k != "dev"]
    lines = sum(extras, project["dependencies"])
    if odd := [line for line in lines if not re.fullmatch(r"[\w-]+[>=]=[\w.]+", line)]:
        sys.exit(f"{pyproject}: expected NAME>=VERSION or NAME==VERSION, found {', '.join(odd)}")
    return [line.replace(">=", "==") for line in lines]


def install(venv: Path, requirements: list[str]) -> str:
    """What went wrong; nothing if all is installed."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*pip, *requirements, "pytest"], stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"ReadTimeout: not installed after {LIMIT_S // 60} minutes"
    return "" if done.returncode == 0 else done.stderr or f"pip ended with {done.returncode}"


def main(cache: Path) -> int:
    """Exit code: 0 also where the index cannot be reached."""
    requirements = floors(ROOT / "pyproject.toml")
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    stamp = cache / f"floors-{key}"
    if stamp.exists():
        return 0
    for old in cache.glob("floors-*"):  # other versions, and what a killed run left
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    print(f"floors: installing {len(requirements)} lowest versions, gigabytes, once", flush=True)
    venv = cache / "floors-venv"
    try:
        if problem := install(venv, requirements):
            print(problem, file=sys.stderr)
            if re.search(NO_INDEX, problem):
                print("floors: NOT CHECKED: the index gave no versions; the next run tries again")
                return 0
            print("floors: cannot be installed: raise what pip names in pyproject.toml")
            return 1
        tests = [f"tests/test_{name}.py" for name in TESTS]
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "NO_ALBUMENTATIONS_UPDATE": "1"}
        for arguments in (["-c", IMPORTS], [*pytest, *tests, f"tests/{ONNX}"]):
            done = subprocess.run([venv / "bin/python", *arguments], cwd=ROOT, env=environ)
            if done.returncode:
                print("floors: these versions do not work: raise them in pyproject.toml")
                return 1
    finally:
        shutil.rmtree(venv, ignore_errors=True)
    stamp.write_text("\n".join(requirements) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
