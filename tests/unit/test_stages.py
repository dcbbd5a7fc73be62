"""The stages after measurement: from events to verdict.json, and from there to what is adopted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import shown_trial
import yaml
from shown_trial import ARMS, steady

from kvtrial.conformance import TESTS
from kvtrial.host import machine, selection
from kvtrial.measure import exclusive
from kvtrial.run import events
from kvtrial.stages import conformance, manifest
from kvtrial.stages.after import adopt
from kvtrial.stages.after.verdict import write_verdict
from kvtrial.stages.common import StageError
from kvtrial.stages.progress import Progress
from kvtrial.tools import command

#: What to run is an FP16 arm, and Cython stays; and a trial that Rust wins.
KEEPS = steady(**ARMS)
RUST_WINS = steady(**{**ARMS, "K3": 10.0})


def finished_run(results: Path, step_ms: dict, name: str = "run-a") -> Path:
    """A run's folder as its measuring stages leave it."""
    facts = {"run_id": name, "machine": machine.machine_class()}
    table = shown_trial.trial(step_ms, facts=facts)
    run_dir = results / name
    for stage, rows in table.groupby("stage"):
        events.write(rows, run_dir / "events" / f"{stage}.parquet")
    (run_dir / "protocol.json").write_text(json.dumps(shown_trial.FEW), encoding="utf-8")
    return run_dir


def decided_run(results: Path, step_ms: dict, name: str = "run-a") -> Path:
    """The same with its verdict."""
    run_dir = finished_run(results, step_ms, name)
    with shown_trial.evidence():
        write_verdict(run_dir)
    return run_dir


def test_what_a_run_was_begun_with_stays(tmp_path, monkeypatch):
    """Snakemake removes a manifest before it has it made again; the run is the same one."""
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"one")
    monkeypatch.setattr(manifest.machine, "usable_cpus", lambda: 8)
    first = manifest.begin(tmp_path / "run", gguf)
    monkeypatch.setattr(manifest.machine, "usable_cpus", lambda: 4)
    assert manifest.begin(tmp_path / "run", gguf) == first
    assert first["usable_cpus"] == 8
    gguf.write_bytes(b"another")
    with pytest.raises(StageError, match="is a run of 7692c3ad3540"):  # sha256sum of "one"
        manifest.begin(tmp_path / "run", gguf)


def test_the_verdict_is_derived_again_byte_for_byte(tmp_path, monkeypatch, capsys):
    run_dir = decided_run(tmp_path, KEEPS)
    first = (run_dir / "verdict.json").read_bytes()
    assert json.loads(first)["run"]["store"] == "K2T"
    assert str(tmp_path) not in first.decode()
    (run_dir / "verdict.json").unlink()
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path))
    with shown_trial.evidence():
        assert command.main(["decide", "run-a"]) == 0
    assert (run_dir / "verdict.json").read_bytes() == first
    assert "What to run: K2T (FP16)" in capsys.readouterr().out


def test_a_verdict_is_derived_again_on_a_machine_without_candidates(tmp_path):
    """A fresh process in which no candidate, kernel, engine, probe or MLflow can be imported. Nothing is said
    of parity there, so the verdict is INCONCLUSIVE, which has a code of its own."""
    run_dir = finished_run(tmp_path, KEEPS)
    write_verdict(run_dir)
    first = (run_dir / "verdict.json").read_bytes()
    (run_dir / "verdict.json").unlink()
    code = """
import sys
from importlib.abc import MetaPathFinder
class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        native = parts[0] == "kvtrial" and parts[-1].startswith("_") and parts[-1][1:2] != "_"
        ours = ("candidates", "hot", "cold", "conformance", "reference")
        if name.split(".")[0] == "mlflow" or native or parts[:1] == ["kvtrial"] and parts[1:2] and (
            parts[1] in ours
        ):
            raise ImportError(f"{name} is not on this machine")
sys.meta_path.insert(0, Refuse())
from kvtrial.tools import command
sys.exit(command.main(["decide", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 4, done.stderr
    assert (run_dir / "verdict.json").read_bytes() == first
    assert "What to run: undecided" in done.stdout


def adopted(run_dir: Path, folder: Path, *more: str) -> dict:
    arguments = ["--run-dir", run_dir, "--selection", folder / "selection.yaml"]
    assert adopt.main([*map(str, arguments), *more]) == 0
    return yaml.safe_load((folder / "selection.yaml").read_text(encoding="utf-8"))


def own(adopted: dict) -> dict:
    """This machine's entry for the shape of the trial."""
    return adopted[machine.machine_class()]["9q3kv"]


SHAPE = {"q_heads": 9, "kv_heads": 3, "head_dim": 64}


def test_a_reduced_profile_becomes_the_default_and_fp32_stays(tmp_path, capsys):
    run_dir = decided_run(tmp_path, KEEPS)
    here = machine.machine_class()
    (tmp_path / "selection.yaml").write_text(
        f"other-machine: {{9q3kv: {{default: K1}}}}\n{here}: {{14q2kv: {{default: K1T}}}}\n"
    )
    chosen = adopted(run_dir, tmp_path)
    assert chosen["other-machine"] == {"9q3kv": {"default": "K1"}}
    assert chosen[here]["14q2kv"] == {"default": "K1T"}
    assert own(chosen) == {
        "default": "K2T",
        "profile": "fp16",
        "fp32": "K1",
        "reference": "K1",
        "retired": ["K3", "K3T", "K4"],
        "cold": None,
        "run_id": "run-a",
    }
    said = capsys.readouterr().out
    assert f"adopted from run-a, for {here} and models of 9q3kv:" in said
    assert "  open_store(): K1 -> K2T\n  its numerical profile: fp32 -> fp16\n" in said
    assert '  open_store(profile="fp32"): K1\n' in said
    assert "  retired: none -> K3, K3T, K4\n" in said
    assert "session-state.md, " in said
    page = (run_dir / "session-state.md").read_text(encoding="utf-8")
    assert "| `open_store()`, the default | **K2T** (fp16) | K2T (fp16) decodes 1.43x" in page
    assert '| `open_store(profile="fp32")` | **K1** (fp32) | KEEP (ruled out): K3 runs at' in page
    assert "| K1 | 49.9 | 49.9 | 49.9 | - | 46080 | 23301 | - | FP32 arm |" in page
    record = (run_dir / "0006-hot-and-cold-kv-tiers.md").read_text("utf-8")
    places = [
        record.index(f"{question}: **{answer}**")
        for question, answer in (
            ("What to run", "K2T (FP16)"),
            ("Which language", "KEEP (ruled out): K1"),
            ("Which cold store", "undecided"),
        )
    ]
    assert places == sorted(places)


def test_adopting_rust_keeps_k1_as_reference_and_retires_k0(tmp_path):
    chosen = own(adopted(decided_run(tmp_path, RUST_WINS), tmp_path))
    assert (chosen["default"], chosen["profile"], chosen["fp32"]) == ("K3", "fp32", "K3")
    assert (chosen["reference"], chosen["retired"]) == ("K1", ["K0"])


def test_what_was_adopted_can_be_undone_with_the_command_that_is_said(tmp_path, capsys):
    """Also after the same verdict was adopted twice: then the first one's `before` counts."""
    before = decided_run(tmp_path, RUST_WINS, "run-a")
    adopted(before, tmp_path)
    wanted = (tmp_path / "selection.yaml").read_text(encoding="utf-8")
    after = decided_run(tmp_path, KEEPS, "run-b")
    adopted(after, tmp_path)
    adopted(after, tmp_path)
    said = capsys.readouterr().out
    (undo,) = {line for line in said.splitlines() if line.startswith("undo: ") and "run-b" in line}
    program, *arguments = shlex.split(undo.removeprefix("undo: python -m "))
    assert program == adopt.__name__
    assert adopt.main(arguments) == 0
    assert (tmp_path / "selection.yaml").read_text(encoding="utf-8") == wanted
    assert "  open_store(): K2T -> K3\n" in capsys.readouterr().out
    with pytest.raises(adopt.NothingToAdopt, match="another verdict was adopted since"):
        adopt.main(arguments)


def test_undoing_the_first_adoption_leaves_the_default_before_any_verdict(tmp_path, monkeypatch):
    run_dir = decided_run(tmp_path, KEEPS)
    adopted(run_dir, tmp_path)
    monkeypatch.setenv("KVTRIAL_SELECTION", str(tmp_path / "selection.yaml"))
    assert selection.load(SHAPE).default == "K2T"
    assert selection.load({**SHAPE, "head_dim": 80}) == selection.Selection()  # not of its heads
    arguments = ["--undo", run_dir / "adopted.json", "--selection", tmp_path / "selection.yaml"]
    assert adopt.main([str(a) for a in arguments]) == 0
    assert selection.load(SHAPE) == selection.Selection()


def test_an_open_language_leaves_the_fp32_arm_and_retires_nobody(tmp_path):
    """What to run can be decided where the language can't."""
    run_dir = decided_run(tmp_path, KEEPS)
    path = run_dir / "verdict.json"
    verdict = json.loads(path.read_text(encoding="utf-8"))
    verdict["language"] |= {"outcome": "INCONCLUSIVE", "kind": None, "reason": "A1 is in doubt"}
    verdict["language"] |= {"adopted": None, "reference": None, "retired": []}
    path.write_text(json.dumps(verdict), encoding="utf-8")
    chosen = own(adopted(run_dir, tmp_path))
    assert (chosen["default"], chosen["fp32"], chosen["reference"]) == ("K2T", "K1", "K1")
    assert chosen["retired"] == []


def test_nothing_is_adopted_where_what_to_run_is_undecided(tmp_path):
    run_dir = finished_run(tmp_path, KEEPS)
    (run_dir / "events" / "aa.parquet").unlink()
    with shown_trial.evidence():
        write_verdict(run_dir)
    with pytest.raises(adopt.NothingToAdopt, match="what to run is undecided: "):
        adopted(run_dir, tmp_path)
    assert not (tmp_path / "selection.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"synthetic": True}, "m has random weights"),
        ({"protocol": "kvtrial-smoke"}, "protocol kvtrial-smoke shows that every stage runs"),
    ],
)
def test_random_weights_and_a_smoke_run_are_adopted_only_where_that_is_asked_for(
    tmp_path, capsys, changes, why
):
    run_dir = decided_run(tmp_path, KEEPS)
    path = run_dir / "verdict.json"
    verdict = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**verdict, **changes}), encoding="utf-8")
    with pytest.raises(adopt.NothingToAdopt, match=rf"{why}.*make adopt FORCE=1"):
        adopted(run_dir, tmp_path)
    assert not (tmp_path / "selection.yaml").exists()
    adopted(run_dir, tmp_path, "--force")
    assert f"note: {why}" in capsys.readouterr().out


def test_another_eligible_arm_can_be_the_default_and_is_not_retired_then(tmp_path):
    run_dir = decided_run(tmp_path, KEEPS)
    chosen = own(adopted(run_dir, tmp_path, "--store", "K3"))
    assert (chosen["default"], chosen["profile"], chosen["fp32"]) == ("K3", "fp32", "K3")
    assert chosen["retired"] == ["K3T", "K4"]
    page = (run_dir / "session-state.md").read_text(encoding="utf-8")
    assert "**K3** (fp32) | chosen by hand among the eligible; the verdict says K2T |" in page


@pytest.mark.parametrize(
    ("store", "why"),
    [("C0", "a control"), ("K1C", "not built"), ("K9", "no arm of this trial")],
)
def test_an_arm_that_may_not_win_is_no_default(tmp_path, store, why):
    with pytest.raises(
        adopt.NothingToAdopt, match=rf"the store to adopt is '{store}': {why}.*allowed: K2T, "
    ):
        adopted(decided_run(tmp_path, KEEPS), tmp_path, "--store", store)


def test_nothing_is_adopted_from_another_machine(tmp_path, monkeypatch):
    run_dir = decided_run(tmp_path, KEEPS)
    monkeypatch.setattr(machine, "machine_class", lambda: "aarch64-other-8c")
    with pytest.raises(adopt.NothingToAdopt, match="this is 'aarch64-other-8c'"):
        adopted(run_dir, tmp_path)


def test_outcomes_of_the_suite_become_events():
    document = {
        "candidate": "K1",
        "crash": "ended by SIGSEGV: nothing on stderr",
        "outcomes": {
            "KvFine": {"16": {"status": "passed", "detail": ""}},
            "KvBad": {"32": {"status": "failed", "detail": "why"}},
            "KvGap": {"64": {"status": "gap", "detail": "holes"}},
        },
    }
    table = events.to_frame(conformance.outcome_events(document))
    assert list(table["text"]) == [
        "KvFine@P16",
        "KvBad@P32",
        "KvGap@P64",
        "suite (ended by SIGSEGV: nothing on stderr)",
    ]
    assert list(table["value"].fillna(-1)) == [1, 0, -1, 0]
    assert set(table["candidate"]) == {"K1"}


def test_what_another_pipeline_removes_meanwhile_is_there_at_the_end(tmp_path, monkeypatch):
    """Case: two pipelines on one run; Snakemake removes the outputs as the second one's job begins."""
    registered = {**shown_trial.REGISTERED, "candidates": ["A2", "K1"]}
    registered.pop("control")
    (tmp_path / "protocol.json").write_text(json.dumps(registered), encoding="utf-8")
    monkeypatch.setattr(conformance.protocol, "load", lambda path: registered)
    folder = tmp_path / "conformance"

    monkeypatch.setenv("KVTRIAL_LOCK", str(tmp_path / "lock"))

    def suite(name, out, page_tokens, *, on_outcome):
        assert exclusive.held()  # nothing of another pipeline is timed beside it
        document = {"candidate": name, "passed": True, "failed": [], "crash": "", "outcomes": {}}
        conformance.isolated.write(out, document)
        (folder / "A2.json").unlink(missing_ok=True)
        return document

    monkeypatch.setattr(conformance.isolated, "run_isolated", suite)
    assert conformance.main(["--run-dir", str(tmp_path)]) == 0
    for name in ("A2", "K1"):
        assert json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["passed"]
    assert (tmp_path / "events" / "conformance.parquet").is_file()


def test_the_suite_says_which_candidate_and_page_size_is_done(tmp_path, monkeypatch, capsys):
    """One candidate passes, one ends half way through its second page size."""
    reached = {"K1": (16, 32), "K3": (16,)}

    def suite(name, out, page_tokens, *, on_outcome):
        for p in reached[name]:
            for test in TESTS:
                on_outcome(test.name, p)
        if name == "K3":
            on_outcome(TESTS[0].name, 32)
        return {
            "candidate": name,
            "passed": name == "K1",
            "failed": [],
            "crash": "" if name == "K1" else "ended by SIGSEGV: nothing on stderr",
            "outcomes": {},
        }

    monkeypatch.setattr(conformance.isolated, "run_isolated", suite)
    units = conformance.units(["K1", "K3"], (16, 32))
    with Progress("conformance", units) as progress:
        for name in ("K1", "K3"):
            conformance.try_candidate(name, tmp_path / f"{name}.json", (16, 32), progress)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", about")[0] for line in lines] == [
        "conformance: K1 at P=16 done, 25% of all",
        "conformance: K1 at P=32 done, 50% of all",
        "conformance: K1 passed",
        "conformance: K3 at P=16 done, 75% of all",
        "conformance: K3 at P=32 done (not finished), 100% of all",
        "conformance: K3 FAILED: ended by SIGSEGV: nothing on stderr",
    ]


def test_an_arm_without_a_usable_time_is_a_dash_in_the_written_pages(tmp_path):
    broken = {**KEEPS, "K5": {c: [float("nan")] * len(b) for c, b in KEEPS["K5"].items()}}
    adopted(decided_run(tmp_path, broken), tmp_path)
    text = (tmp_path / "run-a" / "session-state.md").read_text(encoding="utf-8")
    assert "| K5 | - | - | - | - | 12240 | 87724 | 0.021 | quality, speed |" in text
