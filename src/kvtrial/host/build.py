"""What the kernels were built from, and whether that still is what lies in the source tree.

Standard library only: CMake runs this file as a script to bake the facts into ``_build_facts.py``,
and the pipeline asks it for the build's identity before anything is compiled.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import os
import platform
import pprint
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
REBUILD = "make build   (or: snakemake --cores 1 build)"
#: Below src/kvtrial, whole: the Python that runs beside the kernels in a measured process, what a run asks
#: for, and the stages that say what such a process does. The modules at the package's top belong to them.
_MEASURED = ("contract", "host", "hot", "cold", "engine", "measure", "run", "stages")
#: Below these: what is done with the events when all are there.
_AFTER = ("stages", "after")
_LIBRARY_SUFFIXES = {".so", ".dylib"}
_NATIVE_SUFFIXES = {".c", ".pyx", ".pxd", ".pxi", ".h", ".rs", ".in"}


def native_sources(root: Path = ROOT) -> list[Path]:
    """Every file that a compiled kernel depends on, sorted; relative to ``root``."""
    sources = [Path("CMakeLists.txt")]
    for folder in ("src/kvtrial", "rust"):
        for path in (root / folder).rglob("*"):
            if path.suffix in _NATIVE_SUFFIXES and "target" not in path.parts:
                sources.append(path.relative_to(root))
    return sorted(sources)


def measured_modules(root: Path = ROOT) -> list[Path]:
    """Every Python module that decides what is measured, sorted; relative to ``root``."""
    package = root / "src" / "kvtrial"
    modules = [path for folder in _MEASURED for path in (package / folder).rglob("*.py")]
    modules += package.glob("*.py")
    after = package.joinpath(*_AFTER)
    return sorted(path.relative_to(root) for path in modules if after not in path.parents)


def _hash(root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for relative in files:
        data = (root / relative).read_bytes()
        digest.update(f"{relative.as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def source_hash(root: Path = ROOT) -> str:
    """sha256 over names and contents of the native sources."""
    return _hash(root, native_sources(root))


def measured_hash(root: Path = ROOT) -> str:
    """sha256 over names and contents of `measured_modules`."""
    return _hash(root, measured_modules(root))


def rows_hash(root: Path = ROOT) -> str:
    """sha256 over whatever computes rows of K and V from tokens: native sources, engine and stores."""
    package = root / "src" / "kvtrial"
    modules = [path for folder in ("engine", "hot") for path in (package / folder).rglob("*.py")]
    own = sorted(path.relative_to(root) for path in modules)
    return _hash(root, [*native_sources(root), *own])


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def cpu_features() -> list[str]:
    """Instruction-set features that the kernels may use, as the kernel or sysctl names them."""
    wanted = {
        "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
        "avx_vnni",
        "asimd", "asimdhp", "asimddp", "fphp",
    }  # fmt: skip
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        ):
            if line.startswith(("flags", "Features")):
                return sorted(wanted & set(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return ["asimd"] if platform.machine() == "arm64" else []


def toolchain(c_compiler: str | None = None) -> dict[str, Any]:
    """Compilers and target of a build made now."""
    compiler = c_compiler or os.environ.get("CC") or shutil.which("cc") or "cc"
    rustc, clang = (shutil.which(name) for name in ("rustc", "clang"))
    rust = _said([rustc, "--version", "--verbose"]) if rustc else ""
    llvm = re.search(r"^LLVM version: (.+)$", rust, re.MULTILINE)
    return {
        # Without the name that it was called by: cc and gcc are one compiler.
        "c_compiler": re.sub(r"^(cc|gcc)\S* ", "gcc ", _first_line(_said([compiler, "--version"]))),
        "clang": _first_line(_said([clang, "--version"])) if clang else "",
        "rustc": _first_line(rust),
        "rustc_llvm": llvm[1] if llvm else "",
        "architecture": platform.machine(),
        "system": platform.system(),
        "cpu_features": cpu_features(),
        "python": platform.python_version(),
    }


def has_sources() -> bool:
    """Whether this package lies beside what it was built from; an installed wheel does not."""
    return (ROOT / "CMakeLists.txt").is_file()


def current_identity() -> str:
    """`identity` of the sources at hand; without any, that of the installed kernels."""
    return identity() if has_sources() else str(facts().get("build_id", ""))


def identity(root: Path = ROOT, tools: dict[str, Any] | None = None) -> str:
    """12 hex digits that change with whatever is measured: native sources, the Python beside them,
    compilers, target and interpreter."""
    sources = source_hash(root) + measured_hash(root)
    text = sources + repr(sorted((tools or toolchain()).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def binary_sha256() -> str:
    """sha256 over the compiled modules and the Rust library as they are installed.

    It is in every event of a stage that runs them, so that what is timed is what passed conformance;
    empty where nothing has been built.
    """
    try:
        from kvtrial import _build_facts
    except ImportError:
        return ""
    # CMake installs the facts and the modules below one folder, which in an editable install is not
    # that of the sources.
    folder = Path(_build_facts.__file__).parent
    libraries = [path for path in folder.rglob("*") if path.suffix in _LIBRARY_SUFFIXES]
    return _hash(folder, sorted(path.relative_to(folder) for path in libraries))


@functools.cache
def fingerprint() -> str:
    """sha256 over what a measured process runs: the compiled modules and, in a checkout, the sources
    beside them. Taken at a stage's beginning, so that its processes can tell a change."""
    text = binary_sha256()
    if has_sources():
        text += source_hash() + measured_hash()
    return hashlib.sha256(text.encode()).hexdigest()


def facts() -> dict[str, Any]:
    """The baked facts of the installed kernels; empty where nothing has been built."""
    try:
        from kvtrial import _build_facts
    except ImportError:
        return {}
    return dict(_build_facts.FACTS)


def why_missing(module: str, compiler: str) -> str | None:
    """Why a module that not every build has can't be loaded, or None.

    ``compiler`` is the one that it needs; the facts say why a build went without it.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        return facts().get(f"{compiler}_missing") or str(error)
    return None


@functools.cache
def refuse_stale() -> None:
    """Raise `StaleBuild` when the compiled kernels are missing, older than their sources or than the
    Python beside them, or made for a CPU with features that this one lacks."""
    from kvtrial.contract import StaleBuild

    built = facts()
    if not built:
        raise StaleBuild(f"the kernels are not built; run: {REBUILD}")
    lacking = sorted(set(built["cpu_features"]) - set(cpu_features()))
    if lacking and built.get("native_isa", True):
        raise StaleBuild(
            f"the kernels were built for a CPU with {', '.join(lacking)}, which this one lacks; "
            f"rebuild here: {REBUILD}"
        )
    if not has_sources():
        return
    if built["source_sha256"] != source_hash():
        raise StaleBuild(
            f"the kernels were built from other sources ({built['source_sha256'][:12]}) than "
            f"those in {ROOT} ({source_hash()[:12]}); run: {REBUILD}"
        )
    if built["measured_sha256"] != measured_hash():
        raise StaleBuild(
            f"Python that is measured has changed in {ROOT} since the build; a run has one text of it: "
            f"{REBUILD}"
        )


def _switch(text: str) -> bool:
    """An option as CMake says it."""
    return text.upper() in ("ON", "TRUE", "1")


def _main() -> None:
    parser = argparse.ArgumentParser(description="Write the facts of a build as a Python module.")
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--c-compiler", required=True)
    parser.add_argument("--c-flags", required=True)
    parser.add_argument("--rust-missing", default="")
    parser.add_argument("--clang-missing", default="")
    parser.add_argument("--native-isa", type=_switch, default=True)
    parser.add_argument("--checks", type=_switch, default=False)
    args = parser.parse_args()
    tools = toolchain(args.c_compiler)
    built = {
        **tools,
        "build_id": identity(args.root, tools),
        "source_sha256": source_hash(args.root),
        "measured_sha256": measured_hash(args.root),
        "rows_sha256": rows_hash(args.root),
        "c_flags": args.c_flags,
        "rust_missing": args.rust_missing,
        "clang_missing": args.clang_missing,
        "native_isa": args.native_isa,
        "checks": args.checks,
    }
    text = f'"""Facts of this build, written by CMake."""\n\nFACTS = {pprint.pformat(built)}\n'
    beside = args.write.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(args.write)


if __name__ == "__main__":
    _main()
