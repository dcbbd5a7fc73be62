"""Other people's engines: which there are, their settings, and what has to be installed for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

INSTALL = "make peers"


class NoPeerInstalled(RuntimeError):
    """There is nothing to compare with; the message says what to install."""


#: How a number is stored → its bits, scales included. ``u8`` is OpenVINO's: a scale and an offset, both float32,
#: for each 64. The scales of ``int8`` and ``int4``, one a column, are few.
BITS = {"f32": 32, "f16": 16, "q8_0": 8.5, "q4_0": 4.5, "u8": 9, "int8": 8, "int4": 4}
#: Of these, those that llama.cpp turns before it stores them.
QUANTISED = frozenset({"q8_0", "q4_0"})


@dataclass(frozen=True)
class Peer:
    """One setting of another engine.

    Attributes
    ----------
    program : str
        Whose settings compete for being its best: ``llama.cpp``, ``torch``, ``onnxruntime``, ``openvino``.
    setting : str
        For people.
    k_type, v_type : str
        A key of `BITS`: how K and V are stored.
    flash : bool
        Flash attention, where it is a choice.
    turned : bool
        llama.cpp's attention rotation, which it does by itself where rows are quantised.
    """

    program: str
    setting: str
    k_type: str = "f32"
    v_type: str = "f32"
    flash: bool = False
    turned: bool = True

    def bytes_a_token(self, shape: Mapping[str, int]) -> float:
        """Of all layers, for a store of ``layers``, ``kv_heads`` and ``head_dim``."""
        elements = shape["layers"] * shape["kv_heads"] * shape["head_dim"]
        return elements * (BITS[self.k_type] + BITS[self.v_type]) / 8


#: Program → (package that it comes from, module to import).
PROGRAMS = {
    "llama.cpp": ("llama-cpp-python", "llama_cpp"),
    "torch": ("torch", "torch"),
    "onnxruntime": ("onnxruntime", "onnxruntime"),
    "openvino": ("openvino", "openvino"),
}


def _llama(k_type: str, v_type: str, flash: bool, turned: bool = True) -> Peer:
    """A setting of llama.cpp under the name that it has for people."""
    kinds = f"KV {k_type.upper()}"
    if k_type != v_type:
        kinds = f"K {k_type.upper()}, V {v_type.upper()}"
    words = f"{kinds}, flash attention {'on' if flash else 'off'}"
    if QUANTISED & {k_type, v_type}:
        words += f", attention rotation {'on' if turned else 'off'}"
    return Peer("llama.cpp", words, k_type, v_type, flash, turned)


#: Arm → what it is. llama.cpp stores V quantised only under flash attention; without, only K is.
PEERS = {
    "llama.cpp-f32": _llama("f32", "f32", False),
    "llama.cpp-f32-fa": _llama("f32", "f32", True),
    "llama.cpp-f16": _llama("f16", "f16", False),
    "llama.cpp-f16-fa": _llama("f16", "f16", True),
    "llama.cpp-q8_0": _llama("q8_0", "f16", False),
    "llama.cpp-q8_0-unturned": _llama("q8_0", "f16", False, False),
    "llama.cpp-q8_0-fa": _llama("q8_0", "q8_0", True),
    "llama.cpp-q8_0-fa-unturned": _llama("q8_0", "q8_0", True, False),
    "llama.cpp-q4_0": _llama("q4_0", "f16", False),
    "llama.cpp-q4_0-fa": _llama("q4_0", "q4_0", True),
    "llama.cpp-q4_0-fa-unturned": _llama("q4_0", "q4_0", True, False),
    "llama.cpp-q8_0-q4_0-fa": _llama("q8_0", "q4_0", True),
    "torch": Peer("torch", "scaled_dot_product_attention with GQA, FP32"),
    "onnxruntime": Peer("onnxruntime", "GroupQueryAttention, FP32"),
    "onnxruntime-int8": Peer(
        "onnxruntime", "GroupQueryAttention, KV int8 with a scale a column", "int8", "int8"
    ),
    "onnxruntime-int4": Peer(
        "onnxruntime", "GroupQueryAttention, KV int4 with a scale a column", "int4", "int4"
    ),
    "openvino-f32": Peer("openvino", "stateful scaled_dot_product_attention, KV f32"),
    "openvino-u8": Peer(
        "openvino", "stateful scaled_dot_product_attention, KV u8, its default", "u8", "u8"
    ),
}


def arms_of(program: str) -> list[str]:
    """The arms of one program."""
    return [arm for arm, peer in PEERS.items() if peer.program == program]


def programs_of(arms: Iterable[str]) -> list[str]:
    """The programs whose arms these are; ours are nobody's."""
    return list(dict.fromkeys(PEERS[arm].program for arm in arms if arm in PEERS))


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
