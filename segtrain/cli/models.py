"""The arguments of the commands that take a trained model, or make one of a file."""

from pathlib import Path

from segtrain.cli.common import (
    SOURCE_HELP,
    Commands,
    add_command,
    add_device,
    add_nproc,
    add_set,
    add_size,
    add_switch,
    positive,
    steps,
)


def add_eval(commands: Commands) -> None:
    """Adds `segtrain eval`."""
    add = add_command(
        commands,
        "eval",
        "commands.launch:evaluate",
        help="score a model on a split",
        description="Score a trained model: IoU of every class, mIoU, mAcc, aAcc.",
        epilog="examples:\n"
        "  segtrain eval runs/own\n"
        "  segtrain eval runs/own --set eval.scales='[0.75, 1, 1.25]' --set eval.flip=true\n"
        "  segtrain eval runs/own/checkpoints/last.pt --split val --save-predictions out\n"
        "  segtrain eval runs/own --split test --no-labels --save-predictions out",
    )
    add("checkpoint", metavar="RUN|CHECKPOINT", help=SOURCE_HELP)
    add("--split", metavar="S", help="split (default: data.eval_split)")
    add_set(add, "eval.flip=true, eval.scales='[0.75, 1]', data.root=/elsewhere/data")
    add_nproc(add)
    add_device(add)
    add("--save-predictions", type=Path, metavar="DIR", help="write label maps with raw ids")
    add(
        "--no-labels",
        action="store_true",
        help="the split has no labels: predict for a test server, score nothing",
    )
    add("--json", type=Path, metavar="FILE", help="write all scores as JSON")
    add(
        "--overlays",
        type=Path,
        metavar="DIR",
        help="write pictures of image, label and prediction",
    )
    add("--num-overlays", type=positive, default=8, metavar="N", help="how many (default: 8)")


def add_verify(commands: Commands) -> None:
    """Adds `segtrain verify`."""
    add = add_command(
        commands,
        "verify",
        "commands.launch:verify",
        help="compute steps of a run again and compare every bit",
        description="Compute steps of a run with train.shares again, on any number of ranks, and "
        "compare\nsamples, losses, gradients and weights with its receipts and checkpoints. "
        "Nothing is\nwritten into the run, which may still be training.",
        epilog="The replay starts at the newest checkpoint before A, or at the beginning.\n\n"
        "examples:\n"
        "  segtrain verify runs/own                   from the newest checkpoint before the end\n"
        "  segtrain verify runs/own --steps 1: --nproc 4\n"
        "  segtrain verify runs/own --steps 900:1000 --set data.root=/elsewhere/data",
    )
    add("run", type=Path, metavar="RUN", help="run directory")
    add(
        "--steps",
        type=steps,
        default=(None, None),
        metavar="A:B",
        help="first and last step, counted from 1, or one step (default: from the newest "
        "checkpoint before B; to the last receipt)",
    )
    add_set(add, "data.root=/elsewhere/data, data.pack=null")
    add_nproc(add)
    add_device(add)


def add_predict(commands: Commands) -> None:
    """Adds `segtrain predict`."""
    add = add_command(
        commands,
        "predict",
        "commands.predict:main",
        help="segment images",
        description="Segment images of any size: writes label maps, colour maps and overlays.",
        epilog="example:\n  segtrain predict runs/own photos/ extra.jpg --output predictions",
    )
    add("source", metavar="RUN|CHECKPOINT", help=SOURCE_HELP)
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="image, or folder of images")
    add("--output", type=Path, required=True, metavar="DIR", help="where to write the results")
    add_switch(add, "--overwrite", "replace results that are already there")
    add_set(add, "eval.mode=slide, eval.crop_size='[512, 1024]'")
    add_device(add)


def add_export(commands: Commands) -> None:
    """Adds `segtrain export`."""
    add = add_command(
        commands,
        "export",
        "commands.export:main",
        help="write a model for other programs",
        description="Write a trained model for other programs; the file is run and compared with "
        "the model before it gets its name.",
        epilog="example:\n  segtrain export runs/own --format onnx --output own.onnx --normalize "
        "--argmax",
    )
    add("source", metavar="RUN|CHECKPOINT", help=SOURCE_HELP)
    add(
        "--format",
        required=True,
        choices=("onnx", "pt2", "torchscript", "safetensors"),
        help="pt2: torch.export, for images of more than model.output_stride px a side; "
        "safetensors: the weights, which eval, predict and train.init_from read too",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="file to write")
    add_switch(add, "--overwrite", "replace a file that is already there")
    add(
        "--normalize",
        nargs="?",
        const="uint8",
        choices=("uint8", "float32"),
        help="the file takes RGB of 0..255, as bytes (default) or floats, and normalizes it itself",
    )
    add_switch(add, "--argmax", "the file returns train ids instead of logits")
    text = "safetensors: kernels as float16, which halves the file and changes scores little"
    add_switch(add, "--half", text)
    add_size(add, None, "write a file for images of this height and width only (default: any size)")


def add_convert(commands: Commands) -> None:
    """Adds `segtrain convert`."""
    add = add_command(
        commands,
        "convert",
        "commands.convert:main",
        help="make a checkpoint of another program one of segtrain",
        description="Read weights of torchvision (DeepLabV3), semseg (PSPNet), mmsegmentation,\n"
        "segmentation_models.pytorch (both PSPNet, DeepLabV3, DeepLabV3+) or VainF (DeepLabV3,\n"
        "DeepLabV3+), which are told apart by their keys, and write a checkpoint for eval,\n"
        "predict, export and train.init_from. A key that finds no place is an error.",
        epilog="What a file cannot say, such as model.output_stride, is assumed by the defaults of "
        "its\nprogram and printed; --set changes it.\n\n"
        "examples:\n"
        "  segtrain convert deeplabv3_resnet50_coco.pth --classes voc --output v3.pt\n"
        "  segtrain convert pspnet_r50.pth --classes cityscapes --output psp.pt "
        "--set model.output_stride=16\n"
        "  segtrain convert theirs.pth --classes own.yaml --class-order theirs.yaml "
        "--output own.pt",
    )
    add("file", type=Path, metavar="FILE", help="a .pth, .pt or .safetensors file")
    add("--output", type=Path, required=True, metavar="FILE", help="checkpoint to write, a .pt")
    add("--classes", metavar="NAME|FILE", help="class file (default: the names in the file)")
    add(
        "--class-order",
        metavar="NAME|FILE|stored",
        help="class file in the order of the file's channels, or 'stored': the names in the file; "
        "channels move to the order of --classes, by name",
    )
    add("--entry", metavar="KEY", help="which state dict to read, where the file holds several")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="PREFIX",
        help="leave out keys that begin so and are no part of the model; may be repeated",
    )
    add_switch(add, "--overwrite", "replace a file that is already there")
    add_set(add, "model.output_stride=16, data.root=/elsewhere/data")
