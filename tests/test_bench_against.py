"""The side by side benchmark: equal work, no silent absence, and figures from every section.

Peers that are not installed are left out here, and must be named by the tool.
"""

import importlib.util
import json

import pytest
from against_models import CASES, MMSEG, PACKAGES, SEGTRAIN, SMP, TORCHVISION, missing, work
from bench_against import main

SMALL = ("--rounds", "1", "--steps", "1", "--samples", "1", "--threads", "1")

every_case = pytest.mark.parametrize("case", CASES)


def installed(case):
    """The contenders of a case that can run here."""
    return [name for name in (SEGTRAIN, TORCHVISION, CASES[case].peer) if not missing(name)]


@pytest.fixture
def none_installed(monkeypatch):
    """No peer can be found."""
    found = importlib.util.find_spec
    hidden = {name for peer in (SMP, MMSEG) for name in PACKAGES[peer]}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else found(name)
    )


@every_case
def test_contenders_have_equal_weights_and_operations(case):
    """Pooling by matrix products counts as operations: 0.06 % of PSPNet's at 256x256."""
    ours, *others = [work(name, CASES[case], (96, 128)) for name in installed(case)]
    assert others
    for other in others:
        assert other["weights"] == ours["weights"]
        assert other["gflop"] == pytest.approx(ours["gflop"], rel=1e-3)


def test_the_tool_measures_and_names_missing_peers(none_installed, tmp_path, capsys):
    case = "deeplabv3plus_mnv2 of smp"
    size = ("--sizes", "64:2", "--cases", case, "--json", str(tmp_path / "found.json"))
    size += ("--bfloat16",)
    main(["--sections", "train", *SMALL, *size])
    found, table = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    both = [SEGTRAIN, TORCHVISION]
    assert [x["contender"] for x in found["train"]] == [*both, *(f"{x}, bfloat16" for x in both)]
    assert all(row["median"] > 0 for row in found["train"])
    assert found["not installed"] == {
        SMP: ["segmentation_models_pytorch"],
        MMSEG: ["mmseg", "mmengine", "mmcv"],
    }
    assert "smp: not installed (segmentation_models_pytorch)" in table
    assert "mmseg: not installed (mmseg, mmengine, mmcv)" in table
