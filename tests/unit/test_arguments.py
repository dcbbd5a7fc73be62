"""What Python hands over is checked at the door: a wrong kind is `InvalidArgument`, and names itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from trial_events import REGISTERED, flat, row, trial, with_rows

import kvtrial
from kvtrial.cold import Identity, open_cold
from kvtrial.conformance import __main__ as suite
from kvtrial.contract import (
    InvalidArgument,
    KVStore,
    MemoryLedger,
    Partial,
    StaleOwner,
    UnknownCandidate,
)
from kvtrial.contract.arguments import integers, shown
from kvtrial.engine.errors import ModelNotFetched, UnknownModel
from kvtrial.engine.transformer import Model
from kvtrial.host.files import write_text
from kvtrial.run import models
from kvtrial.tools import command

TINY = Path(__file__).parent.parent / "data" / "llama-tiny-q4_1.gguf"
SHAPE = {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "budget_bytes": 1 << 16}
#: None of them is a whole number that anything could want.
NO_NUMBERS = ["3", 1.5, None, True, [1]]
NO_IDS: list[Any] = [None, 5, "12", b"12", {1: 2}, {1, 2}, [1.7], ["a"], [None], [True], [True, 5], [[1]],
                     [[1], [1, 2]], [2**70]]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return models.load_model(TINY)


@pytest.fixture(scope="module")
def store(model: Model) -> Iterator[KVStore]:
    with contextlib.closing(model.open_store("K1", tokens=32, sessions=8)) as opened:
        yield opened


@pytest.fixture
def session(store: KVStore) -> Iterator[Any]:
    with contextlib.closing(store.open_session()) as opened:
        yield opened


def refused(name: str) -> Any:
    return pytest.raises(InvalidArgument, match=rf"\b{name}\b.*(give|allowed)")


# --------------------------------------------------------------------------------------------------
# The doors themselves


def test_a_message_is_short_whatever_it_shows() -> None:
    assert shown("ab") == "'ab'"
    assert len(shown("x" * 5000)) < 120
    assert shown(10**5000) == "a int"  # Python refuses to print it


@pytest.mark.parametrize("rows", [[1, 2], (1, 2), np.array([1, 2], np.uint8), iter([1, 2])])
def test_integers_come_from_any_row_of_them(rows: Any) -> None:
    found = integers(rows, "ids")
    assert found.dtype.kind in "iu" and found.tolist() == [1, 2]


def test_no_integers_are_a_row_too() -> None:
    assert integers([], "ids").shape == integers(np.zeros(0), "ids").shape == (0,)


# --------------------------------------------------------------------------------------------------
# Stores and ledgers


@pytest.mark.parametrize("name", [["K1"], 5, b"K1", {"K1": 1}, "K" * 5000])
def test_a_store_s_name_is_a_text(name: Any, model: Model) -> None:
    for call in (
        lambda: kvtrial.open_store(name, **SHAPE),
        lambda: model.generate([1], 1, store=name),
    ):
        with pytest.raises(
            UnknownCandidate, match=r"^no candidate .{,120}; registered: A1, "
        ) as raised:
            call()
        assert len(str(raised.value)) < 300


@pytest.mark.parametrize("ledger", [5, "x", object()])
def test_a_ledger_is_a_ledger(ledger: Any) -> None:
    with refused("ledger"):
        kvtrial.open_store("K1", **SHAPE, ledger=ledger)


@pytest.mark.parametrize("n_bytes", [-50, *NO_NUMBERS])
def test_only_bytes_are_reserved(n_bytes: Any) -> None:
    ledger = MemoryLedger(100)
    with refused("n_bytes"):
        ledger.reserve("x", n_bytes)
    assert ledger.free_bytes == 100


@pytest.mark.parametrize("token", [[], None, "x", 1.5])
def test_only_a_token_is_released(token: Any) -> None:
    with refused("token"):
        MemoryLedger(100).release(token)
    with pytest.raises(StaleOwner):
        MemoryLedger(100).release(1)


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -5, 10**30])
def test_a_model_s_store_is_sized_by_whole_numbers(value: Any, model: Model) -> None:
    for name in ("tokens", "sessions"):
        with refused(name):
            model.open_store("K1", **{"tokens": 4, "sessions": 1, name: value})


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, 17, 64.0])
def test_page_tokens_of_a_model_s_store(value: Any, model: Model) -> None:
    with refused("page_tokens"):
        model.open_store("K1", tokens=4, page_tokens=value)


def test_a_partial_comes_from_attend_partial() -> None:
    fits = Partial.empty(2, 4)
    crooked = Partial(fits.max, fits.sum[:1], fits.output)
    for parts in (None, 5, [], "ab", [None], [(1, 2, 3)], [fits, crooked], [Partial(1, 2, 3)]):  # type: ignore[arg-type]
        with refused("merge"):
            kvtrial.merge(parts)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# The engine


@pytest.mark.parametrize("n", [*NO_NUMBERS, -1, 10**18, 2**63, 10**5000], ids=shown)
def test_n_is_a_number_of_tokens(n: Any, model: Model) -> None:
    with refused("n"):
        model.generate([1], n)


@pytest.mark.parametrize("ids", [*NO_IDS, []], ids=str)
def test_ids_are_a_row_of_integers(ids: Any, model: Model, session: Any) -> None:
    for call in (
        lambda: model.generate(ids, 1),
        lambda: model.prefill(session, ids),
        lambda: model.decoder().step([session], ids),
        lambda: model.logits(ids),
    ):
        with refused("ids"):
            call()
    assert session.length(0) == 0


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -1, 10**30])
def test_batches_and_threads_are_whole_numbers(value: Any, model: Model) -> None:
    for name in ("batch", "threads"):
        with refused(name):
            model.decoder(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("batch", 10**9), ("threads", 10**6)])
def test_batches_and_threads_have_an_end(name: str, value: int, model: Model) -> None:
    with refused(name):
        model.decoder(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk", value) for value in [*NO_NUMBERS, 0]),
        *(("threads", value) for value in [*NO_NUMBERS, 0, 10**6]),
        ("each", 5),
        ("progress", "x"),
    ],
)
def test_how_a_prefill_goes(name: str, value: Any, model: Model, session: Any) -> None:
    if value is None and name in ("each", "progress"):
        return
    with refused(name):
        model.prefill(session, [1], **{name: value})
    assert session.length(0) == 0


def test_sessions_are_sessions(model: Model, store: KVStore, session: Any) -> None:
    decoder = model.decoder()
    for sessions in ([None], [5], [store], (s for s in [session]), None, session, {session: 1}):
        with refused("sessions?"):
            decoder.step(sessions, [1])  # type: ignore[arg-type]
    for no_session in (None, 5, "x", store):
        with refused("session"):
            model.prefill(no_session, [1])  # type: ignore[arg-type]
    assert session.length(0) == 0


#: Each has a truth, or none, and is neither True nor False.
NO_FLAGS: list[Any] = ["no", 0, None, np.array([1, 2])]


@pytest.mark.parametrize("value", NO_FLAGS, ids=str)
@pytest.mark.parametrize("arm", ["K0", "K1", "K3", "C0"])
def test_holes_are_allowed_or_not(arm: str, value: Any) -> None:
    with contextlib.closing(kvtrial.open_store(arm, trial=True, **SHAPE)) as opened:
        with refused("position_holes_allowed"):
            opened.open_session(position_holes_allowed=value)
        with contextlib.closing(opened.open_session(position_holes_allowed=np.False_)):
            pass


@pytest.mark.parametrize("value", NO_FLAGS, ids=str)
def test_what_is_asked_by_yes_or_no_takes_no_other(value: Any, model: Model) -> None:
    with refused("beyond_context"):
        model.generate([5], 1, beyond_context=value)
    with refused("direct"):
        model.decoder(direct=value)
    with refused("trial"):
        kvtrial.open_store("K1", trial=value, **SHAPE)
    with refused("parse_special"):
        model.tokenizer.encode("a", parse_special=value)


class Mute:
    """Its own repr fails, so a message has to do without."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("value", [Mute(), 5, ["fp32"], np.array(["fp32", "fp32"])], ids=shown)
def test_activations_and_profiles_are_texts(value: Any, model: Model) -> None:
    with refused("activations"):
        model.decoder(activations=value)
    with refused("profile"):
        kvtrial.open_store(profile=value, **SHAPE)


@pytest.mark.parametrize("value", [Mute(), None, 5, b"m.gguf", ["m.gguf"]], ids=shown)
def test_a_model_is_named_by_a_text_or_a_path(value: Any) -> None:
    with pytest.raises(UnknownModel, match=r"a Mute|None|5|m\.gguf"):
        kvtrial.load_model(value)


@pytest.mark.parametrize("owner", [Mute(), None, 5, b"x"], ids=shown)
def test_bytes_are_reserved_for_somebody(owner: Any) -> None:
    with refused("owner"):
        MemoryLedger(100).reserve(owner, 200)


@pytest.mark.parametrize(
    "value", [{0, 1}, {0: 1, 1: 2}, "01", (True, 2), (0,), 5, Mute()], ids=shown
)
def test_a_range_of_heads_is_two_integers_in_their_order(value: Any) -> None:
    with refused("kv_head_range"):
        kvtrial.open_store("K1", **{**SHAPE, "q_heads": 4, "kv_heads": 2}, kv_head_range=value)


@pytest.mark.parametrize("arm", ["K0", "K1", "K3"])
def test_a_scale_and_positions_are_numbers_of_the_machine(arm: str) -> None:
    with contextlib.closing(kvtrial.open_store(arm, trial=True, **SHAPE)) as opened:
        session = opened.open_session()
        rows = np.ones((2, 1, 8), np.float32)
        with refused("positions"):
            session.append(0, [False, 1], rows, rows)
        session.append(0, [0, 1], rows, rows)
        q = np.ones((2, 8), np.float32)
        with refused("scale"):
            session.attend(0, q, np.zeros_like(q), 10**400)


@pytest.mark.parametrize("dtype", [object, complex, "U1", bool, "M8[s]"])
def test_partials_are_of_floats(dtype: Any) -> None:
    part = Partial.empty(2, 4)
    with refused("merge"):
        kvtrial.merge([part, part._replace(sum=np.zeros(2, dtype))])


@pytest.mark.parametrize("text", [5, b"x", ["a"], None])
def test_only_a_text_is_encoded(text: Any, model: Model) -> None:
    with refused("text"):
        model.tokenizer.encode(text)


@pytest.mark.parametrize("ids", NO_IDS, ids=str)
def test_only_ids_are_decoded(ids: Any, model: Model) -> None:
    with refused("ids"):
        model.tokenizer.decode(ids)


@pytest.mark.parametrize("name", [5, None, "a\0b", "x" * 5000, ["a"], ""])
def test_a_model_has_a_name(name: Any) -> None:
    with pytest.raises(UnknownModel, match="known: "):
        kvtrial.load_model(name)


@pytest.mark.parametrize("path", ["x" * 5000 + ".gguf", "a\0b.gguf"])
def test_no_file_can_have_that_name(path: str) -> None:
    with pytest.raises(ModelNotFetched, match="no file") as raised:
        kvtrial.load_model(path)
    assert len(str(raised.value)) < 300


# --------------------------------------------------------------------------------------------------
# The cold tier


@pytest.mark.parametrize("kind", [["Z2"], 5, "Z9"])
def test_a_cold_store_has_a_kind(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="known: Z1, Z2"):
        open_cold(kind, tmp_path / "cold")


def test_an_identity_is_of_a_store_and_a_model(store: KVStore) -> None:
    for no_store in (None, 5, "K1"):
        with refused("store"):
            Identity.of(no_store, model_sha256="m", rope_base=1e4, activations="fp32")  # type: ignore[arg-type]
    for base in ("x", None, True, float("nan"), float("inf"), 0):
        with refused("rope_base"):
            Identity.of(store, model_sha256="m", rope_base=base, activations="fp32")  # type: ignore[arg-type]
    for model_sha256 in (5, b"m", None):
        with refused("model_sha256"):
            Identity.of(store, model_sha256=model_sha256, rope_base=1e4, activations="fp32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", "2"), ("layers", True), ("page_tokens", 16.0), ("base_position", -1), ("kernel_abi", None),
        ("rope_base", 10**400), ("rope_base", np.complex64(1)), ("kv_head_range", "01"), ("layers", 2**70),
    ],
)  # fmt: skip
def test_an_identity_s_numbers_are_numbers(name: str, value: Any) -> None:
    with refused(name):
        Identity(**{**FIELDS, name: value})


def test_equal_fields_give_equal_identities() -> None:
    one = Identity(**{**FIELDS, "kv_head_range": (0, 1)})
    for same in ({"kv_head_range": [0, 1]}, {"head_dim": np.int64(16), "kv_head_range": (0, 1)}):
        assert Identity(**{**FIELDS, **same}).digest() == one.digest()


FIELDS: dict[str, Any] = {
    "model_sha256": "m", "page_format": "f", "page_tokens": 16, "layers": 2, "kv_heads": 2, "head_dim": 16,
    "rope_base": 1e4, "activations": "fp32",
}  # fmt: skip


def test_equal_numbers_give_equal_identities(store: KVStore) -> None:
    digests = {
        Identity.of(store, model_sha256="m", rope_base=base, activations="fp32").digest()
        for base in (10000, 1e4, np.float32(1e4), np.int64(10000))
    }
    assert len(digests) == 1


def test_the_cold_verbs_take_sessions_numbers_and_callables(
    store: KVStore, session: Any, model: Model, tmp_path: Path
) -> None:
    model.prefill(session, [1, 2, 3])
    identity = Identity.of(store, model_sha256="m", rope_base=1e4, activations="fp32")
    with open_cold("Z2", tmp_path / "cold", identity) as cold:
        for no_session in (None, 5, "x", store):
            with refused("session"):
                cold.spill(no_session, [1, 2, 3])  # type: ignore[arg-type]
            with refused("session"):
                cold.restore([1, 2, 3], no_session)  # type: ignore[arg-type]
        for batch_pages in (*NO_NUMBERS, 0):
            with refused("batch_pages"):
                cold.spill(session, [1, 2, 3], batch_pages=batch_pages)  # type: ignore[arg-type]
        for ids in NO_IDS:
            with refused("token_ids"):
                cold.spill(session, ids)
            with refused("token_ids"):
                cold.contains(ids)
        no_progress: Any = 5
        for call in (
            lambda: cold.spill(session, [1, 2, 3], progress=no_progress),
            lambda: cold.restore([1, 2, 3], store.open_session(), progress=no_progress),
            lambda: cold.gc(no_progress),
            lambda: cold.verify(no_progress),
        ):
            with refused("progress"):
                call()
        assert cold.catalogue() == []
        cold.spill(session, [1, 2, 3])  # nothing of it has poisoned the store


# --------------------------------------------------------------------------------------------------
# The rule, and the command


def test_a_verdict_needs_a_table_of_events() -> None:
    events = trial(flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=20.0))
    for table in (None, [1], pd.DataFrame(), events.iloc[:0]):
        with refused("events"):
            kvtrial.decide(table, REGISTERED)
    for column in ("stage", "protocol_sha256", "binary_sha256"):
        with pytest.raises(InvalidArgument, match=rf"no column {column};"):
            kvtrial.decide(events.drop(columns=[column]), REGISTERED)


def test_a_verdict_is_of_a_run_that_is_known() -> None:
    events = trial(flat(**BASE))
    of_run = events["stage"] == "run"
    with pytest.raises(InvalidArgument, match="run/run_id, run/model, run/machine in stage run"):
        kvtrial.decide(events[~of_run], REGISTERED)
    nameless = events[~(of_run & (events["metric"] == "run/model"))]
    with pytest.raises(InvalidArgument, match="events say no run/model in stage run"):
        kvtrial.decide(nameless, REGISTERED)
    with pytest.raises(InvalidArgument, match="usable_cpus is 'two'; allowed: 1 or more"):
        kvtrial.decide(with_rows(events, [row("run", "run/usable_cpus", text="two")]), REGISTERED)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["generate", "x", "--tokens", "9" * 23], "--tokens"),
        (["generate", "x", "--tokens", "9" * 5000], "--tokens"),
        (["generate", "x", "--tokens", "0"], "--tokens"),
        (["generate", "x", "--threads", "300"], "--threads"),
        (["try", "K3", "--context", "9" * 23], "--context"),
        (["try", "K3", "--blocks", "1.5"], "--blocks"),
    ],
)
def test_the_command_names_the_option(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in said and "give a whole number from 1 to" in said
    assert len(said) < 250


def test_names_too_long_for_a_file_are_unknown_names(tmp_path: Path) -> None:
    for arguments in (["verdict", "x" * 5000], ["fleet", "x" * 5000]):
        with pytest.raises(ValueError, match="x" * 50) as raised:
            command.main(arguments)
        assert type(raised.value).__module__.startswith("kvtrial.")


@pytest.mark.parametrize("folder", ["/proc/self/x", "a/" + "x" * 300])
def test_a_folder_that_can_not_be_made_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtrial.cold.errors import NotWritable

    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotWritable, match=rf"{folder} can't be made .*give another folder"):
        open_cold("Z2", folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.assign(value="x"), "column value that is no float64"),
        (lambda e: e.assign(block=np.nan), "column block that is no int64"),
        (lambda e: e.assign(text=None), "column text with missing texts"),
        (lambda e: e.assign(stage=None), "column stage with missing texts"),
        (lambda e: e.assign(protocol_sha256=None), "column protocol_sha256 with missing texts"),
        (lambda e: e[[*e.columns, "value"]], "a column twice"),
    ],
    ids=range(6),
)
def test_a_table_of_events_has_its_columns_kinds(change: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        kvtrial.decide(change(trial(flat(**BASE))), REGISTERED)


def test_an_index_of_any_kind_says_nothing() -> None:
    events = trial(flat(**BASE))
    by_stage = kvtrial.decide(events.set_index("stage", drop=False), REGISTERED)
    assert by_stage.to_json() == kvtrial.decide(events, REGISTERED).to_json()


BASE = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K2": 15.0, "K3": 20.0}


@pytest.mark.parametrize("sizes", ["a", "", "16,", "5"])
def test_the_suite_s_page_sizes_are_named(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        suite.main(["K1", "out.json", "--page-tokens", sizes])
    assert f"{sizes!r}: give some of 16, 32, 64" in capsys.readouterr().err


def test_an_outcome_that_can_not_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "count_allocations", lambda: None)
    monkeypatch.setattr(suite.faulthandler, "enable", lambda: None)  # it asks for a real stderr
    with pytest.raises(SystemExit, match="2"):
        suite.main(["K1", str(tmp_path), "--page-tokens", "16", "--tests", "KvAppendRequiresOwner"])
    assert "can't be written (" in capsys.readouterr().err


def test_what_is_no_file_is_not_written_over(tmp_path: Path) -> None:
    """By a rename a file took a device's place: `/dev/full`, for whoever is root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        with pytest.raises(FileExistsError, match="no regular file"):
            write_text(place, "x")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
