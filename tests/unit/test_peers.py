"""Other engines beside ours: rows by hand arithmetic, what to install, rounds, llama.cpp's state."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from kvtrial.decision import peers
from kvtrial.measure import child
from kvtrial.measure.peers import llama_state, programs
from kvtrial.measure.peers.programs import PEERS
from kvtrial.measure.specs import PrefillSpec
from kvtrial.run import events
from kvtrial.stages import peers as stage

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "workflow" / "schemas" / "peers.json").read_text(encoding="utf-8"))
SHAPE = {"layers": 30, "kv_heads": 3, "head_dim": 64}
PROFILES = {"K1": "fp32", "K3": "fp32", "K2": "fp16"}
#: The 97.5% quantile of Student's t with two degrees of freedom, from a printed table.
T_2 = 4.302652729911275


def rows(metric, arm, blocks, *, context=4096, threads=1, attempt=1):
    """One value, or several, for each block from 0 on."""
    return [
        {
            **events.event(metric, candidate=arm, context=context, threads=threads, stage="peers"),
            "protocol_sha256": "p",
            "build_id": "b",
            "block": block,
            "attempt": attempt,
            "index": index,
            "value": value,
        }
        for block, values in enumerate(blocks)
        for index, value in enumerate(values if isinstance(values, list) else [values])
    ]


def packages(attempt=1):
    return [
        {
            **events.event("package", candidate=program, text=f"{package} 1.2", stage="peers"),
            "protocol_sha256": "p",
            "build_id": "b",
            "attempt": attempt,
        }
        for program, (package, _) in programs.PROGRAMS.items()
    ]


def compare(*tables):
    table = events.to_frame([row for part in (packages(), *tables) for row in part])
    found = peers.compare(table, model="m", shape=SHAPE, profiles=PROFILES)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    return found


def test_a_row_by_hand():
    # Two steps a block. Ours: 100 tokens/s in each block; theirs: 50, 40 and 25, so that the ratios are
    # 2, 2.5 and 4 and their logarithms sum to log 20.
    (row,) = compare(
        rows("m2/step_ms", "K1", [[10.0, 10.0]] * 3),
        rows("m2/step_ms", "llama.cpp-f16", [[20.0, 20.0], [20.0, 30.0], [40.0, 40.0]]),
    )
    assert row["metric"] == "m2/tokens_per_s/fp32"
    assert (row["model"], row["context"], row["threads"], row["n_blocks"]) == ("m", 4096, 1, 3)
    assert row["ours"] == pytest.approx(100.0)
    assert row["peer"] == pytest.approx((50 * 40 * 25) ** (1 / 3))
    assert row["ratio"] == pytest.approx(20 ** (1 / 3))
    logs = [math.log(2), math.log(2.5), math.log(4)]
    mean = sum(logs) / 3
    half = T_2 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2) / math.sqrt(3)
    assert row["ci95"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)])
    assert row["our_arm"] == "K1"
    assert row["peer_setting"] == "llama-cpp-python 1.2, KV F16, flash attention off"
    assert row["best"] and row["bytes_a_token"] == 30 * 3 * 64 * (2 + 2)


def test_each_side_is_at_its_best_and_profiles_do_not_mix():
    found = compare(
        rows("m2/step_ms", "K1", [10.0, 10.0]),
        rows("m2/step_ms", "K3", [8.0, 9.0]),
        rows("m2/step_ms", "K2", [5.0, 5.0]),
        rows("m2/step_ms", "llama.cpp-f16", [20.0, 20.0]),
        rows("m2/step_ms", "llama.cpp-q8_0-fa", [10.0, 20.0]),
    )
    assert [(r["metric"], r["our_arm"], r["best"]) for r in found] == [
        ("m2/tokens_per_s/fp32", "K3", True),
        ("m2/tokens_per_s/fp32", "K3", False),
        ("m2/tokens_per_s/fp16", "K2", True),
        ("m2/tokens_per_s/fp16", "K2", False),
    ]
    quicker, slower = (
        "KV Q8_0, flash attention on, attention rotation on",
        "KV F16, flash attention off",
    )
    assert [r["peer_setting"].partition(", ")[2] for r in found] == 2 * [quicker, slower]
    assert found[1]["ratio"] == pytest.approx(math.sqrt(20 / 8 * 20 / 9))


def test_a_shorter_time_is_a_ratio_above_one():
    torch, onnx = compare(
        rows("m1/attention_ms", "K1", [[2.0, 2.0, 9.0]] * 2),  # the median counts
        rows("m1/attention_ms", "K3", [3.0, 3.0]),
        rows("m1/attention_ms", "torch", [5.0, 5.0]),
        rows("m1/attention_ms", "onnxruntime", [1.0, 1.0]),
    )
    assert (torch["ours"], torch["peer"], torch["ratio"]) == pytest.approx((2.0, 5.0, 2.5))
    assert torch["peer_setting"].startswith("torch 1.2, ")
    assert (onnx["our_arm"], onnx["ratio"]) == ("K1", pytest.approx(0.5))
    assert onnx["ci95"] == pytest.approx([0.5, 0.5])


def test_prefill_counts_the_tokens_of_the_prompt():
    (row,) = compare(
        rows("prefill/ms", "K1", [1000.0, 1000.0], context=512),
        rows("prefill/ms", "llama.cpp-f32", [4000.0, 4000.0], context=512),
    )
    assert (row["metric"], row["ours"], row["peer"]) == ("prefill/tokens_per_s", 512.0, 128.0)
    assert row["ratio"] == pytest.approx(4.0)


def test_an_arm_that_lacks_a_block_is_no_side():
    found = compare(
        rows("m2/step_ms", "K1", [1.0]),
        rows("m2/step_ms", "K3", [10.0, 10.0]),
        rows("m2/step_ms", "llama.cpp-f32", [20.0, 20.0]),
        rows("m2/step_ms", "llama.cpp-f16", [20.0, float("nan")]),
    )
    assert [r["our_arm"] for r in found] == ["K3"]
    assert "KV F32" in found[0]["peer_setting"]


def test_one_block_and_one_side_give_no_row():
    assert (
        compare(rows("m2/step_ms", "K1", [1.0]), rows("m2/step_ms", "llama.cpp-f32", [2.0])) == []
    )
    assert compare(rows("m2/step_ms", "K1", [1.0, 1.0])) == []


def test_the_attempt_with_the_most_blocks_gives_a_row_and_the_first_among_equals():
    """Case: a second run with twice the blocks was measured for nothing."""
    found = compare(
        rows("m2/step_ms", "K1", [10.0, 10.0]),
        rows("m2/step_ms", "llama.cpp-f32", [20.0, 20.0]),
        packages(attempt=2),
        rows("m2/step_ms", "K1", [1.0, 1.0], attempt=2),
        rows("m2/step_ms", "llama.cpp-f32", [20.0, 20.0], attempt=2),
        rows("m1/attention_ms", "K1", [1.0, 1.0], attempt=2),
        rows("m1/attention_ms", "torch", [2.0, 2.0], attempt=2),
    )
    assert [(r["metric"], r["ratio"]) for r in found] == [
        ("m2/tokens_per_s/fp32", pytest.approx(2.0)),
        ("m1/attention_ms/fp32", pytest.approx(2.0)),
    ]
    more = compare(
        rows("m2/step_ms", "K1", [10.0, 10.0]),
        rows("m2/step_ms", "llama.cpp-f32", [20.0, 20.0]),
        packages(attempt=2),
        rows("m2/step_ms", "K1", [10.0] * 3, attempt=2),
        rows("m2/step_ms", "llama.cpp-f32", [15.0] * 3, attempt=2),
    )
    assert [(r["n_blocks"], r["ratio"]) for r in more] == [(3, pytest.approx(1.5))]


# --- what is installed ---------------------------------------------------------------------------


def test_without_any_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(programs.NoPeerInstalled) as refused:
        programs.what_to_install(programs.missing())
    assert str(refused.value) == (
        "no peer is installed (llama-cpp-python, torch, onnxruntime, openvino); run `make peers`, "
        "which installs them and compares"
    )


def test_a_missing_package_costs_its_own_rows(monkeypatch):
    monkeypatch.setattr(
        programs.importlib.util, "find_spec", lambda module: module != "torch" or None
    )
    assert programs.missing() == {"torch": "torch"}
    assert programs.what_to_install(programs.missing()) == (
        "without torch: not installed, their rows are left out; `make peers` installs them"
    )
    arms = {"ours": ["K1"], "llama.cpp": ["llama.cpp-f32"], "onnxruntime": ["onnxruntime"]}
    planned = stage.plan([64], [1], 2, arms, seed=1)
    assert {r.work for r in planned} == {"decode", "prefill", "attention"}
    assert "torch" not in {arm for r in planned for _, order in r.processes for arm in order}
    without_llama = stage.plan([64], [1], 2, {"ours": ["K1"], "torch": ["torch"]}, seed=1)
    assert {r.work for r in without_llama} == {"attention"}


# --- rounds --------------------------------------------------------------------------------------


def test_rounds_balance_programs_and_arms():
    arms = {"ours": ["K1", "K2", "K3"], "llama.cpp": programs.arms_of("llama.cpp")}
    planned = stage.plan([512, 4096], [1, 2], 4, arms, seed=7)
    cell = [r for r in planned if r.name.startswith("decode-4096x1x2-")]
    assert [r.number for r in cell] == [0, 1, 2, 3]
    for one in cell:  # all arms take turns in one process
        ((_, order),) = one.processes
        assert sorted(order) == sorted(arms["ours"] + arms["llama.cpp"])
    prefills = [r for r in planned if r.name.startswith("prefill-512x1x2-")]
    for first, second in (prefills[:2], prefills[2:]):  # a cycle of two programs
        assert [m for m, _ in second.processes] == [m for m, _ in first.processes][::-1]
        assert [sorted(order) for _, order in sorted(first.processes)] == [
            sorted(arms["llama.cpp"]),
            arms["ours"],
        ]
    prompts = {r.cell["context"] for r in planned if r.work == "prefill"}
    assert prompts == {512}
    names = [r.name for r in planned]
    assert len(set(names)) == len(names) == 2 * (2 * 4) + 2 * 4


def test_our_prefill_is_timed_in_a_process_of_its_own():
    spec = PrefillSpec(
        gguf=str(ROOT / "tests" / "data" / "llama-tiny-q4_1.gguf"),
        candidates=["K1", "K9"],
        ids=list(range(40)),
        threads=1,
        page_tokens=16,
    )
    fine, failed = child.run("kvtrial.measure.peers.prefill", spec, 1)
    assert (fine["candidate"], fine["metric"]) == ("K1", "prefill/ms")
    assert fine["value"] > 0
    assert failed["candidate"] == "K9" and "no candidate 'K9'" in failed["text"]


def test_a_library_that_does_not_load_costs_its_own_rows(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('libgomp.so.1 is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = PrefillSpec(
        gguf="m.gguf", candidates=programs.arms_of("llama.cpp"), ids=[1], threads=1, page_tokens=16
    )
    found = child.run("kvtrial.measure.peers.llama_prefill", spec, 1)
    assert [(r["candidate"], r["metric"]) for r in found] == [
        (arm, "failed") for arm in programs.arms_of("llama.cpp")
    ]
    assert "libgomp.so.1 is missing" in found[0]["text"]


# --- llama.cpp's state ---------------------------------------------------------------------------


def a_few_rows(layers=2, cells=3, heads=2, width=32):
    draw = np.random.default_rng(3)
    return draw.standard_normal((2, layers, cells, heads, width), np.float32)


def test_the_state_byte_for_byte():
    k, v = a_few_rows(layers=1, cells=2, heads=1)
    state = llama_state.join(llama_state.sections(k, v, PEERS["llama.cpp-f32"])).tobytes()
    expected = struct.pack("<Ii", 0xAF143CD8, 0)  # sequence 0
    expected += struct.pack("<II", 1, 2)  # one stream of two cells
    expected += struct.pack("<iIi", 0, 1, 0) + struct.pack("<iIi", 1, 1, 0)
    expected += struct.pack("<II", 1, 1)  # V transposed, one layer
    expected += struct.pack("<iQ", 0, 128) + k.tobytes()  # F32, rows of 32 elements
    expected += struct.pack("<iII", 0, 4, 32) + v[0, :, 0].T.tobytes()
    assert state == expected


def test_with_flash_attention_values_are_rows():
    k, v = a_few_rows(layers=1, cells=2, heads=1)
    state = llama_state.join(llama_state.sections(k, v, PEERS["llama.cpp-f16-fa"])).tobytes()
    assert struct.unpack_from("<II", state, 16 + 24) == (0, 1)
    assert state.endswith(struct.pack("<iQ", 1, 64) + v.astype("<f2").tobytes())


def test_q8_0_rows_are_a_scale_and_32_bytes_a_block():
    row = np.zeros((1, 64), np.float32)
    row[0, :3] = [127.0, -64.0, 0.75]  # the largest is 127, so the scale is 1
    stored = llama_state.stored(row, "q8_0")
    assert stored.shape == (1, 2 * 34)
    assert stored[0, :2].view("<f2")[0] == 1.0
    assert stored[0, 2:34].view(np.int8).tolist() == [127, -64, 1] + [0] * 29
    assert not stored[0, 34:].any()  # zeros stay zeros
    with pytest.raises(ValueError, match="rows of 40 elements; Q8_0 needs a multiple of 32"):
        llama_state.stored(np.zeros((1, 40), np.float32), "q8_0")


def test_q4_0_rows_are_a_scale_and_32_nibbles_a_block():
    row = np.zeros((1, 32), np.float32)
    row[0, [0, 1, 16]] = [-8.0, 7.0, 2.4]  # the largest is -8, so the scale is 1, and 8 is added
    stored = llama_state.stored(row, "q4_0")
    assert stored.shape == (1, 18)
    assert stored[0, :2].view("<f2")[0] == 1.0
    assert stored[0, 2:4].tolist() == [0 | (8 + 2) << 4, 15 | 8 << 4]
    assert stored[0, 4:].tolist() == [0x88] * 14
    row[0, 0] = 16.0  # the largest is positive: the scale is negative, and 16 is -8 times it
    stored = llama_state.stored(row, "q4_0")
    assert stored[0, :2].view("<f2")[0] == -2.0
    assert stored[0, 2] & 15 == 0 and stored[0, 3] & 15 == 5  # 7 / -2 is -3.5, and rounds to -3


def test_quantised_heads_of_64_are_turned_before():
    peer = PEERS["llama.cpp-q8_0-fa"]
    row = np.zeros((1, 1, 128), np.float32)
    row[0, 0, 0] = 16.0
    spread = llama_state.turned(row, peer, "q8_0", widest=False)  # 16 / sqrt(64) over the first 64
    assert spread[0, 0].tolist() == [2.0] * 64 + [0.0] * 64
    wide = llama_state.turned(row, peer, "q8_0", widest=True)
    assert wide[0, 0] == pytest.approx(np.full(128, 16 / math.sqrt(128)))
    twice = llama_state.turned(spread, peer, "q8_0", widest=False)  # its own inverse
    assert twice == pytest.approx(row)
    assert llama_state.turned(row, peer, "f16", widest=True) is row
    narrow = np.ones((1, 1, 32), np.float32)
    assert llama_state.turned(narrow, peer, "q8_0", widest=True) is narrow
    plain = PEERS["llama.cpp-q8_0-fa-unturned"]
    assert llama_state.turned(row, plain, "q8_0", widest=True) is row


@pytest.mark.parametrize("arm", programs.arms_of("llama.cpp"))
def test_a_layout_is_recognised_whatever_its_rows_are(arm):
    k, v = a_few_rows()
    own = llama_state.join(llama_state.sections(k, v, PEERS[arm]))
    llama_state.check_layout(own, llama_state.sections(2 * k, -v, PEERS[arm]))
    for changed in (own[:-1], np.append(own, np.uint8(0))):
        with pytest.raises(llama_state.UnknownStateLayout):
            llama_state.check_layout(changed, llama_state.sections(k, v, PEERS[arm]))
    other = own.copy()
    other[16 + 3 * 12] ^= 1  # whether V is transposed
    with pytest.raises(llama_state.UnknownStateLayout, match=r"at byte 52; run `make peers`"):
        llama_state.check_layout(other, llama_state.sections(k, v, PEERS[arm]))
