"""segtrain from Python, in a notebook too: `segtrain.Predictor` and `segtrain.train`."""

import os
import re
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from segtrain.checkpoint.ready import make_ready
from segtrain.commands.from_desk import named_config
from segtrain.commands.launch import interpreter
from segtrain.commands.run_target import resolve_run
from segtrain.config import Config, config_to_yaml
from segtrain.config.loading import override_config
from segtrain.data.check.image_findings import photo_findings
from segtrain.data.check.values import image_values
from segtrain.data.read.image import form_of, ignore_missing, ignored_where, set_dtype
from segtrain.data.read.photos import other_unit
from segtrain.distributed import signals
from segtrain.distributed.process_group import device_for
from segtrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExecutionError,
    MemoryLimitError,
    NonFiniteError,
    UserError,
)
from segtrain.task.tasks import task_of
from segtrain.text import printable

if TYPE_CHECKING:
    from segtrain.desk.results.runs import Run

# Before each line of a message: the command, or that of a refused command line.
_NAME = re.compile(r"segtrain( [a-z]+)*: (error: )?")
# Of `train`, where a message names an option of the command.
_ARGUMENTS = {
    "--resume": "resume=True",
    "--output": "output=DIR",
    "--finish": "finish=STEPS",
    "--set": "overrides=['SECTION.KEY=VALUE']",
}


class Predictor:
    """A trained model that labels images, as `segtrain predict` does. Threads take turns.

    classes: their names, by train id. palette: the colour of each, (red, green, blue).
    """

    # `float32_products` sets what belongs to the process, not to a thread.
    _lock = threading.Lock()

    def __init__(
        self, source: str | Path, *, device: str = "auto", settings: Sequence[str] = ()
    ) -> None:
        """Loads the model.

        source: a run (its best checkpoint), a checkpoint, or the name of a config that comes with
            weights.
        device: auto (CUDA if there is any), cpu or cuda.
        settings: such as `eval.flip=true`; they begin with eval., or are data.short_side_px or
            train.precision.

        Raises:
            UserError: no checkpoint, no such device, or a setting that cannot be taken.
        """
        _refuse_text("settings", settings)
        self._ready = make_ready(source, settings=settings, device=device_for(device))
        self.classes = self._ready.loaded.classes.names
        self.palette = self._ready.loaded.classes.palette

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """The train id of every pixel, (H, W) uint8; 255 where the image has no value.

        With task multilabel (H, W, K) uint8: 1 where a class is, else 0. With that of a plugin what
        it predicts; of floats NaN where the image has no value.

        image: (H, W, C) with the values that the file holds, neither scaled nor normalized; three
            channels are RGB. uint8 or uint16; other numbers if the model was trained on a
            `data.value_range`, where NaN is no value. What a numpy masked array masks has no
            value either. Large images go through the model by windows.

        Raises:
            DataError: the image is not like those of the training, as far as is known of them.
            MemoryLimitError: it does not fit into the memory of the device.
            NonFiniteError: the scores are not finite, and labels from them would mean nothing.
        """
        return self._predict(image, probabilities="none")

    def probabilities(self, image: np.ndarray) -> np.ndarray:
        """The probability of every class, (K, H, W) float32; NaN where the image has no value.

        image and errors: as of a call.
        """
        task_of(self._ready.config.task).check_classes("probabilities")
        return self._predict(image, probabilities="all")

    def _predict(self, image: np.ndarray, *, probabilities: Literal["none", "all"]) -> np.ndarray:
        pixels, missing = self._checked(image)
        with self._lock:
            images, asked = [torch.from_numpy(pixels)], {"probabilities": probabilities}
            (maps,) = self._ready.predictor.label_maps(images, place="image", **asked)
            label, is_finite, probability = (x if x is None else x.cpu() for x in maps)
        if not is_finite:
            raise NonFiniteError(
                "image: its scores are not finite, so a prediction would mean nothing; if they "
                "were computed in float16, use the setting train.precision=bfloat16"
            )
        if probability is not None:
            return np.where(missing, np.float32(np.nan), probability.float().numpy())
        return ignored_where(missing, label.numpy())

    def _checked(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The image as the model takes it; (H, W) uint8, IGNORE_INDEX without a value, else 0."""
        given, image, data = image, np.asarray(image), self._ready.config.data
        image = image.astype(image.dtype.newbyteorder("="), copy=False)
        if image.ndim != 3 or image.shape[2] != data.channels or 0 in image.shape:
            found = image.shape if image.ndim else printable(f"{type(given).__name__} {given}")
            more = {
                0: "; read a file before, as by cv2.imread(FILE)[..., ::-1]",
                3: " without a pixel" * (image.size == 0),
                4: "; give the images of a batch one by one",
            }.get(image.ndim, "")
            raise DataError(f"image: expected an array (H, W, {data.channels}), got {found}{more}")
        is_number, has_range = image.dtype.kind in "iuf", data.value_range is not None
        if not (image.dtype in (np.uint8, np.uint16) or (is_number and has_range)):
            low, high = (image.min(), image.max()) if is_number else ("", "")
            found = f" from {low:g} to {high:g}" if is_number else ""
            raise DataError(
                "image: expected uint8 from 0 to 255, or uint16 from 0 to 65535, as in the files "
                f"of the training; got {image.dtype}{found}"
            )
        form = form_of(data)._replace(dtype=set_dtype(image.dtype))
        form.check()
        # torch.from_numpy refuses negative strides, as of [..., ::-1], and warns of read-only
        # arrays.
        image = np.require(image, form.dtype, ["C", "W"])
        if form.dtype.kind == "f":
            image = np.where(np.isfinite(image), image, np.float32(np.nan))
        if np.ma.is_masked(given):
            image = np.where(np.ma.getmaskarray(given), np.float32(np.nan), image)
        if problem := other_unit(image, self._ready.form):
            raise DataError(f"image: {problem}")
        for found in photo_findings([image_values(image, form, "image")]):
            warnings.warn(found.text, stacklevel=4)
        return ignore_missing(image, np.zeros(image.shape[:2], np.uint8), form)


def _refuse_text(name: str, values: Sequence[str]) -> None:
    if isinstance(values, str):
        raise ConfigError(f"{name}: expected a list such as [{values!r}], got text")


def train(
    config: str | Path | Config | Mapping[str, Any],
    *,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    nproc: int | Literal["auto"] = "auto",
    resume: bool = False,
    finish: int | None = None,
    device: str = "auto",
) -> "Run":
    """Trains as `segtrain train` does, in a process of its own, and returns the run.

    Its lines are printed as they come. KeyboardInterrupt stops it as Ctrl-C does: the step is
    saved, then the exception goes on, and `resume=True` continues. If this process dies, the
    training is saved and stops, too.

    config: a file, the name of a config that comes with segtrain, a folder or a run as the command
        takes them; or a Config; or its options by section, as `{"train": {"steps": 100}, ...}`.
    output: the directory of the run, which only a file or name can tell by itself.
    overrides: such as `optim.lr=0.02`. nproc: processes; auto: one for each GPU, or one.
    resume: go on at the last checkpoint; start if there is none. finish: from the checkpoint that
        `config` names, or the newest of the run, so many steps to the end, as a run of its own.

    Raises:
        UserError: training failed, with the message and exit code of the command.
    """
    from segtrain.desk.results.runs import read_run

    _refuse_text("overrides", overrides)
    with tempfile.TemporaryDirectory(prefix="segtrain_") as folder:
        if isinstance(config, Config | Mapping):
            if output is None:
                raise ConfigError("output: expected a directory for the run; only files have names")
            text = config_to_yaml(
                override_config(config, overrides, source="config", imports_from=Path())
            )
            # The overrides are in the file already.
            source, overrides = str(Path(folder, "config.yaml")), ()
            Path(source).write_text(text)
        else:
            source = str(config)
        options = ["--nproc", str(nproc), "--device", device]
        options += [] if output is None else ["--output", str(output)]
        options += ["--resume"] if resume else []
        options += [] if finish is None else ["--finish", str(finish)]
        options += [word for text in overrides for word in ("--set", text)]
        command = [*interpreter(), "-m", "segtrain", "train", source, *options]
        _run(command, made=source if source.startswith(folder) else "")
        place = None if output is None else Path(output)
        if finish is not None:
            from segtrain.desk.commands.finish import branch_directory

            return read_run(branch_directory(source, place))
        target = resolve_run(named_config(source, may_write=False), resume=resume, output=place)
    return read_run(target.directory)


def _run(command: Sequence[str], *, made: str) -> None:
    """Runs a command of segtrain and prints what it says; an error of it is raised here.

    made: the file of options that were given as a Config or dict; or empty.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"},
        # Ctrl-C in a terminal reaches a whole group; a second signal would stop it unsaved.
        start_new_session=True,
        preexec_fn=signals.die_with_parent,
    )
    message: list[str] = []
    interrupted = False
    with process:
        try:
            while True:
                try:
                    for line in process.stdout:
                        print(line, end="", flush=True)
                        text = line.rstrip("\n")
                        # The last lines in a row that begin with a command's name are the message
                        # of its error.
                        message = [*message, text] if _NAME.match(text) else []
                    process.wait()
                    break
                except KeyboardInterrupt:
                    # The training saves its state first. Its lines are read until it ends.
                    interrupted = True
                    process.send_signal(SIGINT)
        except BaseException:
            process.terminate()
            raise
    code = process.returncode
    kinds = ConfigError, DataError, CheckpointError, NonFiniteError, ExecutionError
    by_code = {kind.exit_code: kind for kind in (*kinds, MemoryLimitError)}
    # If the training ended with an error of its own, that is raised instead.
    if interrupted and code not in by_code:
        raise KeyboardInterrupt
    if code == 0:
        return
    said = "\n".join(_NAME.sub("", line, count=1) for line in message)
    if made:
        said = re.sub(rf"{re.escape(made)}(:\d+)?", "config", said)
    if here := [f"{name} is {new}" for name, new in _ARGUMENTS.items() if name in said]:
        said += f"\nfrom Python: {', '.join(here)}"
    if code < 0:
        with suppress(ValueError):
            said = said or f"training was ended by {Signals(-code).name}"
    error = by_code.get(code, UserError)(said or f"training ended with exit code {code}")
    error.exit_code = code
    raise error
