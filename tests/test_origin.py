"""Files and folders of predictions say which weights made them."""

import hashlib
import json

import pytest
from experiments import train
from safetensors import safe_open


@pytest.fixture
def runs(lab, data):
    """Two, of one step each."""
    for name, lr in (("one", 0.02), ("two", 0.03)):
        config = lab.config(data, train={"steps": 1}, optim={"lr": lr})
        assert train(config, lab.folder / name) == 0
    return [lab.folder / name for name in ("one", "two")]


def weights_of(*runs, name="best.pt"):
    files = [run / "checkpoints" / name for run in runs]
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return [
        {"checkpoint": f"{run.name}/checkpoints/{name}", "step": 1, "sha256": sha256}
        for run, sha256 in zip(runs, hashes, strict=True)
    ]


def test_a_folder_of_predictions_tells_of_each_command_that_wrote_there(lab, data, runs):
    one, two = runs
    out, photos = lab.folder / "out", sorted((data / "images").rglob("*.png"))[:2]
    table = "--table", lab.folder / "t.csv"
    lab.done("predict", one, photos[0], "--output", out, "--unknown-below", 0.4, *table)
    words = ["--set", "eval.flip=true", "--threshold", "plant=0.3"]
    said = lab.done("predict", two, photos[1], "--with", one, "--output", out, *words).out
    assert f"warning: {out} also holds predictions of one/checkpoints/best.pt, step 1; " in said
    first, second = map(json.loads, (out / "predicted.jsonl").read_text().splitlines())
    for line, paths in ((first, runs[:1]), (second, runs[::-1])):
        lie = [{"path": str((run / "checkpoints/best.pt").resolve())} for run in paths]
        assert line["models"] == [a | b for a, b in zip(weights_of(*paths), lie, strict=True)]
    assert first["inputs"] == [str(photos[0])]
    assert (first["tables"], second["tables"]) == ([str(table[1])], [])
    assert first["unknown_below"] == 0.4
    assert (first["thresholds"], second["thresholds"]) == ({}, {"plant": 0.3})
    assert "with flip" in second["settings"]
    assert second["set"] == ["eval.flip=true"]
    assert first["time"] <= second["time"]


def test_predictions_of_other_classes_do_not_stand_in_one_folder(lab, data, runs):
    """One id would be two classes."""
    out, photos = lab.folder / "out", sorted((data / "images").rglob("*.png"))[:2]
    assert "also holds" not in lab.done("predict", runs[0], photos[0], "--output", out).out
    assert "also holds" not in lab.done("predict", runs[0], photos[1], "--output", out).out
    record = out / "predicted.jsonl"
    record.write_text(record.read_text().replace('"plant"', '"tree"'))
    words = "predict", runs[1], photos[0], "--output", lab.folder / "out"
    (out / f"labels/{photos[0].stem}.png").unlink()
    said = lab.refused(*words)
    assert "out: holds predictions of one/checkpoints/best.pt, step 1, whose ids are those" in said
    lab.done(*words, "--overwrite")
    record.write_text("[1]\n{")  # of nobody knows which program
    lab.done(*words, "--overwrite")


def test_a_file_names_its_checkpoint_and_no_folder_of_this_machine(lab, runs):
    file = lab.folder / "m.safetensors"
    lab.done("export", runs[0], "--format", "safetensors", "--output", file)
    with safe_open(file, "np") as opened:
        about = opened.metadata()
    assert json.loads(about["weights"]) == weights_of(runs[0])
    assert str(lab.folder) not in about["weights"]
