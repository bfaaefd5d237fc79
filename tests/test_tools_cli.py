"""The verbs explain, check and diff as a user runs them: forms of output, exit codes, errors with file and line."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from thunder_fusionfix import sources as sources_module
from thunder_fusionfix.document import show
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.explain import explain_trace
from thunder_fusionfix.parse import parse
from thunder_fusionfix.passes import PASSES
from thunder_fusionfix.sources import diff_traces, sources
from thunder_fusionfix.store import save
from thunder_fusionfix.tools_cli import allowance_of, register
from thunder_fusionfix.verify import Allow
from thunder_fusionfix.views import explanation_blocks

BEFORE = """\
def computation(a, b):
  # a: "cuda:0 f32[1024, 1024]"
  # b: "cuda:0 f32[1024, 1024]"
  t1 = torch.exp(a)  # t1: "cuda:0 f32[1024, 1024]"
  t2 = torch.sin(b)  # t2: "cuda:0 f32[1024, 1024]"
  t3 = torch.neg(t2)  # t3: "cuda:0 f32[1024, 1024]"
  del t2
  t4 = torch.dot(t1, t3)  # t4: "cuda:0 f32[]"
  del t1, t3
  return t4
"""
_LINES = BEFORE.splitlines(keepends=True)
AFTER = "".join([*_LINES[:3], *_LINES[4:7], _LINES[3], *_LINES[7:]])  # exp right before its consumer
RENAMED = re.sub(r"\bt(\d)\b", r"value_\1", BEFORE)
BROKEN = BEFORE.replace("torch.dot(t1, t3)", "torch.dot(t1, t2)")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"before": BEFORE, "after": AFTER, "renamed": RENAMED, "broken": BROKEN, "prose": "no trace (here)\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return {name: str(tmp_path / f"{name}.txt") for name in texts}


def run(*args: str, stdin: str | None = None) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(args), input=stdin)


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("diff", "before", "renamed"), 0),
        (("diff", "before", "after"), 1),
        (("diff", "before", "nowhere"), 2),
        (("diff", "before", "prose"), 2),
        (("diff", "before"), 2),
        (("check", "before"), 0),
        (("check", "broken"), 1),
        (("check", "before", "before"), 0),
        (("check", "before", "after"), 1),
        (("check", "before", "after", "--allow", "reorder"), 0),
        (("check", "before", "after", "--allow", "everything"), 2),
        (("explain", "before"), 0),
        (("explain", "prose"), 2),
        (("explain", "before", "--trace", "9"), 2),
    ],
)
def test_exit_code_is_0_fine_1_differs_2_wrong_usage(files: dict[str, str], args: tuple[str, ...], code: int) -> None:
    """Scripts can rely on the three codes."""
    assert run(*(files.get(arg, arg) for arg in args)).exit_code == code


def test_wrong_usage_names_the_file(files: dict[str, str], tmp_path: Path) -> None:
    """One line on standard error says which file, and what is wrong with it; nothing goes to standard output."""
    nowhere = str(tmp_path / "nowhere.txt")
    for args, words in (
        (("explain", files["prose"]), ":1: no trace found"),
        (("diff", files["before"], nowhere), ": there"),
    ):
        result = run(*args)
        assert result.stdout == ""
        assert re.fullmatch(rf"error: {re.escape(args[-1])}{words}.+\n", result.stderr)


# ---------------------------------------------------------------- what the verbs say


def test_diff_leads_with_the_change_in_peak(files: dict[str, str]) -> None:
    """The first line has both peaks; the moved op is named with its places and distances."""
    lines = run("diff", files["before"], files["after"]).stdout.splitlines()
    assert lines[0] == "peak 21.0 -> 16.8 MB (-4.2), saved 0 -> 0 MB"
    assert any(re.match(r" +torch\.exp +t1 +0 +3 +3 -> 1$", line) for line in lines)


def test_diff_of_strangers_says_so_in_one_line(files: dict[str, str], tmp_path: Path) -> None:
    """Traces with next to nothing in common differ, exit code 1, and the reader is told that the files may be wrong."""
    path = tmp_path / "other.txt"
    lines = [f"  y{i + 1} = torch.tanh(y{i})" for i in range(9)]
    path.write_text("\n".join(["def f(y0):", *lines, "  return y9"]))
    result = run("diff", files["before"], str(path))
    assert result.exit_code == 1
    assert result.stdout.count("are hardly two traces of one program; wrong file?\n") == 1
    assert "hardly" not in run("diff", files["before"], files["after"]).stdout


def test_check_shows_rule_place_and_ten_lines_around_the_fault(files: dict[str, str]) -> None:
    """A use after ``del`` is found, with file and line, the law, and the line marked among ten."""
    text = run("check", files["broken"]).stdout
    assert f"{files['broken']}:8: use-after-del" in text
    marked = [line for line in text.splitlines() if line.startswith("  > ")]
    assert len(marked) == 1 and "torch.dot(t1, t2)" in marked[0]
    assert sum(line.startswith(("  > ", "    ")) for line in text.splitlines()) == 10


def test_allow_fix_admits_all_that_any_pass_may_do() -> None:
    """Whatever a pass declares is in it, flags and sets; nothing more than that and the copies of cheap ops."""
    allow = allowance_of(["fix"], parse(BEFORE))
    for item in PASSES:
        for name, admitted in vars_of(item.allow).items():
            assert (
                (admitted <= vars_of(allow)[name])
                if isinstance(admitted, frozenset)
                else not admitted or vars_of(allow)[name]
            )
    assert not allow.may_keep_longer and not allow.may_repeat_work
    assert allow.may_clone == {"t1", "t2", "t3", "t4"}


def vars_of(allow: Allow) -> dict[str, object]:
    return {field.name: getattr(allow, field.name) for field in fields(allow)}


def test_explain_of_standard_input_names_the_peak_and_its_holders() -> None:
    """A trace that is piped in is explained; three tensors of 4.2 MB and the arguments hold the peak."""
    result = run("explain", "-", stdin=f"my trace:\n```\n{BEFORE}```\n")
    assert result.exit_code == 0
    assert result.stdout.startswith("computation (<stdin>:3): peak of this trace 21.0 MB at torch.neg, line 8")
    assert re.search(r"t1 +4\.2 +cuda:0 f32\[1024, 1024\] +torch\.exp +torch\.dot, line 10", result.stdout)


def test_several_traces_in_a_file_are_all_explained_and_one_can_be_chosen(tmp_path: Path) -> None:
    """Without a choice each is explained; ``--trace`` takes a number, a name or a stage."""
    path = tmp_path / "two.txt"
    path.write_text(BEFORE + "\n" + AFTER.replace("computation", "second"))
    assert run("explain", str(path)).stdout.count("alive at the peak") == 2
    for wanted in ("2", "second"):
        assert run("explain", str(path), "-t", wanted).stdout.startswith("second (")
    assert run("diff", str(path), str(path)).exit_code == 0
    with pytest.raises(UsageError, match="2 traces where one is wanted"):
        diff_traces(path, path)


def test_traces_are_paired_by_label_and_none_is_left_out_in_silence(tmp_path: Path) -> None:
    """Whatever the order in the files, a label is compared with its like; a trace without counterpart is named, exit code 1."""
    other = BEFORE.replace("torch.sin", "torch.cos")
    graphs = {"one forward": parse(BEFORE), "two forward": parse(other)}
    save(graphs, tmp_path / "a.json")
    save(dict(reversed(graphs.items())), tmp_path / "b.json")
    save({"two forward": parse(other)}, tmp_path / "c.json")
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    assert run("diff", a, b).exit_code == 0
    for verb in ("diff", "check"):
        result = run(verb, a, c)
        assert result.exit_code == 1
        assert result.stderr == f"not compared, the other file has no counterpart: computation ({a}#one forward)\n"


def test_explain_asks_for_the_traces_of_a_model_where_the_target_is_no_file() -> None:
    """What is no file is a model's name, if the command knows models."""
    asked = []

    def traces_of(name: str) -> list[object]:
        asked.append(name)
        return [parse(BEFORE)]

    app = typer.Typer()
    register(app, traces_of)
    result = CliRunner().invoke(app, ["explain", "qwen2.5-7b"])
    assert asked == ["qwen2.5-7b"] and "peak of this trace 21.0 MB" in result.stdout
    result = CliRunner().invoke(app, ["explain", "missing.txt"])
    assert result.exit_code == 2 and len(asked) == 1


# ---------------------------------------------------------------- forms


def test_markdown_has_headings_and_tables_and_escapes_names(files: dict[str, str]) -> None:
    """Markdown is what an issue shows: headings, tables, and underscores that stay underscores."""
    text = run("diff", files["before"], files["after"], "--markdown").stdout
    assert text.startswith("## peak 21.0 -\\> 16.8 MB")
    assert "| torch.exp | t1 | 0 | 3 | 3 -\\> 1 |" in text
    assert "value\\_1" in run("explain", files["renamed"], "--markdown").stdout


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_terminal_output_is_coloured_unless_no_color(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], coloured: bool
) -> None:
    """Colours on a terminal only, and none with NO_COLOR."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    show(
        explanation_blocks(explain_trace(BEFORE)[0]), Console(file=out, force_terminal=True, width=200, highlight=False)
    )
    assert ("\x1b[1;36m" in out.getvalue()) == coloured
    assert "\x1b[36m" not in out.getvalue()


def test_piped_output_is_plain(files: dict[str, str]) -> None:
    """Nothing but text where the output is no terminal: no escape codes, no borders, lines as long as they are."""
    text = run("explain", files["before"]).stdout
    assert "\x1b" not in text and text.isascii()


# ---------------------------------------------------------------- sources


def test_diff_traces_takes_graphs_text_paths_and_saved_graphs(files: dict[str, str], tmp_path: Path) -> None:
    """Whatever form the two traces have, the diff is the same; a directory or a number is refused by name."""
    saved = tmp_path / "graphs.json"
    save({"one": parse(BEFORE)}, saved)
    for before in (BEFORE, files["before"], Path(files["before"]), parse(BEFORE), saved):
        assert diff_traces(before, RENAMED).is_empty
        assert [move.name_before for move in diff_traces(before, AFTER).moved] == ["t1"]
    with pytest.raises(UsageError, match="int is no trace"):
        sources(3)
    with pytest.raises(UsageError, match="cannot be read"):
        sources(tmp_path)


@pytest.mark.nvfuser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Thunder leaves source files open
def test_diff_traces_of_thunders_own_traces_works_as_it_is() -> None:
    """Two traces of one compile, straight from Thunder: the last passes keep the ops, so no op is gone."""
    import torch

    from thunder_fusionfix.capture import capture

    part = capture(lambda x: torch.relu(x).sum() * 2, (torch.ones(4, 4, requires_grad=True),)).parts[0]
    assert diff_traces(part.forward, part.forward).is_empty
    assert diff_traces(part.forward, str(part.forward)).is_empty
    assert diff_traces(part.joint, part.fused).entered


def test_tools_import_neither_torch_nor_thunder() -> None:
    """A user with a pasted trace and no GPU waits for no framework."""
    code = "import sys, thunder_fusionfix.tools_cli; sys.exit('torch' in sys.modules or 'thunder' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=Path(sources_module.__file__).parent.parent
        ).returncode
        == 0
    )
