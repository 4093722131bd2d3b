"""What a checkpoint says about its run: the config, the classes and the data, as JSON."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from segtrain.checkpoint.format import Checkpoint
from segtrain.config import Config
from segtrain.data.class_file import class_file_from_json
from segtrain.data.classes import ClassFile
from segtrain.data.fingerprint import DataFingerprint, fingerprint_from_json
from segtrain.errors import CheckpointError, ConfigError
from segtrain.text import MAX_NAME, printable

_CLASS_FILE = TypeAdapter(ClassFile)


def experiment_fields(config: Config, classes: ClassFile) -> dict[str, str]:
    """The fields `config` and `classes` of a Checkpoint."""
    # Without an ignored colour, leave the key out: the default colour may be that of a class.
    default = set() if classes.ignores_color else {"ignore_color"}
    # Indented, because `torch_file` refuses a long text without blanks.
    return {
        "config": config.model_dump_json(indent=1),
        # Keys that came later are left out where unused, so that older versions can read the rest.
        "classes": _CLASS_FILE.dump_json(
            classes, indent=1, exclude=default, exclude_defaults=True
        ).decode(),
    }


def parse_experiment(checkpoint: Checkpoint, path: Path) -> tuple[Config, ClassFile]:
    """The config and the classes of the run; CheckpointError if this version cannot read them."""
    try:
        config = Config.model_validate_json(checkpoint.config)
        return config, class_file_from_json(checkpoint.classes)
    except ConfigError as error:
        raise CheckpointError(f"{path}: its classes contradict themselves: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = printable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 2 * MAX_NAME)
        what = "its config does not fit this version of segtrain"
        raise CheckpointError(f"{path}: {what}: {problem}") from None


def parse_data(checkpoint: Checkpoint, path: Path) -> DataFingerprint | None:
    """The data of the run; None if the checkpoint, of an older version, does not say."""
    if checkpoint.data is None:
        return None
    try:
        return fingerprint_from_json(checkpoint.data)
    except ValidationError:
        raise CheckpointError(f"{path}: damaged: the field data cannot be read") from None
