"""The command's parser, the scripts made from it, and `kvtrial run`'s command line."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys

import pytest

from kvtrial.host import paths
from kvtrial.run.layout import ConfigError
from kvtrial.tools import command, completion, conforming, pipeline, verbs

#: What a shell is asked here: the words that it offers behind `kvtrial try --ag`.
BASH = """
source {script}
COMP_WORDS=(kvtrial {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _kvtrial
echo "${{COMPREPLY[@]}}"
"""


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        command.main(list(words))
    return ended.value.code, capsys.readouterr().err


def test_an_unknown_word_says_which_was_meant(capsys):
    code, err = said(capsys, "verdct")
    assert code == 2 and err.rstrip().endswith("; did you mean verdict?")
    assert "did you mean" not in said(capsys, "zzz")[1]
    assert said(capsys, "completion", "bsh")[1].rstrip().endswith("; did you mean bash?")


def test_help_says_what_holds_without_an_option(capsys):
    with pytest.raises(SystemExit):
        command.main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("tokens to make (default: 64)", "of the decode (default: 1)",
                 "(default: smollm2-135m-instruct-q4_1)"):  # fmt: skip
        assert part in text
    assert "(default: None)" not in text and "(default: False)" not in text


def test_a_text_is_read_from_stdin(monkeypatch):
    import kvtrial.tools.generate as generate

    asked = []

    class Stop(Exception):
        pass

    def continuation(text, **options):
        asked.append(text)
        raise Stop

    monkeypatch.setattr(generate, "Continuation", continuation)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\n"))
    for words in (["-"], ["minus"]):
        with pytest.raises(Stop):
            command.main(["generate", *words])
    assert asked == ["Once upon\n", "minus"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("try --against", {"--against", "--against-ref"}),
        ("cold ver", {"verify"}),
        ("verd", {"verdict"}),
        ("completion ''", {*completion.SHELLS, "--help"}),
        ("run --profile ''", {"default", "full"}),
        ("try K2", {"K2", "K2T"}),
        ("try MINE --against K3", {"K3", "K3T"}),
        ("generate x --model smol", {"smollm2-135m-instruct-q4_1"}),
        ("compare a-run an", {"another-run"}),
    ],
)
def test_bash_completes_verbs_options_words_and_names(tmp_path, monkeypatch, words, offered):
    script = tmp_path / "kvtrial.bash"
    script.write_text(completion.script("bash", command.parser()), encoding="utf-8")
    program = tmp_path / "kvtrial"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvtrial "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for run in ("a-run", "another-run"):
        (tmp_path / "results" / run).mkdir(parents=True)
        (tmp_path / "results" / run / "protocol.json").touch()
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    asked = BASH.format(script=script, words=words)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


def test_names_that_cannot_be_read_are_none(tmp_path, monkeypatch):
    (tmp_path / "models.yaml").write_text("models: [", encoding="utf-8")
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    assert completion.names("MODEL") == completion.names("no kind") == []


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_verb_and_option_is_in_each_script(shell):
    text = completion.script(shell, command.parser())
    for verb in completion.verbs(command.parser()):
        assert verb.name in text
        for option in verb.options:
            assert option.removeprefix("--") in text
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=text, text=True, check=True)


# --------------------------------------------------------------------------------------------------
# kvtrial run


def after(words, option):
    return words[words.index(option) + 1]


def test_in_a_checkout_the_pipeline_is_its_own():
    root = paths.checkout()
    words = pipeline.command(protocol="smoke", model="tiny-llama", cores=2)
    assert words[:4] == [sys.executable, "-m", "snakemake", "show"]
    assert after(words, "--directory") == str(root)
    assert after(words, "--snakefile") == str(root / "workflow" / "Snakefile")
    # Relative as config.yaml has it: another spelling would be another input, and run stages again.
    assert words[-3:] == ["--config", "model=tiny-llama", "protocol=config/protocol-smoke.yaml"]
    assert "--config" not in pipeline.command() and paths.how_to("adopt") == "make adopt"
    words = pipeline.command(["adopt"], store="K2", force=True)
    assert words[-3:] == ["--config", "store=K2", "force=true"]


def test_away_from_a_checkout_everything_is_the_packages_and_results_are_here(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(paths, "checkout", lambda: None)
    monkeypatch.delenv("KVTRIAL_RESULTS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    words = pipeline.command(["report"], forcerun=["m1"], dry_run=True)
    assert words[3] == "report" and after(words, "--forcerun") == "m1" and "--dry-run" in words
    assert after(words, "--directory") == str(tmp_path)
    assert after(words, "--snakefile") == str(paths.PACKAGE / "workflow" / "Snakefile")
    assert words[-1] == f"protocol={paths.PACKAGE / 'config' / 'protocol.yaml'}"
    assert paths.results_dir() == tmp_path / "home" / ".local" / "share" / "kvtrial" / "results"
    assert paths.how_to() == "kvtrial run" and paths.how_to("report") == "kvtrial run report"
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    pipeline.run(words)
    ((program, given, variables),) = became
    assert (program, given) == (sys.executable, words)
    assert variables["KVTRIAL_RESULTS"] == str(tmp_path / "results")
    # What was made there is found by the other commands.
    assert paths.results_dir() == tmp_path / "results"


def test_a_protocol_that_is_not_there_is_said():
    with pytest.raises(ConfigError, match="no protocol 'nope'; give the path of a registration"):
        pipeline.command(protocol="nope")


# --------------------------------------------------------------------------------------------------
# kvtrial conformance, kvtrial candidates


def test_the_suite_needs_no_file_and_ends_with_a_summary(capfd):
    words = ["conformance", "K0", "--page-tokens", "16", "--tests", "AttentionMasksHoles",
             "KvAppendRequiresOwner"]  # fmt: skip
    assert command.main(words) == 0
    *tests, summary = capfd.readouterr().out.splitlines()
    assert [line.split()[:3] for line in tests] == [
        ["passed", "P=16", "KvAppendRequiresOwner"],
        ["gap", "P=16", "AttentionMasksHoles"],
    ]
    assert summary == "K0: 1 passed, 0 failed, 1 gap"


def test_a_crash_and_a_failure_are_in_the_summary():
    outcomes = {"A": {"16": {"status": "passed"}, "32": {"status": "failed"}}}
    found = {"candidate": "X", "outcomes": outcomes, "failed": ["A"], "crash": ""}
    assert conforming.summary(found) == "X: 1 passed, 1 failed, 0 gaps (A)"
    crash = "crashed in B at P=16: ended by SIGSEGV: File x"
    assert conforming.summary({**found, "outcomes": {}, "failed": [], "crash": crash}) == (
        f"X: 0 passed, 0 failed, 0 gaps; {crash}"
    )


def test_a_test_that_is_not_there_says_which_was_meant():
    with pytest.raises(ConfigError, match="did you mean AttentionMasksHoles"):
        conforming.try_suite("K0", (16,), ["AttentionMaskHoles"])


def test_candidates_for_programs(capsys):
    import json

    assert command.main(["candidates", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["K2"]["profile"] == "fp16" and rows["K3"]["language"] == "Rust"
    assert set(rows["K1"]) == {"name", "title", "profile", "language", "state"}


def test_every_verb_is_a_function_of_its_name():
    for verb in completion.verbs(command.parser()):
        function = getattr(verbs, {"try": "try_"}.get(verb.name, verb.name))
        assert function.__doc__.startswith(f"kvtrial {verb.name}")
