"""The command: each verb's answer, its files, and one line with exit code 2 for whatever is wrong with the input."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from thunder_fusionfix import __version__
from thunder_fusionfix.cli import app, main

LOSS = ["causal-lm-loss", "--seq", "16"]

# A new option is a decision: change it here too, and in the documentation.
SIZES = {"--layers", "--hidden-size", "--seq", "--batch", "--fusion-type", "--executors", "--dynamo"}
OPTIONS = {
    "capture": SIZES | {"--out", "--picture", "--json"},
    "explain": SIZES | {"--step", "--device", "--optimizer", "--trace", "--picture", "--html", "--json", "--markdown"},
    "fix": SIZES | {"--trace", "--out", "--picture", "--json", "--markdown"},
    "diff": {"--trace", "--html", "--json", "--markdown"},
    "check": {"--trace", "--allow", "--json", "--markdown"},
    "bench": set(),  # reads its own
    "doctor": {"--json"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A capture of a small loss: the path of its Graphs."""
    out = tmp_path_factory.mktemp("saved") / "loss.json"
    assert main(["capture", *LOSS, "--out", str(out)]) == 0
    return out


def verbs():
    import typer.main

    return typer.main.get_command(app).commands


def test_every_verb_has_the_options_that_are_documented():
    """Verbs and options are exactly those in the list above."""
    found = {
        name: {option for param in verb.params for option in param.opts if option.startswith("--")} - {"--help"}
        for name, verb in verbs().items()
    }
    assert found == OPTIONS


def test_what_needs_no_torch_does_not_import_it(tmp_path):
    """Help, wrong names and sizes, and every verb on traces: neither torch nor Thunder is loaded, so that none of them waits."""
    trace = tmp_path / "trace.txt"
    trace.write_text("def f(x):\n  [t1] = nvFusion0(x)\n    # t1 = prims.neg(x)\n  return t1\n")
    lines = [
        ["--help"],
        ["explain", "qwen9"],
        ["fix", *LOSS, "--layers", "0"],
        ["capture", "missing.py:build"],
        ["explain", *LOSS, "--step", "--device", "abacus"],
        ["bench", "qwen9"],
        ["bench", *LOSS, "--jobs", "many"],
        *(["explain", str(trace)], ["fix", str(trace), "--out", str(tmp_path / "fixed.json")]),
        *(["check", str(trace), str(trace)], ["diff", str(trace), str(trace)]),
    ]
    code = (
        "import sys; from thunder_fusionfix.cli import main; "
        f"print([main(line) for line in {lines}], sorted({{'torch', 'thunder', 'matplotlib'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in OPTIONS)
    assert done.stdout.splitlines()[-1] == f"{[0, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0]} []"
    assert done.stderr.count("\n") == 6


def test_help_names_every_model():
    """The names in the help are the models that there are."""
    from thunder_fusionfix.model_names import NAMES
    from thunder_fusionfix.models import MODELS

    assert tuple(MODELS) == NAMES


def test_explain_step_says_whether_it_fits(capsys):
    """`--step` prices a whole training step against a GPU."""
    assert main(["explain", *LOSS, "--step", "--device", "a100-40gb"]) == 0
    out = capsys.readouterr().out
    assert "a step needs" in out
    assert "a100-40gb" in out
    assert "fits" in out


def test_version_is_printed(capsys):
    """`--version` says which release this is."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fusionfix {__version__}\n"


def test_capture_saves_graphs_and_the_printed_trace(saved, capsys):
    """The Graphs can be read back, and the text beside them is what Thunder prints."""
    from thunder_fusionfix.store import load_graphs

    assert list(load_graphs(saved)) == ["causal_lm_loss forward", "causal_lm_loss backward"]
    printed = saved.with_suffix(".txt").read_text()
    assert printed.startswith("# ---- causal_lm_loss forward\n")
    assert "def backward_fn(saved_for_backward, cotangents):" in printed


def test_capture_says_what_it_found_as_json(tmp_path, capsys):
    """`--json` prints one object and nothing else."""
    assert main(["capture", *LOSS, "--out", str(tmp_path / "loss.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["name"] for part in found["parts"]] == ["causal_lm_loss"]
    assert found["peak_bytes"] > 0


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_explain_of_a_saved_trace_names_the_peak(saved, suffix, capsys):
    """Saved Graphs and the printed text both give the peak and what holds it."""
    assert main(["explain", str(saved.with_suffix(f".{suffix}"))]) == 0
    out = capsys.readouterr().out
    assert "peak" in out
    assert "MB" in out


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_the_trace_that_holds_the_peak_of_the_step_comes_first(saved, suffix, capsys):
    """The sentence on the step names a trace, and that is the first one which is explained."""
    assert main(["explain", str(saved.with_suffix(f".{suffix}"))]) == 0
    out = capsys.readouterr().out
    assert re.search(r"before: The peak of a step, .* MB, is in the backward of causal_lm_loss, at ", out)
    assert re.findall(r"^(\w+) \(.*: peak of this trace", out, re.MULTILINE) == ["backward_fn", "computation"]


def test_a_saved_trace_can_be_chosen_by_its_label(saved, capsys):
    """`--trace` takes the label that `capture` gave, from the Graphs and from the text."""
    for path in (saved, saved.with_suffix(".txt")):
        assert main(["explain", str(path), "--trace", "causal_lm_loss forward", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "computation"


def test_lines_are_those_of_the_file_and_graphs_have_none(saved, capsys):
    """Of a printed trace the peak has a line; saved Graphs stand on none, and their ops go by position."""
    assert main(["explain", str(saved), "--trace", "2", "--json"]) == 0
    graph = json.loads(capsys.readouterr().out)
    assert main(["explain", str(saved.with_suffix(".txt")), "--trace", "2", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert (graph["first_line"], graph["peak_line"]) == (None, None)
    line = saved.with_suffix(".txt").read_text().splitlines()[text["peak_line"] - 1]
    assert line.split(" = ")[1].startswith(graph["peak_op"])


@pytest.mark.nvfuser
def test_fix_of_a_saved_trace_says_what_was_done_and_draws_it(saved, tmp_path, capsys):
    """Every decision is printed with its reason, the picture is written, and the fixed traces are saved."""
    picture, out = tmp_path / "step.svg", tmp_path / "fixed.json"
    assert main(["fix", str(saved), "--picture", str(picture), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "hoisted slice_prim, reshape of logits" in printed
    assert "a view of the stored tensor outside" in printed
    assert picture.read_text().lstrip().startswith("<?xml")
    capsys.readouterr()
    assert main(["check", str(saved), str(out)]) == 1
    assert capsys.readouterr().out.endswith("with --allow fix no rule is broken\n")
    assert main(["check", str(saved), str(out), "--allow", "fix"]) == 0
    assert main(["check", str(out)]) == 0
    capsys.readouterr()
    assert (
        main(["fix", str(out), "--json"]) == 0
    )  # what is fixed stays as it is: the names of new values are names like any
    again = json.loads(capsys.readouterr().out)
    assert again["before"] == again["after"]
    assert not any(decision["applied"] for trace in again["traces"] for decision in trace["decisions"])


@pytest.mark.nvfuser
def test_fix_of_a_model_lowers_the_peak(tmp_path, capsys):
    """A model is captured with the transform; before and after are compared as a whole step."""
    picture = tmp_path / "step.png"
    assert main(["fix", *LOSS, "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"]["peak_bytes"] < found["before"]["peak_bytes"]
    assert found["after"]["num_layouts"] == 0
    assert [trace["label"] for trace in found["traces"]] == ["causal_lm_loss forward", "causal_lm_loss backward"]
    assert any(decision["applied"] for trace in found["traces"] for decision in trace["decisions"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nvfuser
@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_fix_of_a_saved_trace_and_of_its_model_agree(saved, suffix, capsys):
    """The passes give the same numbers on saved Graphs, on printed text and on Thunder's own traces."""
    assert main(["fix", str(saved.with_suffix(f".{suffix}")), "--json"]) == 0
    of_graphs = json.loads(capsys.readouterr().out)
    assert main(["fix", *LOSS, "--json"]) == 0
    of_traces = json.loads(capsys.readouterr().out)
    assert (of_graphs["before"], of_graphs["after"]) == (of_traces["before"], of_traces["after"])


def test_explain_of_a_model_from_a_file(tmp_path, capsys):
    """file.py:function is a model like any other."""
    path = tmp_path / "program.py"
    path.write_text("import torch\ndef build(): return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n")
    assert main(["explain", f"{path}:build", "--executors", "torchcompile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["stage"] for one in found] == ["forward", "backward"]


def test_fix_of_a_trace_without_regions_says_so(tmp_path, capsys):
    """Nothing to fix is an answer, not an error."""
    path = tmp_path / "trace.txt"
    path.write_text("def f(x):\n  t1 = prims.neg(x)\n  return t1\n")
    assert main(["fix", str(path)]) == 0
    assert "nothing to fix" in capsys.readouterr().out


@pytest.mark.nvfuser
def test_doctor_says_that_everything_fits(capsys):
    """The environment of the tests is one that the project supports; JSON has the same checks."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("everything fits together")
    assert main(["doctor", "--json"]) == 0
    assert all(check["name"] in printed for check in json.loads(capsys.readouterr().out)["checks"])


def test_doctor_says_why_thunder_cannot_be_imported(tmp_path):
    """A Thunder that does not import is a diagnosis, not a failure of the doctor; other verbs send there."""
    (tmp_path / "thunder").mkdir()
    (tmp_path / "thunder" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from thunder_fusionfix.cli import main; "
    code += f"print(main(['doctor']), main(['capture', *{LOSS}, '--out', {str(tmp_path / 'loss.json')!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(r"NO +importing Thunder +ImportError: libcuda.so.1: cannot open", done.stdout)
    assert done.stdout.endswith("1 1\n")
    assert re.fullmatch(
        r"error: ImportError: libcuda.so.1: cannot open \(`fusionfix doctor` looks at .*\)\n", done.stderr
    )


def test_doctor_fails_where_a_version_was_not_tested(monkeypatch, capsys):
    """An untested version is named, with exit code 1."""
    from thunder_fusionfix import _thunder

    versions = {"torch": "3.0.0", "lightning-thunder": "0.2.6", "nvFuser": "0.2.36"}
    monkeypatch.setattr(_thunder, "installed_versions", lambda: versions)
    assert main(["doctor"]) == 1
    assert "3.0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "missing.txt"], "missing.txt"),
        (["fix", "missing.json"], "missing.json"),
        (["explain", "foreign.json"], "foreign.json"),
        (["fix", "foreign.txt"], "foreign.txt"),
        (["fix", "trace.txt", "--layers", "2"], "--layers is for models; trace.txt is a trace: leave it out"),
        (
            ["explain", "trace.txt", "--trace", "7"],
            "--trace 7: give a number, a name or a stage; there is 1 f (trace.txt:1)",
        ),
        (["diff", "trace.txt", "missing.txt"], "error: missing.txt: there is no such file"),
        (["explain", "none/missing"], "error: none/missing: there is no such file"),
        (["explain", "."], "error: .: cannot be read (Is a directory); give a file with a trace"),
        (["capture", "qwen2.5"], "no model 'qwen2.5'; the nearest is qwen2.5-7b. Choose one of qwen2.5-7b"),
        (["capture", "xxl"], "no model 'xxl'; choose one of qwen2.5-7b"),
        (["capture", "program.py"], "name the function too, as in program.py:build"),
        (["explain", "program.py:other"], "program.py defines no function 'other'"),
        (["fix", "missing.py:build"], "missing.py: there is no such file"),
        (["capture", "causal-lm-loss", "--layers", "2"], "causal-lm-loss has no layers"),
        (
            ["capture", "causal-lm-loss", "--seq", "many"],
            "error: --seq: give a whole number; see fusionfix capture --help",
        ),
        (["capture", "causal-lm-loss", "--seq", "0"], "--seq 0: at least 1"),
        (["fix", *LOSS, "--hidden-size", "-1"], "--hidden-size -1: at least 1"),
        (["capture", *LOSS, "--fusion-type", "flow"], "--fusion-type flow: dataflow or consecutive"),
        (["capture", *LOSS, "--executors", "nvfusr"], "there is no executor 'nvfusr'; Thunder knows"),
        (["capture", *LOSS, "--out", "loss.txt"], "loss.txt: end the file's name in .json"),
        (["capture", *LOSS, "--out", "none/loss.json"], "none/loss.json: there is no directory none; make it first"),
        (["fix", *LOSS, "--picture", "step.bmp"], "step.bmp: end the file's name in .png or .svg or .pdf"),
        (["fix", *LOSS, "--trace", "1"], "--trace is for files with several traces"),
        (["explain", "trace.txt", "--step"], "--step is for models; trace.txt is a trace"),
        (["explain", *LOSS, "--step", "--json"], "--step prints one table: leave --json out"),
        (["explain", *LOSS, "--device", "h100-80gb"], "--device and --optimizer go with --step"),
        (["explain", *LOSS, "--step", "--device", "abacus"], "--device 'abacus': one of"),
        (["explain", *LOSS, "--step", "--optimizer", "lion"], "--optimizer lion: one of none"),
        (["explain", *LOSS, "--html", "none/page.html"], "none/page.html: there is no directory none; make it first"),
        (["capture"], "error: Missing argument 'MODEL'; see fusionfix capture --help"),
        (["fry", "x"], "error: No such command 'fry'; see fusionfix --help"),
        (["capture", *LOSS, "--wide"], "No such option: --wide; see fusionfix capture --help"),
        (["check", "trace.txt", "--allow", "all"], "--allow all: one of fix, reorder"),
        (["bench", *LOSS, "--steps", "many"], "--steps: invalid int value: 'many'; see fusionfix bench --help"),
        (["bench", "qwen9"], "no model 'qwen9'"),
    ],
)
def test_wrong_input_ends_with_one_line_that_says_what_to_do(argv, message, tmp_path, monkeypatch, capsys):
    """Exit code 2, one line on standard error, nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    (tmp_path / "foreign.txt").write_text("no trace here\n")
    (tmp_path / "trace.txt").write_text("def f(x):\n  t1 = prims.neg(x)\n  return t1\n")
    (tmp_path / "program.py").write_text("import torch\ndef build(): return torch.exp, (torch.ones(2),)\n")
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    "made", ["(lambda x: x.reshape(7)), (torch.ones(2),)", "torch.nn.Linear(4, 4), (torch.ones(2, 3),)"]
)
def test_a_program_that_fails_while_it_is_traced_ends_with_one_line(made, tmp_path, capfd):
    """Exit code 1 and the first line of what went wrong, once and without torch's logs; how to see more is said."""
    path = tmp_path / "program.py"
    path.write_text(f"import torch\ndef build(): return {made}\n")
    assert main(["explain", f"{path}:build", "--executors", "torchcompile"]) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "FUSIONFIX_DEBUG=1 shows where" in err


def test_bench_reads_its_own_options(capsys):
    """What follows `bench` is bench's own, its help too."""
    assert main(["bench", "--help"]) == 0
    assert "--variants" in capsys.readouterr().out
