"""tools/gpu_check.py: a crash or a hang ends no other check, and no answer is asked for twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest
from gpu_checks import CHECKS, Check, children
from gpu_checks.findings import BAD, GOOD, MEASURED, NEEDS_CUDA, Finding, Findings, read_findings
from gpu_checks.report import Result, as_markdown, status_of

from segtrain.distributed.machine import is_alive

TESTS = Path(__file__).resolve().parent
REAL = dict(CHECKS)
STUBS = str(TESTS / "gpu_check_stubs.py")
MACHINE = {"device": "cpu", "name": "a CPU", "torch": "2.11.0", "driver": None, "memory_gib": 79.6}


def stub_command(*arguments):
    return [sys.executable, STUBS, *map(str, arguments)]


@pytest.fixture
def stubs(monkeypatch, tmp_path):
    """`stubs(*names)` replaces all checks by those of gpu_check_stubs; returns a new folder."""
    monkeypatch.setattr(gpu_check, "machine_of", lambda device, folder: dict(MACHINE))
    monkeypatch.setattr(gpu_check, "child_command", stub_command)
    monkeypatch.setenv("GPU_CHECK_NOTES", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)

    def use(*names, limit_s=60.0):
        CHECKS.clear()
        for name in names:
            CHECKS[name] = Check(name, f"does it {name}?", limit_s)
        return tmp_path

    yield use
    CHECKS.clear()
    CHECKS.update(REAL)
    signal.signal(signal.SIGTERM, handler)


def run(folder, *options):
    """The exit code, and the results by name."""
    code = gpu_check.main(["--output", str(folder / "out"), *options])
    content = json.loads((folder / "out/report.json").read_text())
    return code, {one["name"]: one for one in content["checks"]}


def gone(pid):
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_each_ending_has_its_name_and_ends_no_other_check(stubs, capsys):
    folder = stubs("crashes", "runs_out", "fails", "needs", "passes")
    code, found = run(folder)
    assert code == 1
    assert {name: one["status"] for name, one in found.items()} == {
        "crashes": "CRASHED",
        "runs_out": "CRASHED",
        "fails": "FAILED",
        "needs": "needs a CUDA device",
        "passes": "passed",
    }
    assert found["crashes"]["findings"][0]["found"] == "1 ms"
    assert found["crashes"]["detail"].startswith("exit code -11")
    assert found["runs_out"]["detail"] == "exit code 1; MemoryError: all is taken"
    assert {one["device"] for one in found.values()} == {"a CPU"}
    printed = capsys.readouterr().out
    assert (folder / "out/report.md").read_text() in printed
    assert "| sum | 3 | 4 \\| or 5 | BAD |" in printed


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["torch.OutOfMemoryError: CUDA out", "[W] destroy_process_group"],
            "torch.OutOfMemoryError",
        ),
        (
            ["Fatal Python error: Aborted", "", "Extension modules: a"],
            "Fatal Python error: Aborted",
        ),
        (["RuntimeError: first", "ValueError: second", "  "], "ValueError: second"),
        (["told", "nothing else", ""], "nothing else"),
        ([], "no output"),
    ],
)
def test_the_reason_of_a_crash_is_its_last_error(tmp_path, lines, reason):
    (tmp_path / "log").write_text("\n".join(lines))
    assert gpu_check.reason(tmp_path / "log").startswith(reason)


def test_what_needs_a_device_is_no_failure(stubs):
    assert run(stubs("needs"))[0] == 0


def test_a_hang_is_killed_with_its_children(tmp_path):
    script = "setsid sleep 300 & echo $! > child; sleep 300"
    began = time.monotonic()
    ending = children.run_limited(
        ["sh", "-c", f"cd {tmp_path}; {script}"], tmp_path / "log", 1.0, os.environ, mark="a test"
    )
    assert ending.code is None
    assert 1 <= ending.seconds <= time.monotonic() - began
    assert gone(int((tmp_path / "child").read_text()))


def test_children_that_a_crash_has_left_are_killed(tmp_path):
    command = ["sh", "-c", f"setsid sleep 300 & echo $! > {tmp_path}/child; exit 3"]
    ending = children.run_limited(command, tmp_path / "log", 30.0, os.environ, mark="a test")
    assert ending.code == 3
    assert gone(int((tmp_path / "child").read_text()))


def test_a_hang_keeps_what_was_found_before(stubs):
    folder = stubs("hangs", "passes", limit_s=5.0)
    code, found = run(folder)
    assert code == 1
    assert [one["status"] for one in found.values()] == ["TIMED OUT", "passed"]
    assert found["hangs"]["detail"] == "killed after 5 s; see hangs.log"
    assert [line["what"] for line in found["hangs"]["findings"]] == ["before"]
    assert gone(int((folder / "child").read_text()))


def test_answers_are_not_repeated_but_for_other_code_or_torch(stubs, monkeypatch):
    folder = stubs("passes")

    def times_started(*options):
        assert run(folder, *options)[0] == 0
        return len((folder / "passes").read_text())

    assert times_started() == 1
    assert times_started() == 1
    assert times_started("--again") == 2
    monkeypatch.setattr(gpu_check, "revision", lambda: "other")
    assert times_started() == 3
    monkeypatch.setitem(MACHINE, "torch", "2.15.0")
    assert times_started() == 4


def test_the_revision_is_that_of_the_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (tmp_path / "segtrain/norm").mkdir(parents=True)
    source = tmp_path / "segtrain/norm/sync.py"
    seen = set()
    for text in ("a = 1\n", "a = 2\n"):
        source.write_text(text)
        seen |= {gpu_check.revision(), gpu_check.revision()}
    source.rename(source.with_name("other.py"))
    assert len(seen | {gpu_check.revision()}) == 3


def test_only_the_named_checks_run(stubs):
    folder = stubs("fails", "passes")
    code, found = run(folder, "--only", "passes")
    assert (code, found["passes"]["status"], found["fails"]["status"]) == (0, "passed", "not run")


def test_without_time_nothing_is_started_and_that_is_no_success(stubs, monkeypatch):
    folder = stubs("passes")
    monkeypatch.setattr(gpu_check, "ask", lambda *_: pytest.fail("it was started"))
    code, found = run(folder, "--minutes", "0")
    assert (code, found["passes"]["status"]) == (1, "not run")


def test_a_check_that_the_end_cuts_is_asked_again(stubs):
    folder = stubs("hangs")
    code, found = run(folder, "--minutes", "0.03")
    assert (code, found["hangs"]["status"]) == (1, "not run")
    assert not list((folder / "out").glob("*/hangs.result.json"))


SCRIPT = """
import sys, gpu_check, test_gpu_check
from gpu_checks import CHECKS, Check
CHECKS.clear()
for name in ("passes", "hangs_once"):
    CHECKS[name] = Check(name, "", 60)
gpu_check.machine_of = lambda device, folder: test_gpu_check.MACHINE
gpu_check.child_command = test_gpu_check.stub_command
sys.exit(gpu_check.main(["--output", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_goes_on_where_it_was_killed(stubs, number):
    folder = stubs("passes", "hangs_once")
    tools = str(Path(gpu_check.__file__).parent)
    paths = os.pathsep.join([tools, str(gpu_check.ROOT), str(TESTS)])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder / "out")],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 100
    while not (folder / "child").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(SystemExit, match=r"another .* is at work here"):
        run(folder)
    child = int((folder / "child").read_text() or 0)
    process.send_signal(number)
    process.wait(60)
    if number == signal.SIGTERM:
        assert gone(child)
    kept = list((folder / "out").glob("*/hangs_once.work"))
    assert bool(kept) == (number == signal.SIGKILL)
    if kept:
        (kept[0] / "large").touch()
    code, found = run(folder)
    assert gone(child)
    assert code == 0
    assert {one["status"] for one in found.values()} == {"passed"}
    started = [len((folder / name).read_text()) for name in ("passes", "hangs_once")]
    assert started == [1, 2]
    assert not list((folder / "out").glob("*/*.work"))


def test_findings_are_written_one_by_one(tmp_path):
    findings = Findings(tmp_path / "f.json")
    assert read_findings(tmp_path / "f.json") == ([], False)
    findings.judged("a", False, "1", "2", n=1)
    assert read_findings(tmp_path / "f.json") == ([Finding("a", "1", "2", BAD, {"n": 1})], False)
    findings.end()
    assert read_findings(tmp_path / "f.json")[1]
    assert read_findings(tmp_path / "none.json") == ([], False)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([GOOD, MEASURED], "passed"),
        ([GOOD, NEEDS_CUDA], "needs a CUDA device"),
        ([NEEDS_CUDA, BAD], "FAILED"),
        ([MEASURED, "not measured"], "passed"),
    ],
)
def test_half_an_answer_is_no_pass(verdicts, status):
    assert status_of([Finding("", "", "", verdict, {}) for verdict in verdicts]) == status


def test_the_table_says_what_on_which_device(monkeypatch):
    monkeypatch.setitem(CHECKS, "norm", Check("", "is it exact?", 1))
    lines = [Finding("a|b", "1.5 ms", "at most\n2", GOOD, {})]
    results = [Result("norm", "passed", "", 4.4, lines), Result("pack", "CRASHED", "why", 0.6, [])]
    assert as_markdown(MACHINE, "abc", results).splitlines() == [
        "# a CPU",
        "",
        "Code abc.",
        "",
        "| device | torch | memory_gib |",
        "|---|---|---|",
        "| cpu | 2.11.0 | 80 |",
        "",
        "| check | question | result | s |",
        "|---|---|---|---|",
        "| norm | is it exact? | passed | 4 |",
        f"| pack | {CHECKS['pack'].question} | CRASHED: why | 1 |",
        "",
        "## norm: a CPU",
        "",
        "|  | found | wanted | verdict |",
        "|---|---|---|---|",
        "| a\\|b | 1.5 ms | at most 2 | good |",
    ]


def test_a_machine_without_a_device_is_refused_in_words(tmp_path):
    with pytest.raises(SystemExit, match="--device cuda: torch finds no CUDA device"):
        gpu_check.machine_of("cuda", tmp_path)


def test_a_whole_run_on_this_cpu(tmp_path):
    """The real machine, and a real check that takes seconds."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        only = ["--only", "norm"]
        code, found = run(tmp_path, "--device", "cpu", *only)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert code == 0
    assert found["norm"]["status"] == "needs a CUDA device"
    report = (tmp_path / "out/report.md").read_text()
    assert "needs a CUDA device" in report
    assert report.startswith("# CPU ")


@pytest.mark.slow
def test_every_check_ends_on_a_cpu(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code, found = run(tmp_path, "--device", "cpu", "--minutes", "60")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert code == 0
    assert {one["status"] for one in found.values()} == {"passed", "needs a CUDA device"}
    assert all(one["findings"] for one in found.values())
