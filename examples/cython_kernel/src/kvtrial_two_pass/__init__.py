"""Registers the candidate TwoPass: kvtrial's pages, a kernel of ours."""

from dataclasses import replace
from functools import partial
from typing import Any

from kvtrial.contract import Candidate, Capability
from kvtrial.hot.formats.fp32 import FP32
from kvtrial.hot.paged import open_paged


def _two_pass() -> Any:
    from kvtrial_two_pass import _kernel  # compiled: loaded when a store opens, not before

    return _kernel.capsule()


TWO_PASS = Candidate(
    name="TwoPass",
    title="Paged, two passes over a span, FP32",
    role="contender",
    profile=FP32.profile,
    language="Cython",
    owner="Cython",
    layout="paged [kv_head][token][head_dim]",
    capabilities=frozenset(Capability),
    open=partial(open_paged, format=replace(FP32, kernel=_two_pass)),
)
