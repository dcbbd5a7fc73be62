"""Parity and quality, judged from events made by hand."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvtrial.decision import parity, quality
from kvtrial.run import events, protocol

LOGIT = "parity/max_abs_logit_difference"
DECODED_LOGIT = "parity/decode_max_abs_logit_difference"
REGISTERED = protocol.load(Path(__file__).resolve().parents[2] / "config" / "protocol.yaml")
PROFILES = {"K2": "fp16", "K2T": "fp16", "K5": "q8_0"}
#: Context to texts: the prompt set, two contexts within the trained length and one beyond it.
TEXTS = {0: 24, 512: 64, 4096: 64, 16384: 16}
#: What every arm has in each text.
SMALL = {
    "parity/positions": 16.0,
    LOGIT: 1e-4,
    "quality/kld": 1e-5,
    "quality/worst_kld": 2e-5,
    "quality/top1_agrees": 16.0,
}
#: … and in each decoded step.
DECODED = {DECODED_LOGIT: 2e-4, "quality/decode_kld": 1e-5, "quality/decode_top1_agrees": 1.0}


def row(stage, metric, **columns):
    return events.event(metric, stage=stage, protocol_sha256="p", build_id="b", **columns)


def with_rows(table, rows):
    return pd.concat([table, events.to_frame(rows)], ignore_index=True)


def made():
    """Events of a run in which all arms are right."""
    rows = [row("run", "run/context_length", text="8192")]
    for name in REGISTERED["candidates"]:
        rows.append(
            row("run", "candidate/profile", candidate=name, text=PROFILES.get(name, "fp32"))
        )
        rows += [
            row("parity", metric, candidate=name, context=context, index=index, value=value)
            for context, texts in TEXTS.items()
            for index in range(texts)
            for metric, value in SMALL.items()
        ]
        rows += [
            row("parity", metric, candidate=name, context=context, index=step, value=value)
            for context, steps in ((512, 4), (4096, 64), (16384, 4))
            for step in range(steps)
            for metric, value in DECODED.items()
        ]
    return events.to_frame(rows)


TABLE = made()


def changed(table, metric, values, *, candidate="K2", context=4096):
    """The table with other values of a metric, by index; without the rows whose value is None."""
    table = table.copy()
    at = (table["stage"] == "parity") & (table["metric"] == metric)
    at &= (table["candidate"] == candidate) & (table["context"] == context)
    for index, value in values.items():
        which = at & (table["index"] == index)
        assert which.any()
        if value is None:
            table = table[~which]
            at = at[~which]
        else:
            table.loc[which, "value"] = value
    return table


def every(value, n=64):
    return dict.fromkeys(range(n), value)


def of_k2(table, protocol=REGISTERED):
    found = quality.judge(table, protocol, parity.judge(table, protocol))
    json.dumps(found, allow_nan=False)  # as verdict.json has it
    return found["K2"]


def at(found, context):
    return next(one for one in found["contexts"] if one["context"] == context)


# --------------------------------------------------------------------------------------------------
# Parity


def reasons_of(table, name):
    return parity.judge(table, REGISTERED)["candidates"][name]["reasons"]


def test_all_within_the_tolerance_are_in_parity():
    found = parity.judge(TABLE, REGISTERED)
    assert found["contexts"] == [512, 4096, 16384] and found["skipped"] == {}
    assert "K0" not in found["candidates"]
    assert all(not found["candidates"][name]["reasons"] for name in ("A1", "A2", "K1", "K3", "K5"))
    k2 = found["candidates"]["K2"]
    assert [one["context"] for one in k2["by_context"]] == [0, 512, 4096, 16384]
    assert k2["by_context"][1] == {
        "context": 512,
        "texts": 4,
        "positions": 64 * 16,
        "decoded_steps": 4,
        "max_abs_logit_difference": 2e-4,
        "tolerance": 0.1,
    }
    assert k2["by_context"][3]["tolerance"] is None


@pytest.mark.parametrize("context", [0, 512, 4096])
@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("K3", 0.002, True),
        ("K3", 0.0020001, False),
        ("K2", 0.1, True),
        ("K2", 0.1000001, False),
        ("K5", 2.0, True),
        ("K5", 2.0000001, False),
        ("A1", math.nan, False),
        ("A1", math.inf, False),
    ],
)
def test_each_logit_stays_within_what_the_profile_declares(name, context, value, fine):
    """Both sides of the edge, in the last text that is compared."""
    last = {0: 23, 512: 63, 4096: 63}[context]
    reasons = reasons_of(
        changed(TABLE, LOGIT, {last: value}, candidate=name, context=context), name
    )
    assert len(reasons) == (0 if fine else 1)
    if not fine:
        where = f"context {context}" if context else "the prompt set"
        assert f"at {where} a logit differs by {value:.4g}" in reasons[0]


@pytest.mark.parametrize("metric", [LOGIT, DECODED_LOGIT])
@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [("K3", 0.05, True), ("K3", 0.0500001, False), ("A1", math.nan, False), ("K5", 25.0, True)],
)
def test_beyond_the_trained_length_the_tolerance_is_wider_or_none(name, value, fine, metric):
    table = changed(TABLE, metric, {0: value}, candidate=name, context=16384)
    assert (reasons_of(table, name) == []) is fine
    longer = table.copy()
    longer.loc[longer["metric"] == "run/context_length", "text"] = "32768"
    assert reasons_of(longer, name)
    unknown = table[table["metric"] != "run/context_length"]
    assert reasons_of(unknown, name)


@pytest.mark.parametrize("value", [0.0020001, math.nan])
def test_a_decoded_step_stays_within_the_tolerance_too(value):
    """The causal block form is shared by stores whose decode is their own."""
    table = changed(TABLE, DECODED_LOGIT, {3: value}, candidate="K4")
    assert f"context 4096 a logit differs by {value:.4g}" in reasons_of(table, "K4")[0]
    gone = changed(TABLE, DECODED_LOGIT, {3: None}, candidate="K4", context=512)
    assert "4 of 4 texts and 3 of 4 decoded steps were compared" in reasons_of(gone, "K4")[0]


@pytest.mark.parametrize(
    ("name", "context", "needed"), [("K3", 0, 24), ("K3", 512, 4), ("A2", 4096, 1), ("K2", 512, 4)]
)
def test_as_many_texts_as_registered_are_demanded(name, context, needed):
    spare = dict.fromkeys(range(needed, 24 if context == 0 else 64))
    assert reasons_of(changed(TABLE, LOGIT, spare, candidate=name, context=context), name) == []
    short = changed(TABLE, LOGIT, {needed - 1: None}, candidate=name, context=context)
    (reason,) = reasons_of(short, name)
    assert f"{needed - 1} of {needed} texts and" in reason


def test_the_comparison_is_held_against_the_baseline_and_takes_the_others_along():
    """The baseline's rows at a filled context are those of the pair."""
    table = changed(TABLE, LOGIT, {0: 0.01}, candidate="K0")
    assert reasons_of(table, "K1") == [
        "parity: at context 4096 a logit differs by 0.01; declared tolerance 0.002"
    ]
    assert reasons_of(table, "K3") == [
        "parity: not shown at the filled contexts: K1 is not in parity"
    ]
    assert of_k2(table)["reasons"] == ["quality: K1, which it is compared with, is not in parity"]
    missing = TABLE[~((TABLE["candidate"] == "K0") & (TABLE["context"] == 512))]
    assert "0 of 1 texts" in reasons_of(missing, "K1")[0] and reasons_of(missing, "K3")


def test_a_context_that_the_machine_cannot_hold_is_not_demanded():
    why = "1 sessions of 16384 positions need 9 GiB"
    skipped = row("parity", "cell/skipped", context=16384, text=why)
    table = TABLE[~((TABLE["stage"] == "parity") & (TABLE["context"] == 16384))]
    found = parity.judge(with_rows(table, [skipped]), REGISTERED)
    assert found["contexts"] == [512, 4096] and found["skipped"] == {"16384": why}
    assert found["candidates"]["K3"]["reasons"] == []
    # Another cell of that context says nothing of the deciding one.
    other = row("parity", "cell/skipped", context=16384, sessions=4, text=why)
    assert parity.judge(with_rows(table, [other]), REGISTERED)["candidates"]["K3"]["reasons"]


# --------------------------------------------------------------------------------------------------
# Quality


def test_quality_is_shown_and_a_context_beyond_the_trained_length_is_reported():
    found = of_k2(TABLE)
    assert found["shown"] and found["reasons"] == []
    assert [(c["context"], c["gated"], c["chunks"]) for c in found["contexts"]] == [
        (512, True, 64),
        (4096, True, 64),
        (16384, False, 8),
    ]
    assert at(found, 512) == {
        "context": 512,
        "gated": True,
        "chunks": 64,
        "positions": 1024,
        "mean_kld": 1e-5,
        "kld_upper": 1e-5,
        "worst_chunk_kld": 1e-5,
        "worst_position_kld": 2e-5,
        "top1_agreement": 1.0,
        "top1_lower": pytest.approx(0.025 ** (1 / 1024)),  # all agree: p^n is the tail
    }
    assert found["decode"]["steps"] == 64 and found["decode"]["mean_kld"] == 1e-5


@pytest.mark.parametrize(("kld", "shown"), [(0.001, True), (0.00100001, False), (math.nan, False)])
@pytest.mark.parametrize("context", [512, 4096])
def test_the_divergence_has_an_edge(kld, shown, context):
    found = of_k2(changed(TABLE, "quality/kld", every(kld), context=context))
    assert found["shown"] is shown
    assert shown or f"context {context}: the mean KLD may be {kld:.3g}" in found["reasons"][0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_one_wild_chunk_shows_nothing_and_breaks_nothing(value):
    found = of_k2(changed(TABLE, "quality/kld", {5: value}))
    assert not found["shown"] and "the mean KLD may be" in found["reasons"][0]


def test_an_outlier_widens_the_bound_beyond_a_t_interval():
    rng = np.random.default_rng(3)
    values = rng.exponential(4e-4, 64)
    values[7] = 0.02
    mean = float(values.mean())
    high = stats.t.interval(0.95, 63, mean, stats.sem(values))[1]
    found = at(of_k2(changed(TABLE, "quality/kld", dict(enumerate(values)))), 4096)
    assert found["mean_kld"] == pytest.approx(mean)
    assert found["worst_chunk_kld"] == 0.02
    assert found["kld_upper"] > high > mean


@pytest.mark.parametrize(("wrong", "shown"), [(11, True), (12, False), (math.nan, False)])
def test_the_agreement_has_an_edge(wrong, shown):
    """scipy.stats.binomtest of 1013 and 1012 of 1024: 0.98087 and 0.97962."""
    found = of_k2(changed(TABLE, "quality/top1_agrees", {0: 16 - wrong}))
    assert found["shown"] is shown
    if not math.isnan(wrong):
        interval = stats.binomtest(1024 - wrong, 1024).proportion_ci(0.95, "exact")
        assert at(found, 4096)["top1_lower"] == pytest.approx(interval.low, rel=1e-9)
        assert (interval.low >= 0.98) is shown


def test_beyond_the_trained_length_nothing_is_gated():
    bad = changed(TABLE, "quality/kld", every(1.0, 16), context=16384)
    assert of_k2(bad)["shown"] and at(of_k2(bad), 16384)["mean_kld"] == 1.0
    gone = TABLE[~((TABLE["candidate"] == "K2") & (TABLE["context"] == 16384))]
    assert of_k2(gone)["shown"] and at(of_k2(gone), 16384)["chunks"] == 0


@pytest.mark.parametrize(
    ("trained", "gated"),
    # All 256 appended positions of a place lie within it, or the context does not.
    [(4096, [512]), (4351, [512]), (4352, [512, 4096]), (767, []), (768, [512])],
)
def test_a_context_within_the_trained_length_has_its_chunks_within_it(trained, gated):
    table = TABLE.copy()
    table.loc[table["metric"] == "run/context_length", "text"] = str(trained)
    found = of_k2(table)
    assert [one["context"] for one in found["contexts"] if one["gated"]] == gated
    assert found["shown"] is bool(gated)
    assert found["decode"]["gated"] is (4096 in gated)
    if not gated:
        assert found["reasons"] == ["quality: no context lies within the trained length of 767"]


@pytest.mark.parametrize("text", [None, ""])
def test_without_the_trained_length_nothing_is_shown(text):
    table = TABLE.copy()
    where = table["metric"] == "run/context_length"
    table.loc[where, "text"] = text or ""
    if text is None:
        table = table[~where]
    assert of_k2(table)["reasons"] == ["quality: the model's trained length is not known"]


@pytest.mark.parametrize(
    ("metric", "index", "said"),
    [
        ("quality/kld", 63, "quality: context 4096: 63 of 64 chunks were measured"),
        ("quality/top1_agrees", 0, "quality: context 4096: 63 of 64 chunks were measured"),
        ("quality/decode_kld", 63, "quality: 63 of 64 decoded steps were compared at 4096"),
    ],
)
def test_missing_evidence_shows_nothing(metric, index, said):
    assert of_k2(changed(TABLE, metric, {index: None}))["reasons"] == [said]


def test_no_rows_at_all_show_nothing():
    run = TABLE[TABLE["stage"] == "run"]
    found = quality.judge(run, REGISTERED, parity.judge(run, REGISTERED))
    assert set(found) == set(REGISTERED["decision"]["profiles"])
    assert not any(one["shown"] for one in found.values())


def test_the_decode_is_a_check_of_its_own():
    found = of_k2(changed(TABLE, "quality/decode_kld", every(0.0011)))
    assert found["reasons"] == ["quality: the decode's mean KLD at 4096 is 0.0011; at most 0.001"]
    assert of_k2(changed(TABLE, "quality/decode_kld", every(0.001)))["shown"]


def test_other_gates_are_other_answers():
    strict = copy.deepcopy(REGISTERED)
    strict["quality"]["kld_upper"] = 1e-6
    assert not of_k2(TABLE, strict)["shown"]


# --------------------------------------------------------------------------------------------------
# Bounds


def test_the_bootstrap_t_by_hand_and_beside_scipy():
    """Three values: the 27 equally likely resamples, by hand, are what 20,000 drawn ones approach."""
    x = np.array([1.0, 2.0, 4.0])
    grid = np.stack(np.meshgrid(x, x, x), -1).reshape(-1, 3)
    spread = grid.std(axis=1, ddof=1)
    shift = grid.mean(axis=1) - x.mean()
    t = np.sort(
        [a / b if b > 0 else math.copysign(math.inf, a) for a, b in zip(shift, spread, strict=True)]
    )
    # 27 x 0.2 = 5.4: the sixth order statistic. Two resamples of one value alone lie below the mean.
    low = t[5]
    assert math.isinf(t[1]) and math.isfinite(low)
    wanted = x.mean() - low * x.std(ddof=1)
    assert quality.mean_upper(x, 0.6, 20_000, 1) == pytest.approx(wanted, rel=1e-12)
    assert math.isinf(quality.mean_upper(x, 0.95, 20_000, 1))


def test_the_bound_covers_a_skewed_mean():
    """Nominal: misses 2.5%. A t interval of the same samples misses twice as often as this one."""
    rng = np.random.default_rng(11)
    ours = normal = 0
    for _ in range(400):
        values = rng.lognormal(0, 1, 64)
        mean = math.exp(0.5)
        ours += quality.mean_upper(values, 0.95, 1000, 5) < mean
        normal += values.mean() + stats.t.ppf(0.975, 63) * stats.sem(values) < mean
    assert ours < 0.06 * 400 and normal > 2 * ours


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_the_bound_goes_with_the_scale(scale):
    values = np.random.default_rng(2).exponential(1.0, 64)
    once = quality.mean_upper(values, 0.95, 2000, 9)
    assert quality.mean_upper(values * scale, 0.95, 2000, 9) == pytest.approx(once * scale)
    assert math.isfinite(once)


@pytest.mark.parametrize(
    ("values", "upper"),
    [
        ([0.0] * 64, 0.0),
        ([3e-4] * 64, 3e-4),
        ([1.0, 2.0], math.nan),
        ([0.0, 0.0, math.nan], math.nan),
    ],
)
def test_constant_chunks_are_their_own_bound_and_too_few_have_none(values, upper):
    np.testing.assert_equal(quality.mean_upper(np.array(values), 0.95, 1000, 0), upper)


def test_one_outlier_among_zeros_has_no_bound():
    values = np.zeros(64)
    values[9] = 1.0
    assert math.isinf(quality.mean_upper(values, 0.95, 10_000, 0))


@pytest.mark.parametrize(("right", "of"), [(0, 10), (1, 10), (9, 10), (10, 10), (500, 1024)])
def test_the_share_is_scipys(right, of):
    low = stats.binomtest(right, of).proportion_ci(0.95, "exact").low
    assert quality.share_lower(right, of, 0.95) == pytest.approx(low, rel=1e-9)


@pytest.mark.parametrize(
    ("right", "of"),
    [(0, 0), (11, 10), (-1, 10), (1.5, 10), (math.nan, 10), (1, math.nan), (math.inf, 10)],
)
def test_counts_that_are_none_have_no_share(right, of):
    assert math.isnan(quality.share_lower(right, of, 0.95))
