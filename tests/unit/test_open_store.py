"""Finding candidates and opening stores by name."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import pkgutil
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvtrial
from kvtrial import candidates
from kvtrial.contract import (
    FP32,
    CandidateNotBuilt,
    InvalidArgument,
    KVStore,
    PoolExhausted,
    Profile,
    RetiredCandidate,
    StaleOwner,
    StoreSpec,
    UnknownCandidate,
)
from kvtrial.engine.transformer import Model
from kvtrial.host import selection, shapes
from kvtrial.host.machine import machine_class
from kvtrial.hot import formats
from kvtrial.hot.formats import RowFormat
from kvtrial.hot.formats import fp16 as fp16_rows
from kvtrial.hot.formats import fp32 as fp32_rows
from kvtrial.hot.paged import open_paged
from kvtrial.measure.stores import opened
from kvtrial.run import layout

SHAPE = {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "budget_bytes": 1 << 20}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownCandidate, match=r"K9.*K1.*K2"):
        kvtrial.open_store("K9", **SHAPE)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(InvalidArgument, match="heads_per_kv"):
        kvtrial.open_store("K1", **SHAPE, heads_per_kv=3)


@pytest.mark.parametrize("name", sorted(candidates.candidates()))
def test_a_session_without_a_store_can_not_be_made(name: str) -> None:
    """Its verbs would look behind a pointer that leads nowhere."""
    if candidates.get(name).not_built is not None:
        pytest.skip(str(candidates.get(name).not_built))
    with contextlib.closing(kvtrial.open_store(name, **SHAPE, trial=True)) as store:
        kind = type(store.open_session())
        with pytest.raises(TypeError, match=r"comes from open_session\(\)"):
            kind()


@pytest.mark.parametrize("name", sorted(candidates.candidates()))
@pytest.mark.parametrize("count", ["pages_total", "pages_free", "resident_bytes"])
def test_a_closed_store_counts_nothing(name: str, count: str) -> None:
    """K3 said how many pages it had had, K1 refused."""
    if candidates.get(name).not_built is not None:
        pytest.skip(str(candidates.get(name).not_built))
    store = kvtrial.open_store(name, **SHAPE, trial=True)
    assert getattr(store, count) >= 0
    store.close()
    with pytest.raises(StaleOwner, match="the store is closed"):
        getattr(store, count)


@pytest.mark.parametrize("name", ["My store", "", "a/b", "-k", "K\u00e9", 5, None])
def test_a_candidate_s_name_can_be_a_file_s(name: Any) -> None:
    """The crash of one with a space in it ended a stage: the journal could not name it."""
    with pytest.raises(InvalidArgument, match=r"^name of a candidate is .*; allowed: letters"):
        dataclasses.replace(candidates.get("K1"), name=name)


def test_an_entry_point_without_such_a_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = EntryPoint(name="My store", value="kvtrial.hot.paged:K1", group=candidates.GROUP)
    every = [*candidates.entry_points(group=candidates.GROUP), odd]
    for module in (candidates, layout):
        monkeypatch.setattr(module, "entry_points", lambda group: every)
    candidates.candidates.cache_clear()
    try:
        with pytest.warns(UserWarning, match="entry point 'My store' .* is left out"):
            found = candidates.candidates()
        assert "K1" in found and "My store" not in found
        assert "K1" in layout.registered_candidates()
        assert "My store" not in layout.registered_candidates()
    finally:
        candidates.candidates.cache_clear()


def test_no_public_name_is_a_module_s() -> None:
    """`kvtrial.decide` was a module or the function, as imports happened to be."""
    modules = {module.name for module in pkgutil.iter_modules(kvtrial.__path__)}
    assert modules.isdisjoint(kvtrial.__all__)


@pytest.mark.parametrize(
    "value", ["kvtrial.no_such_module:K", "kvtrial.contract:NoSuchName", "kvtrial.contract:merge"]
)
def test_a_candidate_that_does_not_load_costs_its_own_column(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint(name="X1", value=value, group=candidates.GROUP)
    every = [*candidates.entry_points(group=candidates.GROUP), broken]
    monkeypatch.setattr(candidates, "entry_points", lambda group: every)
    candidates.candidates.cache_clear()
    try:
        found = candidates.candidates()
        assert found["K1"].not_built is None
        assert value in str(found["X1"].not_built)
        with pytest.raises(CandidateNotBuilt, match="X1"):
            kvtrial.open_store("X1", **SHAPE)
    finally:
        candidates.candidates.cache_clear()


def page_format(**arguments: object) -> str:
    with contextlib.closing(kvtrial.open_store(**SHAPE, **arguments)) as store:  # type: ignore[arg-type]
        return store.page_format


@pytest.fixture
def adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An FP16 default, with FP32 at hand."""
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    (tmp_path / "selection.yaml").write_text(
        f"{machine_class()}: {{{shapes.name_of(SHAPE)}: {{default: K2, profile: fp16, fp32: K1, reference: K1, "
        "retired: [K0], cold: Z2, run_id: r}}\n"
    )


def test_the_adopted_selection_is_obeyed(adopted: None) -> None:
    assert "fp16" in page_format()
    with pytest.raises(RetiredCandidate, match="trial=True"):
        kvtrial.open_store("K0", **SHAPE)
    kvtrial.open_store("K0", **SHAPE, trial=True).close()


@pytest.mark.parametrize("profile", ["fp32", FP32])
def test_fp32_stays_available(adopted: None, profile: Profile | str) -> None:
    assert "fp32" in page_format(profile=profile)
    assert "fp16" in page_format(profile="fp16")  # the default's own


def test_a_profile_that_was_not_adopted_lists_the_allowed_ones(adopted: None) -> None:
    with pytest.raises(InvalidArgument, match=r"'q8_0' .*allowed: fp16 \(K2\), fp32 \(K1\)"):
        kvtrial.open_store(profile="q8_0", **SHAPE)


def test_a_name_and_a_profile_are_one_too_many(adopted: None) -> None:
    with pytest.raises(InvalidArgument, match=r"name 'K1' and profile 'fp32' .*one of the two"):
        kvtrial.open_store("K1", profile="fp32", **SHAPE)


def test_which_one_and_why(adopted: None) -> None:
    assert [(c.name, why) for c, why in (candidates.choose(*a, SHAPE) for a in CHOICES)] == [
        ("K2", "adopted from the verdict of r"),
        ("K1", "fp32 was asked for; adopted from the verdict of r"),
        ("K5", "as asked"),
    ]


CHOICES = ((None, None), (None, "fp32"), ("K5", None))


def test_k1_is_both_before_any_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    assert "fp32" in page_format()
    assert "fp32" in page_format(profile="fp32")
    for profile in (None, "fp32"):
        candidate, why = candidates.choose(None, profile, SHAPE)
        assert candidate.name == "K1" and why.endswith("the default before any verdict")
    with pytest.raises(InvalidArgument, match=r"allowed: fp32 \(K1\)"):
        kvtrial.open_store(profile="fp16", **SHAPE)


def test_what_was_adopted_for_other_heads_is_not_obeyed(adopted: None) -> None:
    other = {**SHAPE, "q_heads": 2 * SHAPE["q_heads"]}
    for name in (None, "K0"):  # K0 is retired for the others alone
        with contextlib.closing(kvtrial.open_store(name, **other)) as store:
            assert "fp32" in store.page_format


@pytest.mark.parametrize(
    "text", ["{0}: {{default: K1}}", "{0}: 7", "- a", "{0}: {{", "a: 2026-99-99", "[" * 5000]
)
def test_what_is_no_selection_names_file_and_remedy(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    (tmp_path / "selection.yaml").write_text(text.format(machine_class()))
    with pytest.raises(selection.SelectionInvalid, match=r"selection\.yaml: not what `make adopt`"):
        kvtrial.open_store(**SHAPE)


@pytest.mark.parametrize("head_dim", [2, 4, 10, 20, 36, 100])
@pytest.mark.parametrize("name", sorted(candidates.candidates()))
def test_a_pool_has_room_for_rows_that_its_store_pads(name: str, head_dim: int) -> None:
    """By the model's door and by the measurement's, in every arm."""
    if candidates.get(name).not_built is not None:
        pytest.skip(str(candidates.get(name).not_built))
    shape = {"layers": 2, "q_heads": 2, "kv_heads": 2, "head_dim": head_dim}
    rows = np.zeros((600, 2, head_dim), np.float32)

    def filled(store: KVStore) -> None:
        session = store.open_session()
        for layer in range(2):
            session.append(layer, np.arange(600), rows, rows)

    config = SimpleNamespace(store_shape=shape)
    stand_in = cast(Model, SimpleNamespace(config=config))
    with contextlib.closing(Model.open_store(stand_in, name, tokens=600)) as store:
        filled(store)
    with opened(name, shape, tokens=600, page_tokens=16) as (store, _):
        filled(store)


def test_a_budget_holds_the_pages_that_were_asked_for() -> None:
    """K1 pads 20 elements to 24; K5 has two scales and 32 codes for each row."""
    shape = {"layers": 3, "q_heads": 2, "kv_heads": 1, "head_dim": 20}
    pages = 3 * 2 * (2 + 1)
    assert candidates.pool_bytes("K1", shape, tokens=17, sessions=2) == pages * 16 * 2 * 24 * 4
    assert candidates.pool_bytes("K0", shape, tokens=17, sessions=2) == pages * 16 * 2 * 20 * 4
    budget = candidates.pool_bytes("K2", shape, tokens=17, sessions=2)
    with contextlib.closing(kvtrial.open_store("K2", **shape, budget_bytes=budget)) as store:
        assert store.pages_total == pages


def test_a_store_that_no_page_fits_in_is_said_and_not_asked_for_ever() -> None:
    def refuse(spec: StoreSpec) -> KVStore:
        raise PoolExhausted(f"{spec.budget_bytes} bytes are too few")

    never = dataclasses.replace(candidates.get("K1"), open=refuse)
    spec = StoreSpec(1, 1, 1, 8, budget_bytes=1)
    with pytest.raises(PoolExhausted, match=f"^{8 * 16 * 8 << 10} bytes"):
        candidates.page_bytes(never, spec)


# --------------------------------------------------------------------------------------------------
# Row formats of another package


class NativeRows(ctypes.Structure):
    """``kv_rows`` of native/kv_rows.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("row_bytes", "first_unfit", "write", "read", "fill", "key_offset")
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)
_held = ctypes.pythonapi.PyCapsule_GetPointer
_held.restype, _held.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
KV_ROWS = b"kvtrial.kv_rows"
#: What a capsule points to has to stay.
_kept: list[Any] = []


def rows_of_another(name: bytes = KV_ROWS, row_bytes: int | None = None, **fields: Any) -> Any:
    """K1's ``kv_rows`` with some of its fields changed, in a capsule."""
    rows = NativeRows.from_buffer_copy(
        ctypes.string_at(_held(fp32_rows.FP32.rows(), KV_ROWS), ctypes.sizeof(NativeRows))
    )
    if row_bytes is not None:
        told = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(
            lambda format, head_dim: row_bytes
        )
        _kept.append(told)
        rows.row_bytes = ctypes.cast(told, ctypes.c_void_p)
    for field, value in fields.items():
        setattr(rows, field, value)
    _kept.append(rows)
    return _capsule(ctypes.addressof(rows), name, None)


def paged(format: Any) -> KVStore:
    return open_paged(StoreSpec(**SHAPE), format=format)


def test_the_native_half_of_a_format_is_taken_as_it_is() -> None:
    with contextlib.closing(
        paged(dataclasses.replace(fp32_rows.FP32, rows=lambda: rows_of_another()))
    ) as store:
        assert store.row_bytes == 2 * 8 * 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"row_bytes": 0}, "takes 0 bytes at head_dim 8; allowed: 1 to"),
        ({"row_bytes": -64}, "takes -64 bytes"),
        ({"row_bytes": 2**60}, f"takes {2**60} bytes"),
        *(({name: None}, "lacks a function") for name in ("first_unfit", "write", "read")),
        ({"name": b"other.rows"}, "rows of format fp32 gives .*named 'kvtrial.kv_rows'"),
    ],
)
def test_rows_that_lead_out_of_a_page_are_refused(fields: dict[str, Any], said: str) -> None:
    format = dataclasses.replace(fp32_rows.FP32, rows=lambda: rows_of_another(**fields))
    with pytest.raises(InvalidArgument, match=said):
        paged(format)


@pytest.mark.parametrize("gives", [None, 5, "x", object()])
@pytest.mark.parametrize("what", ["rows", "kernel"])
def test_what_is_no_capsule_is_refused(what: str, gives: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{what} of format fp32 gives .*give a PyCapsule"):
        paged(dataclasses.replace(fp32_rows.FP32, **{what: lambda: gives}))


@pytest.mark.parametrize("what", ["rows", "kernel"])
def test_a_native_half_that_does_not_load_says_why(what: str) -> None:
    def missing() -> Any:
        raise OSError("no such library")

    with pytest.raises(CandidateNotBuilt, match=f"{what} of format fp32: OSError: no such library"):
        paged(dataclasses.replace(fp32_rows.FP32, **{what: missing}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("name", "a/b"),
        ("profile", "fp32"),
        ("rows", 5),
        ("kernel", None),
    ],
)
def test_a_format_s_fields_are_of_their_kinds(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=field):
        dataclasses.replace(fp32_rows.FP32, **{field: value})


def test_only_floats_are_written_where_they_lie() -> None:
    def slots(format: Any) -> list[Any]:
        with contextlib.closing(paged(format)) as store:
            session = store.open_session()
            return [session.reserve_slot(0, np.array([0], np.int64))]

    assert slots(fp32_rows.FP32) != [None]
    lent = dataclasses.replace(fp32_rows.FP32, rows=lambda: rows_of_another(key_offset=None))
    assert slots(lent) == slots(fp16_rows.FP16) == [None]


@pytest.mark.parametrize("value", ["kvtrial.nowhere:X", "kvtrial.hot.formats:GROUP"])
def test_another_s_format_that_does_not_load_is_in_nobody_s_way(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = EntryPoint("mine", value, formats.GROUP)
    real = formats.entry_points
    monkeypatch.setattr(formats, "entry_points", lambda group: [*real(group=group), mine])
    formats._points.cache_clear()
    try:
        with contextlib.closing(paged("fp32")):
            pass
        with pytest.raises((CandidateNotBuilt, InvalidArgument), match="mine"):
            paged("mine")
        with pytest.raises(InvalidArgument, match=r"'no'; allowed: fp16, .*mine"):
            paged("no")
    finally:
        formats._points.cache_clear()


def test_a_format_is_named_or_given() -> None:
    for name in (["fp32"], None, 5, RowFormat):
        with pytest.raises(InvalidArgument, match="format is"):
            paged(name)
