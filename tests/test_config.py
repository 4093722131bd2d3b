import json
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from segtrain import __version__
from segtrain.config import (
    Config,
    LayerRule,
    OptimConfig,
    config_schema,
    config_to_yaml,
    override_config,
    parse_config,
)
from segtrain.config.experiment import config_warnings, wrong_units
from segtrain.config.loading import with_places
from segtrain.config.section import CONFLICTS, NEEDS, Section
from segtrain.errors import ConfigError

DATA = "data: {layout: folders, root: /d, classes: voc}\n"
LAYERS = "optim: {layers: [{"
STEPS_9 = "train: {steps: 9}\nschedule: {kind: constant, "


def parse(text, *overrides):
    return parse_config(DATA + text, source="f.yaml", overrides=overrides)


def refusal(text, *overrides, data=DATA):
    with pytest.raises(ConfigError) as caught:
        parse_config(data + text, source="f.yaml", overrides=overrides)
    return str(caught.value).splitlines()


def test_a_file_says_only_what_differs_from_the_defaults():
    config = parse("optim:\n  lr: 1e-3\neval:\n  scales: [1, 0.5]\n")
    assert config.optim == OptimConfig(lr=0.001)
    assert config.eval.scales == (1.0, 0.5)
    assert isinstance(config.eval.scales[0], float)


@pytest.mark.fault(77, 79, 80)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lrr: 1", "3: optim.lrr: unknown key; did you mean 'lr'?"),
        ("model:\n  lr: 1", "3: model.lr: unknown key; did you mean optim.lr?"),
        ("lr: 1", "2: lr: unknown key; did you mean optim.lr?"),
        ("trian: {lr: 1}", "2: trian: unknown key; did you mean 'train'?"),
        ("model: {num_classes: 19}", "2: model.num_classes: unknown key; the class file in data."),
        ("train: {num_epochs: 3}", "an epoch is images / train.batch_size steps"),
        ("train: {loss: {kind: ohem}}", "2: train.loss: unknown key; did you mean loss?"),
        ("augment: {crop: [3, 5]}", "2: augment.crop: unknown key; did you mean 'crop_size'?"),
        ("eval: {new_eval_key: 5}", "scales, flip, thresholds, precision, batch_size"),
        ("train: {init_from: 's3://b/last.pt'}", "2: train.init_from: s3:// is not read: expected"),
        ("model: {pretrained: hf://x}", "2: model.pretrained: hf:// is not read: expected a local"),
        ("train:\n  steps: 19.0", "3: train.steps: must be an integer, got 19.0"),
        ("train: {steps: 0}", "2: train.steps: must be greater than 0, got 0"),
        ("optim: {lr: '0.1'}", "2: optim.lr: must be a number, got '0.1'"),
        ("eval: {flip: yes}", "2: eval.flip: must be true or false, got 'yes'"),
        ("train: {split: [1.5, 2]}", "2: train.split[0]: must be an integer, got 1.5"),
        ("model: {arch: DeepLabV3+}", "; did you mean deeplabv3plus?"),
        ("train: {split: evn}", "must be 'even' or a list in brackets, got"),
        ("augment: {crop_size: [512]}", "2: augment.crop_size[1]: is required"),
        ("eval: {scales: []}", "2: eval.scales: must have at least 1 item, got []"),
        ("train: null", "2: train: must be keys and values, got null"),
        ("augment:\n  scale_range: [2, 0.5]", "scale_range: the first number, 2.0, is larger th"),
        ("schedule:\n  warmup_steps: 10\ntrain: {steps: 10}", "3: schedule.warmup_steps: 10 must"),
        ("train:\n  batch_size: 4\n  accumulate_steps: 3", "3: train.batch_size: one image has"),
        ("norm:\n  images: 1", "3: norm.images: one image has one value a channel after global"),
        ("model:\n  backbone: mobilenet_v2\n  stem: 64-64-128", "model.stem: has no effect"),
        ("model: {backbone: resnet18, multi_grid: [1, 2, 4]}", "multi_grid: expected 2 numbers"),
        ("model: {backbone: timm/resnet50, stem: 32-32-64}", "stem: has no effect"),
        ("model: {backbone: timm/resnet50.a1_in1k}", "2: model.backbone: "),
        # The feature maps would be larger, and the dilations of the head those of smaller ones.
        ("model: {num_stages: 2, output_stride: 16}", "num_stages 2 ends at stride 8"),
        ("schedule: {finish_from: 5}", "finish_from: has no effect with kind poly"),
        ("schedule: {kind: constant, min_lr: 0.001}", "min_lr: has no effect with kind constant"),
        (f"{STEPS_9}finish_from: 9}}", "finish_from: 9 must be smaller than train.steps, 9"),
        (f"{STEPS_9}finish_from: 4, warmup_steps: 5}}", "4 must not be smaller than warmup"),
        (f"{STEPS_9}finish_from: 4, min_lr: 0.5}}", "min_lr: 0.5 must not be larger than"),
        ("train: {steps: 3}\nschedule: {kind: one_cycle}", "rises in 0.3 of the steps, and of 3 s"),
        (f"{LAYERS}names: [head]}}]}}", "nothing is said about these weights; set one of freeze"),
        (f"{LAYERS}names: [a], freeze: true, lr_mult: 2.0}}]}}", "lr_mult: has no effect with fre"),
        (f"{LAYERS}names: [a], freeze: true}}]}}", "name some in model.pretrained"),
        (f"{LAYERS}names: [a], keep_zeros: true}}]}}", "name some in model.pretrained"),
        (f"{LAYERS}names: [a], zero: ['a[0]']}}]}}", "nothing is said about these weights"),
        (f"{LAYERS}lr_mult: 2.0}}]}}", "names: expected the weights that lr_mult is for"),
        (f"{LAYERS}names: [a], freeze: true, zero: ['a[0]']}}]}}", "zero: has no effect with fre"),
        ("optim: {decay_toward: start}", "2: optim.decay_toward: is about weights that are loaded"),
    ],
)
def test_a_mistake_names_line_key_expectation_and_repair(text, message):
    (line,) = refusal(text)
    assert line.startswith("f.yaml:")
    assert message in line


def test_an_unknown_key_of_a_run_names_the_version_that_wrote_it():
    own = config_to_yaml(parse("")).replace("  flip: ", "  flop: ")
    assert own.startswith(f"# segtrain {__version__}\n")
    newer = own.replace(__version__, "9.1.0", 1)
    for text, said in (
        (own, f"; segtrain {__version__} wrote this file"),
        (newer, f"; segtrain 9.1.0 wrote this file, and this is {__version__}"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(text, source="f.yaml")
        assert str(caught.value).endswith(f"eval.flop: unknown key; did you mean 'flip'?{said}")
    with pytest.raises(
        ConfigError, match=r"^--set eval\.flop: unknown key; did you mean 'flip'\?$"
    ):
        parse_config(newer.replace("flop", "flip"), source="f.yaml", overrides=["eval.flop=true"])


def test_an_option_that_a_later_check_refuses_has_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(DATA)
    said = "data.root: gone\n  data.classes: x\nlog: y"
    assert with_places(said, "own.yaml", ()) == f"own.yaml:1: {said}"
    assert with_places(said, "own.yaml", ("data.root=a",)) == f"--set {said}"
    assert with_places(said, "runs/own", ("data.classes=b",)) == f"runs/own: {said}"
    # A default is written nowhere.
    assert with_places("optim.lr: bad", "own.yaml", ()) == "optim.lr: bad"


def test_the_line_of_a_cross_check_is_that_of_a_key_that_is_written():
    """min_lr is a default here; only lr is in the file."""
    text = "optim:\n  momentum: 0.5\n  lr: 1e-9\n"
    (line,) = refusal(text, "schedule.min_lr=0.1")
    assert line == "--set schedule.min_lr: 0.1 must not be larger than optim.lr, 1e-09"
    scaled = "optim: {lr_batch_size: 16}\ntrain: {batch_size: 4}\nschedule: {min_lr: 0.005}"
    (line,) = refusal(scaled)
    assert line.endswith("must not be larger than optim.lr as scaled to train.batch_size, 0.0025")
    config = parse("schedule: {min_lr: 0.005}")
    with pytest.raises(ConfigError, match=r"^--set optim\.lr: schedule\.min_lr: 0\.005 must not"):
        override_config(config, ["optim.lr=1e-3"], source="runs/x")


@pytest.mark.fault(80)
def test_all_mistakes_are_listed_in_the_order_of_the_file():
    text = "optim:\n  layers: 1.5\n  lr: 012\n  lr: 1\nnorm: {kind: syn}\nmodel:\n  x: 1\neval:\n"
    lines = refusal(text, "foo", "log.every_steps=0", "train.x.y=1", "seed=no")
    assert [line.split(": ")[0] for line in lines] == [
        "f.yaml:3",
        "f.yaml:4",
        "f.yaml:5",
        "f.yaml:6",
        "f.yaml:8",
        "f.yaml:9",
        "--set log.every_steps",
        "--set train.x.y",
        "--set seed",
        "--set foo",
    ]


def test_missing_keys_say_what_they_mean():
    lines = refusal("data:\n  root: /d\n", data="")
    assert lines[0].startswith(
        "f.yaml:1: data.layout: is required: directory layout of the data set"
    )
    assert lines[1].startswith("f.yaml:1: data.classes: is required: class file")
    assert refusal("seed: 1", data="") == [
        "f.yaml: data: is required: a section with layout, root, classes"
    ]


@pytest.mark.fault(82)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "--set optim.lrr: unknown key; did you mean 'lr'?"),
        ("optim.lr", "--set optim.lr: expected section.key=value, such as optim.lr=0.01"),
        ("optim.lr=", "--set optim.lr: has no value; write null for nothing, '' for no text"),
        ("optim.lr=x", "--set optim.lr: must be a number, got 'x'"),
        ("train.steps=01", "--set train.steps: 01 is refused, YAML readers disagree"),
        ("optim={lr: 1}", "--set optim: is a section; set its keys one by one"),
        ("seed.x=1", "--set seed.x: "),
        ("x.y=1", "--set x.y: x: unknown key; expected one of seed, task, plugins"),
    ],
)
def test_an_override_obeys_the_same_checks(override, message):
    (line,) = refusal("optim: {lr: 0.1}\nseed: 3\n", override)
    assert line.startswith(message)


def test_an_override_replaces_what_the_file_says_even_a_mistake():
    config = parse("optim:\n  lr: 012\n", "optim.lr=1e-3", "augment.crop_size=[3, 5]", "optim.lr=2")
    assert config.optim.lr == 2
    assert config.augment.crop_size == (3, 5)


AWKWARD = (
    "data.root='yes'",
    "data.train_split='012'",
    "data.images_dir=a b#c: d\\x'é\"",
    "model.pretrained='None'",
    "norm.momentum=1e-12",
    "optim.clip_grad_norm=null",
    "model.multi_grid=[1, 2, 4]",
    "loss.class_weights=[1, 2, 3e-7]",
    "augment.extra=[{name: Blur, args: {blur_limit: [3, 7], y: {z: [1, [null, true]]}}}]",
)


def test_the_printed_config_loads_back_equal_here_and_elsewhere():
    config = parse("", *AWKWARD)
    text = config_to_yaml(config)
    assert parse_config(text, source="f.yaml") == config
    assert yaml.safe_load(text) == config.model_dump(mode="json")


def test_the_printed_config_is_complete_and_in_order():
    printed = yaml.safe_load(config_to_yaml(parse("")))
    assert list(printed) == list(Config.model_fields)
    for name, section in printed.items():
        if isinstance(section, dict):
            assert list(section) == list(Config.model_fields[name].annotation.model_fields)


def test_the_schema_describes_every_option():
    schema = json.loads(json.dumps(config_schema()))
    assert schema["additionalProperties"] is False
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(field.get("description") for field in section["properties"].values())


# One of each form that a rule of NEEDS and CONFLICTS can have.
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("optim.kind=adamw optim.momentum=0.5", "optim.momentum: has no effect with kind adamw"),
        ("schedule.warmup_start=0.2", "schedule.warmup_start: has no effect with schedule.warmup_"),
        # Of no table: any of several rates will do.
        ("optim.weight_decay=0 optim.decay_toward=start", "optim.decay_toward: has no effect"),
        ("model.aux_head=false loss.aux_weight=1", "loss.aux_weight: has no effect with model.aux"),
        (
            "augment.color_prob=1 augment.color_jitter=[0,0,0,0]",
            "augment.color_prob: has no effect with color_jitter of zeros",
        ),
        ("train.shares=3 train.compile=true", "train.shares: 3 cannot go with compile true"),
        ("norm.images=2 train.parallel=hogwild", "norm.images: 2 cannot go with train.parallel h"),
        ("model.recompute=blocks train.compile=true", "model.recompute: blocks cannot go with tr"),
    ],
)
def test_options_without_effect_and_options_that_contradict_are_refused(options, said):
    (line,) = refusal("", *options.split())
    assert line.startswith(f"--set {said}")


def test_the_tables_of_rules_name_options_that_exist():
    options = {"data": {"layout": "folders", "root": "x", "classes": "x"}}
    config = Config.model_validate(options)
    sections = [config, *(value for _, value in config if isinstance(value, Section))]
    sections.append(LayerRule(names=("a",), freeze=True))
    found = {each.__name__: section for section in sections for each in type(section).__mro__}
    rules = [(name, f"{keys} {needed}") for name in NEEDS for keys, needed in NEEDS[name].items()]
    rules += [(name, f"{keys} {other}") for name in CONFLICTS for keys, other, _ in CONFLICTS[name]]
    for name, words in rules:
        for word in words.split():
            *section, key = word.partition("=")[0].split(".")
            owner = attrgetter(*section)(found[name]) if section else found[name]
            assert key in type(owner).model_fields


@pytest.mark.parametrize(
    ("key", "values", "repair"),
    [
        ("mean", [0.485, 0.456, 0.406], "[123.675, 116.28, 103.53]"),  # torchvision's
        ("std", [0.229, 0.224, 0.225], "[58.395, 57.12, 57.375]"),
        ("mean", [0, 0, 1], "[0, 0, 255]"),
    ],
)
def test_a_mean_or_std_of_0_to_1_is_in_the_wrong_unit(key, values, repair):
    (line,) = wrong_units(parse("", f"data.{key}={values}"))
    assert line.startswith(f"data.{key}: [")
    assert line.endswith(f"write {repair}")


@pytest.mark.parametrize("text", ["mean=[0, 0, 0]", "std=[1, 1, 1]", "mean=[1, 1, 2]"])
def test_no_normalization_and_numbers_of_0_to_255_pass(text):
    assert wrong_units(parse("", f"data.{text}")) == []


@pytest.mark.parametrize("option", ["crop_size=[64, 64]", "overlap=0.5"])
def test_windows_that_hardly_an_image_goes_by_are_a_surprise(option):
    (line,) = config_warnings(parse("", f"eval.{option}"))
    assert line.startswith(f"eval.{option.partition('=')[0]}: with eval.mode whole, only images")
    assert config_warnings(parse("", f"eval.{option}", "eval.mode=slide")) == []


def test_no_normalization_before_pretrained_weights_is_a_surprise():
    raw = ("data.mean=[0.0,0.0,0.0]", "data.std=[1.0,1.0,1.0]")
    (line,) = config_warnings(parse("", *raw, "model.pretrained=imagenet"))
    assert line.startswith("data.std: [1.0, 1.0, 1.0] leaves pixels at 0..255")
    assert config_warnings(parse("", *raw)) == []
