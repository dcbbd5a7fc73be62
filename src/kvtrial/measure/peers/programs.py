"""Other people's engines: which there are, their settings, and what has to be installed for them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version

INSTALL = "make peers"


class NoPeerInstalled(RuntimeError):
    """There is nothing to compare with; the message says what to install."""


@dataclass(frozen=True)
class Peer:
    """One setting of another engine.

    Attributes
    ----------
    program : str
        Whose settings compete for being its best: ``llama.cpp``, ``torch``, ``onnxruntime``.
    setting : str
        For people.
    k_type, v_type : str
        ``f32``, ``f16`` or ``q8_0``: how K and V are stored.
    flash : bool
        Flash attention, where it is a choice.
    """

    program: str
    setting: str
    k_type: str = "f32"
    v_type: str = "f32"
    flash: bool = False


#: Program → (package that it comes from, module to import).
PROGRAMS = {
    "llama.cpp": ("llama-cpp-python", "llama_cpp"),
    "torch": ("torch", "torch"),
    "onnxruntime": ("onnxruntime", "onnxruntime"),
}

#: Arm → what it is. llama.cpp stores V as Q8_0 only under flash attention; without, only K is.
PEERS = {
    "llama.cpp-f32": Peer("llama.cpp", "KV F32, flash attention off"),
    "llama.cpp-f32-fa": Peer("llama.cpp", "KV F32, flash attention on", flash=True),
    "llama.cpp-f16": Peer("llama.cpp", "KV F16, flash attention off", "f16", "f16"),
    "llama.cpp-f16-fa": Peer("llama.cpp", "KV F16, flash attention on", "f16", "f16", True),
    "llama.cpp-q8_0": Peer("llama.cpp", "K Q8_0, V F16, flash attention off", "q8_0", "f16"),
    "llama.cpp-q8_0-fa": Peer("llama.cpp", "KV Q8_0, flash attention on", "q8_0", "q8_0", True),
    "torch": Peer("torch", "scaled_dot_product_attention with GQA, FP32"),
    "onnxruntime": Peer("onnxruntime", "GroupQueryAttention, FP32"),
}


def arms_of(program: str) -> list[str]:
    """The arms of one program."""
    return [arm for arm, peer in PEERS.items() if peer.program == program]


def missing() -> dict[str, str]:
    """Program → its package, for those that can't be imported here."""
    return {
        program: package
        for program, (package, module) in PROGRAMS.items()
        if importlib.util.find_spec(module) is None
    }


def what_to_install(absent: dict[str, str]) -> str:
    """One line for people; `NoPeerInstalled` where no program is left."""
    packages = ", ".join(absent.values())
    if len(absent) == len(PROGRAMS):
        raise NoPeerInstalled(
            f"no peer is installed ({packages}); run `{INSTALL}`, which installs them and compares"
        )
    return f"without {packages}: not installed, their rows are left out; `{INSTALL}` installs them"


def package_of(program: str) -> str:
    """The program's package and its version here, as ``torch 2.15.0``."""
    package, _ = PROGRAMS[program]
    return f"{package} {version(package)}"
