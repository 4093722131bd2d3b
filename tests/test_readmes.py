"""The READMEs say what is so: commands and code run, links, files, options and targets exist."""

import importlib
import io
import os
import re
import shlex
import shutil
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import cv2
import pytest
from experiments import write_data
from test_predict import write_video

from segtrain import cli
from segtrain.config import Config, load_config, recipes
from segtrain.data.read.classes import load_class_file

ROOT = Path(__file__).resolve().parent.parent
READMES = [
    *ROOT.glob("README.md"),
    *ROOT.glob("[!.]*/README.md"),
    *ROOT.glob("segtrain/*/**/README.md"),
    *ROOT.glob("segtrain/EXTENDING.md"),
    *ROOT.glob("tools/*/**/README.md"),
]

# In this order, in one folder with my_data/, photos/, photo.jpg, drive.mp4 and configs/photos.
RUN = """
segtrain config list
segtrain config show cityscapes_pspnet_r50
segtrain config copy cityscapes_pspnet_r50 city.yaml
segtrain config schema --output schema.json
segtrain doctor
segtrain data synth runs/street --num-train 20 --num-val 4
segtrain init my_data --output mine
segtrain data check mine
segtrain data stats mine
segtrain config show mine
segtrain data pack mine --output packs/mine
segtrain data check mine --set data.pack=packs/mine
segtrain train mine
segtrain train mine --set optim.lr=0.02 --output runs/mine_lr2
segtrain train mine --set data.pack=packs/mine --output runs/mine_pack
segtrain train mine --resume
segtrain train runs/mine --resume
segtrain eval runs/mine
segtrain eval runs/mine --overlays pictures
segtrain eval runs/mine --per-image images.csv --overlays worst --worst 20
segtrain report runs/mine
segtrain report runs/mine runs/mine_lr2 --output both.html
segtrain report runs/mine --figures figures
segtrain compare runs/mine runs/mine_lr2
segtrain compare runs/mine runs/mine_lr2 --steps
segtrain eval runs/mine --with runs/mine_lr2
segtrain eval runs/mine_pack --set data.pack=null
segtrain predict camvid_deeplabv3plus_r34 configs/photos --output street
segtrain predict camvid_deeplabv3plus_r34 photos/ --output street
segtrain train my_data
segtrain predict runs/mine photos/ --output predictions
segtrain predict runs/mine photos/ one_more.jpg --output predictions
segtrain export runs/mine --format safetensors --output mine.safetensors
segtrain export runs/mine --format onnx --output mine.onnx --normalize --argmax
segtrain export runs/mine --format pt2 --output mine.pt2 --normalize --argmax --scale 0.5
segtrain runs
segtrain watch
segtrain watch runs/mine
segtrain runs --clear runs/mine
""".strip().splitlines()
NO_CITYSCAPES = "needs the images of Cityscapes; test_configs.py builds the model"
NO_WEIGHTS = "needs weights of other programs; test_convert.py converts some"
DRAWN = "test_annotations.py draws files of each format"
SLICES = "test_volumes.py cuts and predicts volumes"
ON_MAP = "test_geojson.py draws outlines, and outlines what is drawn"
SIDES = "test_results.py compares sides of several runs"
SCORED = "test_score.py scores label maps, and compares them and lists"
SUSPECTS = "two steps teach a model too little; test_suspects.py trains on planted mistakes"
BRANCHES = "test_finish.py makes branches"
PLUGINS = "test_plugins.py has plugins"
S3 = "test_storage.py has an S3 server"
NOT_RUN = {
    "train cityscapes_pspnet_r50 --nproc 4": NO_CITYSCAPES,
    "eval runs/cityscapes_pspnet_r50 --set eval.flip=true --json scores.json": NO_CITYSCAPES,
    "convert deeplabv3_resnet50_coco.pth --classes voc --output v3.pt": NO_WEIGHTS,
    "convert deeplabv3plus_r101_mg124.pth --output v3plus.pt": NO_WEIGHTS,
    "convert theirs.pth --classes own.yaml --class-order theirs.yaml --output own.pt": NO_WEIGHTS,
    "convert theirs.pth --classes voc --output ours.pt": NO_WEIGHTS,
    "data import my_export --output drawn": DRAWN,
    "data import instances_train.json --images train2017 --output drawn": DRAWN,
    "data import fields.geojson --images rasters --output drawn": ON_MAP,
    "data polygons predictions/labels --classes mine/classes.yaml --output map.geojson": ON_MAP,
    "data import scans --output cut": SLICES,
    "predict runs/cut scan.nii.gz --output predictions": SLICES,
    "predict runs/cut scan.nii.gz --output out --table ml.csv --probabilities nii": (
        "test_volume_table.py predicts volumes"
    ),
    "export runs/mine --format onnx --quantize int8 --normalize --argmax --output mine_int8.onnx": (
        "two steps measure too little; test_quantize.py scores files"
    ),
    "train mine --set data.root=none --set data.pack=s3://bucket/packs/camvid": S3,
    "train mine --output s3://bucket/runs/mine": S3,
    "train s3://bucket/runs/mine --resume": S3,
    "eval s3://bucket/runs/mine": S3,
    "train mine --nproc 4": "four processes; test_launch.py starts two",
    "train runs/mine --nproc 4 --resume": "four processes; test_resume.py resumes on three",
    "train mine --until 500": "test_until.py pauses runs",
    "train mine --set schedule.kind=constant --set checkpoint.keep_every_steps=2000": BRANCHES,
    "train runs/mine --finish 3000": BRANCHES,
    "data synth street --num-train 120 --num-val 60 --size 96 160": "test_synthetic.py draws",
    "train runs/mine/checkpoints/step_0006000.pt --finish 2000 --output runs/mine_8000": BRANCHES,
    "population mine --members 4 --every 500": "test_population.py trains populations",
    "folds mine -k 5": "test_folds.py trains folds",
    "folds runs/mine_folds --resume": "test_folds.py resumes folds",
    "seeds mine -n 5": "test_seeds.py trains seeds",
    "seeds a -n 5": "test_seeds.py trains seeds",
    "seeds runs/a_seeds --resume -n 8": "test_seeds.py resumes and adds seeds",
    "compare runs/a_seeds --with runs/b_seeds --latex table.tex": SIDES,
    "compare runs/a_seeds runs/b_seeds runs/c_seeds --latex table.tex": SIDES,
    "compare runs/old runs/new --on new.txt": SCORED,
    "compare runs/mine runs/theirs": SCORED,
    "score theirs/ --data mine --label-format train_ids": SCORED,
    "score theirs/ --data mine --label-format train_ids --output runs/theirs": SCORED,
    "bench mine": "test_bench.py measures steps",
    "train mine --fit": "test_fit.py fits trainings to limits",
    "init my_data --output mine2 --like mine": "test_grown.py adds images to folders",
    "eval runs/mine --class crack --recall 0.95 --min-area 50": "test_image_calls.py has defects",
    "init photos --ignore 255": "test_init.py answers questions",
    "init scans --task multilabel": "test_multilabel.py runs it",
    "data import annotations.json --overlap keep --output drawn": "test_multilabel.py runs it",
    "eval runs/mine --plugin ./my_loss.py": PLUGINS,
    "eval runs/mine --set 'eval.metrics=[{name: share}]'": PLUGINS,
    "compare runs/a runs/a_seed1 runs/a_seed2 --with runs/b runs/b_seed1 runs/b_seed2": SIDES,
    "verify runs/mine": "test_verify.py verifies runs with shares",
    "suspects runs/mine": SUSPECTS,
    "suspects runs/mine --exclude wrong.yaml": SUSPECTS,
    "suspects runs/mine --data mine2": SUSPECTS,
}
NOT_RUN = {f"segtrain {line}": why for line, why in NOT_RUN.items()}
# Added to every training of own data: two steps of a small model.
SMALL = (
    "data.num_workers=0",
    "augment.crop_size=[33,41]",
    "model.backbone=resnet18",
    "model.num_stages=2",
    "model.output_stride=8",
    "model.pretrained=null",
    "model.head_channels=16",
    "train.steps=2",
    "train.batch_size=2",
    "schedule.warmup_steps=0",
    "log.charts=false",
)
SECTIONS = {
    name: field.annotation.model_fields
    for name, field in Config.model_fields.items()
    if hasattr(field.annotation, "model_fields")
}
SHELLS = ("sh", "bash", "shell", "console")
MAX_ROOT_LINES, MAX_ROOT_BYTES = 200, 8192

every_readme = pytest.mark.parametrize(
    "readme", READMES, ids=[str(path.relative_to(ROOT)) for path in READMES]
)


@cache
def blocks(readme):
    """(language, text) of every code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", readme.read_text(), re.M | re.S)


# A tool that has answered its question: `tools/x.py` of commit abcdef0.
OF_COMMIT = re.compile(r"`([^`]+)`\s+of\s+commit\s+([0-9a-f]{7,40})")


@cache
def prose(readme):
    """The text without its code blocks, and without what is there in another commit only."""
    text = re.sub(r"^```.*?^```$", "", readme.read_text(), flags=re.M | re.S)
    return OF_COMMIT.sub("", text)


@cache
def spans(readme):
    """Every `code span`; a line may break in it."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(readme))]


def shell_lines(readme):
    """The lines of blocks of no language or a shell's, without a prompt."""
    texts = [text for language, text in blocks(readme) if language in ("", *SHELLS)]
    return [line.removeprefix("$ ") for text in texts for line in text.splitlines()]


def commands(readme):
    """Every whole segtrain command, without its comment."""
    lines = [*shell_lines(readme), *(span for span in spans(readme) if is_whole(span))]
    lines = [line for line in lines if line.startswith("segtrain ")]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def is_whole(span):
    """Whether it is more than the name of a command."""
    return refusal(span) is None if re.match("segtrain [a-z]", span) else False


def refusal(line):
    """What the parser says against a command line, or None."""
    try:
        with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
            cli._parser().parse_args(shlex.split(line, comments=True)[1:])
    except SystemExit as exit:
        return said.getvalue().partition("error: ")[2].strip() if exit.code else None
    return None


@every_readme
def test_the_parser_takes_every_command(readme):
    refused = {line: refusal(line) for line in commands(readme)}
    # A name of a command in running text needs no arguments, but must be one.
    for span in spans(readme):
        if re.match("segtrain [a-z]", span):
            said = refusal(span)
            if said and not said.startswith("the following arguments are required"):
                refused[span] = said
    assert {line: said for line, said in refused.items() if said} == {}


def test_every_command_is_run_here_or_has_a_reason():
    found = {line for readme in READMES for line in commands(readme)}
    # RUN, FOLDER, A and the like stand for any.
    found = {line for line in found if not re.search(r"\b[A-Z]+\b", line)}
    listed = {shlex.join(shlex.split(line)) for line in (*RUN, *NOT_RUN)}
    assert found - listed == set(), "run them here, or say why not"
    assert listed - found == set(), "no README has these any more"
    assert set(RUN) & set(NOT_RUN) == set()
    for line in NOT_RUN:
        args = cli._parser().parse_args(shlex.split(line)[1:])
        if getattr(args, "config", None) in recipes.names():
            load_config(recipes.find(args.config).path, args.set)


@pytest.mark.parametrize("with_onnx", [False, pytest.param(True, marks=pytest.mark.slow("export"))])
def test_the_commands_and_the_code_run(forkserver, tmp_path, with_onnx):
    """Making a file of ONNX takes as long as a third of the others."""
    (tmp_path / "my_data").mkdir()
    write_data(tmp_path / "my_data")
    shutil.copytree(tmp_path / "my_data/images/val", tmp_path / "photos")
    shutil.copytree(ROOT / "configs/photos", tmp_path / "configs/photos")
    photo = cv2.imread(str(tmp_path / "photos/0.png"))
    for name in ("photo.jpg", "one_more.jpg"):
        cv2.imwrite(str(tmp_path / name), photo)
    write_video(tmp_path / "drive.mp4", [(200, 20, 30), (20, 200, 30), (30, 20, 200)])
    codes = [
        (str(readme.relative_to(ROOT)), text)
        for readme in READMES
        for language, text in blocks(readme)
        if language == "python" and (with_onnx or "onnxruntime" not in text)
    ]
    assert len(codes) >= 5
    lines = [line for line in RUN if with_onnx or "--format onnx" not in line]
    process = forkserver.Process(target=run_all, args=(tmp_path, lines, codes))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text()[-3000:]
    assert len(list((tmp_path / "predictions/labels").iterdir())) == 4
    if with_onnx:
        label = cv2.imread(str(tmp_path / "label.png"), cv2.IMREAD_UNCHANGED)
        assert label.shape == photo.shape[:2]
    frames = [cv2.imread(str(path), -1).shape for path in sorted(tmp_path.glob("frame_*.png"))]
    assert frames == 3 * [(48, 64)]


def run_all(directory, lines, codes):
    """Runs commands and Python blocks in a process of its own, whose output goes to a file."""
    import multiprocessing

    import torch

    from segtrain import api
    from segtrain.desk.commands import init

    multiprocessing.set_start_method(None, force=True)
    output = os.open(directory / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(directory)
    torch.set_num_threads(1)
    init._HOST = ("127.0.0.1", 9)  # nothing is downloaded
    for line in lines:
        print(f"$ {line}", flush=True)
        words = shlex.split(line)[1:]
        if words[0] == "data":
            words += ["--jobs", "1"]  # starting processes would take longer than the work
        if words[:2] == ["data", "synth"]:
            words += ["--size", "64", "96"]
        if words[0] == "train" and not words[1].startswith("runs/"):
            words += [word for setting in SMALL for word in ("--set", setting)]
        if words[0] == "predict":
            shutil.rmtree("predictions", ignore_errors=True)  # of the command before
        if code := cli.main(words):
            sys.exit(code)

    def run_here(command, *, made):
        assert cli.main(command[command.index("segtrain") + 1 :]) == 0

    train, api._run = api.train, run_here  # Python would start anew
    api.train = lambda config, *, overrides=(), **options: train(
        config, overrides=[*overrides, *SMALL], **options
    )
    for name, text in codes:
        print(f"# {name}", flush=True)
        exec(compile(text, name, "exec"), {"model": torch.nn.Sequential(torch.nn.BatchNorm2d(3))})


@every_readme
def test_named_modules_files_options_and_targets_exist(readme):
    """The code blocks, which import what they need, run above."""
    for name in spans(readme):
        if match := re.match(r"(segtrain(?:\.[a-z_]+)+)", name):
            assert exists_in_python(match[1]), name
    for word in code_words(readme):
        if re.fullmatch(r"(tests|tools|configs|segtrain|\.ci)/[\w./-]*|[\w/]+\.(py|md)", word):
            assert (ROOT / word).exists() or (readme.parent / word).exists(), word
        match = re.match(r"'?([a-z]+)\.([a-z_]+)(?=$|[:=])", word)
        if match and match[1] in SECTIONS and not word.endswith((".log", ".txt")):
            assert match[2] in SECTIONS[match[1]], word
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:^|(?<=`))make ([a-z-]+)", "\n".join(shell_lines(readme)), re.M)
    named += [match[1] for span in spans(readme) if (match := re.match("make ([a-z-]+)", span))]
    assert set(named) <= targets


def exists_in_python(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True


@every_readme
def test_class_files_and_parts_of_configs_load(readme, tmp_path):
    path = tmp_path / "shown.yaml"
    for language, text in blocks(readme):
        if language == "yaml" and text.startswith("classes:"):
            path.write_text(text)
            assert load_class_file(path).num_classes > 1
        elif language == "yaml":
            path.write_text("data: {layout: folders, root: /d, classes: voc}\n" + text)
            load_config(path)


@every_readme
def test_links_lead_to_files_and_headings(readme):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(readme)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (readme.parent / path).resolve() if path else readme
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@cache
def anchors(readme):
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(readme), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_words(readme):
    """The words of all code spans and of shell lines, but not of messages."""
    lines = [line for line in shell_lines(readme) if not line.startswith("segtrain: ")]
    return [word for text in (*spans(readme), *lines) for word in text.split()]


@every_readme
def test_options_of_commands_exist(readme):
    for line in (*spans(readme), *shell_lines(readme)):
        line = line.partition(" # ")[0]
        if tool := re.search(r"python (tools/\w+\.py)", line):
            known = set(re.findall(r'"(--[a-z0-9-]+)"', (ROOT / tool[1]).read_text()))
        elif line.startswith(("segtrain", "--", "pip", "docker")):
            known = options_of_segtrain() | {"--index-url"}  # pip's
        else:
            continue
        assert set(re.findall(r"(?<!\S)--[a-z0-9-]+", line)) <= known, line


@cache
def options_of_segtrain():
    """The options of all commands."""
    found, parsers = set(), [cli._parser()]
    while parsers:
        for action in parsers.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action.choices, dict):
                parsers += action.choices.values()
    return found


def test_the_first_readme_is_short_and_leads_to_all_others():
    assert len(READMES) >= 9
    links = re.findall(r"\]\(([^)#\s]+)", prose(ROOT / "README.md"))
    others = {str(path.relative_to(ROOT)) for path in READMES} - {"README.md"}
    assert others <= set(links)
    text = (ROOT / "README.md").read_bytes()
    assert text.count(b"\n") <= MAX_ROOT_LINES
    assert len(text) <= MAX_ROOT_BYTES


def test_the_map_names_every_room_and_no_other():
    text = (ROOT / "segtrain/README.md").read_text()
    _, _, rest = text.partition("## The map")
    lines = rest.split("```\n")[1].splitlines()
    named = {word.rstrip("/") for line in lines for word in line[: line.find("    ")].split()}
    there = {path.name for path in (ROOT / "segtrain").iterdir()}
    there -= {"__init__.py", "__main__.py", "__pycache__", "README.md", "EXTENDING.md"}
    assert named == there


def test_extras_are_installed_from_the_checkout_and_exist():
    """On the registry, the name segtrain is another program's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folders = ("segtrain", "tests", "tools")
    files = [*READMES, *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    named = set()
    for path in files:
        text = path.read_text()
        foreign = r"segtrain\[[a-z]|pip\s+install\s+['\"]?segtrain\b(?!/)"
        assert not re.search(foreign, text), path
        for extras in re.findall(r"""'\.\[([a-z,]+)\]'|install_line\(['"]([a-z]+)""", text):
            named |= {*"".join(extras).split(",")}
    assert {"storage", "onnx", "timm"} <= named <= {*project["optional-dependencies"]}
