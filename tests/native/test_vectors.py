"""The C below the kernels, compiled alone and held against plain arithmetic: for this machine, for a plain
x86-64, and for AArch64 under QEMU (`make test-neon`)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from kvtrial.host import build

HERE = Path(__file__).parent
NATIVE = build.ROOT / "src" / "kvtrial" / "native"
#: As the kernels are built, but for the machine.
FLAGS = [f for f in build.facts()["c_flags"].split() if not f.startswith(("-march", "-mcpu"))]
WARNINGS = ["-Wall", "-Werror", "-Wno-unused-function", "-Wno-psabi"]
OWN = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
AARCH64 = ("-march=armv8-a", "-march=armv8.2-a+fp16+dotprod")


def compiled(source: str, folder: Path, compiler: str, *more: str) -> Path:
    """The program made of tests/native/``source``."""
    program = folder / Path(source).stem
    command = [compiler, *FLAGS, *more, f"-I{NATIVE}", str(HERE / source), "-o", str(program)]
    subprocess.run([*command, "-lm", "-pthread"], check=True, timeout=300)
    return program


def kernels(name: str, folder: Path, compiler: str, *more: str) -> Path:
    """The program of spans.c with kernels as Cython made them for this machine's build: ``simd`` of K1, K2
    and K5, or ``panel_simd`` of K1T and K2T."""
    build.refuse_stale()  # what the build made is of these sources
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (made,) = (build.ROOT / "build").glob(f"{tag}-*/kv_hot__kernels_{name}.c")
    inline = "-DCYTHON_INLINE=inline __attribute__((always_inline))"  # as CMakeLists.txt
    folder.mkdir()
    program = compiled(
        "spans.c",
        folder,
        compiler,
        "-w",
        "-Wno-psabi",
        f'-DKERNELS="{made}"',
        f"-I{sysconfig.get_path('include')}",
        *(["-DPANELS", inline] if name == "panel_simd" else []),
        # The module's own door needs Python, which is not there to be linked; nobody goes through it.
        "-static",
        "-Wl,--unresolved-symbols=ignore-all",
        *more,
    )
    return program.rename(folder.with_suffix(".kernels"))


def said(command: Sequence[str | Path]) -> str:
    """What a program that found no failure printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* checks, 0 failures$", done.stdout, re.MULTILINE), done.stdout
    return done.stdout


def form(output: str) -> str:
    """The form of simd.h that was tested, once the page checks are those of the `xxhash` package."""
    data = bytes((i * 131 + (i >> 8)) & 255 for i in range(5000))
    checks = re.findall(r"^xxh3 (\d+) ([0-9a-f]{16})$", output, re.MULTILINE)
    assert len(checks) > 50
    for length, digest in checks:
        assert xxhash.xxh3_64_hexdigest(data[: int(length)]) == digest, length
    return re.search(r"^form (\w+)$", output, re.MULTILINE)[1]


def own_form() -> str:
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    return "avx2" if {"avx2", "fma", "f16c"} <= set(build.cpu_features()) else "portable"


def test_vectors_of_this_machine(tmp_path: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    program = compiled("vectors.c", tmp_path, compiler, OWN, *WARNINGS)
    assert form(said([program])) == own_form()


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the build without extensions is one for x86-64"
)
def test_vectors_without_extensions(tmp_path: Path) -> None:
    """What a build without KVTRIAL_NATIVE_ISA runs on x86-64."""
    compiler = os.environ.get("CC", "cc")
    program = compiled("vectors.c", tmp_path, compiler, "-march=x86-64", *WARNINGS)
    assert form(said([program])) == "portable"


@pytest.mark.parametrize(
    ("header", "opening", "closing", "define"),
    [
        ("simd", "#else\n", "#endif /* KV_NEON */", r"^KV_INLINE [\w ]*?\b(kv_\w+)\("),
        ("quants", "\n#else\n", "\n#endif\n", r"^static inline [\w ]*?\b(q_\w+)\("),
    ],
)
def test_neon_has_every_function(header: str, opening: str, closing: str, define: str) -> None:
    """What a header defines for other machines it defines for NEON, and all that it defines is tested."""
    text = (NATIVE / f"{header}.h").read_text(encoding="utf-8")
    neon = (NATIVE / f"{header}_neon.h").read_text(encoding="utf-8")
    portable = text.split(f'#include "{header}_neon.h"\n{opening}')[1].split(closing)[0]
    functions = re.compile(define, re.MULTILINE)
    wanted = set(functions.findall(portable))
    assert len(wanted) > 20
    assert wanted <= set(functions.findall(neon))
    tested = (HERE / "vectors.c").read_text(encoding="utf-8")
    for name in ("panels.h", "unpacked.h"):  # whose products are
        tested += (NATIVE / name).read_text(encoding="utf-8")
    after = text.split(closing)[1]
    for name in wanted | set(functions.findall(after)):
        assert re.search(rf"\b{name}\(", tested), name


@pytest.fixture(scope="module")
def aarch64() -> tuple[str, list[str]]:
    """A compiler for AArch64 and what runs its programs."""
    if platform.machine() == "aarch64":
        return os.environ.get("CC", "cc"), []
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.fail(
            "no AArch64 compiler or no QEMU; Debian: apt install gcc-aarch64-linux-gnu "
            "libc6-dev-arm64-cross qemu-user-static"
        )
    return compiler, [emulator]


@pytest.mark.neon
@pytest.mark.parametrize("machine", AARCH64)
def test_vectors_of_neon(aarch64: tuple[str, list[str]], machine: str, tmp_path: Path) -> None:
    compiler, emulator = aarch64
    program = compiled("vectors.c", tmp_path, compiler, machine, "-static", *WARNINGS)
    assert form(said([*emulator, program])) == "neon"


@pytest.mark.neon
@pytest.mark.parametrize("name", ["simd", "panel_simd"])
def test_kernels_on_neon(aarch64: tuple[str, list[str]], name: str, tmp_path: Path) -> None:
    """At every shape of head and page."""
    compiler, emulator = aarch64
    said([*emulator, kernels(name, tmp_path / name, compiler, AARCH64[0])])
