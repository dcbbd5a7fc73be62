"""Weight kernels against NumPy in float64, on blocks packed and unpacked here by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvtrial.engine._panels import Quads
from kvtrial.engine._regions import gate_rows, rms_norm_rows, rotate_rows
from kvtrial.engine._weights import Matrix, packed_nbytes

from kvtrial.engine import weights
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.gguf import read_gguf

KINDS = ("F32", "F16", "Q8_0", "Q4_1")


def packed(kind: str, rows: int, cols: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of a matrix in ``kind``, and its values in float64."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16"):
        values = rng.standard_normal((rows, cols)).astype("<f4" if kind == "F32" else "<f2")
        return values.reshape(-1).view(np.uint8), values.astype(np.float64)
    blocks = rows * cols // 32
    d = rng.uniform(0.001, 0.02, (blocks, 1)).astype("<f2")
    if kind == "Q8_0":
        q = rng.integers(-128, 128, (blocks, 32)).astype(np.int8)
        data = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1)
        values = d.astype(np.float64) * q
    else:
        m = rng.uniform(-0.2, 0, (blocks, 1)).astype("<f2")
        q = rng.integers(0, 16, (blocks, 32)).astype(np.uint8)
        nibbles = q[:, :16] | q[:, 16:] << 4
        data = np.concatenate([d.view(np.uint8), m.view(np.uint8), nibbles], axis=1)
        values = d.astype(np.float64) * q + m.astype(np.float64)
    return data.reshape(-1), values.reshape(rows, cols)


def decoded(matrix: Matrix, x: np.ndarray, threads: int = 1) -> np.ndarray:
    """A product with quantised activations, by the decode's kernels."""
    return matrix.multiply(x, quantised=True, threads=threads)


def prefilled(matrix: Matrix, x: np.ndarray, threads: int = 1) -> np.ndarray:
    """The same by the prefill's."""
    quads = Quads(len(x) + 3, matrix.cols)
    quads.take(x, threads)
    out = np.full((len(x), matrix.rows), np.nan, np.float32)
    quads.multiply(matrix, out, threads)
    return out


both_ways = pytest.mark.parametrize("multiplied", [decoded, prefilled])
quantised_kinds = pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5, 67])
def test_dequantise(kind, rows):
    """C16: block bytes, nibble order, rows after the first."""
    data, values = packed(kind, rows, 96)
    matrix = Matrix("w", kind, rows, 96, data)
    out = np.full((rows, 96), np.nan, np.float32)
    matrix.dequantise(0, rows, out)
    np.testing.assert_allclose(out, values, rtol=1e-6, atol=1e-7)
    picked = np.array([rows - 1, 0])
    some = np.empty((2, 96), np.float32)
    matrix.dequantise_rows(picked, some)
    assert (some == out[picked]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (3, 64), (66, 96), (130, 576)])
def test_float_products(kind, rows, cols):
    data, values = packed(kind, rows, cols)
    x = np.random.default_rng(2).standard_normal((3, cols)).astype(np.float32)
    got = Matrix("w", kind, rows, cols, data).multiply(x)
    bound = 1e-6 * (np.abs(x.astype(np.float64)) @ np.abs(values.T))
    assert (np.abs(got - x.astype(np.float64) @ values.T) <= bound).all()


@both_ways
@quantised_kinds
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (7, 64), (8, 96), (17, 576), (66, 96)])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 9])
def test_quantised_products_round_each_block_of_activations(multiplied, kind, rows, cols, n):
    """Exactly the product with activations rounded to int8 by their block's largest."""
    data, values = packed(kind, rows, cols)
    x = np.random.default_rng(2).standard_normal((n, cols)).astype(np.float32)
    blocks = x.reshape(n, -1, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    rounded = (np.rint(blocks / scale) * scale.astype(np.float64)).reshape(n, cols)
    got = multiplied(Matrix("w", kind, rows, cols, data), x)
    bound = 2e-6 * (np.abs(rounded) @ np.abs(values.T))
    assert (np.abs(got - rounded @ values.T) <= bound).all()


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("cols", range(1, 68))
def test_tails(kind, cols):
    """B16: a dot of ones counts them."""
    ones = np.ones((5, cols), "<f4" if kind == "F32" else "<f2").reshape(-1).view(np.uint8)
    got = Matrix("w", kind, 5, cols, ones).multiply(np.ones((1, cols), np.float32))
    assert (got == cols).all()


@both_ways
@quantised_kinds
def test_large_activations_do_not_overflow(multiplied, kind):
    """C15: 32 * 3000 is past FP16."""
    data, values = packed(kind, 8, 64)
    x = np.full((1, 64), 3000, np.float32)
    got = multiplied(Matrix("w", kind, 8, 64, data), x)
    np.testing.assert_allclose(got, x.astype(np.float64) @ values.T, rtol=1e-5, atol=1e-2)


@both_ways
@quantised_kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_activations_surface(multiplied, kind, bad):
    """In all products of their own vector, and in no other's."""
    data, _ = packed(kind, 9, 64)
    x = np.ones((3, 64), np.float32)
    x[1, 5] = bad
    got = multiplied(Matrix("w", kind, 9, 64, data), x)
    assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all()


@both_ways
@quantised_kinds
@pytest.mark.parametrize("peak", [0.0, 1e-38, 1e-40])
def test_tiny_activations_give_no_nan(multiplied, kind, peak):
    data, _ = packed(kind, 8, 64)
    got = multiplied(Matrix("w", kind, 8, 64, data), np.full((1, 64), peak, np.float32))
    assert np.isfinite(got).all() and np.abs(got).max() < 1e-30


@both_ways
@pytest.mark.parametrize(("kind", "weight"), [("Q4_1", 15), ("Q8_0", 127), ("Q8_0", -128)])
@pytest.mark.parametrize("x", [1.0, -1.0])
def test_the_largest_bytes_stay_inside_the_integer_sums(multiplied, kind, weight, x):
    one, zero = np.float16(1).tobytes(), np.float16(0).tobytes()
    if kind == "Q4_1":
        block = one + zero + bytes([weight | weight << 4]) * 16
    else:
        block = one + np.full(32, weight, np.int8).tobytes()
    data = np.frombuffer(block * (5 * 96 // 32), np.uint8)
    got = multiplied(Matrix("w", kind, 5, 96, data), np.full((4, 96), x, np.float32))
    np.testing.assert_allclose(got, 96.0 * weight * x, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("batch", [2, 3, 4, 5])
def test_threads_and_batch_change_no_bit(kind, quantised, batch):
    data, _ = packed(kind, 333, 64)
    matrix = Matrix("w", kind, 333, 64, data)
    x = np.random.default_rng(3).standard_normal((batch, 64)).astype(np.float32)
    together = matrix.multiply(x, quantised, threads=3)
    for b in range(batch):
        assert matrix.multiply(x[b : b + 1], quantised).tobytes() == together[b].tobytes()


@quantised_kinds
def test_threads_and_other_positions_change_no_bit_of_a_prefill(kind):
    data, _ = packed(kind, 333, 64)
    matrix = Matrix("w", kind, 333, 64, data)
    x = np.random.default_rng(3).standard_normal((11, 64)).astype(np.float32)
    together = prefilled(matrix, x, threads=3)
    for p in range(11):
        assert prefilled(matrix, x[p : p + 1]).tobytes() == together[p].tobytes()


def test_what_the_integer_products_cannot_take_is_refused():
    quads = Quads(4, 64)
    x, out = np.ones((4, 64), np.float32), np.empty((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"shape \(5, 64\).*room for 8 blocks"):
        quads.take(np.ones((5, 64), np.float32), 1)
    with pytest.raises(ValueError, match=r"shape \(4, 40\).*whole blocks of 32"):
        quads.take(np.ones((4, 40), np.float32), 1)
    quads.take(x, 1)
    for kind, cols in (("F16", 64), ("Q8_0", 32)):
        data, _ = packed(kind, 8, cols)
        with pytest.raises(ValueError, match=f"w is {kind} and has {cols} columns"):
            quads.multiply(Matrix("w", kind, 8, cols, data), out, 1)
    data, _ = packed("Q8_0", 9, 64)
    with pytest.raises(ValueError, match=r"out has shape \(4, 8\).*need \(4, 9\)"):
        quads.multiply(Matrix("w", "Q8_0", 9, 64, data), out, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [1, 4, 12, 20])
def test_unaligned_read_only_data(kind, offset):
    """B18, B23: weights lie where the file puts them, in a read-only map."""
    data, _ = packed(kind, 6, 64)
    moved = np.frombuffer(bytes(offset) + data.tobytes(), np.uint8)[offset:]
    assert not moved.flags.writeable
    x = np.ones((1, 64), np.float32)
    x.flags.writeable = False
    for quantised in (False, True):
        got = Matrix("w", kind, 6, 64, moved).multiply(x, quantised)
        assert (got == Matrix("w", kind, 6, 64, data).multiply(x, quantised)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_need_their_file_no_more(kind):
    data, values = packed(kind, 9, 64)
    room = np.empty(packed_nbytes(kind, 9, 64), np.uint8)
    with pytest.raises(
        ValueError, match=f"room for w has {room.size - 1} bytes; it takes {room.size}"
    ):
        Matrix("w", kind, 9, 64, data, room[1:])
    matrix = Matrix("w", kind, 9, 64, data, room)
    data[:] = 0
    out = np.empty((9, 64), np.float32)
    matrix.dequantise(0, 9, out)
    np.testing.assert_allclose(out, values, rtol=1e-6, atol=1e-7)


def test_read_only_output_is_refused():
    matrix = Matrix("w", "F32", 1, 4, np.zeros(16, np.uint8))
    out = np.zeros((1, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        matrix.dequantise(0, 1, out)


@pytest.mark.parametrize(
    ("kind", "rows", "cols", "size", "message"),
    [
        ("Q4_1", 2, 33, 40, "whole blocks of 32"),
        ("Q8_0", 2, 64, 135, "takes 136"),
        ("Q5_K", 1, 32, 22, "blocks of 256"),
        ("Q8_K", 1, 32, 32, "allowed: F32, F16, BF16, Q4_0, Q4_1"),
        ("F32", 0, 4, 0, "at least one row"),
    ],
)
def test_wrong_matrices_are_refused(kind, rows, cols, size, message):
    with pytest.raises(ValueError, match=message):
        Matrix("w", kind, rows, cols, np.zeros(size, np.uint8))


@pytest.mark.parametrize("n", [1, 8, 13, 576])
def test_norm_and_gate(n):
    rng = np.random.default_rng(4)
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((3, n), n))
    out = np.empty_like(x)
    rms_norm_rows(x, weight, 1e-5, out, threads=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    gate = 30 * rng.standard_normal((3, n)).astype(np.float32)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * x
    gate_rows(gate, x, gelu=False, threads=1)
    np.testing.assert_allclose(gate, expected, rtol=1e-5, atol=1e-30)
    gate = 3 * rng.standard_normal((3, n)).astype(np.float32)
    wide = gate.astype(np.float64)
    expected = wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) / 2 * x
    gate_rows(gate, x, gelu=True, threads=1)
    np.testing.assert_allclose(gate, expected, rtol=1e-4, atol=1e-6)


def test_rows_that_do_not_fit_together_are_refused():
    four, five = (np.ones((n, 8), np.float32) for n in (4, 5))
    with pytest.raises(ValueError, match="rows 5 by 8 do not fit"):
        rms_norm_rows(five, four[0], 1e-5, four, threads=1)
    with pytest.raises(ValueError, match="up has 5 by 8 floats, gate 4 by 8"):
        gate_rows(four, five, gelu=False, threads=1)
    with pytest.raises(ValueError, match="turns are 5 of 8 floats, rows 4 of 8"):
        rotate_rows(four.reshape(4, 1, 8), five.reshape(5, 2, 4), False, threads=1)


def test_no_rows_are_nothing_to_do():
    none = np.empty((0, 8), np.float32)
    rms_norm_rows(none, np.ones(8, np.float32), 1e-5, none, threads=2)
    gate_rows(none, none, gelu=False, threads=2)
    rotate_rows(none.reshape(0, 1, 8), none.reshape(0, 2, 4), False, threads=2)
    data, _ = packed("Q4_1", 8, 64)
    assert prefilled(Matrix("w", "Q4_1", 8, 64, data), np.empty((0, 64), np.float32)).shape == (
        0,
        8,
    )


def test_a_system_without_huge_pages_loads_models_too(monkeypatch):
    monkeypatch.setattr(weights.mmap, "MADV_HUGEPAGE", 1 << 20)  # no advice that a system knows
    file = read_gguf(Path(__file__).parent.parent / "data" / "llama-tiny-q4_1.gguf")
    assert weights.load_weights(file, ModelConfig.from_gguf(file)).head.output.rows == 320


def test_floating_point_mode_is_the_processes():
    """B19: denormals survive the import and a product."""
    code = (
        "import numpy as np; from kvtrial.engine._weights import Matrix\n"
        "Matrix('w', 'F32', 1, 4, np.zeros(16, np.uint8)).multiply(np.ones((1, 4), np.float32))\n"
        "raise SystemExit(float(np.float32(1e-40) * np.float32(1)) == 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_threads_are_refused():
    data, _ = packed("Q8_0", 8, 64)
    with pytest.raises(ValueError, match="threads is 0; give at least 1"):
        Matrix("w", "Q8_0", 8, 64, data).multiply(np.ones((1, 64), np.float32), threads=0)
