"""What to run: each gate of a reduced profile at its edge, ties, and what is said of each."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats as scipy_stats
from trial_events import BLOCKS, REGISTERED, at_contexts, flat, row, trial, with_rows, without

from kvtrial.decision import quality
from kvtrial.decision.verdict import ADOPT, INCONCLUSIVE, KEEP, Verdict, decide

BASE = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0}
PROFILES = REGISTERED["decision"]["profiles"]
K = len(PROFILES)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that says of which profiles the quality is shown; what makes it so is not asked here."""

    def say(*names: str) -> None:
        found = {
            name: {
                "shown": name in names,
                "reasons": [] if name in names else ["quality: the mean KLD may be 0.02"],
                "contexts": [{"context": 4096, "mean_kld": 1e-5}],
            }
            for name in PROFILES
        }
        monkeypatch.setattr(quality, "judge", lambda *_: found)

    say(*PROFILES)
    return say


def run(step_ms: dict[str, Any], **changed: Any) -> Verdict:
    return decide(trial(step_ms, missing={"K0": "pool"}, **changed), REGISTERED)


def answer(verdict: Verdict) -> tuple[Any, ...]:
    found = verdict.data["run"]
    return found["store"], found["profile"]


def why_not(verdict: Verdict, name: str) -> str:
    (own,) = [line for line in verdict.data["run"]["profiles"] if line["candidate"] == name]
    return "; ".join(own["why_not"])


def t(freedom: int, confidence: float) -> float:
    return float(scipy_stats.t.ppf(0.5 + confidence / 2, freedom))


@pytest.mark.parametrize(
    ("k2", "expected"),
    [
        (22.0 / 1.05, ("K2", "fp16")),  # exactly 5% passes
        (22.0 / 1.05 * (1 + 5e-10), ("K2", "fp16")),  # within the slack
        (22.0 / 1.05 * (1 + 5e-9), ("K1", "fp32")),
        (22.0 / 1.04, ("K1", "fp32")),
        (15.0, ("K2", "fp16")),
        (30.0, ("K1", "fp32")),
    ],
)
def test_the_edge_of_a_profiles_gain(shown: Any, k2: float, expected: tuple[str, str]) -> None:
    verdict = run(flat(**BASE, K2=k2, K3=22.0))
    assert answer(verdict) == expected
    assert ("an interval that begins at 1.05" in why_not(verdict, "K2")) == (expected[0] == "K1")


@pytest.mark.parametrize("context", [512, 16384])
@pytest.mark.parametrize(("ratio", "store"), [(0.97, "K2"), (0.969999, "K1")])
def test_the_edge_of_a_profiles_veto(shown: Any, context: int, ratio: float, store: str) -> None:
    k2 = {**at_contexts(15.0, 15.0, 15.0), context: [22.0 / ratio] * BLOCKS}
    verdict = run(flat(**BASE, K2=k2, K3=22.0))
    assert answer(verdict)[0] == store
    assert ("at most 3% slower is allowed" in why_not(verdict, "K2")) == (store == "K1")


def test_a_profile_whose_quality_is_not_shown_is_not_run(shown: Any) -> None:
    arms = flat(**BASE, K2=15.0, K5=10.0, K3=22.0)
    assert answer(run(arms)) == ("K5", "q8_0")
    shown("K2")
    verdict = run(arms)
    assert answer(verdict) == ("K2", "fp16")
    assert why_not(verdict, "K5") == "quality: the mean KLD may be 0.02"
    shown()
    verdict = run(arms)
    assert answer(verdict) == ("K1", "fp32")
    # One cause for all of them is said once; the rows of the profiles have the figures.
    said = "K1 in FP32: no reduced profile passes (quality: K2, K5; not built: "
    assert verdict.data["run"]["reason"].startswith(said)


@pytest.mark.parametrize(("kld", "store"), [(1e-5, "K2"), (0.02, "K1")])
def test_the_evidence_decides_by_its_own_gate(kld: float, store: str) -> None:
    """From events alone: the divergence of one profile at one context is changed."""
    events = trial(flat(**BASE, K2=15.0, K3=22.0), missing={"K0": "pool"})
    own = (events["metric"] == "quality/kld") & (events["candidate"] == "K2")
    events.loc[own & (events["context"] == 512), "value"] = kld
    verdict = decide(events, REGISTERED)
    assert answer(verdict)[0] == store
    said = "quality: context 512: the mean KLD may be 0.02; at most 0.001 is allowed"
    assert (said in why_not(verdict, "K2")) == (store == "K1")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"failed_conformance": {"K2": "KvFine@P32"}}, "conformance: KvFine@P32 failed"),
        ({"difference": {"K2": 5.0}}, "parity: "),
        ({"not_built": {"K2": "no compiler"}}, "not built: no compiler"),
    ],
)
def test_a_profile_that_is_not_eligible_is_not_run(
    shown: Any, changed: dict[str, Any], said: str
) -> None:
    arms = flat(**BASE, K2=15.0, K3=22.0)
    if "not_built" in changed:
        del arms["K2"]
    verdict = run(arms, **changed)
    assert answer(verdict) == ("K1", "fp32")
    assert said in why_not(verdict, "K2")


def test_the_confidence_allows_for_the_number_of_profiles(shown: Any) -> None:
    """An interval at 95% would pass, one at 1 - 0.05/3 does not."""
    by = 0.015
    error = by * math.sqrt(8 / 7) / math.sqrt(8)
    narrow, wide = t(7, 0.95) * error, t(7, 1 - 0.05 / K) * error
    mean = math.log(1.05) + (narrow + wide) / 2
    k2 = [22.0 * math.exp(-mean + by * (-1) ** block) for block in range(BLOCKS)]
    verdict = run(flat(**BASE, K2=at_contexts(k2, 15.0, 15.0), K3=22.0))
    assert answer(verdict)[0] == "K1"
    found = verdict.data["run"]
    assert found["confidence"] == pytest.approx(1 - 0.05 / K)
    (line,) = [own for own in found["profiles"] if own["candidate"] == "K2"]
    low, high = line["against_fp32"]["4096"]["ci95"]
    assert math.log(low) == pytest.approx(mean - wide, rel=1e-9)
    assert math.log(high) == pytest.approx(mean + wide, rel=1e-9)
    assert mean - narrow > math.log(1.05) > mean - wide


@pytest.mark.parametrize(
    ("arms", "store"),
    [
        ({"K2": 15.0, "K2T": 14.0, "K5": 18.0}, "K2T"),  # alone: 7% over the next
        (
            {"K2": 14.4, "K2T": 14.0, "K5": 18.0},
            "K2",
        ),  # tied, equal bytes: the order of registration
        ({"K2": 14.0 / 0.97, "K2T": 14.0, "K5": 18.0}, "K2"),  # exactly 3% is tied
        ({"K2": 14.0 / 0.9699999, "K2T": 14.0, "K5": 18.0}, "K2T"),
        ({"K2": 14.4, "K2T": 14.0, "K5": 14.2}, "K5"),  # tied: the fewest bytes
        ({"K2": 14.4, "K2T": 14.0, "K5": 14.5}, "K2"),  # K5 is 3.4% behind
    ],
)
def test_of_tied_profiles_the_fewest_bytes_win_then_the_order(
    shown: Any, arms: dict[str, float], store: str
) -> None:
    verdict = run(flat(**BASE, **arms, K3=22.0))
    assert answer(verdict)[0] == store
    chosen = [own["candidate"] for own in verdict.data["run"]["profiles"] if own["chosen"]]
    assert chosen == [store]


def test_a_tie_needs_the_lower_bound(shown: Any) -> None:
    """K5 is 2% behind on average, but its interval reaches to 3% and further."""
    by = 0.015
    half = t(7, 1 - 0.05 / K) * by * math.sqrt(8 / 7) / math.sqrt(8)
    assert -math.log(1.02) - half < math.log(0.97)
    k5 = [14.0 * 1.02 * math.exp(by * (-1) ** block) for block in range(BLOCKS)]
    arms = flat(**BASE, K2=14.0, K5=at_contexts(k5, 14.0, 14.0), K3=22.0)
    assert answer(run(arms))[0] == "K2"
    arms["K5"][4096] = [14.0 * 1.02] * BLOCKS
    assert answer(run(arms))[0] == "K5"


def test_only_profiles_that_pass_are_tied(shown: Any) -> None:
    """K5 has the fewest bytes and is vetoed."""
    arms = flat(**BASE, K2=14.0, K5=at_contexts(14.0, 30.0, 14.0), K3=22.0)
    assert answer(run(arms))[0] == "K2"


@pytest.mark.parametrize(("k2", "store"), [(9.0, "K2"), (10.6, "K3")])
def test_it_is_compared_with_the_fp32_arm_that_the_language_leaves(
    shown: Any, k2: float, store: str
) -> None:
    verdict = run(flat(**BASE, K2=k2, K3=11.0))
    assert verdict.outcome == ADOPT
    assert (answer(verdict)[0], verdict.data["run"]["fp32_store"]) == (store, "K3")


def test_where_another_cython_arm_stays_it_is_the_fp32_arm(shown: Any) -> None:
    verdict = run(flat(**BASE, K1T=18.0, K2=17.5, K3=22.0))
    assert (answer(verdict), verdict.data["run"]["fp32_store"]) == (("K1T", "fp32"), "K1T")


def test_it_is_asked_whatever_the_languages_outcome(shown: Any) -> None:
    """A doubt about K1T leaves the language open; K1 is the FP32 arm then."""
    events = trial(flat(**BASE, K1T=18.0, K2=17.5, K3=11.0), missing={"K0": "pool"})
    wrong = row("m2", "m2/output_error", candidate="K1T", block=0, value=3.0, context=4096)
    verdict = decide(with_rows(events, [wrong]), REGISTERED)
    assert verdict.outcome == INCONCLUSIVE
    assert (answer(verdict), verdict.data["run"]["fp32_store"]) == (("K2", "fp16"), "K1")
    assert not verdict.decided
    assert run(flat(**BASE, K2=15.0, K3=22.0)).decided


def test_a_doubt_about_the_fp32_arm_is_no_answer(shown: Any) -> None:
    wrong = row("m2", "m2/row_error", candidate="K1", block=0, value=3.0, context=4096)
    verdict = decide(with_rows(trial(flat(**BASE, K2=15.0, K3=22.0)), [wrong]), REGISTERED)
    assert answer(verdict) == (None, None)
    assert verdict.data["run"]["reason"].startswith("K1 is in doubt: output:")


@pytest.mark.parametrize(
    ("name", "bad"), [("K1", math.nan), ("K1", None), ("K2", math.nan), ("K2", None)]
)
def test_a_figure_that_alone_is_missing_is_no_answer(
    shown: Any, name: str, bad: float | None
) -> None:
    """An eligible entrant that was not measured, or not as registered, is not taken for a slow one."""
    arms = flat(**BASE, K2=15.0, K3=22.0)
    if bad is None:
        del arms[name][512]
    else:
        arms[name][512][3] = bad
    verdict = run(arms)
    assert answer(verdict) == (None, None)
    assert f"{name} against K1 at 512" in verdict.data["run"]["reason"]


def test_a_profile_that_failed_costs_its_own_column(shown: Any) -> None:
    arms = flat(**BASE, K2=15.0, K5=12.0, K3=22.0)
    arms["K5"][4096] = arms["K5"][4096][:3]
    died = row("m2", "failed", candidate="K5", context=4096, text="hung at step 9")
    verdict = decide(with_rows(trial(arms, missing={"K0": "pool"}), [died]), REGISTERED)
    assert answer(verdict) == ("K2", "fp16")
    assert "failed: m2: hung at step 9" in why_not(verdict, "K5")
    assert verdict.outcome == KEEP


def test_every_profile_is_a_row(shown: Any) -> None:
    verdict = run(flat(**BASE, K2=11.0, K2T=14.0, K3=22.0))
    rows = {own["candidate"]: own for own in verdict.data["run"]["profiles"]}
    assert list(rows) == ["K1", *PROFILES]
    assert rows["K2"]["tokens_per_s"]["4096"] == pytest.approx(1000 / 11)
    assert rows["K2"]["bytes_per_token"] == 23040.0
    assert rows["K2"]["tokens_per_gib"] == 2**30 // 23040
    assert (rows["K1"]["tokens_per_gib"], rows["K1"]["why_not"]) == (2**30 // 46080, [])
    assert rows["K2"]["layouts_differ"] is False and rows["K2T"]["layouts_differ"] is True
    assert rows["K5"]["why_not"][0].startswith("not built:")
    said = verdict.data["run"]["reason"]
    assert said.startswith("K2 (fp16) decodes 2.00x as fast as K1 at 4096 positions")
    assert "with 50% of its bytes" in said


def test_bytes_that_nobody_said_are_left_out(shown: Any) -> None:
    events = without(trial(flat(**BASE, K2=15.0, K5=15.1, K3=22.0)), metric="m2/row_bytes")
    verdict = decide(events, REGISTERED)
    assert answer(verdict)[0] == "K2"
    assert "of its bytes" not in verdict.data["run"]["reason"]
