"""Command lines that are refused: the exit code, what is said, and that no file changes.

Each row is a command in a folder that holds experiments and runs; `world` says which.
"""

import re
import shutil

import pytest
from experiments import small, train, write_config, write_data

from segtrain.config import load_config
from segtrain.run.directory import write_description

SAVED = ("last.pt", "best.pt", "manifest.json")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A data set with a config, folders that are none, and runs that have and have not trained."""
    root = tmp_path_factory.mktemp("world")
    (root / "data").mkdir()
    write_data(root / "data")
    sections = {
        "train": {"steps": 4, "batch_size": 6},
        "augment": {"crop_size": [25, 33]},
        "schedule": {"kind": "constant"},
    }
    config = write_config(root / "my.yaml", small(root / "data", **sections))
    assert train(config, root / "runs/my") == 0

    settings = load_config(config)
    for name in SAVED:  # runs that have saved, one whose config is lost too
        for run in (root / "saved" / name, root / "bare" / name):
            (run / "checkpoints").mkdir(parents=True)
            (run / "checkpoints" / name).write_bytes(b"content")
        write_description(root / "saved" / name, settings, ["cpu"])
    shutil.copytree(root / "runs/my", root / "lost", ignore=shutil.ignore_patterns("config.yaml"))

    for file, text in {
        "foreign/config.yaml": "# mine\n",
        "two.yaml": "classes: [road, dog]\nignore_ids: [255]\n",
        "coco/train/a.jpg": "",
        "coco/train/_annotations.coco.json": "",
        "notes/notes.txt": "",
        "empty/config.yaml": "",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    (root / "none").mkdir()
    return root


@pytest.fixture
def here(lab, world, monkeypatch, handlers):
    """The world as the current folder; nothing is evaluated in it."""
    for name in ("SLURM_JOB_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(world)
    monkeypatch.setattr(
        "segtrain.commands.evaluate.evaluate_dataset", lambda *_, **__: pytest.fail("too late")
    )
    lab.folder = world
    return lab


# Each has a command, its exit code and what it says without the name of the program, where ...
# stands for any text.
USAGE = [
    ("", 2, "usage: segtrain [-h]..."),
    ("trian c.yaml", 2, "usage: segtrain [-h]..."),
    ("train", 2, "usage: segtrain train [-h]..."),
    ("train c.yaml --nproc 0", 2, "usage: segtrain train [-h]..."),
    ("train c.yaml --nnodes 2", 2, "...arguments: --nnodes 2; torchrun starts the ranks of ..."),
    ("train c.yaml --master-addr=a", 2, "...; torchrun starts the ranks of several machines..."),
    ("predict runs/x --output out", 2, "usage: segtrain predict [-h]..."),
    *(
        (f"predict runs/x a.png --output out --pixel-size {size}", 2, "... and a unit, such as ...")
        for size in ("5", "um", "0um", "5m2", "1e999m")
    ),
    *(
        (f"predict runs/x a.png --output out --min-area {area}", 2, "... or square units, such...")
        for area in ("0", "5m", "m2", "-1")
    ),
    ("predict runs/x a.png --output o --threshold a", 2, "... expected CLASS=T, got 'a'"),
    ("predict runs/x a.png --output o --unknown-below 0", 2, "... above 0, up to 1, got '0'"),
    ("predict runs/x a.png --output o --threshold a=2", 2, "... above 0, up to 1, got '2'"),
    ("data synth root --size 64", 2, "usage: segtrain data synth [-h]..."),
    ("data synth root --size 64 1", 2, "--size 64 1: a scene has at least 16 px a side"),
    ("train c.yaml --lr 0.1", 2, "...arguments: --lr 0.1; did you mean --set optim.lr=VALUE?"),
    ("train c.yaml --train.crop_size", 2, "...; did you mean --set augment.crop_size=VALUE?"),
    ("train c.yaml train.batch_size=4", 2, "...; did you mean --set train.batch_size=VALUE?"),
    ("eval runs/x --flip", 2, "...; did you mean --set eval.flip=VALUE?"),
    ("eval a --with b c", 2, "...arguments: c; each further model needs its own --with..."),
    ("train c.yaml --gpus 2", 2, "... is an option of the command: --nproc"),
    ("export a --format onnx --output x --lr 0.1", 2, "...arguments: --lr 0.1"),
    ("train c.yaml --zebra 1", 2, "...arguments: --zebra 1"),
    ("data stats my.yaml --beta 1", 2, "... below 1, got '1'"),
    ("verify runs/my --steps=4:3", 2, "...argument --steps: expected A up to B, got '4:3'"),
    *(
        (f"verify runs/my --steps={steps}", 2, "...argument --steps: expected an integer of at ...")
        for steps in ("0", "a", "-1", "0:", "a:b", ":-1")
    ),
    *(  # pathlib makes a local folder `s3:` of it
        (
            f"export a --format onnx --output {url}",
            2,
            f"... is neither read nor written: expected a local path, got '{url}'",
        )
        for url in ("s3://b", "gs://b", "http://x", "file:///t")
    ),
]

A_FOLDER = (
    "...: is a directory; expected a config file, such as my.yaml, or a name from "
    "'segtrain config list'"
)
COCO = (
    "\ncoco holds 1 .jpg file, a COCO export of Roboflow (train/_annotations.coco.json); "
    "segtrain init coco makes a config of it"
)
UNKNOWN = ": no such file, and no config of this name comes with segtrain; "
NO_CONFIG = [
    ("bench coco", 2, A_FOLDER + COCO),
    ("data check coco", 2, A_FOLDER + COCO),
    ("bench notes", 2, A_FOLDER),
    ("data check notes", 2, A_FOLDER),
    ("config show .", 2, f"{A_FOLDER}..."),
    ("train notes", 3, "notes: no images ..."),  # with images, it is surveyed first
    ("train none --resume", 3, "none: no images ..."),
    ("train runs/mistyped --resume", 2, f"runs/mistyped{UNKNOWN}see 'segtrain config list'"),
    ("population mistyped --resume", 2, f"mistyped{UNKNOWN}see 'segtrain config list'"),
    ("config show a/zebra.yaml", 2, f"a/zebra.yaml{UNKNOWN}see 'segtrain config list'"),
    ("config show camvid_smal", 2, f"camvid_smal{UNKNOWN}did you mean camvid_small?"),
    ("config show my", 2, f"my{UNKNOWN}did you mean my.yaml?"),
    ("config show configs/demo.yaml", 2, f"configs/demo.yaml{UNKNOWN}did you mean demo?"),
    ("config show myy.yaml", 2, f"myy.yaml{UNKNOWN}did you mean my.yaml?"),
    ("config copy demo two.yaml", 2, "two.yaml: exists already; choose another name"),
    ("config copy demo folder", 2, "folder: expected a name that ends in .yaml"),
    ("config copy demo no/x.yaml", 2, "no/x.yaml: cannot be written: no such ... no folder no"),
    ("config copy x y.yaml", 2, "x: no config of this name comes with segtrain; ... ade20k..."),
]

SHOW = "config show my.yaml --set"
HOGWILD = f"{SHOW} optim.ema_decay=null --set train.parallel=hogwild --set"
SERVER = f"{SHOW} train.parallel=server --set"
UNIT = "--set data.mean=[0.485,0.456,0.406]"
WRONG_UNIT = (
    "--set data.mean: [0.485, 0.456, 0.406] is in units of 0..1, and pixels are 0..255 here; "
    "write [123.675, 116.28, 103.53]"
)
VALUES = [
    (f"{SHOW} train.timeout_s=0.0", 2, "--set train.timeout_s: must be greater than 0, got 0.0"),
    (f"{SHOW} train.shares=7", 2, "...shares: 7 shares of a microbatch of 6 images ..."),
    (
        f"{SHOW} train.shares=4 --set train.batch_size=11 --set train.accumulate_steps=3",
        2,
        "--set train.shares: 4 shares of a microbatch of 3 images ...",
    ),
    (f"{SHOW} train.shares=0", 2, "--set train.shares: must be greater than 0, got 0"),
    (
        "train my.yaml --output new --nproc 3 --set train.shares=2",
        2,
        "...2 shares leave some of 3 ranks without one; start at most 2 ranks, ...",
    ),
    (f"{SHOW} train.split=[0,0]", 2, "--set train.split: all numbers are 0..."),
    (f"{SHOW} train.split=[]", 2, "--set train.split: ... at least 1 ..."),
    (f"{SHOW} train.split=fast", 2, "--set train.split: ..."),
    (f"{SHOW} norm.kind=frozen", 2, "...train.init_from..."),
    (
        f"{SHOW} norm.kind=group --set model.recompute=norm",
        2,
        "... no effect with norm.kind group...",
    ),
    (
        f"{SHOW} model.backbone=mobilenet_v2 --set model.recompute=norm",
        2,
        "...recompute: has no effect with backbone mobilenet...",
    ),
    (f"{HOGWILD} train.precision=float16", 2, "...precision: ... cannot go ..."),
    (f"{HOGWILD} loss.kind=ohem", 2, "...loss: ohem is about the pixels of the whole batch..."),
    (
        f"{HOGWILD} loss.kind=lovasz_batch",
        2,
        "...loss: lovasz_batch is about the pixels of the whole batch...",
    ),
    (f"{SHOW} train.staleness=3", 2, "...staleness: has no effect with parallel sync..."),
    (f"{SERVER} train.precision=float16", 2, "...precision: float16 cannot go ... server..."),
    (f"{SERVER} train.accumulate_steps=2", 2, "...accumulate_steps: 2 cannot go ... server..."),
    (f"{SERVER} train.compile=true", 2, "...compile: true cannot go ... server..."),
    (f"{SERVER} norm.precise_batches=2", 2, "...precise_batches: 2 cannot go ... server..."),
    (f"{SERVER} loss.kind=ohem", 2, "...which no process has with train.parallel server..."),
    (
        f"{SERVER} train.staleness=0 --set "
        "'loss.also=[{kind: focal, class_weights: [1.0, 2.0, 3.0, 4.0]}]'",
        2,
        "...and parts with train.staleness 0, and those of the terms differ...",
    ),
    (
        "train my.yaml --output new --nproc 4 --set train.parallel=server --set train.staleness=1",
        2,
        "...train.staleness: 1 would let some of 3 workers always wait, ... at least 2",
    ),
    (f"{SHOW} 'loss.also=[{{weight: 5.0}}]'", 2, "...kind..."),
    (
        f"{SHOW} 'loss.also=[{{kind: dice, ohem_min_kept: 5}}]'",
        2,
        "...ohem_min_kept: has no effect with kind dice...",
    ),
    (
        f"{SHOW} 'loss.also=[{{kind: focal, class_weights: [0.0]}}]'",
        2,
        "...class_weights: all weights are 0...",
    ),
    (
        f"{SHOW} loss.logit_adjustment=0.5",
        2,
        "...logit_adjustment: has no effect with class_weights null...",
    ),
    *(
        (f"{SHOW} eval.best={value}", 2, "--set eval.best: ...")
        for value in ("[]", "[sand,sand]", "mIoU", "sand", "['']", "3")
    ),
    (f"data check my.yaml {UNIT}", 2, WRONG_UNIT),
    (f"train my.yaml --output new {UNIT} --nproc 1 --resume", 2, WRONG_UNIT),
]

COMMANDS = """
to go on with the run: segtrain train runs/my --resume
to train it longer: segtrain train runs/my --finish STEPS
to start a new run with its config: segtrain train runs/my/config.yaml --output """
A_RUN = f"...: expected a config, found a run{COMMANDS}"
BEST = "runs/my/checkpoints/best.pt"
A_CHECKPOINT = f"{BEST}: expected a config, found a checkpoint{COMMANDS}runs/my_2"
LOST = (
    "lost/config.yaml: missing; to go on with a config of your own: "
    "segtrain train CONFIG --output lost --resume"
)
HOLDS_A_RUN = (
    "...: holds a run already; go on with it by --resume, move it away, or choose another "
    "directory by --output"
)
RESTARTED = "TORCHELASTIC_RESTART_COUNT=1 train my.yaml"
TRAINING = [
    ("train runs/my", 2, f"{A_RUN}runs/my_2"),
    ("train runs/my/config.yaml", 2, f"{A_RUN}runs/my_2"),
    ("train runs/my --resume --output 'runs/my 2'", 2, f"{A_RUN}'runs/my 2'"),
    (f"train {BEST}", 2, A_CHECKPOINT),
    (f"train {BEST} --resume", 2, A_CHECKPOINT),
    ("train lost --resume", 2, LOST),
    ("train lost/config.yaml --resume", 2, LOST),
    *(
        (f"train my.yaml --nproc 1 --output {place}/{name}", 2, HOLDS_A_RUN)
        for place in ("saved", "bare")
        for name in SAVED
    ),
    (
        "train my.yaml --output foreign",
        2,
        "foreign: holds a config.yaml that no run has written...",
    ),
    (
        "train my.yaml --output data/images/run",
        2,
        "...: would write into .../data/images, where ...outside of it, such as --output runs/my",
    ),
    ("train my.yaml --output q\udcff", 2, "q\\udcff: expected a name in UTF-8"),
    ("export runs/my --format onnx --output q\udcff.onnx", 2, "...: expected a name in UTF-8"),
    (f"{RESTARTED} --until 10", 2, "--until: 10 is more than train.steps, 4"),
    (f"{RESTARTED} --accept-changes", 2, "--accept-changes: serves only --resume"),
    ("export a --format onnx --output a.pt2", 2, "... onnx write --output a.onnx..."),
    (
        "export a --format pt2 --output b/a.PT",
        2,
        "... torchscript; for --format pt2 write ... b/a...",
    ),
    (
        "export a --format safetensors --output a --size 64 96",
        2,
        "...--size: no effect on --format safetensors, ...",
    ),
    ("train my.yaml --requeue", 2, "--requeue: this is no SLURM job (SLURM_JOB_ID is not set)"),
]

FINISH = "train runs/my --finish 3"
FINISHING = [
    (f"train {BEST} --finish 3", 4, f"{BEST}: holds no training state; name last.pt..."),
    (f"{FINISH} --set train.steps=9", 2, "--set train.steps: the checkpoint decides this ..."),
    (f"{FINISH} --set schedule.min_lr=1", 2, "...1.0 must not be larger than optim.lr, 0.02"),
    (f"{FINISH} --output runs/my", 2, HOLDS_A_RUN),
    (f"{FINISH} --output runs/my --resume", 2, "runs/my: no branch (schedule.finish_from); ..."),
    ("train my.yaml --finish 3", 2, "my.yaml: expected a run, or a checkpoint of one, to finish"),
]

EVAL = "eval runs/my --device cpu"
DECIDED = "the checkpoint decides this; only data., eval., train.precision can be set"
INTO_LABELS = "... data/labels/val: would write into .../data/labels, where ..."
EVALUATING = [
    (
        f"{EVAL} --set eval.flip=true --set model.align_corners=true",
        2,
        f"--set model.align_corners=true: {DECIDED}",
    ),
    (f"{EVAL} --set eval.best=mdice", 2, "--set eval.best: is about evaluations while a model..."),
    (f"{EVAL} --set train.steps=7", 2, f"--set train.steps=7: {DECIDED}"),
    (f"{EVAL} --set data.classes=two.yaml", 3, "...4 classes there, 2 now; class 0 is ground ..."),
    (f"{EVAL} --no-labels", 2, "...there is nothing to score; add --save-predictions DIR"),
    (f"{EVAL} --no-labels --json s --save-predictions o", 2, "--json: needs labels; ..."),
    (f"{EVAL} --no-labels --overlays o --save-predictions o", 2, "--overlays: needs labels; ..."),
    (f"{EVAL} --no-labels --curves c --save-predictions o", 2, "--curves: needs labels; ..."),
    (f"{EVAL} --class ground", 2, "--class: needs either --precision or --recall"),
    (f"{EVAL} --recall 0.5", 2, "--precision, --recall: need --class NAME"),
    (f"{EVAL} --class nothing --recall 0.5", 2, "--class: no class nothing; there are ground..."),
    (f"{EVAL} --class ground --recall 0", 2, "... expected a number above 0, up to 1, got '0'"),
    (f"{EVAL} --group (p[0-9]+)", 2, "--group (p[0-9]+): ... no group: ..."),
    (f"{EVAL} --group (p", 2, "...argument --group: no regular expression: ..."),
    (f"{EVAL} --surface -1", 2, "...argument --surface: expected ..."),
    (f"{EVAL} --surface nan", 2, "... expected pixels of at least 0, got 'nan'"),
    (f"{EVAL} --no-labels --surface 0 --save-predictions o", 2, "--surface: needs labels; ..."),
    (f"{EVAL} --curves my.yaml", 2, "--curves my.yaml: cannot be written: exists, and is no ..."),
    (f"{EVAL} --save-predictions my.yaml/x", 2, "... my.yaml/x: cannot make this folder: ..."),
    (f"{EVAL} --overlays my.yaml/x", 2, "--overlays my.yaml/x: cannot make this folder: ..."),
    (f"{EVAL} --json my.yaml/x", 2, "--json my.yaml/x: cannot be written: ..."),
    (f"{EVAL} --save-predictions data/labels/val", 2, INTO_LABELS),
    (f"{EVAL} --overlays data/labels/val", 2, INTO_LABELS),
]

POPULATION = "population my.yaml --output new --members 2 --every 2"
A_RANK = "...torchrun or srun has started this as one of several ranks; ..."
BENCH = "bench my.yaml --steps 99999 --nproc 1"
OTHERS = [
    (f"{POPULATION} --members 1", 2, "--members: expected at least 2, got 1"),
    (f"{POPULATION} --every 4", 2, "--every: 4 must be smaller than train.steps"),
    (
        f"{POPULATION} --set train.shares=2",
        2,
        "...shares: has no place in a population; set it ...",
    ),
    (f"{POPULATION} --perturb optim.lrr", 2, "... no such option; did you mean optim.lr?"),
    (
        f"{POPULATION} --perturb optim.clip_grad_norm",
        2,
        "--perturb optim.clip_grad_norm: is None here; ...",
    ),
    (f"{POPULATION} --perturb optim.momentum", 2, "...momentum: 0.9 times 1.2 is refused: ..."),
    (
        f"{POPULATION} --perturb schedule.poly_power",
        2,
        "... no effect with kind constant; ...",
    ),
    (f"RANK=2 WORLD_SIZE=2 {POPULATION}", 2, A_RANK),
    (f"SLURM_STEP_ID=2 SLURM_NTASKS=2 {POPULATION}", 2, A_RANK),
    (
        f"{BENCH} --set train.parallel=hogwild --set optim.ema_decay=null",
        2,
        "--set train.parallel: hogwild: its processes do not share steps: use sync",
    ),
    (f"{BENCH} --profile /", 2, "--profile /: cannot be written: is a folder; name a file"),
    (f"{BENCH} --profile q\udcff.json", 2, "q\\udcff.json: expected a name in UTF-8"),
    *(
        (f"{command} {other}", 2, f"{other}: {said}")
        for other, said in (
            # The best checkpoint of the run would be read in its place.
            ("runs/my/checkpoints/last.pt", "... found a checkpoint; instead of it give runs/my"),
            ("empty", "expected a run, found an experiment, ..."),
            ("none", "expected the directory of a run"),
        )
        for command in ("report --output page.html", "suspects", "verify")
    ),
    ("compare runs/my", 2, "expected two runs, or several a side: compare A A2 --with B B2"),
    ("compare runs/my --with runs/../runs/my --with b", 2, "...runs/my: on both sides"),
    *(
        (
            f"compare runs/my none {more} --steps",
            2,
            "--steps: expected two runs, without --by and ...",
        )
        for more in ("other", "--by image", "--json file")
    ),
    ("compare runs/my none --steps", 2, "none: expected the directory of a run"),
    ("watch nowhere", 2, "nowhere: cannot be read: no such file or directory"),
    ("runs nowhere", 2, "nowhere: cannot be read: no such file or directory"),
    ("runs --clear", 2, "--clear: expected the directories of runs"),
]
ROWS = [*USAGE, *NO_CONFIG, *VALUES, *TRAINING, *FINISHING, *EVALUATING, *OTHERS]


@pytest.mark.fault(31, 91)
@pytest.mark.parametrize(("command", "code", "said"), ROWS, ids=[command for command, *_ in ROWS])
def test_a_command_is_refused_with_its_reason_and_writes_nothing(here, command, code, said):
    error = re.sub(r"^segtrain: ", "", here.refused(command, code=code), flags=re.MULTILINE)
    expected = ".*".join(map(re.escape, said.split("...")))
    assert re.fullmatch(f"{expected}\n", error, re.DOTALL), error
