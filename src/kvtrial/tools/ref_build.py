"""The package of a candidate as a git ref has it, built in a folder of its own.

The folder is an environment: it sees the packages that are installed here, all but the one that it builds itself.
So the code of the ref runs beside the code at work on, in another process, and the checkout is not touched. Builds
are kept in ``results/refs``, by commit, and may be removed at any time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from kvtrial.contract import CandidateNotBuilt, UnknownCandidate
from kvtrial.contract.arguments import shown
from kvtrial.host import build, paths
from kvtrial.measure.baton import INTERFACE
from kvtrial.measure.exclusive import exclusive
from kvtrial.run.layout import ConfigError

#: Where a ref of kvtrial says which interface its measured processes have.
_INTERFACE_FILE = "src/kvtrial/measure/baton.py"
#: Lines of a failed build that are shown.
_LAST_LINES = 15
#: Asked of the environment's own interpreter: what the candidate is there.
_QUESTION = """
import importlib.metadata, json, sys
from kvtrial import candidates
name, package = sys.argv[1:]
known = candidates.candidates()
found = known.get(name)
print(json.dumps({
    "known": list(known),
    "not_built": found.not_built if found else None,
    "layout": found.layout if found else "",
    "folder": str(importlib.metadata.distribution(package).locate_file("")),
}))
"""


class NotACheckout(ConfigError):
    """The candidate's package was not installed from a git checkout."""


class NoSuchRef(ConfigError):
    """The checkout has no such ref."""


class RefTooOld(ConfigError):
    """The ref can't take turns with this build."""


class RefBuildFailed(RuntimeError):
    """The ref does not build here; the message has the end of what the build said."""


@dataclass(frozen=True)
class RefBuild:
    """A built ref.

    Attributes
    ----------
    ref, commit : str
        As it was asked for, and the 40 digits that it meant.
    python : str
        The environment's interpreter.
    candidate : str
        Of the ref.
    layout : str
        The candidate's, there.
    """

    ref: str
    commit: str
    python: str
    candidate: str
    layout: str

    @property
    def arm(self) -> str:
        """Such as ``K1@3f2a1bc``."""
        return f"{self.candidate}@{self.commit[:7]}"


def at_ref(ref: str, candidate: str, say: Callable[[str], None]) -> RefBuild:
    """Build the package of a candidate at a ref, or find it built.

    Parameters
    ----------
    ref : str
        A branch, tag or commit of the checkout from which the package was installed.
    candidate : str
        Registered here and there.
    say : callable
        Gets a line before a build begins.

    Raises
    ------
    NotACheckout, NoSuchRef, RefTooOld, RefBuildFailed
    UnknownCandidate, CandidateNotBuilt
        Of the ref.
    """
    package, folder = _installed_from(candidate)
    top = Path(_git(folder, "rev-parse", "--show-toplevel"))
    inside = _git(folder, "rev-parse", "--show-prefix")
    try:
        commit = _git(top, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}")
    except NotACheckout:
        raise NoSuchRef(
            f"no git ref {shown(ref)} in {top}; give a branch, a tag or a commit, such as main or HEAD~1 (a "
            "shallow clone has its last commit alone: git fetch --unshallow)"
        ) from None
    named = f"{package} at {ref} ({commit[:7]})"
    if package == "kvtrial":
        _refuse_too_old(top, commit, inside, named)
    home = (
        paths.results_dir().resolve() / "refs" / f"{package}-{commit[:12]}-{_surroundings(package)}"
    )
    if not home.is_dir():
        with exclusive(f"build of {named}"):  # compilers would take the cores of what is measured
            say(f"building {named}; a minute or two, once")
            _build(top, commit, inside, package, home, named)
    return _asked(RefBuild(ref, commit, str(home / "bin" / "python"), candidate, ""), package, home)


def _installed_from(candidate: str) -> tuple[str, Path]:
    """The package that registers a candidate, and the folder that it was installed from."""
    for point in importlib.metadata.entry_points(group="kvtrial.candidates"):
        if point.name == candidate and point.dist is not None:
            package = point.dist.name
            said = json.loads(point.dist.read_text("direct_url.json") or "{}")
            address = urlparse(said.get("url", ""))
            if address.scheme == "file":
                return package, Path(url2pathname(address.path))
            raise NotACheckout(
                f"{candidate} comes from {package} {point.dist.version}, which was not installed from a folder: "
                "--against-ref needs a git checkout; install it from there (pip install --no-deps "
                "--no-build-isolation FOLDER)"
            )
    raise UnknownCandidate(f"no candidate {shown(candidate)} in any package")


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise NotACheckout("git is not here; --against-ref needs it: install git") from None
    except subprocess.CalledProcessError as error:
        raise NotACheckout(
            f"{folder} is no git checkout that can be read: {error.stderr.strip()}; --against-ref needs the "
            "one that the package was installed from"
        ) from None
    return done.stdout.strip()


def _refuse_too_old(top: Path, commit: str, inside: str, named: str) -> None:
    """A ref of kvtrial itself runs its own measured process, which has to know how a pair takes turns."""
    try:
        text = _git(top, "show", f"{commit}:{inside}{_INTERFACE_FILE}")
    except NotACheckout:
        text = ""
    said = re.search(r"^INTERFACE = (\d+)$", text, re.MULTILINE)
    if said is None or int(said[1]) != INTERFACE:
        has = f"has interface {said[1]}" if said else "does not know how two builds take turns"
        raise RefTooOld(
            f"{named} {has}; this build has interface {INTERFACE}, and both sides need the same: give a ref "
            "that has it, or check the older one out beside this one and compare two runs (kvtrial compare)"
        )


def _surroundings(package: str) -> str:
    """8 hex digits of what a build depends on beside its source: compilers, interpreter, environment, and
    kvtrial's own build where the package is another's."""
    own = "" if package == "kvtrial" else build.fingerprint()
    text = repr([sys.prefix, sys.version, sorted(build.toolchain().items()), own])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _build(top: Path, commit: str, inside: str, package: str, home: Path, named: str) -> None:
    """Make the environment beside its place, and put it there when it is whole."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=home.parent) as name:
        made, source = Path(name) / "environment", Path(name) / "source"
        source.mkdir()
        _unpack(top, commit, source)
        venv.EnvBuilder(symlinks=True).create(made)
        _share_packages(made, package)
        command = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install"]
        flags = ["--no-deps", "--no-build-isolation", "--no-input", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, *flags, str(source / inside)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        if done.returncode:
            raise RefBuildFailed(f"{named} does not build here:\n{last_words(done.stdout)}")
        try:
            made.rename(home)
        except OSError:  # another one was quicker
            if not home.is_dir():
                raise


def _unpack(top: Path, commit: str, into: Path) -> None:
    tar = subprocess.run(
        ["git", "-C", str(top), "archive", "--format=tar", commit],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        archive.extractall(into, filter="data")


def _share_packages(environment: Path, package: str) -> None:
    """Let an environment see what is installed here, but for ``package``.

    An editable install is a ``.pth`` file, which would come before the environment's own packages; those of others
    are copied, so that what is at work on there is seen as it is here.
    """
    target = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    own = {Path(file).name for file in importlib.metadata.files(package) or ()}
    folders = list(dict.fromkeys(_package_folders()))
    # "_" sorts before the letters: the folders are there when the others are read.
    lines = "".join(f"{folder}\n" for folder in folders)
    (target / "__kvtrial_shared.pth").write_text(lines, encoding="utf-8")
    for folder in folders:
        for path in folder.glob("*.pth"):
            if path.name not in own:
                shutil.copyfile(path, target / path.name)


def _package_folders() -> Iterator[Path]:
    for name in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if name and Path(name).is_dir():
            yield Path(name).resolve()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    for name in [*site.getsitepackages(), *user]:
        if Path(name).is_dir():
            yield Path(name)


def last_words(output: str) -> str:
    """The last lines of what a build said, without what pip says around them."""
    inner = output.partition("[end of output]")[0]
    lines = [line.rstrip() for line in inner.splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:])


def _asked(found: RefBuild, package: str, home: Path) -> RefBuild:
    """The same, with what the candidate is there; that it is there, and that the ref's own code answers."""
    done = subprocess.run(
        [found.python, "-P", "-c", _QUESTION, found.candidate, package],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    named = f"{package} at {found.ref} ({found.commit[:7]})"
    if done.returncode:
        raise RefBuildFailed(
            f"{named} was built and does not load:\n{last_words(done.stderr)}\n(remove {home} to build it again)"
        )
    said: dict[str, Any] = json.loads(done.stdout)
    if not Path(said["folder"]).is_relative_to(home):
        raise RefBuildFailed(
            f"{named} is in {home}, and its interpreter finds the one in {said['folder']}: remove {home} to "
            "build it again"
        )
    if found.candidate not in said["known"]:
        raise UnknownCandidate(
            f"{named} has no candidate {shown(found.candidate)}; registered there: {', '.join(said['known'])}; "
            "name one with --against"
        )
    if said["not_built"] is not None:
        raise CandidateNotBuilt(f"{found.arm} is not built: {said['not_built']}")
    return RefBuild(found.ref, found.commit, found.python, found.candidate, said["layout"])
