"""A git ref of a candidate's package: built beside the checkout, found again, measured by turns; or why not."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess

import pytest
from test_trying import ROOT, small  # noqa: F401

from kvtrial.contract import UnknownCandidate
from kvtrial.tools import ref_build, tried, trying
from kvtrial.tools.ref_build import NoSuchRef, NotACheckout, RefBuildFailed, RefTooOld

NAME = "FlatNumpy"


def git(folder, *words):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The example store in a git checkout, below its top, and installed from there as far as metadata say."""
    top = tmp_path / "a checkout"
    shutil.copytree(ROOT / "examples" / "numpy_store", top / "store")
    git(tmp_path, "init", "-q", "-b", "main", str(top))
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "first")
    info = tmp_path / "site" / "kvtrial_numpy-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtrial-numpy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        f"[kvtrial.candidates]\n{NAME} = kvtrial_numpy:FLAT_NUMPY\n"
    )
    (info / "direct_url.json").write_text(json.dumps({"url": (top / "store").as_uri()}))
    (info / "RECORD").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("KVTRIAL_LOCK", str(tmp_path / "machine.lock"))
    return top


def test_a_ref_is_built_once_and_measured_by_turns(checkout, small, monkeypatch, capfd):  # noqa: F811
    said = []
    built = ref_build.at_ref("main", NAME, said.append)
    commit = git(checkout, "rev-parse", "HEAD")
    assert (built.commit, built.arm, len(said)) == (commit, f"{NAME}@{commit[:7]}", 1)
    assert ref_build.at_ref("HEAD", NAME, said.append).python == built.python
    assert len(said) == 1  # found
    assert git(checkout, "status", "--porcelain", "--ignored") == ""
    assert git(checkout, "worktree", "list").count("\n") == 0

    found = trying.measure(
        "K1", model="tiny-llama", against=NAME, against_ref="main", contexts=[64], count=2
    )
    assert (found["against"], found["ref"], found["commit"]) == (built.arm, "main", commit)
    (cell,) = found["cells"]
    assert cell["failed"] == []
    assert (cell["decode"]["n_blocks"], cell["attention"]["n_blocks"]) == (2, 2)
    assert set(cell["decode"]["arms"]) == {"K1", built.arm}
    # FP32 rows on both sides and one forced stream, but another order of sums.
    assert cell["decode"]["agreement"]["bitwise"] is False
    assert f"its logits are not the same as {built.arm}'s" in tried.markdown(found)
    assert f"2 of 2: decoding, with {built.arm} by turns" in capfd.readouterr().err


def test_a_ref_that_does_not_build_says_the_builds_last_words(checkout, tmp_path):
    project = checkout / "store" / "pyproject.toml"
    project.write_text(project.read_text().replace("wheel.cmake = false", "wheel.cmake = 7"))
    git(checkout, "commit", "-qam", "broken")
    with pytest.raises(
        RefBuildFailed, match=r"kvtrial-numpy at HEAD \(\w{7}\) does not build here:\n"
    ) as e:
        ref_build.at_ref("HEAD", NAME, lambda text: None)
    # CMake's own words, without what pip says around them.
    assert "does not appear to contain CMakeLists.txt" in str(e.value)
    assert str(e.value).endswith("*** CMake configuration failed")
    assert not list((tmp_path / "results" / "refs").iterdir())  # nothing half built is left


def test_what_is_no_ref_of_a_checkout_is_named(checkout, tmp_path):
    with pytest.raises(NoSuchRef, match=r"no git ref 'v9' in .*a checkout; give a branch, a tag"):
        ref_build.at_ref("v9", NAME, print)
    with pytest.raises(NoSuchRef, match="no git ref '--help'"):
        ref_build.at_ref("--help", NAME, print)
    with pytest.raises(UnknownCandidate, match="no candidate 'Nobody' in any package"):
        ref_build.at_ref("main", "Nobody", print)
    shutil.rmtree(checkout / ".git")
    with pytest.raises(NotACheckout, match="is no git checkout that can be read"):
        ref_build.at_ref("main", NAME, print)
    (tmp_path / "site" / "kvtrial_numpy-0.1.0.dist-info" / "direct_url.json").unlink()
    with pytest.raises(
        NotACheckout, match=r"kvtrial-numpy 0\.1\.0, which was not installed from a folder"
    ):
        ref_build.at_ref("main", NAME, print)


def test_a_ref_of_another_interface_is_refused_before_it_is_built(checkout):
    refuse = functools.partial(ref_build._refuse_too_old, checkout, named="kvtrial at v1 (3f2a1bc)")
    with pytest.raises(
        RefTooOld, match="does not know how two builds take turns; this build has interface"
    ):
        refuse(commit="HEAD", inside="")
    known = checkout / "src" / "kvtrial" / "measure" / "baton.py"
    known.parent.mkdir(parents=True)
    for number in (ref_build.INTERFACE, ref_build.INTERFACE + 1):
        known.write_text(f"INTERFACE = {number}\n")
        git(checkout, "add", "-A")
        git(checkout, "commit", "-qm", f"interface {number}")
    refuse(commit="HEAD~1", inside="")
    with pytest.raises(RefTooOld, match=f"has interface {ref_build.INTERFACE + 1}; this build has"):
        refuse(commit="HEAD", inside="")


def test_of_a_builds_output_the_compilers_words_are_kept():
    said = [
        "Processing x",
        *(f"line {n}" for n in range(40)),
        "k.c:3: error: no",
        "",
        "[end of output]",
    ]
    shown = ref_build.last_words("\n".join([*said, "note: this is an issue with the package"]))
    assert shown.splitlines()[-1] == "k.c:3: error: no"
    assert len(shown.splitlines()) == 15
