"""The roofline: every arm at the intensity that its rows and heads give it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtrial.run import events
from kvtrial.show.plots import roofline


def m1_rows(candidate, shape, context, row_bytes, ms, block=0, threads=1, share=0.5):
    """A block of three iterations around ``ms``, whose bytes are what the rows of the region hold."""
    at = {"stage": "m1", "candidate": candidate, "shape": shape, "context": context}
    at |= {"block": block, "threads": threads}
    rows = []
    for index, taken in enumerate((ms, ms / 2, ms * 2)):
        rate = row_bytes * context / taken / 1e6
        rows += [
            events.event("m1/attention_ms", value=taken, index=index, **at),
            events.event("m1/unique_gb_per_s", value=rate, index=index, **at),
            events.event("m1/ceiling_fraction", value=share, index=index, **at),
        ]
    return rows


def probe_rows(context, gb_per_s, gflop_per_s, threads=1):
    at = {"stage": "m1", "context": context, "threads": threads}
    return [
        *(events.event("probe/read_gb_per_s", value=v, **at) for v in gb_per_s),
        *(events.event("probe/fma_gflop_per_s", value=v, **at) for v in gflop_per_s),
    ]


@pytest.mark.parametrize(
    ("shape", "row_bytes", "intensity"),
    [
        (
            "9q3kv",
            2 * 3 * 64 * 4,
            1.5,
        ),  # FP32: three query heads a row, half an operation a byte each
        ("9q3kv", 2 * 3 * 64 * 2, 3.0),  # FP16: the same in half the bytes
        ("14q2kv", 2 * 2 * 64 * 4, 3.5),
        ("14q2kv", 2 * 2 * 2 * 34, 4 * 14 * 64 / 272),  # Q8_0: 34 bytes for 32 elements
        ("32q8kv128d", 2 * 8 * 128 * 4, 2.0),
    ],
)
def test_the_intensity_follows_from_heads_and_row_bytes(shape, row_bytes, intensity):
    table = events.to_frame(m1_rows("X", shape, 4096, row_bytes, 0.8))
    (point,) = roofline.points(table).itertuples()
    assert point.intensity == pytest.approx(intensity)
    operations = intensity * row_bytes * 4096
    assert point.gflop_per_s == pytest.approx(operations / 0.8e-3 / 1e9)
    assert point.share == 0.5


def test_blocks_contexts_and_threads_stay_apart():
    rows = m1_rows("K1", "9q3kv", 512, 1536, 0.1)
    rows += m1_rows("K1", "9q3kv", 512, 1536, 0.05, block=1)
    rows += m1_rows("K1", "9q3kv", 4096, 1536, 0.9) + m1_rows("K1", "9q3kv", 512, 1536, 0.06, 0, 2)
    found = roofline.points(events.to_frame(rows))
    assert len(found) == 4
    assert set(found["intensity"].round(9)) == {1.5}
    twice = found[(found["threads"] == 1) & (found["context"] == 512)].set_index("block")
    assert twice["gflop_per_s"][1] == pytest.approx(2 * twice["gflop_per_s"][0])


def test_dots_lie_below_the_slope_and_the_flat_that_the_probes_measured():
    rows = m1_rows("K1", "9q3kv", 4096, 1536, 0.8) + m1_rows("K2", "9q3kv", 4096, 768, 0.6)
    rows += m1_rows("K1", "14q2kv", 4096, 1024, 0.7)
    rows += m1_rows("K1", "9q3kv", 4096, 1536, 0.5, threads=2)
    rows += probe_rows(4096, (9.0, 12.0), (70.0, 80.0)) + probe_rows(4096, (20.0,), (150.0,), 2)
    # Another stage's probes are no ceilings of this figure.
    rows.append(events.event("probe/read_gb_per_s", stage="m2", context=4096, value=1000.0))
    drawn = roofline.draw({"shape": "9q3kv"}, events.to_frame(rows))
    one, two = drawn.axes
    assert [axis.get_xscale() + axis.get_yscale() for axis in (one, two)] == ["loglog"] * 2
    assert one.get_title().splitlines() == [
        "4,096 positions, 1 thread",
        "14q2kv: n = 1, hollow",
        "9q3kv: n = 1",
    ]
    assert two.get_title().splitlines() == ["4,096 positions, 2 threads", "9q3kv: n = 1"]
    slope, flat = one.collections
    (low, high) = one.get_xlim()
    for band, at_left, at_right in ((slope, low, high), (flat, 1, 1)):
        edges = band.get_paths()[0].vertices
        rates = (9.0, 12.0) if band is slope else (70.0, 80.0)
        for x, factor in ((low, at_left), (high, at_right)):
            y = edges[np.isclose(edges[:, 0], x), 1]
            assert y.min() == pytest.approx(rates[0] * factor)
            assert y.max() == pytest.approx(rates[1] * factor)
    dots = {
        (line.get_label(), line.get_markerfacecolor() == "none"): line.get_xydata()
        for line in one.lines
    }
    assert dots["K1", False] == pytest.approx(np.array([[1.5, 1.5 * 1536 * 4096 / 0.8e6]]))
    assert dots["K2", False] == pytest.approx(np.array([[3.0, 3.0 * 768 * 4096 / 0.6e6]]))
    assert [t.get_text() for t in drawn.legends[0].get_texts()] == [
        *("K1", "K2"),
        *("streaming read", "multiply-add"),
    ]
    assert [t.get_text() for t in one.texts] == ["50%"] * 3


def test_without_m1_there_is_no_figure():
    assert (
        roofline.draw({"shape": "9q3kv"}, events.to_frame(probe_rows(512, (9.0,), (70.0,)))) is None
    )
