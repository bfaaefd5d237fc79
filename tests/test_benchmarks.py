"""The scripts in benchmarks/: what they decide without a GPU, and that one command starts each of them rightly."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import first_step
import linear_table
import padded_products
import pytest
import results_table
import run_all
import splits
import torch
import torch.nn.functional as F
from run_all import Step, calls, estimate_s, plan_text
from table_file import table_file

from thunder_fusionfix import bench
from thunder_fusionfix.capture import Split
from thunder_fusionfix.results import CUT, OK, Run, Spec
from thunder_fusionfix.variants import find

ROOT = Path(__file__).parent.parent

# ---------------------------------------------------------------- run_all


def step(name: str, seconds: float = 10.0, code: str = "", limit_s: float = 60.0, file: str = "") -> Step:
    """A step that runs ``code``, which finds the results file as ``out``; it has the name of ``file``, or the step's."""
    return Step(name, seconds, 0.0, limit_s, script=(file or name, code))


WRITE = 'open(out, "w").write(json.dumps({"rows": [{}], "is_complete": True, "source": source}))'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs batches of such steps; gives what did not end well, and keeps what was said in ``run.said``."""
    monkeypatch.setattr(run_all, "source_digest", lambda: "s")
    monkeypatch.setattr(run_all, "LAST_S", 0.2)

    def command(self: Step, out: Path, seconds: float, *, retry: bool = False) -> list[str]:
        start = f"import json, sys, time; out, source = {str(self.file(out))!r}, 's'; "
        return ["-c", start + self.script[1]]

    monkeypatch.setattr(Step, "command", command)

    def go(*batches: tuple[Step, ...], minutes: float = 5.0, **options: object) -> dict[str, str]:
        go.said = []
        return run_all.run_all(batches, tmp_path, minutes, go.said.append, predictions=tmp_path / "none", **options)

    return go


def ends_soon(pid: int) -> bool:
    """Whether the process is gone, or only to be waited for, within 20 s."""
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    while time.monotonic() < deadline:
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_run_all_a_step_that_fails_or_hangs_stops_no_other(run, tmp_path):
    """Each end is told, and the batch after them runs."""
    bad, hangs = step("bad", code="sys.exit(3)"), step("hangs", code="time.sleep(60)", limit_s=1.0)
    good = step("good", code=WRITE)
    start = time.monotonic()
    assert run((bad, hangs), (good,)) == {"bad": "exit 3", "hangs": "took too long"}
    assert good.state(tmp_path) == (True, "1 rows") and not bad.state(tmp_path)[0]
    assert "exit 3" in run_all.table([(bad, hangs), (good,)], tmp_path, {"bad": "exit 3"})
    assert time.monotonic() - start < 40


def test_run_all_interrupted_ends_what_it_started(run, tmp_path, monkeypatch):
    """No step outlives the command, whatever ends it."""
    pid = tmp_path / "pid"
    hangs = step("hangs", code=f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupted(seconds: float) -> None:
        if pid.exists() and pid.read_text():
            raise SystemExit(143)

    monkeypatch.setattr(run_all.time, "sleep", interrupted)
    with pytest.raises(SystemExit):
        run((hangs,))
    monkeypatch.undo()
    assert ends_soon(int(pid.read_text()))


def test_run_all_again_runs_only_what_has_no_result(run, tmp_path):
    """A second call skips what is done; another source, or an incomplete file, is not done."""
    one, other = step("one", code=WRITE), step("other", code="pass")
    run((one, other))
    run((one, other))
    assert [words.split(":")[0] for words in run.said] == ["other", "other"]
    file = one.file(tmp_path)
    for change in ({"source": "t"}, {"is_complete": False}):
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        assert not one.state(tmp_path)[0]


def test_run_all_takes_the_first_batch_that_fits(run, tmp_path):
    """What is too long for the minutes that are left waits for another call; what is shorter goes first."""
    long, short = step("long", 400.0, WRITE), step("short", 100.0, WRITE)
    run((long,), (short,), minutes=3.0)
    assert not long.state(tmp_path)[0] and short.state(tmp_path)[0]


def test_run_all_lanes_run_beside_each_other_and_see_one_gpu_each(run, tmp_path):
    """Two lanes run at the same time, each with one of the GPUs; a failing and a late step in one stop nothing in the other."""
    meet = (
        "import os, pathlib; here = pathlib.Path(out).parent; gpu = os.environ['CUDA_VISIBLE_DEVICES']; "
        "(here / gpu).touch(); "
        "exec('while len([*here.glob(\\'GPU-*\\')]) < 2: time.sleep(0.01)'); "
    )
    fails, hangs = step("fails", code=meet + "sys.exit(3)"), step("hangs", code="time.sleep(60)", limit_s=1.0)
    left, after = step("left", code=meet + WRITE), step("after", code=WRITE)
    ends = run((fails, hangs), (left,), (after,), gpus=("GPU-a", "GPU-b"))
    assert ends == {"fails": "exit 3", "hangs": "took too long"}
    assert left.state(tmp_path)[0] and after.state(tmp_path)[0]
    started = [words for words in run.said if "about" in words]
    assert [words.rpartition(" ")[2] for words in started] == ["GPU-a", "GPU-b", "GPU-b"], "the free lane went on"


def test_run_all_lanes_do_not_write_one_file_at_once(run, tmp_path):
    """What writes a file that another lane is writing waits until that lane has ended, even where a lane has nothing else."""
    alone = "import os; handle = os.open(out + '.lock', os.O_CREAT | os.O_EXCL); time.sleep(0.5); os.unlink(out + '.lock'); "
    one, other = step("one", code=alone, file="same"), step("other", code=alone + WRITE, file="same")
    assert run((one,), (other,), gpus=("0", "1")) == {}
    assert other.state(tmp_path)[0] and [words.split(":")[0] for words in run.said] == ["one", "one", "other", "other"]


def test_run_all_lanes_end_with_the_command(run, tmp_path, monkeypatch):
    """An interruption ends what every lane runs."""
    write = "import os; open(out, 'w').write(str(os.getpid())); time.sleep(60)"
    lanes = step("one", code=write), step("other", code=write)
    files = [one.file(tmp_path) for one in lanes]

    def interrupted(seconds: float) -> None:
        if all(file.exists() and file.read_text() for file in files):
            raise KeyboardInterrupt

    monkeypatch.setattr(run_all.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run((lanes[0],), (lanes[1],), gpus=("0", "1"))
    monkeypatch.undo()
    assert all(ends_soon(int(file.read_text())) for file in files)


@pytest.mark.parametrize(
    ("visible", "number", "lanes"),
    [
        (("0", "1"), None, ("0", "1")),
        (("3", "5"), 1, ("3",)),
        ((), None, (None,)),
        ((), 2, ("0", "1")),  # of a plan
    ],
)
def test_run_all_has_a_lane_for_each_gpu(visible, number, lanes):
    """By default all that are visible, and one that changes nothing where there are none."""
    assert run_all.lanes_of(number, visible) == lanes


def test_run_all_sees_the_gpus_that_its_steps_would_see(monkeypatch):
    """CUDA's variable comes first, and ends at the first name that is none, as CUDA reads it; else all of the machine's."""
    monkeypatch.setattr(run_all, "machine_gpus", lambda: [("0", "GPU-a"), ("1", "GPU-b")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run_all.visible_gpus() == ("0", "1")
    for visible, names in {"": (), "-1": (), "2, 3": ("2", "3"), "1,-1,0": ("1",), "GPU-b": ("GPU-b",)}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert run_all.visible_gpus() == names


def test_run_all_more_lanes_than_gpus_are_refused_but_planned(monkeypatch, tmp_path, capsys):
    """Two lanes on one GPU would time each other; a plan may be made anywhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for number in ("0", "2"):
        with pytest.raises(SystemExit):
            run_all.main(["--gpus", number, "--out", str(tmp_path)])
        assert "from 1 to 1" in capsys.readouterr().err
    assert run_all.main(["--gpus", "2", "--dry-run", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "GPU 0:" in shown and "GPU 1:" in shown


def names_of(call: list[run_all.Planned], lane: int = 0) -> list[str]:
    return [one.name for planned in call for one in planned.batch if planned.lane == lane]


def test_calls_cover_all_batches_and_keep_to_the_minutes():
    """The plan says what runs in which call; what fits into none is said."""
    batches = [(step("a", 300.0), step("b", 200.0)), (step("c", 150.0),), (step("d", 900.0),), (step("e", 250.0),)]
    planned = list(calls(batches, 9.0))
    assert [names_of(call) for call in planned] == [["a", "b", "c"], ["e"]]
    assert all(sum(estimate_s(one.batch) for one in call) <= 9 * 60 for call in planned)
    text = plan_text(batches, 9.0, Path("out"))
    assert "call 2" in text and "in no call of 9 minutes: d" in text
    assert plan_text([], 9.0, Path("out")) == "nothing is left"


def test_calls_give_each_lane_the_next_batch_when_it_is_free():
    """Two lanes share a call: none waits for the other, and none writes the other's file at the same time."""
    batches = [(step("a", 300.0),), (step("b", 100.0),), (step("c", 100.0, file="a"),), (step("d", 100.0),)]
    (call,) = calls(batches, 9.0, 2)
    assert (names_of(call, 0), names_of(call, 1)) == (["a", "c"], ["b", "d"])
    assert max(one.end_s for one in call) <= 9 * 60
    text = plan_text(batches, 9.0, Path("out"), ("0", "1"))
    assert "call 1: 7.2 of 9 minutes" in text and "GPU 0: 7.2 minutes" in text and "GPU 1: 3.8 minutes" in text


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_run_all_every_batch_fits_into_one_call(lanes):
    """No step of the real plan needs more than the ten minutes that a call may take."""
    real = run_all.batches()
    planned = [one.batch for call in calls(real, 9.0, lanes) for one in call]
    assert sorted(map(real.index, planned)) == list(range(len(real)))
    names = [one.name for batch in real for one in batch]
    assert len(names) == len(set(names))


def test_run_all_measures_cudnn_at_real_width_and_a_budget_at_full_depth():
    """Where attention and memory count most, they are measured in one run with what they are compared with."""
    variants = {one.name: one.variants for batch in run_all.batches() for one in batch}
    assert {"both", "both:fusionfix_cudnn_attention=False", "torch-compile"} <= set(variants["4 layers, real width"])
    assert {"both", "both:fusionfix_memory_budget=37.7GB"} <= set(variants["28 layers"])


def test_run_all_no_two_steps_of_a_batch_write_one_file():
    """Steps of a batch run side by side: the second writer of a file would be refused."""
    for batch in run_all.batches():
        assert len({one.file(Path("out")) for one in batch}) == len(batch)


@pytest.mark.parametrize("step", [one for batch in run_all.batches() for one in batch], ids=lambda step: step.name)
def test_run_all_starts_commands_that_exist(step, tmp_path):
    """Every command of the plan is one that its program understands."""
    command = step.command(tmp_path, 100.0)
    if step.spec is None:
        source = (ROOT / command[0]).read_text()
        assert all(f'"{word}"' in source for word in command if word.startswith("--"))
        return
    args = bench.parser().parse_args(command[2:])
    assert all(find(name) for name in args.variants.split(",")) and args.no_predict
    assert bench.parser().parse_args(step.command(tmp_path, 1.0, predict=True)[2:]).predict_only


def test_run_all_a_new_file_has_the_predictions_and_no_measurement(tmp_path):
    """What was predicted before stands before the measurement; a file that is there is left alone."""
    one = next(one for batch in run_all.batches() for one in batch if one.spec)
    old = Run(one.spec, "c", "2026-01-01", {"plain": {"status": OK}}, {"plain": {"peak_bytes": 1}})
    old.save(bench.results_path(one.spec, tmp_path / "predictions"))
    run_all.seed(one, tmp_path / "out", tmp_path / "predictions")
    seeded = Run.load(one.file(tmp_path / "out"))
    assert seeded.predictions == old.predictions and not seeded.variants
    assert one.state(tmp_path / "out")[0] is False
    old.save(one.file(tmp_path / "out"))
    run_all.seed(one, tmp_path / "out", tmp_path / "predictions")
    assert Run.load(one.file(tmp_path / "out")).variants


def test_run_all_publishes_what_was_measured_and_nothing_else(tmp_path):
    """Files with measurements go into docs/, with the tables; predictions alone do not stand in for results."""
    measuring, predicting = [one for batch in run_all.batches() for one in batch if one.spec][:2]
    docs, out, readme = tmp_path / "docs", tmp_path / "out", tmp_path / "README.md"
    for folder in ("results", "benchmarks"):
        (docs / folder).mkdir(parents=True)
    readme.write_text(f"head\n{results_table.BEGIN}\nold\n{results_table.END}\ntail\n")
    Run(measuring.spec, "c", "", {"plain": measured(20, 50.0)}).save(measuring.file(out))
    Run(predicting.spec, "c", "", {}, {"plain": {"peak_bytes": 1}}).save(predicting.file(out))
    loss = {"case": "cut:1x4096", "variant": "plain", "forward_mb": 4982.9, "backward_mb": 1.0, "ms": 7.5}
    with table_file(out / "benchmarks" / "loss.json", "loss") as file:
        file.add({**loss, "grad_distance": 0.25}, shown=False)
    run_all.publish([[measuring, predicting, step("loss")]], out, docs, readme)
    assert measuring.file(docs).exists() and not predicting.file(docs).exists()
    assert "20,000" in readme.read_text() and "old" not in readme.read_text()
    page = (docs / "benchmarks" / "README.md").read_text()
    assert "4982.90" in page and "Command: `python benchmarks/loss.py" in page and "cut short" not in page


def test_run_all_wrong_step_is_named(capsys):
    """A step that does not exist is named, with those that do."""
    with pytest.raises(SystemExit):
        run_all.main(["--only", "nothing"])
    assert "nothing" in capsys.readouterr().err


# ---------------------------------------------------------------- rows on disk


def test_table_file_has_each_row_at_once_and_is_complete_only_at_its_end(tmp_path, capsys):
    """A run that is cut leaves its rows and does not look complete."""
    path = tmp_path / "t.json"
    with pytest.raises(KeyboardInterrupt), table_file(path, "loss") as file:
        file.add({"case": "a"})
        raise KeyboardInterrupt
    found = json.loads(path.read_text())
    assert found["rows"] == [{"case": "a"}] and found["is_complete"] is False and "loss.py" in found["command"]
    with table_file(path, "loss") as file:
        file.add({"case": "b"})
        file.add({"case": "c"}, shown=False)
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2 and found["is_complete"] is True
    assert capsys.readouterr().out.splitlines() == ['{"case": "a"}', '{"case": "b"}']


# ---------------------------------------------------------------- linear_table


@pytest.mark.parametrize("way", linear_table.WAYS)
@pytest.mark.parametrize("form", linear_table.FORMS)
def test_linear_by_hand_is_what_autograd_gives(way, form):
    """The reference does all the work of the row, casts included: it gives output and gradients in their dtypes."""
    torch.manual_seed(0)
    dtype = torch.float32 if form == "autocast" else torch.float64
    x = linear_table.strided((3, 4, 8), dtype, True, device="cpu")
    w = torch.randn(5, 8, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        out = F.linear(x, w)
    grad = torch.randn(3, 4, 5).to(out.dtype)
    out.backward(grad)
    got = linear_table.by_hand(way, form, x.detach(), w.detach(), grad)
    want = (out, x.grad, w.grad)[: 1 if form == "frozen" else 3]
    assert len(got) == len(want)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_linear_rows_are_judged_by_the_better_way():
    """The bar is 1.1 of the device time of mm or bmm, whichever is less; the host's time has no part in it."""
    times = {"mm": 2.0, "bmm": 1.0, "plain": 5.0, "fusionfix": 1.09}
    row = {name: {"device": value, "host": 9.0} for name, value in times.items()}
    judged = linear_table.judged({"case": "x", "form": "frozen", **row})
    assert (judged["best"], judged["verdict"]) == ("bmm", "met")
    row["fusionfix"]["device"] = 1.11
    missed = linear_table.judged({"case": "x", "form": "frozen", **row})
    assert missed["verdict"] == "missed"
    shown = linear_table.table([judged, missed, {"case": "x", "form": "trained", "error": "OutOfMemoryError: 1 GiB"}])
    assert "1.09 met" in shown and "1.11 missed" in shown and "OutOfMemoryError" in shown


# ---------------------------------------------------------------- first_step


def test_first_steps_side_by_side_are_all_kept_and_compared(monkeypatch, tmp_path, capsys):
    """Every run is in the file, one that was cut with what it had; growth is told where both ends were measured."""

    def run_apart(args: argparse.Namespace, variant: str, layers: int, seconds: float) -> dict[str, object]:
        found = {"variant": variant, "layers": layers}
        if (variant, layers) == ("plain", 8):
            return {**found, "error": "not done after 5 s"}
        profile = dict.fromkeys(first_step.PHASES, float(layers))
        more = {"first_step_s": 10.0 * layers, "step_ms": None, "peak_mb": None, "profile_s": profile}
        return {**found, **more, "sharing": {}, "grad_norms": {}, "loss": 1.0}

    monkeypatch.setattr(first_step, "run_apart", run_apart)
    out = tmp_path / "f.json"
    monkeypatch.setattr(sys, "argv", ["first_step.py", "--jobs", "4", "--out", str(out)])
    assert first_step.main() == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["layers"], row["variant"]) for row in rows] == [(n, v) for n in (2, 8) for v in ("shared", "plain")]
    shown = capsys.readouterr().out
    assert "shared, from 2 to 8 layers: first step + 60.0 s" in shown and "not done after 5 s" in shown


# ---------------------------------------------------------------- results_table


def measured(peak: float, step_ms: float | None, status: str = OK) -> dict[str, object]:
    found: dict[str, object] = {"peak_bytes": peak * 1e9}
    if step_ms is not None:
        found["step_ms"] = {"median": step_ms}
    return {"status": status, "measured": found}


def result(layers: int, **variants: dict[str, object]) -> tuple[str, Run]:
    spec = Spec("qwen2.5-7b", layers, 28, 4096, 1)
    return spec.slug, Run(spec, "", "", {name.replace("_", "-"): record for name, record in variants.items()})


def test_results_table_shows_what_is_missing():
    """A variant that was cut has its memory and its status; a goal that cannot be judged says why; a miss is one."""
    runs = [result(8, plain=measured(20, 50.0), both=measured(17, None, CUT), torchcompile={"status": "timeout"})]
    rows = list(results_table.table(runs))
    assert "| fusionfix, transform and entry (cut short) | 17,000 | 0.850 | - | - | - | - | - |" in rows
    assert "| Thunder, torchcompile executor (timeout) | - | - | - | - | - | - | - |" in rows
    goals = list(results_table.goals(runs))
    assert any("x plain Thunder" in row and "0.850 | **missed**" in row for row in goals)
    assert any("not measured (Thunder, torchcompile executor: timeout)" in row for row in goals)
    assert any("layers28" in row and row.endswith("| not measured |") for row in goals)


def test_results_table_shows_a_variant_with_options_that_stands_for_no_goal():
    """A budget gives time for memory on purpose: what it costs is a row. Where the one that stands for us misses, it is shown below."""
    budget = "both:fusionfix_memory_budget=1GB"
    slug, run = result(8, plain=measured(20, 50.0), both=measured(17, 50.0))
    run.variants[budget] = measured(10, 90.0)
    run.predictions[budget] = {"peak_bytes": 12e9}
    text = [*results_table.table([(slug, run)]), *results_table.predictions([(slug, run)])]
    label = "fusionfix, transform and entry, fusionfix_memory_budget=1GB"
    assert f"| {label} | 10,000 | 0.500 | 90.0 | 1.800 | - | +20.0% | - |" in text
    assert any(line.startswith("- **missed**:") and line.endswith(f"{label}: +20.0%") for line in text)
    goals = list(results_table.goals([(slug, run)]))
    by_it = [row for row in goals if label in row]
    assert by_it and all(row.endswith("met with these options |") and "peak <= 0.82" in row for row in by_it)
    assert any("0.850 | **missed**" in row for row in goals) and not any(
        "step" in row and label in row for row in goals
    )


def test_results_table_extrapolates_what_does_not_end():
    """Where a variant has no run with all layers, a line through fewer layers stands for it, and that is said."""
    runs = [result(n, torchcompile=measured(2 + n, 10.0 * n)) for n in (4, 8, 12)]
    runs.append(result(28, plain_shared=measured(40, 500.0), both=measured(27, 280.0)))
    goals = [row for row in results_table.goals(runs) if "28 layers" in row]
    assert any("(a line through 4, 8, 12 layers)" in row and "| 0.900 | met |" in row for row in goals)
    assert any("step <= 1.00" in row and "| 1.000 | met |" in row for row in goals)


def test_readme_shows_what_is_in_docs():
    """README's results are those of the files, to the letter."""
    assert results_table.main(["--check", str(ROOT / "README.md")]) == 0


# ---------------------------------------------------------------- splits


def test_splits_replace_their_own_release_and_keep_the_others():
    """Each release has one section, in order, behind what stands at the head of the file."""
    text = splits.put("# Head\n\nWords.\n", "5.24.0", "## transformers 5.24.0\n\nnew\n")
    text = splits.put(text, "4.47.1", "## transformers 4.47.1\n\nolder\n")
    text = splits.put(text, "5.24.0", "## transformers 5.24.0\n\nnewer\n")
    assert text == "# Head\n\nWords.\n\n## transformers 4.47.1\n\nolder\n\n## transformers 5.24.0\n\nnewer\n"


def test_splits_tell_place_and_reason_of_each():
    """A program in one function says so; one that is split has a row for each reason, shortened to what a reader can use."""
    part = SimpleNamespace(fused=SimpleNamespace(bound_symbols=[1, 2]))
    whole = splits._rows("m", SimpleNamespace(parts=(part,), splits=()))
    assert list(whole) == ["| m | 1 (2) | | | one function |"]
    why = "got [IntegerProxy name=dim, value=-2, static=CONSTRAINT.STATIC] | or\nnot"
    cuts = (Split(0, "ThunderFX", "cat", why, 4), Split(0, "torch.compile", "a.py:7", "x" * 200))
    first, second = splits._rows("m", SimpleNamespace(parts=(part, part), splits=cuts))
    assert first == "| m | 2 (2, 2) | ThunderFX | 4 x cat | got [-2] \\| or not |"
    assert second.startswith("|  |  | torch.compile | a.py:7 | xxx") and len(second) < 200


# ---------------------------------------------------------------- padded_products


def test_products_of_a_layer_are_those_of_its_gradients():
    """Shapes of output, gradient of the input and gradient of the weight; heads beside each other are strided."""
    layer = padded_products.layer_products(6, 5, 7, device="cpu")
    assert [tuple((left @ right).shape) for left, right in layer.values()] == [(6, 7), (6, 5), (7, 5)]
    heads = padded_products.attention_products(2, 6, 3, device="cpu")
    assert [tuple((left @ right).shape) for left, right in heads.values()] == [
        (2, 6, 6),
        (2, 6, 6),
        (2, 6, 3),
        (2, 6, 3),
    ]
    assert heads["q @ k.T beside"][0].stride() == (3, 6, 1)


def test_padded_products_are_judged_by_the_better_way_and_counted():
    """The bar is 1.1 of the faster way, and none for what launches decide; copies are those that simulate counts."""
    row = {"case": "c", "product": "p", "distance": 1e-3, "plain_distance": 1e-3, "copies_mb": 1.0, "counted_mb": 1.0}
    for plain, always, ours, verdict in (
        (1.0, 0.5, 0.54, "met"),
        (1.0, 0.5, 0.56, "missed"),
        (0.01, 0.005, 0.01, "met"),
    ):
        found = padded_products.judged({**row, "plain": plain, "always": always, "ours": ours})
        assert found["verdict"] == verdict
    shown = padded_products.table([found, {"case": "c", "product": "p", "error": "OutOfMemoryError: 1 GiB"}])
    assert "of best" in shown and "met" in shown and "OutOfMemoryError" in shown
    left, right = padded_products.layer_products(1024, 768, 50257, device="cpu")["x @ w.T"]
    assert 0 < padded_products.counted_mb(left, right) < 2 * 1024 * 50257 / 1e6
    distances = padded_products.distances(
        left[:, :8] @ right[:8, :9], left[:, :8] @ right[:8, :9], left[:, :8], right[:8, :9]
    )
    assert 0 < distances["distance"] == distances["plain_distance"] < 1e-2
