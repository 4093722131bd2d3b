"""`segtrain seeds`: interruptions, further seeds, the numbers of its table, and what is refused."""

import json
import re

import numpy as np
import pytest
from experiments import bits, last, small, train, write_config, write_data

from segtrain.run.division import read_seeds

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture
def own(tmp_path):
    """A config whose best score need not be its last."""
    write_data(tmp_path, num_images=6, size=(40, 56), num_val=2)
    sections = {"train": {"steps": 2, "batch_size": 2}, "eval": {"every_steps": 1}}
    sections["optim"] = {"ema_decay": None}
    return write_config(tmp_path / "own.yaml", small(tmp_path, **sections) | {"seed": 5})


def scores(run):
    """mIoU of all evaluations of a run, in their order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/mIoU"] for line in lines if "eval/mIoU" in line]


def test_runs_that_are_stopped_resumed_and_more(own, stop, tmp_path, lab):
    """And in the end refused, on data that have changed."""
    out, ran = tmp_path / "out", stop["ran"]
    words = ("seeds", own, "-n", 2, "--device", "cpu", "--output", out)
    stop[2] = 1
    said = lab.command(*words)
    assert said.code == 143
    assert f"to go on: segtrain seeds {out} --resume" in said.err
    assert f"segtrain seeds {out} --resume" in lab.done("runs", out).out
    said = lab.refused("compare", out, "--with", out / "seed_5")
    assert "not trained to the end: seed_6; go on with segtrain seeds" in said
    del stop[2]
    more = ("--resume", "-n", 3, "--set", "log.charts=true")
    said = lab.done("seeds", out, *more, "--device", "cpu")
    assert [re.findall(r"seed_\d", " ".join(words))[0] for words in ran] == [
        *("seed_5", "seed_6"),
        *("seed_5", "seed_6", "seed_7"),
    ]

    text = own.read_text()
    write_config(tmp_path / "6.yaml", {})
    (tmp_path / "6.yaml").write_text(text.replace("seed: 5", "seed: 6"))
    assert train(tmp_path / "6.yaml", tmp_path / "alone") == 0
    assert bits(last(out / "seed_6")) == bits(last(tmp_path / "alone"))
    assert bits(last(out / "seed_6")) != bits(last(out / "seed_5"))

    rows = [re.split(r"  +", line.strip()) for line in said.out.splitlines()]
    found = [scores(out / f"seed_{seed}") for seed in (5, 6, 7)]
    assert all(len(one) == 2 for one in found)
    for (name, best, step, final), seed, values in zip(rows[1:4], (5, 6, 7), found, strict=True):
        assert (name, step) == (f"seed_{seed}", str(1 + np.argmax(values)))
        assert (best, final) == (f"{max(values):.4f}", f"{values[-1]:.4f}")
    best, final = np.max(found, axis=1), np.array(found)[:, -1]
    means = [f"{np.mean(x):.4f} ± {np.std(x, ddof=1):.4f}" for x in (best, final)]
    assert rows[4] == ["mean ± sd", *means]
    page = (out / "report.html").read_text()
    assert all(f"seed_{seed}" in page for seed in (5, 6, 7))
    lab.done("report", out, "--output", tmp_path / "again.html", "--device", "cpu")
    assert (tmp_path / "again.html").read_text() == page

    file = tmp_path / "c.json"
    said = lab.done("compare", out, "--with", tmp_path / "alone", "--json", file, "--by", "image")
    assert said.out.startswith(f"A           {out / 'seed_5'}, {out / 'seed_6'}, ")
    compared = json.loads(file.read_text())["scores"]
    assert compared == [pytest.approx(best), [pytest.approx(best[1])]]
    words = "compare", out, tmp_path / "alone", "--latex", tmp_path / "t.tex", "--json", file
    lab.done(*words[:3], "--by", "image", *words[3:])
    assert json.loads(file.read_text())["scores"] == compared
    assert (
        f"{100 * np.mean(best):.2f} \\pm {100 * np.std(best, ddof=1):.2f}"
        in (tmp_path / "t.tex").read_text()
    )
    assert "seed_6: on both sides" in lab.refused("compare", out, "--with", out / "seed_6")
    assert "--steps: expected two" in lab.refused("compare", out, tmp_path / "alone", "--steps")

    count = len(ran)
    words = ("seeds", out, "--resume", "-n", 2, "--set", "optim.lr=0.5", "--device", "cpu")
    said = lab.refused(*words)
    assert "-n: 3 there, 2 now" in said
    assert "optim.lr: 0.02 there, 0.5 now" in said
    said = lab.refused("seeds", own, "--output", out, "--device", "cpu")
    assert "is not empty; go on by --resume" in said
    assert len(ran) == count

    label = tmp_path / "labels/train/3.png"
    label.write_bytes(label.read_bytes() + b" ")
    said = lab.command("seeds", out, "--resume", "--device", "cpu")
    assert said.code == 2
    assert "to go on: segtrain seeds" in said.err
    assert "mean" not in said.out
    assert len(read_seeds(out).runs) == 3
