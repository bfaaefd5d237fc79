"""`bench` drives processes and files; what is measured in them is for the GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thunder_fusionfix import bench as bench_module
from thunder_fusionfix import measure as measure_module
from thunder_fusionfix.bench import Options, bench, main, results_path
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.measure import GpuLock, replay, thunder_options
from thunder_fusionfix.predict import predict
from thunder_fusionfix.results import (
    CUT,
    FAILED,
    OK,
    OUT_OF_MEMORY,
    TIMEOUT,
    Run,
    Spec,
    draw,
    markdown,
    notes,
    plain_table,
    ratios,
)
from thunder_fusionfix.variants import find

SPEC = Spec("file.py:build")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Lets bench start stub processes; call it with what each variant does. Gives the variants that were started."""
    log = tmp_path / "log"

    def behave(**variants: str) -> None:
        log.write_text("")
        names = {name if ":" in name else name.replace("_", "-"): what for name, what in variants.items()}
        monkeypatch.setenv("STUB", ",".join(f"{name}={what}" for name, what in names.items()))

    def started() -> list[str]:
        return [line.split()[0] for line in log.read_text().splitlines()]

    monkeypatch.setattr(bench_module, "require_gpu", lambda: None)
    monkeypatch.setattr(bench_module, "source_digest", lambda: "as it is")
    monkeypatch.setattr(bench_module, "MEASURE", "stub_worker")
    monkeypatch.setattr(bench_module, "PREDICT", "stub_prediction")
    monkeypatch.setenv("STUB_LOG", str(log))
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]))
    behave.started = started  # type: ignore[attr-defined]
    behave.log = log  # type: ignore[attr-defined]
    return behave


def options(tmp_path: Path, *variants: str, **more: object) -> Options:
    return Options(variants, out=tmp_path / "out", **{"predict": False, **more})  # type: ignore[arg-type]


def test_bench_variants_that_die_or_run_out_of_memory_are_recorded_and_the_others_measured(stub, tmp_path):
    """One variant's end never costs another's measurement, and its reason is in the file."""
    stub(plain="crash", torch_compile="out of memory", eager="ok")
    run = bench(SPEC, options(tmp_path, "plain", "torch-compile", "eager"))
    assert [run.variants[name]["status"] for name in ("plain", "torch-compile", "eager")] == [FAILED, OUT_OF_MEMORY, OK]
    assert (
        "exit code 3" in run.variants["plain"]["reason"] and "something went wrong" in run.variants["plain"]["reason"]
    )
    assert Run.load(results_path(SPEC, tmp_path / "out")).variants == run.variants


def test_bench_second_run_measures_only_what_is_missing(stub, tmp_path):
    """What the file holds is not measured again, a failure only with --retry, all of it with --again."""
    stub(plain="ok", eager="crash", torch_compile="ok")
    bench(SPEC, options(tmp_path, "plain", "eager"))
    stub(plain="ok", eager="ok", torch_compile="ok")
    bench(SPEC, options(tmp_path, "plain", "eager", "torch-compile"))
    assert stub.started() == ["torch-compile"]
    bench(SPEC, options(tmp_path, "plain", "eager", "torch-compile", retry=True))
    assert stub.started() == ["torch-compile", "eager"]
    bench(SPEC, options(tmp_path, "plain", again=True))
    assert stub.started() == ["torch-compile", "eager", "plain"]


def test_bench_changed_source_measures_fusionfix_again_and_plain_not(stub, tmp_path, monkeypatch):
    """A measurement of our own passes holds for the source that it was made with."""
    stub(plain="ok", transform="ok")
    bench(SPEC, options(tmp_path, "plain", "transform"))
    monkeypatch.setattr(bench_module, "source_digest", lambda: "another")
    bench(SPEC, options(tmp_path, "plain", "transform"))
    assert stub.started() == ["plain", "transform", "transform"]


BUDGET = "both:fusionfix_memory_budget=37.7GB+fusionfix_reorder=False"


def test_bench_variant_with_options_is_one_of_its_own(stub, tmp_path):
    """It stands beside the one without in file, table, ratios, notes and picture, and is measured where that is there."""
    stub(both="ok", plain="ok")
    bench(SPEC, options(tmp_path, "both", "plain"))
    stub(**{BUDGET: "ok", "both:fusionfix_reorder=False": "crash", "both": "crash"})
    bench(SPEC, options(tmp_path, BUDGET, "both"))
    assert stub.started() == [BUDGET]
    run = bench(SPEC, options(tmp_path, BUDGET, "both:fusionfix_reorder=False"))
    assert {name: record["status"] for name, record in run.variants.items()} == {
        **dict.fromkeys(("both", "plain", BUDGET), OK),
        "both:fusionfix_reorder=False": FAILED,
    }
    label = "fusionfix, transform and entry, fusionfix_memory_budget=37.7GB, fusionfix_reorder=False"
    shown = markdown(run).splitlines()
    assert [line.split(" | ")[0] for line in shown if line.startswith("| ")][1:] == [
        "| plain Thunder",
        "| fusionfix, transform and entry",
        f"| {label}",
        "| fusionfix, transform and entry, fusionfix_reorder=False (failed)",
    ]
    assert f"- {label}, peak / step against plain Thunder 1.000 / 1.000" in shown
    assert any(
        line.startswith("- fusionfix, transform and entry, fusionfix_reorder=False: failed: exit") for line in shown
    )
    assert draw(run, tmp_path / "p.png")


def test_bench_predicts_a_variant_with_options(stub, tmp_path):
    """Its prediction is kept under its own name, before its measurement."""
    stub(**{BUDGET: "ok"})
    run = bench(SPEC, options(tmp_path, BUDGET, predict=True))
    assert list(run.predictions) == list(run.variants) == [BUDGET] and stub.started() == [BUDGET, BUDGET]


def test_variant_with_options_gives_them_to_thunder():
    """Ours and Thunder's beside what the variant has already; a word that is no number, True, False or None is text."""
    found = find("plain-shape-only:nv_store_fusion_inputs=True+other=none+more=-3+nothing=None")
    wanted = {"nv_store_fusion_inputs": True, "other": "none", "more": -3, "nothing": None}
    given = thunder_options(found)
    assert {**wanted, "nv_enable_shape_only_fusion": True}.items() <= given.items()
    assert given["executors"] == find("plain").executors and given["transforms"] == []
    assert thunder_options(find("transform:fusionfix_reorder=False"))["fusionfix_reorder"] is False


def test_variant_with_options_reaches_the_passes():
    """Without the passes that a variant switches off, the loss needs what it needs under plain Thunder."""
    off = "transform:fusionfix_unfuse_layouts=False+fusionfix_ignore_cut_rows=False"
    plain, without, with_all = (
        predict(Spec("causal-lm-loss"), name).step.peak_bytes for name in ("plain", off, "transform")
    )
    assert plain == without > with_all


def test_bench_variant_over_its_time_is_killed_and_said(stub, tmp_path):
    """A process that hangs is ended after --timeout, and the next variant runs."""
    stub(plain="hang", eager="ok")
    start = time.monotonic()
    run = bench(SPEC, options(tmp_path, "plain", "eager", timeout_s=2.0))
    assert run.variants["plain"]["status"] == TIMEOUT and "first step" in run.variants["plain"]["reason"]
    assert run.variants["eager"]["status"] == OK
    assert time.monotonic() - start < 30


def test_bench_waiting_for_the_gpu_does_not_count_as_time(stub, tmp_path):
    """Only work counts against --timeout: a wait of 4 s for the lock is none of 3 s."""
    stub(plain="wait")
    run = bench(SPEC, options(tmp_path, "plain", timeout_s=3.0))
    assert run.variants["plain"]["status"] == OK


def test_bench_prediction_is_in_the_file_before_its_measurement(stub, tmp_path, monkeypatch):
    """When a measurement starts, the file on disk holds the prediction already."""
    stub(plain="ok")
    seen = []

    def progress(variant: str, state: str) -> None:
        file = results_path(SPEC, tmp_path / "out")
        seen.append((state, file.exists() and "plain" in json.loads(file.read_text())["predictions"]))

    run = bench(SPEC, options(tmp_path, "plain", predict=True), progress=progress)
    assert stub.started() == ["plain", "plain"]
    ended = [state for state, _ in seen].index("predicted: ok")
    assert seen[-1] == (OK, True) and all(there for _, there in seen[ended:]) and not seen[0][1]
    assert run.predictions["plain"]["peak_bytes"] == 7_000_000


def test_bench_side_by_side_a_prediction_never_waits_for_another_variants(stub, tmp_path):
    """With several processes each variant is predicted, then measured; one without a prediction starts at once."""
    stub(plain="wait", eager="ok")
    run = bench(SPEC, options(tmp_path, "plain", "eager", predict=True, jobs=2))
    assert sorted(stub.started()) == ["eager", "plain", "plain"] and stub.started()[-1] == "plain"
    assert run.variants["plain"]["status"] == run.variants["eager"]["status"] == OK and "eager" not in run.predictions


def test_bench_out_of_memory_beside_others_is_tried_alone(stub, tmp_path):
    """Side by side a variant may lack the memory that another takes: it gets a second try alone."""
    stub(plain="out of memory", eager="ok")
    run = bench(SPEC, options(tmp_path, "plain", "eager", jobs=2))
    assert sorted(stub.started()) == ["eager", "plain", "plain"]
    assert run.variants["plain"]["status"] == OUT_OF_MEMORY


def test_bench_interrupted_keeps_what_is_done_and_ends_its_processes(stub, tmp_path, request):
    """After an interruption the file holds the finished variants and no process is left."""
    stub(plain="ok", eager="hang")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def progress(variant: str, state: str) -> None:
        if (variant, state) == ("eager", "first step"):
            import _thread

            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        bench(SPEC, options(tmp_path, "plain", "eager"), progress=progress)
    run = Run.load(results_path(SPEC, tmp_path / "out"))
    assert list(run.variants) == ["plain"]
    pid = int(stub.log.read_text().splitlines()[-1].split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Clock:
    """Stands in for the module `time`; ``late`` seconds pass at once when a variant is being timed."""

    def __init__(self, late: float) -> None:
        self.late, self.passed = late, 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def progress(self, variant: str, state: str) -> None:
        self.passed = self.late if state == "timing" else self.passed


@pytest.mark.parametrize(
    ("behaviour", "limits", "status"),
    [
        ("part", {"budget_s": 500.0}, CUT),
        ("part", {"timeout_s": 500.0}, TIMEOUT),
        ("part and crash", {}, FAILED),
    ],
)
def test_bench_variant_that_does_not_come_to_its_end_keeps_what_it_measured(
    stub, tmp_path, monkeypatch, behaviour, limits, status
):
    """Whatever ends a variant after its memory was measured, the memory is in the file, beside the reason."""
    stub(plain=behaviour)
    clock = Clock(600.0)
    monkeypatch.setattr(bench_module, "time", clock)
    run = bench(SPEC, options(tmp_path, "plain", **limits), progress=clock.progress)
    assert run.variants["plain"]["status"] == status and "timing" in run.variants["plain"]["reason"]
    assert run.variants["plain"]["measured"] == {"peak_bytes": 5_000_000}
    assert "plain Thunder (" in results_path(SPEC, tmp_path / "out").with_suffix(".md").read_text()


def test_bench_cut_short_is_measured_by_the_next_and_loses_no_whole_measurement(stub, tmp_path, monkeypatch):
    """Only what was cut runs again; a cut of something measured before leaves that in the file."""
    clock = Clock(600.0)
    monkeypatch.setattr(bench_module, "time", clock)
    stub(plain="part", eager="ok")
    bench(SPEC, options(tmp_path, "eager", "plain", budget_s=500.0), progress=clock.progress)
    stub(plain="ok", eager="part")
    run = bench(SPEC, options(tmp_path, "eager", "plain"))
    assert stub.started() == ["plain"] and run.variants["plain"]["status"] == OK
    clock.late = 2000.0
    run = bench(SPEC, options(tmp_path, "eager", again=True, budget_s=500.0), progress=clock.progress)
    assert stub.started() == ["plain", "eager"] and run.variants["eager"]["status"] == OK


def test_bench_killed_has_on_disk_what_was_measured(stub, tmp_path, monkeypatch):
    """While a variant is being timed its memory is in the file already, whatever comes after."""
    stub(plain="part")
    clock = Clock(0.0)
    monkeypatch.setattr(bench_module, "time", clock)
    thread = threading.Thread(target=bench, args=(SPEC, options(tmp_path, "plain", budget_s=500.0)))
    thread.start()
    file, deadline = results_path(SPEC, tmp_path / "out"), time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    on_disk = Run.load(file).variants
    clock.passed = 600.0
    thread.join()
    assert on_disk["plain"]["status"] == CUT and on_disk["plain"]["measured"] == {"peak_bytes": 5_000_000}


def test_worker_ends_when_its_parent_is_gone(stub, tmp_path):
    """A bench that is killed leaves no process on the GPU."""
    stub(plain="hang")
    job = bench_module.Job(SPEC, "plain").to_json()
    worker = subprocess.Popen(
        [sys.executable, "-m", "stub_worker", job, str(tmp_path / "record")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None and worker.stdin is not None
    worker.stdout.readline()
    worker.stdin.close()
    assert worker.wait(timeout=10) == 1
    worker.stdout.close()


def test_bench_without_gpu_refuses_with_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    """There is nothing to measure without a GPU, and the message says what works without one."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["qwen2.5-7b", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "GPU" in captured.err and "explain" in captured.err and len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nobody"], "no model"),
        (["qwen2.5-7b", "--layers", "0"], "layers"),
        (["causal-lm-loss", "--layers", "2"], "layers"),
        (["qwen2.5-7b", "--variants", "fastest"], "fastest"),
        (["qwen2.5-7b", "--variants", "plain,fastest:a=1"], "'fastest'"),
        (["qwen2.5-7b", "--variants", "both:fusionfix_reorder"], "'fusionfix_reorder' is no OPTION=VALUE"),
        (["qwen2.5-7b", "--variants", "both:fusionfix_reorder=False+"], "'' is no OPTION=VALUE"),
        (["qwen2.5-7b", "--variants", "both:"], "'' is no OPTION=VALUE"),
        (["qwen2.5-7b", "--variants", "both:a=1+a=2"], "option a is given twice"),
        (["qwen2.5-7b", "--variants", "both:fusionfix_fastest=1"], "no option 'fastest'"),
        (["qwen2.5-7b", "--variants", "both:fusionfix_memory_budget=37.7XB"], "memory_budget: '37.7XB'"),
        (["qwen2.5-7b", "--variants", "both:fusionfix_reorder=maybe"], "reorder='maybe'"),
        (["qwen2.5-7b", "--variants", "plain:fusionfix_reorder=False"], "nothing in 'plain' reads fusionfix_reorder"),
        (["qwen2.5-7b", "--variants", "eager:nv_store_fusion_inputs=True"], "does not compile 'eager'"),
        (["qwen2.5-7b", "--jobs", "0"], "jobs"),
        (["qwen2.5-7b", "--timeout", "0"], "timeout"),
        (["qwen2.5-7b", "--budget", "-1"], "budget"),
    ],
)
def test_bench_wrong_usage_is_one_line_and_exit_code_2(arguments, word, tmp_path, capsys):
    """Each wrong option is named, before any process starts."""
    assert main([*arguments, "--predict-only", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert word in captured.err and len(captured.err.splitlines()) == 1


def test_results_file_of_another_program_or_kind_is_refused(tmp_path):
    """Nothing is ever written over a file that is not this run's."""
    file = tmp_path / "r.json"
    file.write_text("{}")
    with pytest.raises(UsageError, match="no results file"):
        Run.load(file)
    file.write_text(json.dumps({"schema": 99}))
    with pytest.raises(UsageError, match="schema 99"):
        Run.load(file)


def test_second_bench_of_the_same_file_is_refused(stub, tmp_path):
    """Two writers of one file would lose each other's measurements."""
    stub(plain="ok")
    with (
        bench_module._only_writer(results_path(SPEC, tmp_path / "out")),
        pytest.raises(UsageError, match="another bench"),
    ):
        bench(SPEC, options(tmp_path, "plain"))


def test_gpu_lock_timing_waits_for_all_who_share_it(tmp_path):
    """Who times is alone: it waits until nobody shares the GPU, and nobody gets in meanwhile."""
    lock, order = GpuLock(tmp_path / "lock"), []

    def time_it() -> None:
        with lock.alone(lambda: order.append("waiting")):
            order.append("timing")
            time.sleep(0.2)
            order.append("timed")

    with lock.shared(), lock.shared():
        thread = threading.Thread(target=time_it)
        thread.start()
        time.sleep(0.2)
        order.append("shared ends")
    while "timing" not in order:
        time.sleep(0.01)
    with lock.shared():
        order.append("shared again")
    thread.join()
    assert order == ["waiting", "shared ends", "timing", "timed", "shared again"]
    with lock.alone(lambda: order.append("waiting")):
        assert order[-1] == "shared again", "nobody waits for a lock that is free, and nobody says so"


class Steps:
    """A step takes ``ms`` of it."""

    def __init__(self, ms: float) -> None:
        self.ms, self.now, self.turns, self.steps = ms, 0.0, 0, 0

    def timed(self) -> float:
        assert self.turns % 2 == 1, "nobody else has the GPU"
        self.now += self.ms / 1e3
        self.steps += 1
        return self.ms

    @contextlib.contextmanager
    def turn(self):
        self.turns += 1
        yield
        self.turns += 1

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("ms", "least", "most"), [(500.0, 23, 30), (100.0, 23, 30), (10.0, 200, 215), (1.0, 2000, 2015)]
)
def test_steps_are_timed_in_rounds_and_quick_ones_for_two_seconds(ms, least, most, monkeypatch):
    """At least as many as were asked for; warm-up steps are none of them, and each round is a turn of its own."""
    monkeypatch.setattr(measure_module, "PAUSE_SECONDS", 0.0)
    clock = Steps(ms)
    times = measure_module.in_rounds(clock.timed, 23, clock.turn, clock)
    assert least <= len(times) <= most and set(times) == {ms}
    first, later = measure_module.WARM_UP_STEPS
    assert clock.turns == 2 * measure_module.ROUNDS
    assert clock.steps == len(times) + first + (measure_module.ROUNDS - 1) * later
    assert measure_module.spread_of([1.0, 2.0, 3.0, 10.0])["median"] == 2.5


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (None, "0", True),
        ("1", "1,0", True),
        ("GPU-bb", "1", True),  # the UUID of the second, or how it begins
        ("0", "1", False),
        ("MIG-a", "MIG-b", False),
    ],
)
def test_gpu_lock_is_of_the_first_visible_gpu(monkeypatch, one, other, is_same):
    """Processes on one GPU share a lock, whatever they call it; those on others do not wait."""
    monkeypatch.setattr(measure_module, "machine_gpus", lambda: [("0", "GPU-aa-1"), ("1", "GPU-bb-1")])
    paths = []
    for visible in (one, other):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        paths.append(GpuLock().path)
    assert (paths[0] == paths[1]) is is_same
    assert (GpuLock().beside("float32").path == GpuLock(paths[0]).beside("float32").path) is is_same


def test_gpus_are_read_as_nvidia_smi_lists_them(monkeypatch, tmp_path):
    """Parts of a GPU are no GPUs of their own; where the program is not there, there is nothing to know."""
    tool = tmp_path / "nvidia-smi"
    listed = [
        "GPU 0: NVIDIA H200 (UUID: GPU-aa-1)",
        "  MIG 1g.18gb Device 0: (UUID: MIG-c)",
        "GPU 1: H (UUID: GPU-bb-1)",
    ]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in listed))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_module.machine_gpus() == [("0", "GPU-aa-1"), ("1", "GPU-bb-1")]
    tool.unlink()
    assert measure_module.machine_gpus() == []


def test_bench_prediction_locks_the_gpu_that_bench_sees(stub, tmp_path, monkeypatch):
    """A prediction sees no GPU, and leaves the processor to who times on its bench's all the same."""
    stub(plain="ok")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    mine, seen = GpuLock().path, tmp_path / "seen"
    monkeypatch.setenv("STUB_LOCK", str(seen))
    bench(SPEC, options(tmp_path, "plain", predict=True))
    assert seen.read_text().splitlines() == [f" {mine}", f"3 {mine}"]


# ---------------------------------------------------------------- the allocator's history


def alloc(addr: int, size: int) -> dict[str, object]:
    return {"action": "alloc", "addr": addr, "size": size}


def free(addr: int, size: int) -> dict[str, object]:
    return {"action": "free_requested", "addr": addr, "size": size}


MARK = [alloc(99, 1_000_003), free(99, 1_000_003)]


def test_replay_by_hand_gives_peak_start_and_what_is_alive():
    """Ten allocations in the backward: its start is the first of them; the peak is the sixth."""
    events = [alloc(1, 1000), alloc(2, 512), free(2, 512), *MARK]  # 1,024 saved
    events += [alloc(10, 2048), free(10, 2048)]
    for at in range(8):
        events += [alloc(20 + at, 100), free(20 + at, 100)]
    events += [free(1, 1000), alloc(40, 4000)]
    found = replay(events, base=100_000)
    assert found["backward_start_bytes"] == 100_000 + 1024 + 2048
    assert found["replayed_peak_bytes"] == 104_096
    assert found["alive_at_peak"] == [{"bytes": 4096, "count": 1, "seen": "backward"}]
    assert {"bytes": 1024, "count": 1, "seen": "forward"} in found["alive_at_backward_start"]


def test_replay_without_a_mark_has_no_start_of_the_backward():
    """A history that lost its mark gives the peak alone."""
    found = replay([alloc(1, 512), free(1, 512)], base=0)
    assert found["replayed_peak_bytes"] == 512 and "backward_start_bytes" not in found


def test_replay_other_events_count_nothing():
    """Segments and completed frees are the allocator's own affair."""
    events = [
        {"action": "segment_alloc", "addr": 1, "size": 2**21},
        alloc(1, 512),
        {"action": "free_completed", "addr": 1, "size": 512},
    ]
    assert replay(events, base=0)["replayed_peak_bytes"] == 512


# ---------------------------------------------------------------- tables


@pytest.fixture
def run() -> Run:
    def record(peak: int, step: float) -> dict[str, object]:
        measured = {"peak_bytes": peak * 10**6, "step_ms": {"median": step, "spread": 0.125}, "launches": 1234}
        return {
            "status": OK,
            "measured": measured,
            "notes": [],
            "environment": {"gpu": "G", "packages": {"torch": "2"}},
        }

    run = Run(Spec("m", layers=8), "fusionfix bench m", "2026-01-01")
    run.variants |= {"plain": record(20_000, 50.0), "transform": record(15_000, 45.0)}
    run.variants["eager"] = {"status": OUT_OF_MEMORY, "reason": "while first step: tried"}
    run.predictions |= {"plain": {"peak_bytes": 20_200 * 10**6, "notes": ["two graphs"]}}
    return run


def test_tables_show_ratio_miss_and_failure(run):
    """A prediction's miss, each ratio and each failure's reason are in the text and in the Markdown."""
    for text in (markdown(run), plain_table(run)):
        assert "20,000" in text and "20,200" in text and "+1.0%" in text and "1,234" in text
        assert "plain Thunder 0.750 / 0.900" in text
        assert "eager: out of memory: while first step: tried" in text and "two graphs" in text
    assert len(ratios(run)) == 1 and notes(run)[0].startswith("eager")


def test_tables_lower_bound_is_shown_as_one(run):
    """A prediction that counts only part of the memory says so, and how far it is off all the same."""
    run.predictions["plain"]["is_lower_bound"] = True
    assert ">= 20,200" in plain_table(run) and "+1.0%" in plain_table(run)


def test_run_saved_and_loaded_is_the_same_and_leaves_no_part(run, tmp_path):
    """The file is written whole: nothing else is left beside it."""
    run.save(tmp_path / "r.json")
    assert Run.load(tmp_path / "r.json") == run
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_run_on_disk_is_short_and_any_text_survives(run, tmp_path):
    """Each innermost list or object is one line, and brackets in names of kernels change nothing."""
    run.variants["plain"]["measured"]["curve"] = list(range(200))
    run.variants["plain"]["measured"]["kernels"] = [{"name": "void f<[a, b]>{ {x  y} ]", "count": 1}] * 3
    run.save(tmp_path / "r.json")
    assert Run.load(tmp_path / "r.json") == run
    assert len((tmp_path / "r.json").read_text().splitlines()) < 80


def test_recorded_command_says_nothing_of_places():
    """Where results went and how long everything could take are no part of a measurement."""
    given = ["gpt2", "--out", "/somewhere", "--layers", "2", "--budget=30", "--jobs", "4"]
    assert bench_module.for_the_record(given) == ["gpt2", "--layers", "2", "--jobs", "4"]


def test_picture_has_a_point_for_each_measured_variant(run, tmp_path):
    """A run with measurements is drawn, one without is not."""
    assert draw(run, tmp_path / "p.png") and (tmp_path / "p.png").stat().st_size > 10_000
    assert not draw(Run(SPEC, "", ""), tmp_path / "none.png") and not (tmp_path / "none.png").exists()
