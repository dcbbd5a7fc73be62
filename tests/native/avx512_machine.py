"""An emulated computer with AVX-512 that runs static programs: Linux in Bochs, whose CPU model has it."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
#: Seconds that the emulated machine may take; it runs about a hundredth as fast as this one.
PATIENCE_S = 1800
NEEDED = (
    "the emulated machine needs {}. Debian: apt install isolinux syslinux-common xorriso "
    "linux-image-cloud-amd64; Bochs 3.0 from its source, since Debian's has no AVX-512: configure "
    "--enable-x86-64 --enable-avx --enable-evex --enable-all-optimizations --enable-pci --with-nogui"
)
#: A CPU with AVX-512 F, BW, DQ and VL as a file of settings.
SETTINGS = """\
display_library: nogui
cpu: model=corei7_skylake_x, ips=50000000
memory: guest=256, host=256
ata0-master: type=cdrom, path=boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
log: bochs.log
panic: action=fatal
"""
BOOT = """\
DEFAULT tests
LABEL tests
  KERNEL /vmlinuz
  APPEND initrd=/initrd console=ttyS0 quiet mitigations=off nokaslr random.trust_cpu=on
"""


def _found(what: str, *places: Path) -> Path:
    for place in places:
        if place.is_file() and os.access(place, os.R_OK):
            return place
    raise FileNotFoundError(NEEDED.format(what))


def _bochs() -> str:
    program = os.environ.get("BOCHS") or shutil.which("bochs")
    if program is None:
        raise FileNotFoundError(NEEDED.format("Bochs (in PATH, or named by BOCHS)"))
    return program


def _archive(files: dict[str, bytes]) -> bytes:
    """A cpio archive in the kernel's format: the programs, and a console that the first process writes to."""

    def entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
        fields = (1, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)

    folders = b"".join(entry(name, stat.S_IFDIR | 0o755) for name in ("dev", "tests"))
    console = entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    programs = b"".join(entry(name, stat.S_IFREG | 0o755, data) for name, data in files.items())
    return folders + console + programs + entry("TRAILER!!!", 0)


def run(programs: list[Path], folder: Path) -> dict[str, tuple[int, str]]:
    """Run static programs on the emulated machine, in the order of their names.

    Parameters
    ----------
    programs : list of Path
    folder : Path
        Empty, for the machine's files.

    Returns
    -------
    dict
        Program name to exit code, the negative signal where one ended it, and what it printed.

    Raises
    ------
    FileNotFoundError
        Something of what the machine is made of is not here; the message says what to install.
    """
    bochs = _bochs()
    kernels = sorted(Path("/boot").glob("vmlinuz-*"), reverse=True)
    isolinux = Path("/usr/lib/ISOLINUX/isolinux.bin")
    loader = Path("/usr/lib/syslinux/modules/bios/ldlinux.c32")
    disc = folder / "disc"
    (disc / "isolinux").mkdir(parents=True)
    kernel = _found("a Linux kernel in /boot that this user may read", *kernels)
    shutil.copy(kernel, disc / "vmlinuz")
    for file in (_found("isolinux", isolinux), _found("syslinux", loader)):
        shutil.copy(file, disc / "isolinux")
    (disc / "isolinux" / "isolinux.cfg").write_text(BOOT, encoding="ascii")
    first = folder / "first_process"
    subprocess.run(
        ["cc", "-O1", "-static", HERE / "first_process.c", "-o", first], check=True, timeout=60
    )
    files = {"init": first.read_bytes()}
    files |= {f"tests/{program.name}": program.read_bytes() for program in programs}
    (disc / "initrd").write_bytes(gzip.compress(_archive(files), 1))
    if shutil.which("xorriso") is None:
        raise FileNotFoundError(NEEDED.format("xorriso"))
    subprocess.run(
        [
            "xorriso", "-as", "mkisofs", "-quiet", "-o", folder / "boot.iso", "-b", "isolinux/isolinux.bin",
            "-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", disc,
        ],
        check=True,
        timeout=60,
    )  # fmt: skip
    (folder / "settings").write_text(SETTINGS, encoding="ascii")
    subprocess.run(
        [bochs, "-q", "-f", "settings"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,  # switched off by its own system, it ends as if it had failed
    )
    serial = folder / "serial.txt"
    said = serial.read_text(encoding="utf-8", errors="replace") if serial.is_file() else ""
    found: dict[str, tuple[int, str]] = {}
    start = 0
    for ended in re.finditer(r"^ended (\S+) (-?\d+)\r?$", said, re.MULTILINE):
        text = said[start : ended.start()].replace("\r\n", "\n")
        found[ended[1]] = (int(ended[2]), text)
        start = ended.end()
    missing = {program.name for program in programs} - set(found)
    if missing:
        log = (folder / "bochs.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the machine did not run {missing}: {said[-1000:]} {log[-1000:]}")
    return found
