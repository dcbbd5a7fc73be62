"""Blocks of a stage: resumed, void and run again, and a candidate that takes its process down."""

import inspect
import json
import os
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtrial.decision import validity
from kvtrial.host import build, machine
from kvtrial.measure import child, rotation
from kvtrial.measure.baton import Baton, OutOfStep, PartnerGone
from kvtrial.measure.plan import Hopeless, SamplingPlan
from kvtrial.measure.specs import Spec
from kvtrial.run import events
from kvtrial.run.journal import Journal
from kvtrial.stages import common
from kvtrial.stages.common import Block, CellRun, DoneElsewhere, Stage, StageError, Work, run_cells
from kvtrial.stages.progress import Progress, duration

CELL = {"context": 512, "sessions": 1, "threads": 1}
LIMITS = {"stood_still_s": 0.5, "disk_faults": 0, "throttled": 0, "most": 2}


@pytest.fixture
def stage(tmp_path):
    registered = {
        "void": LIMITS,
        "candidates": ["K0", "K1", "K3"],
        "timed_in_full": [],
        "decision": {"reference": "K1", "challengers": ["K3"]},
    }
    return Stage("m2", tmp_path / "run", tmp_path / "m.gguf", {}, "default", 2, registered)


@dataclass(frozen=True, kw_only=True)
class Told(Spec):
    """What the modules below are told: where they log, and at which arm they fail."""

    log: str
    raises: str = ""
    hangs: str = ""
    bad: str = ""
    signal: int = 11
    hungry: str = ""
    wrong: str = ""
    stood_still: float = 0.0


#: The head of a measured module.
HEAD = f"""
import os, sys, time
from dataclasses import dataclass
from kvtrial.measure.specs import Spec
{inspect.getsource(Told)}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A measured module that logs its order and kills itself when it comes to ``bad``."""
    (tmp_path / "measured.py").write_text(
        HEAD
        + textwrap.dedent(
            """
            from kvtrial.host import machine
            from kvtrial.measure.child import blamed, main
            def measure(spec, note):
                with open(spec.log, "a") as log:
                    log.write(",".join(spec.candidates) + "\\n")
                rows = []
                for place, name in enumerate(spec.candidates):
                    note(name)
                    if name == spec.raises:
                        with blamed(name, note):
                            raise ValueError("at step 40")
                    while name == spec.hangs:
                        time.sleep(1)
                    if name == spec.bad:
                        os.kill(os.getpid(), spec.signal)
                    if name == spec.hungry:
                        raise machine.NotEnoughMemory(f"{name} needs 9 bytes; 1 are available")
                    if name == spec.wrong:
                        raise SystemExit("half way")
                    rows.append({"candidate": name, "place": place, "metric": "m2/step_ms",
                                 "value": float(os.environ["OMP_NUM_THREADS"])})
                rows.append({"metric": "rotation/stood_still_s", "value": spec.stood_still})
                return rows
            if __name__ == "__main__":
                main(Told, measure, sys.argv)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "measured"


def started(log):
    return log.read_text().split() if log.exists() else []


def run(stage, module, log, count, names=("K0", "K1"), said=None, **spec):
    """Blocks of the cell; ``said`` collects why it is hopeless."""
    attempt = Journal(stage.run_dir, "m2").attempt()
    work = Work(
        module, lambda block, own, slow: Told(log=str(log), candidates=own, **spec), list(names)
    )
    plan = SamplingPlan(first=count, most=count, most_void=LIMITS["most"])
    with Progress("m2", {Block(CELL, n).name: 1.0 for n in range(count)}) as progress:
        ended = run_cells([CellRun(stage, attempt, work, CELL, plan)], progress)
    if said is not None:
        said.append(ended)
    return attempt


def test_blocks_run_once(stage, module, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # what a pipeline may export for the stage
    log = tmp_path / "log"
    run(stage, module, log, 2, ["K0", "K1", "K3"])
    assert started(log) == ["K0,K1,K3"] * 2
    run(stage, module, log, 2, ["K0", "K1", "K3"])
    assert len(started(log)) == 2, "finished blocks ran again"

    rows = Journal(stage.run_dir, "m2").all_rows()
    frame = events.to_frame(rows)
    steps = frame[frame["metric"] == "m2/step_ms"]
    assert set(steps["value"]) == {1.0}, "thread settings of the pipeline reached an arm"
    assert set(zip(steps["block"], steps["trial"])) == {(0, 0), (1, 0)}
    assert set(frame["context"]) == {512}
    assert set(frame["build_id"]) == {build.facts()["build_id"]}
    assert len(set(frame["protocol_sha256"])) == 1
    assert set(frame["binary_sha256"]) == {build.binary_sha256()}
    taken = frame[frame["metric"] == "block/taken_s"]["value"]
    assert len(taken) == 2 and (taken > 0).all()


def test_a_killed_stage_runs_only_what_is_missing(stage, module, tmp_path):
    log = tmp_path / "log"
    run(stage, module, log, 3)
    run(stage, module, log, 4)
    assert len(started(log)) == 4


def test_a_void_block_is_run_again_up_to_the_cap_and_every_run_is_kept(stage, module, tmp_path):
    """F1: a stop of 20 s inside a step makes the block void, and enters no average."""
    log, said = tmp_path / "log", []
    attempt = run(stage, module, log, 1, said=said, stood_still=20.0)
    assert len(started(log)) == LIMITS["most"] + 1
    ((_, why),) = said
    assert isinstance(why, Hopeless) and why.again
    assert "3 runs of its blocks were void; at most 2 are allowed" in why.reason
    frame = events.to_frame(attempt.rows())
    assert sorted(set(frame["trial"])) == [0, 1, 2]
    judged = validity.judge(frame, {"void": LIMITS})
    assert judged.summary == {"m2": {"512x1x1": {"valid": 0, "void": 3}}}
    assert judged.valid_rows.empty


def test_asking_again_goes_on_where_a_disturbed_cell_was_given_up(stage, module, tmp_path):
    log = tmp_path / "log"
    run(stage, module, log, 2, stood_still=20.0)
    said = []
    attempt = run(stage, module, log, 2, said=said, stood_still=0.1)
    assert said == [None]
    frame = events.to_frame(attempt.rows())
    assert validity.judge(frame, {"void": LIMITS}).summary["m2"]["512x1x1"] == {
        "valid": 2,
        "void": 3,
    }


def test_a_wait_inside_the_limit_is_no_reason(stage, module, tmp_path):
    log = tmp_path / "log"
    run(stage, module, log, 1, stood_still=0.5)
    assert len(started(log)) == 1


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"raises": "K1"}, "while it ran K1: ValueError: at step 40"),
        ({"hangs": "K1", "step_limit_s": 1.0}, "K1 hung: a step took more than 1 s"),
    ],
)
def test_an_arm_that_raises_or_hangs_costs_its_own_column(stage, module, tmp_path, how, text):
    log = tmp_path / "log"
    attempt = run(stage, module, log, 2, ["K0", "K1", "K3"], **how)
    frame = events.to_frame(attempt.rows())
    (said,) = frame.loc[frame["metric"] == "failed", "text"]
    assert text in said
    steps = frame[frame["metric"] == "m2/step_ms"]
    assert set(zip(steps["block"], steps["candidate"])) == {
        (b, c) for b in range(2) for c in ("K0", "K3")
    }
    assert started(log) == ["K0,K1,K3", "K0,K3", "K0,K3"]


def test_a_process_that_somebody_stopped_does_not_hang(module, tmp_path):
    """SIGSTOP, or a paused machine: the time that it stood still is not held against its step."""
    import threading

    log = tmp_path / "log"
    spec = Told(log=str(log), candidates=["K1"], hangs="K1", step_limit_s=2.0)
    pids: list[int] = []
    real = child.subprocess.Popen

    class Watched(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            pids.append(self.pid)

    def stop_and_go_on():
        while not (pids and log.exists()):
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(4)
        alive.append(Path(f"/proc/{pids[0]}").exists() and not ended)
        os.kill(pids[0], signal.SIGCONT)

    ended, alive = [], []
    child.subprocess.Popen = Watched
    try:
        thread = threading.Thread(target=stop_and_go_on)
        thread.start()
        with pytest.raises(child.ChildDied, match="K1 hung"):
            child.run(module, spec, 1)
        ended.append(True)
        thread.join()
    finally:
        child.subprocess.Popen = real
    assert alive == [True]


def test_groups_of_a_block_are_processes_of_their_own(stage, module, tmp_path):
    log = tmp_path / "log"
    attempt = Journal(stage.run_dir, "m2").attempt()
    work = Work(
        module,
        lambda block, own, slow: Told(log=str(log), candidates=own),
        ["K0", "K1", "K3"],
        lambda cell, names: [["K0", "K1"], ["K1", "K3"]],
    )
    plan = SamplingPlan(first=1, most=1)
    with Progress("m2", {}) as progress:
        run_cells([CellRun(stage, attempt, work, CELL, plan)], progress)
    assert started(log) == ["K0,K1", "K1,K3"]
    frame = events.to_frame(attempt.rows())
    steps = frame[frame["metric"] == "m2/step_ms"]
    assert set(zip(steps["group"], steps["candidate"])) == {
        (0, "K0"),
        (0, "K1"),
        (1, "K1"),
        (1, "K3"),
    }


def test_the_slow_arms_of_a_first_block_are_told_to_the_others(stage, tmp_path, monkeypatch):
    told = []
    attempt = Journal(stage.run_dir, "m2").attempt()

    def spec(block, names, slow):
        told.append(slow)
        return Spec(candidates=names)

    rows = [
        {"candidate": "K0", "metric": "rotation/slow", "value": 1.0},
        {"candidate": "K1", "metric": "m2/step_ms", "value": 1.0},
    ]
    monkeypatch.setattr(common.child, "run_survivors", lambda *a, **k: [dict(r) for r in rows])
    with Progress("m2", {}) as progress:
        for count in (2, 3):  # the second time from the journal
            plan = SamplingPlan(first=count, most=count)
            run_cells(
                [CellRun(stage, attempt, Work("m", spec, ["K0", "K1"]), CELL, plan)], progress
            )
    assert told == [None, ["K0"], ["K0"]]


def test_a_candidate_that_crashes_costs_its_own_column(stage, module, tmp_path, capsys):
    log = tmp_path / "log"
    attempt = run(stage, module, log, 3, ["K0", "K1", "K3"], bad="K1")
    frame = events.to_frame(attempt.rows())
    (text,) = frame.loc[frame["metric"] == "failed", "text"]
    assert "SIGSEGV while it ran K1" in text
    assert "K1 is out" in capsys.readouterr().err
    steps = frame[frame["metric"] == "m2/step_ms"]
    assert {(b, c) for b, c in zip(steps["block"], steps["candidate"])} == {
        (b, c) for b in range(3) for c in ("K0", "K3")
    }
    assert sum("K1" in line for line in started(log)) == 1


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_candidate_is_not_blamed_for_what_came_from_outside(stage, module, tmp_path, sent):
    """A kernel short of memory or a batch system ends whoever runs: the stage is to be given again."""
    with pytest.raises(StageError, match=f"{sent.name} while it ran K1"):
        run(stage, module, tmp_path / "log", 1, bad="K1", signal=int(sent))
    rows = Journal(stage.run_dir, "m2").attempt().rows()
    assert [r for r in rows if r["metric"] == "failed"] == []
    run(stage, module, tmp_path / "log", 1)


def test_code_that_changes_while_a_stage_runs_blames_nobody(stage, module, tmp_path, monkeypatch):
    """The processes of a stage all run what it began with; what is finished stays."""
    run(stage, module, tmp_path / "log", 1)
    with monkeypatch.context() as patch:
        patch.setattr(build, "fingerprint", lambda: "before the change")
        with pytest.raises(StageError, match="have changed since the stage began"):
            run(stage, module, tmp_path / "log", 2)
    attempt = run(stage, module, tmp_path / "log", 2)
    assert len(started(tmp_path / "log")) == 2
    assert [r for r in attempt.rows() if r["metric"] == "failed"] == []


def test_one_that_takes_the_process_down_is_left_out_of_what_others_were_asked(module, tmp_path):
    log, out = tmp_path / "log", []
    spec = Told(log=str(log), candidates=["K0", "K1"], bad="K0")
    rows = child.run_survivors(module, spec, 1, left_out=lambda *args: out.append(args))
    assert {r["candidate"] for r in rows if "candidate" in r} == {"K1"}
    ((name, what),) = out
    assert name == "K0" and "SIGSEGV while it ran K0" in what
    assert started(log) == ["K0,K1", "K1"]


def test_too_little_memory_stops_the_stage_and_blames_no_arm(stage, module, tmp_path):
    """Case: an arm whose pool did not fit beside the others' was ineligible, and left the comparison."""
    with pytest.raises(StageError, match="K3 needs 9 bytes; 1 are available"):
        run(stage, module, tmp_path / "log", 1, ["K0", "K3"], hungry="K3")
    with pytest.raises(machine.NotEnoughMemory):
        child.failed_row(machine.NotEnoughMemory("1 byte"))


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A measured module whose arms step by turns, and write down when: one that is ``bad`` dies at its third."""
    (tmp_path / "by_turns.py").write_text(
        HEAD
        + textwrap.dedent(
            """
            from kvtrial.measure.baton import Baton
            from kvtrial.measure.child import main
            from kvtrial.measure.rotation import orders
            def measure(spec, note):
                (own,), baton, made = spec.own, Baton(**vars(spec.baton)), 0
                for number, order in enumerate(orders(spec.candidates, 8, seed=5)):
                    for name in order:
                        if name != own:
                            baton.give(number)
                            continue
                        baton.take(number)
                        note(own)
                        made += 1
                        if own == spec.bad and made == 3:
                            os.kill(os.getpid(), spec.signal)
                        with open(spec.log, "a") as log:
                            log.write(f"{number}{own} ")
                        note("")
                return [{"candidate": own, "metric": "m2/step_ms", "value": float(made)}]
            if __name__ == "__main__":
                main(Told, measure, sys.argv)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Told(
        log=str(tmp_path / "log"),
        candidates=["K1", "K1@3f2a1bc"],
        pythons={"K1": sys.executable, "K1@3f2a1bc": sys.executable},
    )


def test_two_processes_step_by_turns_in_the_order_of_the_rotation(pair, tmp_path):
    rows = child.run("by_turns", pair, 1)
    assert [(r["candidate"], r["value"]) for r in rows] == [("K1", 8.0), ("K1@3f2a1bc", 8.0)]
    made = (tmp_path / "log").read_text().split()
    expected = rotation.orders(pair.candidates, 8, seed=5)
    assert made == [f"{number}{name}" for number, order in enumerate(expected) for name in order]


def test_the_side_that_died_is_blamed_and_the_other_does_not_wait_for_ever(pair):
    with pytest.raises(child.ChildDied, match="SIGSEGV while it ran K1@3f2a1bc") as caught:
        child.run("by_turns", replace(pair, bad="K1@3f2a1bc"), 1)
    assert caught.value.candidate == "K1@3f2a1bc"


def test_sides_that_are_not_at_the_same_step_are_no_pair():
    there, back = os.pipe(), os.pipe()
    first, second = Baton(back[0], there[1], held=True), Baton(there[0], back[1], held=False)
    first.take(0)
    first.give(1)
    first.give(1)  # it has gone already
    second.take(1)
    second.give(2)
    with pytest.raises(OutOfStep, match="step 3 was to come, and the other side is at 2"):
        first.take(3)
    os.close(back[1])
    with pytest.raises(PartnerGone):
        first.take(4)
    os.close(there[0])
    first = Baton(back[0], there[1], held=True)
    with pytest.raises(PartnerGone):
        first.give(5)
    os.close(back[0])
    os.close(there[1])


def test_a_process_that_ends_badly_says_how(stage, module, tmp_path):
    with pytest.raises(child.ChildDied, match=r"code 1 while it ran K3: half way") as caught:
        child.run(module, Told(log=str(tmp_path / "log"), candidates=["K3"], wrong="K3"), 1)
    assert caught.value.candidate == "K3"
    with pytest.raises(StageError, match="No module named"):
        run(stage, "kvtrial.measure.nothing", tmp_path, 1, ["K0"])


def test_a_run_has_one_model_file(tmp_path):
    """Case: a file put in the other's place was measured under the run's name and the old hash."""
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"one")
    known = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"  # sha256sum of "one"
    common.refuse_another_model(tmp_path / "run-a", known, gguf)
    gguf.write_bytes(b"another")
    with pytest.raises(StageError, match=r"run-a is a run of 7692c3ad3540…: put that file back"):
        common.refuse_another_model(tmp_path / "run-a", known, gguf)


def test_an_arm_that_raises_is_named_once_and_the_block_is_kept(stage, monkeypatch, capfd):
    """Case: what a peer or an arm had raised stood in the events alone, and the log said nothing."""
    failed = {"candidate": "K9", "metric": "failed", "text": "WrongAnswer: far off"}
    monkeypatch.setattr(common, "exclusive", lambda what: _nothing())
    monkeypatch.setattr(common.child, "run_survivors", lambda *a, **k: [failed])
    with stage.attempt() as attempt:
        for _ in range(3):
            rows = common.run_arms(
                stage, attempt, "module", Spec(candidates=["K9"]), {"threads": 1}
            )
            assert rows == [failed]
    assert capfd.readouterr().err.count("m2: K9 failed: WrongAnswer: far off") == 1


def test_a_stage_stopped_while_mlflow_is_written_to_measures_nothing_again(stage, monkeypatch):
    """Case: Ctrl-C behind m2's last block opened another attempt, and all blocks with it."""
    monkeypatch.setattr(common, "exclusive", lambda what: _nothing())

    def main():
        with stage.attempt() as attempt:
            numbers.append(attempt.number)
            if not attempt.has("u"):
                attempt.put("u", [stage.event("m2/step_ms", value=1.0)])
        return 0

    def interrupted(*_):
        raise KeyboardInterrupt

    numbers = []
    monkeypatch.setattr(common.tracking, "begin_stage", lambda *a: None)
    monkeypatch.setattr(sys, "argv", ["m2", "--run-dir", str(stage.run_dir)])
    for finish, code in ((interrupted, 130), (lambda *a: None, 0), (lambda *a: None, 0)):
        monkeypatch.setattr(common.tracking, "finish_stage", finish)
        monkeypatch.setenv("KVTRIAL_PIPELINE_STARTED", repr(time.time() + 60))
        with pytest.raises(SystemExit) as ended:
            common.exit_tracked("m2", main)
        assert ended.value.code == code
    assert numbers == [1, 1, 2]


def test_an_attempt_is_published_and_forcing_opens_the_next(stage, monkeypatch):
    monkeypatch.setattr(common, "exclusive", lambda what: _nothing())
    for number in (1, 2):
        monkeypatch.setenv("KVTRIAL_PIPELINE_STARTED", repr(time.time() + 60))
        with stage.attempt() as attempt:
            assert attempt.number == number
            attempt.put("u", [stage.event("m2/step_ms", value=float(number))])
        Journal(stage.run_dir, "m2").publish()
    frame = events.read_run(stage.run_dir)
    assert list(frame.loc[frame["metric"] == "m2/step_ms", "value"]) == [1.0, 2.0]
    assert list(frame.loc[frame["metric"] == "attempt/complete", "attempt"]) == [1, 2]


def test_two_pipelines_on_one_run_do_a_stage_once(stage, monkeypatch):
    """The second has waited for the first, or planned the stage before the first had finished it."""
    monkeypatch.setattr(common, "exclusive", lambda what: _nothing())
    monkeypatch.setenv("KVTRIAL_PIPELINE_STARTED", repr(time.time() - 60))  # both
    with stage.attempt() as attempt:
        attempt.put("u", [stage.event("m2/step_ms", value=1.0)])
    written = stage.run_dir / "events" / "m2.parquet"
    written.unlink()  # as Snakemake does before the second one's job
    with pytest.raises(DoneElsewhere, match="another process has finished m2"), stage.attempt():
        raise AssertionError("it was done again")
    assert written.is_file()
    Journal(stage.run_dir, "m2").publish()
    # A later pipeline that runs the stage was told to force it.
    monkeypatch.setenv("KVTRIAL_PIPELINE_STARTED", repr(time.time() + 60))
    with stage.attempt() as attempt:
        assert attempt.number == 2


def test_what_another_pipeline_has_done_is_no_failure(monkeypatch, tmp_path, capsys):
    def main():
        raise DoneElsewhere("another process has finished m2")

    for verb in ("begin_stage", "leave_stage"):
        monkeypatch.setattr(common.tracking, verb, lambda *a: None)
    monkeypatch.setattr(sys, "argv", ["m2", "--run-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        common.exit_tracked("m2", main)
    assert ended.value.code == 0
    assert "m2: another process has finished m2" in capsys.readouterr().err


def test_a_stage_that_fails_keeps_its_units_and_writes_no_table(stage, monkeypatch):
    monkeypatch.setattr(common, "exclusive", lambda what: _nothing())
    with pytest.raises(RuntimeError, match="power"), stage.attempt() as attempt:
        attempt.put("u", [])
        raise RuntimeError("power cut")
    assert not (stage.run_dir / "events" / "m2.parquet").exists()
    with stage.attempt() as attempt:
        assert attempt.number == 1 and attempt.has("u")


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_who_did_not_pass_conformance_is_not_timed(stage, monkeypatch):
    class Known:
        not_built = None

    monkeypatch.setattr(common.candidates, "get", lambda name: Known)
    folder = stage.run_dir / "conformance"
    folder.mkdir(parents=True)
    (folder / "K0.json").write_text(json.dumps({"passed": True, "failed": [], "crash": ""}))
    (folder / "K1.json").write_text(json.dumps({"passed": False, "failed": ["KvX"], "crash": ""}))
    attempt = Journal(stage.run_dir, "m2").attempt()
    assert stage.runnable(attempt, timed=True) == ["K0"]
    reasons = {r["candidate"]: r["text"] for r in attempt.rows()}
    assert reasons == {"K1": "conformance failed: KvX", "K3": "conformance was not run"}
    assert stage.runnable(attempt, timed=False) == ["K0", "K1", "K3"]


def test_the_child_gets_the_same_surroundings_whatever_the_parent_has(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/libother.so")
    monkeypatch.setenv("MKL_NUM_THREADS", "16")
    found = child.environment(2)
    assert "LD_PRELOAD" not in found
    assert found["MKL_NUM_THREADS"] == found["OPENBLAS_NUM_THREADS"] == "2"
    assert found["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (89, "89 s"), (100, "2 min"), (3900, "1 h 05 min")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
