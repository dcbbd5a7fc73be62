"""Stage ``build``: compile the kernels where they are missing or stale, write down their facts.

``python -m kvtrial.stages.build [--out results/builds/<build_id>.json]``
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from kvtrial.contract import StaleBuild
from kvtrial.host import build
from kvtrial.host.files import write_text
from kvtrial.measure.exclusive import exclusive

_FACTS = "import json; from kvtrial.host import build; print(json.dumps(build.facts()))"
_INSTALL = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
_INSTALL += ["--no-deps", "--no-build-isolation", "--editable", str(build.ROOT)]


def installed_facts() -> dict[str, object]:
    """Facts of the kernels as a fresh process would load them; empty where there are none."""
    done = subprocess.run(
        [sys.executable, "-c", _FACTS], capture_output=True, text=True, check=True
    )
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def ensure_built() -> dict[str, object]:
    """Compile unless the installed kernels are those of the sources, compilers and CPU at hand.

    It waits while something is measured on this machine: compilers would take its cores.

    Raises
    ------
    StaleBuild
        The compiler failed (its output is on stderr), or the kernels changed while it ran.
    """
    wanted = build.current_identity()
    if not wanted:
        raise StaleBuild(
            "the kernels are not built, and this package has no sources to build from: install it again"
        )
    facts = installed_facts()
    if not _is_of(facts, wanted):
        with exclusive("build"):
            facts = installed_facts()  # another process may have built them meanwhile
            if not _is_of(facts, wanted):
                facts = _compile(facts, wanted)
    for what, missing in (("K3, K3T and K4", "rust_missing"), ("K1C", "clang_missing")):
        if facts[missing]:
            print(f"build: without {what}: {facts[missing]}", file=sys.stderr)
    return facts


def _is_of(facts: dict[str, object], wanted: str) -> bool:
    # Kernels with bounds checks are for the tests; they are never measured.
    return facts.get("build_id") == wanted and not facts.get("checks")


def _compile(before: dict[str, object], wanted: str) -> dict[str, object]:
    print(f"build: compiling the kernels ({wanted}), about a minute", file=sys.stderr)
    tools = build.toolchain()
    if any(before.get(key) != tool for key, tool in tools.items()):
        # Ninja sees sources, not that the compiler or the CPU behind -march=native is another one.
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        for folder in (build.ROOT / "build").glob(f"{tag}-*"):
            shutil.rmtree(folder)
    if subprocess.run([sys.executable, *_INSTALL], stdout=sys.stderr).returncode:
        raise StaleBuild("the kernels do not compile; the compiler's words are above")
    facts = installed_facts()
    if facts.get("build_id") != wanted:
        raise StaleBuild(
            f"the kernels are those of {facts.get('build_id')}, the sources and compilers say "
            f"{wanted}; an edit during the build? run again: {build.REBUILD}"
        )
    return facts


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the facts go, as JSON")
    args = parser.parse_args(argv)
    facts = ensure_built()
    if args.out:
        write_text(args.out, json.dumps(facts, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
