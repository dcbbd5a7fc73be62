"""Make `.venv` and install the pinned dependencies and kvtrial into it; quick when nothing changed.

``python3 scripts/setup.py [EXTRA …]``: extras have pins of their own, requirements/EXTRA.txt.

Runs with whatever `python3` there is, so that an old or incomplete one gets a clear message:
standard library only, and no syntax newer than Python 3.6.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST = (3, 11)
VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kvtrial-setup.sha256"
REQUIREMENTS = Path("requirements/all.txt")
#: Those of them that the kernels are compiled with.
BUILD_REQUIREMENTS = Path("requirements/build.txt")
#: What the environment is made from; a change of any brings it up to date.
INPUTS = [REQUIREMENTS, BUILD_REQUIREMENTS, Path("pyproject.toml")]


def fail(message):
    """Say what is wrong in one line; exit code 1."""
    sys.exit(f"kvtrial set-up: {message}")


def run(*command):
    """Exit code of a command whose output goes where ours goes."""
    return subprocess.call([str(word) for word in command])


def use_new_enough_python():
    """Go on with a Python of at least OLDEST, or say what is needed."""
    if sys.version_info >= OLDEST:
        return
    for minor in range(20, OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            os.execv(found, [found, *sys.argv])
    fail(
        f"Python 3.{OLDEST[1]} or newer is needed; {sys.executable} is "
        f"{sys.version_info[0]}.{sys.version_info[1]}. Install one, or name it: "
        f"make setup PYTHON=/path/to/python3.{OLDEST[1]}"
    )


def check_prerequisites():
    """The parts that Linux distributions package apart from Python."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    missing = []
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append(f"the venv module (Debian, Ubuntu: apt install python{version}-venv)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append(
            f"Python's headers, Python.h (Debian, Ubuntu: apt install python{version}-dev; "
            "Fedora: dnf install python3-devel)"
        )
    compiler = os.environ.get("CC") or "cc"
    if " " in compiler and not shutil.which(compiler):
        fail(
            f"CC is {compiler!r}; it names one program, without arguments: give the compiler alone "
            "(a folder of links to ccache on PATH does what `ccache gcc` would)"
        )
    if not shutil.which(compiler):
        missing.append(
            f"a C compiler, `{compiler}` (Debian, Ubuntu: apt install gcc libc6-dev; "
            "Fedora: dnf install gcc; macOS: xcode-select --install)"
        )
    if missing:
        fail("missing: " + "; ".join(missing))


def fingerprint(inputs):
    """sha256 over this Python, this folder and the contents of ``inputs``.

    The folder: in a copied or moved checkout the environment would run the code of the old place.
    """
    digest = hashlib.sha256(sys.version.encode())
    digest.update(os.fsencode(Path.cwd()))
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_usable():
    """Whether there is an environment with pip and this very Python."""
    code = f"import pip, sys; sys.exit(sys.version != {sys.version!r})"
    return PYTHON.is_file() and not subprocess.call(
        [str(PYTHON), "-c", code], stderr=subprocess.DEVNULL
    )


def is_current(stamp, wanted):
    """Whether the environment was made from just this, and still is one."""
    return stamp.is_file() and stamp.read_text() == wanted and is_usable()


def finds_its_modules():
    """Whether what is installed leads to the sources; one that was moved since is not found any more."""
    code = "import kvtrial.stages.build"
    return not subprocess.call([str(PYTHON), "-c", code], stderr=subprocess.DEVNULL)


def pip_begins(*arguments):
    """Begin to install into the environment."""
    always = ["--quiet", "--disable-pip-version-check"]
    command = [PYTHON, "-m", "pip", "install", *always, *arguments]
    return subprocess.Popen([str(word) for word in command])


def pip_ends(begun):
    """Wait until all is installed."""
    if begun.wait():
        fail("pip failed, its words are above; the same command goes on from here")


def pip(*arguments):
    """Install into the environment."""
    pip_ends(pip_begins(*arguments))


def make_environment():
    """A fresh .venv where there is none to use, then everything into it."""
    check_prerequisites()
    if not is_usable():
        print("set-up: making .venv", flush=True)
        if run(sys.executable, "-m", "venv", "--clear", VENV):
            fail(f"`{sys.executable} -m venv` failed, its words are above")
    print("set-up: installing the pinned dependencies; minutes the first time", flush=True)
    pip("--require-hashes", "--requirement", BUILD_REQUIREMENTS)
    others = pip_begins("--require-hashes", "--requirement", REQUIREMENTS)
    try:
        install_kvtrial()
    finally:
        pip_ends(others)


def install_kvtrial():
    """The package itself, which compiles the kernels."""
    print("set-up: compiling the kernels; minutes the first time", flush=True)
    pip("--no-deps", "--no-build-isolation", "--editable", ".")


def install_extra(name):
    """The pinned packages of an extra; what has to be compiled takes minutes."""
    requirements = REQUIREMENTS.parent / f"{name}.txt"
    if not requirements.is_file():
        fail(f"no extra {name!r}: there is no {requirements}")
    stamp = VENV / f"kvtrial-{name}.sha256"
    wanted = fingerprint([requirements])
    if not is_current(stamp, wanted):
        print(f"set-up: installing the extra `{name}`; minutes the first time", flush=True)
        # llama.cpp's part for pictures takes a third of its build and is not used.
        os.environ.setdefault("CMAKE_ARGS", "-DLLAVA_BUILD=OFF")
        # Without isolation: what builds them is what builds the kernels, pinned and installed already.
        pip("--require-hashes", "--no-build-isolation", "--requirement", requirements)
        stamp.write_text(wanted)


def main():
    """Set up."""
    use_new_enough_python()
    wanted = fingerprint(INPUTS)
    if not is_current(STAMP, wanted):
        make_environment()
        STAMP.write_text(wanted)
    elif not finds_its_modules():
        install_kvtrial()
    for extra in sys.argv[1:]:
        install_extra(extra)
    # Kernels older than their sources are compiled again.
    sys.exit(run(PYTHON, "-m", "kvtrial.stages.build"))


if __name__ == "__main__":
    main()
