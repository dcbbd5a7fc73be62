"""`kvtrial protocol`: a registration with one candidate more, or with the cells of recorded traffic."""

from __future__ import annotations

import copy
import json

import pytest
import yaml
from trial_events import REGISTERED, ROOT, flat, trial

from kvtrial import candidates
from kvtrial.contract import FP32, Candidate, UnknownCandidate
from kvtrial.decision.verdict import decide
from kvtrial.run import protocol
from kvtrial.run.layout import ConfigError
from kvtrial.show import answers
from kvtrial.tools import command, registering, traffic
from kvtrial.tools.traffic import TrafficInvalid, Turn

EXAMPLE = ROOT / "examples" / "traffic.jsonl"


def without(tmp_path, *names):
    """The registration that the checkout has, without some of its arms."""
    registered = yaml.safe_load((ROOT / "config" / "protocol.yaml").read_text(encoding="utf-8"))
    for place, key in ((registered, "candidates"), (registered, "timed_in_full"),
                       (registered["decision"], "challengers"), (registered["decision"], "profiles")):  # fmt: skip
        place[key] = [name for name in place[key] if name not in names]
    registered["sampling"]["pairs"] = [["K1T", "K1"]]
    registered["hypotheses"] = [
        h for h in registered["hypotheses"] if not {h["from"], h["to"]} & set(names)
    ]
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(registered), encoding="utf-8")
    return path


def test_an_fp32_candidate_becomes_the_challenger_that_is_tested(tmp_path, capsys):
    base = without(tmp_path, "K4")
    assert command.main(["protocol", "--add", "K4", "--base", str(base)]) == 0
    out = tmp_path / "mine.yaml"
    out.write_text(capsys.readouterr().out, encoding="utf-8")
    made = protocol.load(out)
    # Only the first challenger that is there is tested, so it comes before the others.
    assert made["decision"]["challengers"] == ["K4", "K3", "K3T"]
    assert made["candidates"][-1] == "K4"
    assert made["hypotheses"][-1] == {
        "id": "K4", "claim": "K4 instead of K1", "from": "K1", "to": "K4"
    }  # fmt: skip
    assert made["sampling"]["pairs"] == [["K1T", "K1"], ["K4", "K1"]]
    first = out.read_text(encoding="utf-8").splitlines()[:2]
    assert (
        first[1]
        == "# K4 is the challenger that is tested; K3, K3T only where it can't be. It wins only as the rule says."
    )
    # Another registration is another run, so it has a name of its own.
    assert made["name"] == f"{REGISTERED['name']}-k4" and made["decision"]["incumbents"] == [
        "K0",
        "A1",
        "A2",
        "K1",
        "K1T",
    ]


def test_one_of_reduced_precision_becomes_a_profile(tmp_path):
    text = registering.registration(["K5"], base=str(without(tmp_path, "K5")))
    made = yaml.safe_load(text)
    assert made["decision"]["profiles"] == [
        *(p for p in REGISTERED["decision"]["profiles"] if p != "K5"),
        "K5",
    ]
    assert made["decision"]["challengers"] == ["K3", "K4", "K3T"]
    assert made["parity"]["logits_tolerance"] == REGISTERED["parity"]["logits_tolerance"]


def test_a_profile_that_the_registration_does_not_know_gets_a_tolerance_to_set(tmp_path):
    path = without(tmp_path, "K5")
    registered = protocol.load(path)
    del registered["parity"]["logits_tolerance"]["q8_0"]
    said = registering.add(registered, candidates.get("K5"))
    # int4p's, the widest that is left.
    assert registered["parity"]["logits_tolerance"]["q8_0"] == 40.0
    assert "parity.logits_tolerance.q8_0 is the widest of the others" in said


def test_what_can_not_be_added_is_refused():
    with pytest.raises(ConfigError, match="K3 is in the registration already"):
        registering.registration(["K3"])
    with pytest.raises(
        UnknownCandidate, match=r"no candidate 'k2t'; registered: .*; did you mean K2T"
    ):
        registering.registration(["k2t"])
    with pytest.raises(ConfigError, match=r"no protocol 'none\.yaml'; give the path"):
        registering.registration(base="none.yaml")
    assert registering.path_of("smoke").name == "protocol-smoke.yaml"


MINE = Candidate(
    "Mine", "somebody's store", "contender", FP32, "C", "Python", "flat", frozenset(), open=lambda spec: None
)  # fmt: skip
#: Milliseconds of a step; what any arm of the registration takes beside it is 22.
STEPS = {"K0": 60.0, "A1": 44.0, "A2": 30.0, "K1": 22.0, "K1T": 22.0}


def decided(registration, mine, **options):
    lacks = {"K0": "branch", **options.pop("missing", {})}
    table = trial(flat(**STEPS, Mine=mine), missing=lacks, registration=registration, **options)
    return decide(table, registration).data


def test_a_strangers_candidate_is_named_with_why_it_could_not_win_or_that_it_did():
    registration = copy.deepcopy(REGISTERED)
    registering.add(registration, MINE)
    won = decided(registration, 11.0)
    assert (won["language"]["outcome"], won["language"]["adopted"]) == ("ADOPT", "Mine")
    assert (
        "Mine is faster than every FP32 incumbent (K0, A1, A2, K1, K1T)"
        in won["language"]["reason"]
    )
    equal = decided(registration, 22.0)
    assert (equal["language"]["challenger"], equal["language"]["kind"]) == ("Mine", "ruled out")
    assert equal["language"]["reason"].endswith("K1 stays")
    for why, options in (
        ("ruled out", {}),
        ("lacks", {"missing": {"Mine": "branch"}}),
        ("conformance", {"failed_conformance": {"Mine": "AttentionMasksHoles"}}),
    ):
        told = answers.arms(decided(registration, 11.0 if options else 22.0, **options))
        (mine,) = (arm for arm in told if arm.name == "Mine")
        assert mine.state == why


def test_an_arm_without_a_role_says_that_it_could_not_win():
    registration = copy.deepcopy(REGISTERED)
    registration["candidates"].append("Mine")
    (mine,) = (arm for arm in answers.arms(decided(registration, 11.0)) if arm.name == "Mine")
    assert mine.state == "measured only"
    assert "not among decision's challengers" in mine.reasons[0]


# --------------------------------------------------------------------------------------------------
# Traffic


def test_quantiles_are_weighted_by_the_tokens_that_are_made():
    """By hand: at 100 positions 10 tokens are made, at 200 30, at 300 60; half of all 100 is reached at 300."""
    assert traffic.quantile([300, 100, 200], [60, 10, 30], 0.5) == 300
    assert traffic.quantile([300, 100, 200], [60, 10, 30], 0.4) == 200
    assert traffic.quantile([300, 100, 200], [60, 10, 30], 0.1) == 100


def test_what_a_turn_finds_again_is_its_conversation_or_a_shared_prefix():
    turns = [
        Turn(100, 50, session="a", shared_prefix=40),  # the prefix
        Turn(180, 20, session="a", shared_prefix=40),  # what was there when it left off: 150
        Turn(90, 10, session="b"),  # nothing
        Turn(120, 10, session="a"),  # the conversation was cut: no more than its context
    ]
    assert traffic.restored(turns) == [40, 150, 120]


def test_traffic_becomes_cells(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [
        *({"context": 400, "generated": 100} for _ in range(2)),
        *(
            {"context": 950, "generated": 100, "concurrent": 3, "shared_prefix": 200}
            for _ in range(6)
        ),
        *({"context": 9950, "generated": 100, "concurrent": 8} for _ in range(2)),
    ]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns) + "\n", encoding="utf-8")
    text = registering.registration(traffic=path)
    made = yaml.safe_load(text)
    own = {"threads": 1, "profile": "default"}
    assert made["cells"] == [
        {"context": 1000, "sessions": 1, "role": "primary", **own},
        {"context": 450, "sessions": 1, "role": "veto", **own},
        {"context": 10000, "sessions": 1, "role": "veto", "rounds": 24, **own},
        {"context": 1000, "sessions": 3, "role": "extra", **own},
        {"context": 1000, "sessions": 8, "role": "extra", **own},
    ]
    assert made["cold"]["prefix_tokens"] == 200
    assert made["control"]["context"] == made["quality"]["decode"]["context"] == 1000
    # 6 times 200 of 2 * 400 + 6 * 950 + 2 * 9950 positions are shared.
    assert "# Not measured: pages shared between sessions, 5% of the contexts here;" in text


def test_the_example_gives_a_registration_that_holds():
    assert protocol.check(yaml.safe_load(registering.registration(traffic=EXAMPLE)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nothing", "line 2: 'nothing'; give a JSON object"),
        ("[1]", r"line 2: '\[1\]'; give a JSON object"),
        ('{"context": 5}', "line 2: no generated; give a whole number from 1 to 1,048,576"),
        ('{"context": 0, "generated": 1}', "line 2: context is 0; allowed: a whole number from 1"),
        ('{"context": true, "generated": 1}', "line 2: context is True; allowed"),
        ('{"context": 5, "generated": 1, "concurrent": 65}', "concurrent is 65; allowed: .* 1 to 64"),
        ('{"context": 5, "generated": 1, "shared_prefix": 6}', "shared_prefix is 6; allowed: up to the context, 5"),
        ('{"context": 5, "generated": 1, "text": "x"}', "unknown key 'text'; allowed: session, context, generated"),
        ('{"context": 5, "generated": 1, "session": 7}', "session is 7; give a text"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "t.jsonl"
    path.write_text('{"context": 5, "generated": 1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(TrafficInvalid, match=said):
        traffic.read(path)


def test_no_file_and_no_line_are_said(tmp_path):
    with pytest.raises(TrafficInvalid, match=r"none\.jsonl: can't be read"):
        traffic.read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(TrafficInvalid, match="has no line"):
        traffic.read(tmp_path / "empty.jsonl")
