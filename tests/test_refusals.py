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


# Each has a command, its exit code if that is not 2, and what it says without the name of the
# program, where ... stands for any text.
USAGE = [
    ("", "usage: segtrain [-h]..."),
    ("train", "usage: segtrain train [-h]..."),
    ("train c.yaml --nproc 0", "usage: segtrain train [-h]..."),
    ("train c.yaml --nnodes 2", "...arguments: --nnodes 2; torchrun starts the ranks of ..."),
    ("train c.yaml --master-addr=a", "...; torchrun starts the ranks of several machines..."),
    ("predict runs/x --output out", "usage: segtrain predict [-h]..."),
    *(
        (f"predict runs/x a.png --output out --pixel-size {size}", "... and a unit, such as ...")
        for size in ("5", "um", "0um", "5m2", "1e999m")
    ),
    *(
        (f"predict runs/x a.png --output out --min-area {area}", "... or square units, such...")
        for area in ("0", "5m", "m2", "-1")
    ),
    ("predict runs/x a.png --output o --threshold a", "... expected CLASS=T, got 'a'"),
    ("predict runs/x a.png --output o --unknown-below 0", "... above 0, up to 1, got '0'"),
    ("predict runs/x a.png --output o --threshold a=2", "... above 0, up to 1, got '2'"),
    ("data synth root --size 64", "usage: segtrain data synth [-h]..."),
    ("data synth root --size 64 1", "--size 64 1: a scene has at least 16 px a side"),
    ("train c.yaml --lr 0.1", "...arguments: --lr 0.1; did you mean --set optim.lr=VALUE?"),
    ("train c.yaml --train.crop_size", "...; did you mean --set augment.crop_size=VALUE?"),
    ("train c.yaml train.batch_size=4", "...; did you mean --set train.batch_size=VALUE?"),
    ("trian c.yaml", "...no command trian; did you mean train?"),
    ("data polygon x", "...no command polygon; did you mean data polygons?"),
    ("eval runs/x --flip", "...; did you mean --set eval.flip=VALUE?"),
    ("eval a --with b c", "...arguments: c; each further model needs its own --with..."),
    ("train c.yaml --gpus 2", "... is an option of the command: --nproc"),
    ("export a --format onnx --output x --lr 0.1", "...arguments: --lr 0.1"),
    ("train c.yaml --zebra 1", "...arguments: --zebra 1"),
    ("data stats my.yaml --beta 1", "... below 1, got '1'"),
    ("verify runs/my --steps=4:3", "...argument --steps: expected A up to B, got '4:3'"),
    *(
        (f"verify runs/my --steps={steps}", "...argument --steps: expected an integer of at ...")
        for steps in ("0", "a", "-1", "0:", "a:b", ":-1")
    ),
    *(  # pathlib makes a local folder `s3:` of it
        (
            f"export a --format onnx --output {url}",
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
    ("bench coco", A_FOLDER + COCO),
    ("data check coco", A_FOLDER + COCO),
    ("bench notes", A_FOLDER),
    ("data check notes", A_FOLDER),
    ("config show .", f"{A_FOLDER}..."),
    ("train notes", 3, "notes: no images ..."),  # with images, it is surveyed first
    ("train none --resume", 3, "none: no images ..."),
    ("train runs/mistyped --resume", f"runs/mistyped{UNKNOWN}see 'segtrain config list'"),
    ("population mistyped --resume", f"mistyped{UNKNOWN}see 'segtrain config list'"),
    ("config show a/zebra.yaml", f"a/zebra.yaml{UNKNOWN}see 'segtrain config list'"),
    ("config show camvid_smal", f"camvid_smal{UNKNOWN}did you mean camvid_small?"),
    ("config show my", f"my{UNKNOWN}did you mean my.yaml?"),
    ("config show configs/demo.yaml", f"configs/demo.yaml{UNKNOWN}did you mean demo?"),
    ("config show myy.yaml", f"myy.yaml{UNKNOWN}did you mean my.yaml?"),
    ("config copy demo two.yaml", "two.yaml: exists already; choose another name"),
    ("config copy demo folder", "folder: expected a name that ends in .yaml"),
    ("config copy demo no/x.yaml", "no/x.yaml: cannot be written: no such ... no folder no"),
    ("config copy x y.yaml", "x: no config of this name comes with segtrain; ... ade20k..."),
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
    (f"{SHOW} train.timeout_s=0.0", "--set train.timeout_s: must be greater than 0, got 0.0"),
    (f"{SHOW} train.shares=7", "...shares: 7 shares of a microbatch of 6 images ..."),
    (
        f"{SHOW} train.shares=4 --set train.batch_size=11 --set train.accumulate_steps=3",
        "--set train.shares: 4 shares of a microbatch of 3 images ...",
    ),
    (f"{SHOW} train.shares=0", "--set train.shares: must be greater than 0, got 0"),
    (
        "train my.yaml --output new --nproc 3 --set train.shares=2",
        "...2 shares ... at most 2 ranks, ...",
    ),
    (f"{SHOW} train.split=[0,0]", "--set train.split: all numbers are 0..."),
    (f"{SHOW} train.split=[]", "--set train.split: ... at least 1 ..."),
    (f"{SHOW} train.split=fast", "--set train.split: ..."),
    (f"{SHOW} norm.kind=frozen", "...train.init_from..."),
    (f"{SHOW} norm.kind=group --set model.recompute=norm", "... no effect with norm.kind group..."),
    (
        f"{SHOW} model.backbone=mobilenet_v2 --set model.recompute=norm",
        "...recompute: ... backbone mobilenet...",
    ),
    (f"{HOGWILD} train.precision=float16", "...precision: ... cannot go ..."),
    (f"{HOGWILD} loss.kind=ohem", "...loss: ohem is about the pixels of the whole batch..."),
    (
        f"{HOGWILD} loss.kind=lovasz_batch",
        "...lovasz_batch is about the pixels of the whole batch...",
    ),
    (f"{SHOW} train.staleness=3", "...staleness: has no effect with parallel sync..."),
    (f"{SERVER} train.precision=float16", "...precision: float16 cannot go ... server..."),
    (f"{SERVER} train.accumulate_steps=2", "...accumulate_steps: 2 cannot go ... server..."),
    (f"{SERVER} train.compile=true", "...compile: true cannot go ... server..."),
    (f"{SERVER} norm.precise_batches=2", "...precise_batches: 2 cannot go ... server..."),
    (f"{SERVER} loss.kind=ohem", "...which no process has with train.parallel server..."),
    (
        f"{SERVER} train.staleness=0 --set "
        "'loss.also=[{kind: focal, class_weights: [1.0, 2.0, 3.0, 4.0]}]'",
        "...and parts with train.staleness 0, and those of the terms differ...",
    ),
    (
        "train my.yaml --output new --nproc 4 --set train.parallel=server --set train.staleness=1",
        "...train.staleness: 1 would let some of 3 workers always wait, ... at least 2",
    ),
    (f"{SHOW} 'loss.also=[{{weight: 5.0}}]'", "...kind..."),
    (
        f"{SHOW} 'loss.also=[{{kind: dice, ohem_min_kept: 5}}]'",
        "...ohem_min_kept: ... with kind dice...",
    ),
    (
        f"{SHOW} 'loss.also=[{{kind: focal, class_weights: [0.0]}}]'",
        "...weights: all weights are 0...",
    ),
    (
        f"{SHOW} loss.logit_adjustment=0.5",
        "...adjustment: has no effect with class_weights null...",
    ),
    *(
        (f"{SHOW} eval.best={value}", "--set eval.best: ...")
        for value in ("[]", "[sand,sand]", "mIoU", "sand", "['']", "3")
    ),
    (f"data check my.yaml {UNIT}", WRONG_UNIT),
    (f"train my.yaml --output new {UNIT} --nproc 1 --resume", WRONG_UNIT),
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
    ("train runs/my", f"{A_RUN}runs/my_2"),
    ("train runs/my/config.yaml", f"{A_RUN}runs/my_2"),
    ("train runs/my --resume --output 'runs/my 2'", f"{A_RUN}'runs/my 2'"),
    (f"train {BEST}", A_CHECKPOINT),
    (f"train {BEST} --resume", A_CHECKPOINT),
    ("train lost --resume", LOST),
    ("train lost/config.yaml --resume", LOST),
    *(
        (f"train my.yaml --nproc 1 --output {place}/{name}", HOLDS_A_RUN)
        for place in ("saved", "bare")
        for name in SAVED
    ),
    ("train my.yaml --output foreign", "foreign: holds a config.yaml that no run has written..."),
    (
        "train my.yaml --output data/images/run",
        "...: would write into .../data/images, where ...outside of it, such as --output runs/my",
    ),
    ("train my.yaml --output q\udcff", "q\\udcff: expected a name in UTF-8"),
    ("export runs/my --format onnx --output q\udcff.onnx", "...: expected a name in UTF-8"),
    (f"{RESTARTED} --until 10", "--until: 10 is more than train.steps, 4"),
    (f"{RESTARTED} --accept-changes", "--accept-changes: serves only --resume"),
    ("export a --format onnx --output a.pt2", "... onnx write --output a.onnx..."),
    ("export a --format pt2 --output b/a.PT", "... torchscript; for --format pt2 write ... b/a..."),
    ("export a --format safetensors --output a --size 64 96", "...--size: no effect on ..."),
    ("train my.yaml --requeue", "--requeue: this is no SLURM job (SLURM_JOB_ID is not set)"),
]

FINISH = "train runs/my --finish 3"
FINISHING = [
    (f"train {BEST} --finish 3", 4, f"{BEST}: holds no training state; name last.pt..."),
    (f"{FINISH} --set train.steps=9", "--set train.steps: the checkpoint decides this ..."),
    (f"{FINISH} --set schedule.min_lr=1", "...1.0 must not be larger than optim.lr, 0.02"),
    (f"{FINISH} --output runs/my", HOLDS_A_RUN),
    (f"{FINISH} --output runs/my --resume", "runs/my: no branch (schedule.finish_from); ..."),
    ("train my.yaml --finish 3", "my.yaml: expected a run, or a checkpoint of one, to finish"),
]

EVAL = "eval runs/my --device cpu"
DECIDED = "the checkpoint decides this; only data., eval., train.precision can be set"
INTO_LABELS = "... data/labels/val: would write into .../data/labels, where ..."
EVALUATING = [
    (f"{EVAL} --set eval.flip=true --set model.stem=7x7", f"--set model.stem=7x7: {DECIDED}"),
    (f"{EVAL} --set eval.best=mdice", "--set eval.best: is about evaluations while a model..."),
    (f"{EVAL} --set train.steps=7", f"--set train.steps=7: {DECIDED}"),
    (f"{EVAL} --set data.classes=two.yaml", 3, "...4 classes there, 2 now; class 0 is ground ..."),
    (f"{EVAL} --no-labels", "...there is nothing to score; add --save-predictions DIR"),
    (f"{EVAL} --no-labels --json s --save-predictions o", "--json: needs labels; ..."),
    (f"{EVAL} --no-labels --overlays o --save-predictions o", "--overlays: needs labels; ..."),
    (f"{EVAL} --no-labels --curves c --save-predictions o", "--curves: needs labels; ..."),
    (f"{EVAL} --class ground", "--class: needs either --precision or --recall"),
    (f"{EVAL} --recall 0.5", "--precision, --recall: need --class NAME"),
    (f"{EVAL} --class nothing --recall 0.5", "--class: no class nothing; there are ground..."),
    (f"{EVAL} --class ground --recall 0", "... expected a number above 0, up to 1, got '0'"),
    (f"{EVAL} --group (p[0-9]+)", "--group (p[0-9]+): ... no group: ..."),
    (f"{EVAL} --group (p", "...argument --group: no regular expression: ..."),
    (f"{EVAL} --surface -1", "...argument --surface: expected ..."),
    (f"{EVAL} --surface nan", "... expected pixels of at least 0, got 'nan'"),
    (f"{EVAL} --no-labels --surface 0 --save-predictions o", "--surface: needs labels; ..."),
    (f"{EVAL} --curves my.yaml", "--curves my.yaml: cannot be written: exists, and is no ..."),
    (f"{EVAL} --save-predictions my.yaml/x", "... my.yaml/x: cannot make this folder: ..."),
    (f"{EVAL} --overlays my.yaml/x", "--overlays my.yaml/x: cannot make this folder: ..."),
    (f"{EVAL} --json my.yaml/x", "--json my.yaml/x: cannot be written: ..."),
    (f"{EVAL} --save-predictions data/labels/val", INTO_LABELS),
    (f"{EVAL} --overlays data/labels/val", INTO_LABELS),
]

POPULATION = "population my.yaml --output new --members 2 --every 2"
A_RANK = "...torchrun or srun has started this as one of several ranks; ..."
BENCH = "bench my.yaml --steps 99999 --nproc 1"
OTHERS = [
    (f"{POPULATION} --members 1", "--members: expected at least 2, got 1"),
    (f"{POPULATION} --every 4", "--every: 4 must be smaller than train.steps"),
    (f"{POPULATION} --set train.shares=2", "...shares: has no place in a population; set it ..."),
    (f"{POPULATION} --perturb optim.lrr", "... no such option; did you mean optim.lr?"),
    (f"{POPULATION} --perturb optim.clip_grad_norm", "...clip_grad_norm: is None here; ..."),
    (f"{POPULATION} --perturb optim.momentum", "...momentum: 0.9 times 1.2 is refused: ..."),
    (f"{POPULATION} --perturb schedule.poly_power", "... no effect with kind constant; ..."),
    (f"RANK=2 WORLD_SIZE=2 {POPULATION}", A_RANK),
    (f"SLURM_STEP_ID=2 SLURM_NTASKS=2 {POPULATION}", A_RANK),
    (
        f"{BENCH} --set train.parallel=hogwild --set optim.ema_decay=null",
        "...do not share steps: use sync",
    ),
    (f"{BENCH} --profile /", "--profile /: cannot be written: is a folder; name a file"),
    (f"{BENCH} --profile q\udcff.json", "q\\udcff.json: expected a name in UTF-8"),
    *(
        (f"{command} {other}", f"{other}: {said}")
        for other, said in (
            # The best checkpoint of the run would be read in its place.
            ("runs/my/checkpoints/last.pt", "... found a checkpoint; instead of it give runs/my"),
            ("empty", "expected a run, found an experiment, ..."),
            ("none", "expected the directory of a run"),
        )
        for command in ("report --output page.html", "suspects", "verify")
    ),
    ("compare runs/my", "expected two runs, or several a side: compare A A2 --with B B2"),
    ("compare runs/my --with runs/../runs/my --with b", "...runs/my: on both sides"),
    *(
        (
            f"compare runs/my none {more} --steps",
            "--steps: expected two runs, without --by, --on ...",
        )
        for more in ("other", "--by image", "--on val", "--json file")
    ),
    ("compare runs/my none --steps", "none: expected the directory of a run"),
    ("watch nowhere", "nowhere: cannot be read: no such file or directory"),
    ("runs nowhere", "nowhere: cannot be read: no such file or directory"),
    ("runs --clear", "--clear: expected the directories of runs"),
]
# Of foreign checkpoints, of predictions, and sizes that no image has.
CONVERT = f"convert {BEST} --classes two.yaml --output"
PREDICT = "predict runs/my data/images/val/0.png --output out"
OTHERS += [
    (f"{CONVERT} ours.pth", "--output ours.pth: checkpoints end in .pt, such as ours.pt"),
    (f"{CONVERT} {BEST}", f"--output {BEST}: is the file to convert; choose another name"),
    (f"{CONVERT} ours.pt --set optim.lr=1", "--set optim.lr=1: is for training; ..."),
    (f"{CONVERT} ours.pt", 4, f"{BEST}: ... checkpoint of segtrain already..."),
    (f"{EVAL} --class ground --recall 0.5 --precision 0.5", "--class: needs either ..."),
    (f"{SHOW} eval.scales=[1e300]", "--set eval.scales...to 100..."),
    (f"{SHOW} augment.scale_range=[1,1e300]", "--set augment.scale_range...to 100..."),
    (f"{PREDICT} --min-area 5", "--min-area: serves only --table..."),
    (f"{PREDICT} --pixel-size 5m", "--pixel-size: serves only --table FILE and --objects..."),
    (f"{PREDICT} --table t.csv --objects t.csv", "--objects t.csv: is the file of --table..."),
    (f"{PREDICT} --table two.yaml", "--table two.yaml: cannot be written: exists, and is no ..."),
    (f"{PREDICT} --table data", "--table data: cannot be written: is a folder; name a file"),
    (f"{PREDICT} --table t.csv --min-area 5um2", "--min-area: no pixel size in um: ...0.png..."),
    (f"{PREDICT} --threshold sky=0.1", "--threshold: no class sky; there are ground..."),
    (f"{PREDICT} --threshold sand=0.1 --threshold sand=0.2", "--threshold: once for each ..."),
    (f"{PREDICT} --unknown-below 0.25", "--unknown-below: no effect: of 4 classes one always..."),
]
# Classes that overlap, or do not
MULTILABEL = (
    "train my.yaml --output new --nproc 1 --set task=multilabel --set data.label_format=bands "
    "--set augment.max_class_share=1.0 --set"
)
TASKS = [
    (f"{MULTILABEL} loss.kind=ohem", "...loss: ohem is for classes of which a pixel has one..."),
    (
        f"{MULTILABEL} loss.label_smoothing=0.1",
        "...label_smoothing and logit_adjustment ...",
    ),
    (f"{MULTILABEL} augment.class_mix_prob=0.5", "...class_mix_prob: 0.5 cannot go with task..."),
    (f"{MULTILABEL} data.label_format=ids", "...bands and task multilabel go together..."),
    (f"{MULTILABEL} data.layout=voc", "...data.layout: voc has one class a pixel..."),
    (f"{MULTILABEL} data.class_uniform=0.5", "...class_uniform: 0.5 cannot go with task..."),
    (f"{MULTILABEL} loss.positive_weights=[1.0]", "...positive_weights: 1 numbers for the 4 ..."),
    (f"{MULTILABEL} eval.thresholds=[0.1,0.2,0.3]", "...eval.thresholds: 3 numbers for the 4..."),
    (f"{SHOW} loss.kind=tversky", "...tversky and positive_weights are for task multilabel..."),
    (f"{SHOW} eval.thresholds=[0.3]", "...thresholds: has no effect with task semantic..."),
]
ROWS = [*USAGE, *NO_CONFIG, *VALUES, *TRAINING, *FINISHING, *EVALUATING, *OTHERS, *TASKS]


@pytest.mark.fault(31, 91)
@pytest.mark.parametrize("row", ROWS, ids=[command for command, *_ in ROWS])
def test_a_command_is_refused_with_its_reason_and_writes_nothing(here, row):
    command, *code, said = row
    told = here.refused(command, code=code[0] if code else 2)
    error = re.sub(r"^segtrain: ", "", told, flags=re.MULTILINE)
    expected = ".*".join(map(re.escape, said.split("...")))
    assert re.fullmatch(f"{expected}\n", error, re.DOTALL), error
