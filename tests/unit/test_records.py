"""Documents read as records: what is right comes in whole, what is wrong is named by its key."""

import json
from dataclasses import replace

import pytest

from kvtrial.host.records import RecordInvalid, plain, read
from kvtrial.measure.specs import AllocationSpec, BlockSpec, CalibrateSpec, Filling

ROTATION = {
    "warmup_rounds": 2,
    "rounds": 8,
    "slow_ratio": 2.5,
    "slow_every": 4,
    "step_limit_s": 60,  # a whole number is a float too
    "output_steps": 2,
    "alone_steps": 0,
}
BLOCK = BlockSpec(
    candidates=["K1", "K3"],
    gguf="m.gguf",
    snapshots=["a"],
    reference="K1",
    threads=1,
    page_tokens=16,
    rotation=ROTATION,
    rounds=8,
    slow=None,
    seed=1,
    probes={"llc_multiple": 4, "read_passes": 1, "passes": 2},
)
CALIBRATE = CalibrateSpec(
    candidates=["K1"],
    gguf="m.gguf",
    contexts={"K1": [32, 48]},
    page_tokens=16,
    probes={"llc_multiple": 4.0, "read_passes": 1, "passes": 2},
    baseline="K1",
    prompts=[[1, 2], []],
    prefill=Filling(store="K1", activations="fp32", chunk=48),
)


@pytest.mark.parametrize("record", [BLOCK, replace(BLOCK, slow=["K3"]), CALIBRATE])
def test_what_is_written_is_read_again(record):
    assert read(type(record), json.loads(json.dumps(plain(record))), "spec") == record


def test_a_build_that_does_not_know_a_field_is_not_told_of_its_default():
    assert "cpu" not in plain(BLOCK) and "own" not in plain(BLOCK) and "slow" in plain(BLOCK)
    assert plain(replace(BLOCK, cpu=1, own=["K3"])).items() >= {"cpu": 1}.items()


def test_what_has_a_default_may_be_left_out():
    given = {
        "candidates": ["K1"],
        "shape": {"layers": 2},
        "threads": 1,
        "page_tokens": 16,
        "steps": 3,
    }
    assert read(AllocationSpec, given, "spec") == AllocationSpec(
        candidates=["K1"], shape={"layers": 2}, threads=1, page_tokens=16, steps=3
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rotations": ROTATION}, r"spec has 'rotations'; allowed: .*rotation"),
        ({"threads": "2"}, r"spec\.threads is '2'; allowed: int"),
        ({"threads": True}, r"spec\.threads is True; allowed: int"),
        ({"slow": "K3"}, r"spec\.slow is 'K3'"),
        ({"slow": [3]}, r"spec\.slow"),
        ({"stands_for": {"K1": 1}}, r"spec\.stands_for\.K1 is 1; allowed: str"),
        ({"snapshots": ["a", 2]}, r"spec\.snapshots\[1\] is 2; allowed: str"),
        ({"baton": {"send": 1.0}}, r"spec\.baton\.send is 1\.0"),
        ({"rotation": {**ROTATION, "round": 8}}, r"spec\.rotation has 'round'"),
        ({"rotation": {"rounds": 8}}, r"spec\.rotation has no alone_steps; needed: "),
    ],
)
def test_what_is_wrong_is_named(wrong, said):
    with pytest.raises(RecordInvalid, match=said):
        read(BlockSpec, {**plain(BLOCK), **wrong}, "spec")


def test_what_is_no_record_at_all_is_said():
    with pytest.raises(RecordInvalid, match=r"spec is \[\]; allowed: BlockSpec"):
        read(BlockSpec, [], "spec")
