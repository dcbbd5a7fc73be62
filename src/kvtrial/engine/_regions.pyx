"""The regions of a decode step, one call each: project, feed forward, head.

Memory is made once, in `Scratch`; a region allocates nothing. A batch of vectors goes through each
weight matrix together; everything else is per vector, so a vector's values do not depend on the
batch that it is in.
"""

from libc.math cimport cos, sin, sqrtf
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

import numpy as np

from kvtrial._threads cimport parallel_for
from kvtrial.engine._weights cimport Activations, Matrix, Product, Target, multiply

cdef extern from "quants.h" nogil:
    ctypedef struct q_f32x8:
        pass
    q_f32x8 q_set(float a)
    q_f32x8 q_load(const float* p)
    void q_store(float* p, q_f32x8 a)
    q_f32x8 q_add(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_mul(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_div(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_fma(q_f32x8 a, q_f32x8 b, q_f32x8 c)
    float q_sum(q_f32x8 a)
    q_f32x8 q_exp(q_f32x8 a)


# --- vectors ---

cdef void _rms_norm(
    const float* x, const float* weight, Py_ssize_t n, float eps, float* out
) noexcept nogil:
    cdef q_f32x8 acc = q_set(0)
    cdef Py_ssize_t whole = n - n % 8, i
    cdef float total, factor
    for i in range(0, whole, 8):
        acc = q_fma(q_load(x + i), q_load(x + i), acc)
    total = q_sum(acc)
    for i in range(whole, n):
        total += x[i] * x[i]
    factor = 1 / sqrtf(total / n + eps)
    for i in range(n):
        out[i] = x[i] * factor * weight[i]


cdef inline q_f32x8 _activation(q_f32x8 g, bint gelu) noexcept nogil:
    """SiLU, g / (1 + exp(-g)); or GELU in its tanh form, which is g / (1 + exp(-2 z)) for
    z = sqrt(2 / pi) (g + 0.044715 g^3)."""
    cdef q_f32x8 minus = q_mul(g, q_set(-1))
    if gelu:
        minus = q_mul(minus, q_set(1.5957691216057308))
        minus = q_mul(minus, q_fma(q_mul(g, g), q_set(0.044715), q_set(1)))
    return q_div(g, q_add(q_set(1), q_exp(minus)))


cdef void _gate(float* gate, const float* up, Py_ssize_t n, bint gelu) noexcept nogil:
    """gate: IN, OUT activation(gate) * up. A tail goes through a padded vector: one exp for all."""
    cdef float tail[8]
    cdef Py_ssize_t whole = n - n % 8, i
    for i in range(0, whole, 8):
        q_store(gate + i, q_mul(_activation(q_load(gate + i), gelu), q_load(up + i)))
    if whole < n:
        for i in range(8):
            tail[i] = gate[whole + i] if whole + i < n else 0
        q_store(tail, _activation(q_load(tail), gelu))
        for i in range(whole, n):
            gate[i] = tail[i - whole] * up[i]


cdef void _angles(
    long long position, const double* frequencies, Py_ssize_t half, float* turn
) noexcept nogil:
    """turn: OUT (2, half) cosines, then sines; the angle is float64."""
    cdef Py_ssize_t i
    for i in range(half):
        turn[i] = <float> cos(position * frequencies[i])
        turn[half + i] = <float> sin(position * frequencies[i])


cdef void _rotate(
    float* row, Py_ssize_t heads, Py_ssize_t head_stride, Py_ssize_t stride, Py_ssize_t half,
    bint halves, const float* turn
) noexcept nogil:
    """RoPE in place. Pairs are (i, i + half) where they are halves, else neighbours (2i, 2i + 1)."""
    cdef Py_ssize_t h, i, step = stride if halves else 2 * stride
    cdef Py_ssize_t apart = half * stride if halves else stride
    cdef float* a
    cdef float first, second
    for h in range(heads):
        for i in range(half):
            a = row + h * head_stride + i * step
            first = a[0]
            second = a[apart]
            a[0] = first * turn[i] - second * turn[half + i]
            a[apart] = first * turn[half + i] + second * turn[i]


cdef void _norm_head(
    float* at, Py_ssize_t stride, const float* weight, Py_ssize_t n, float eps
) noexcept nogil:
    """RMSNorm in place of one head, whose elements are ``stride`` floats apart: by the same sums whatever
    that is."""
    cdef float row[256]  # MAX_HEAD_DIM
    cdef Py_ssize_t i
    for i in range(n):
        row[i] = at[i * stride]
    _rms_norm(row, weight, n, eps, row)
    for i in range(n):
        at[i * stride] = row[i]


cdef void _add_bias(const Target* target, const float* bias, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t r
    for r in range(n):
        target.data[
            (r // target.inner) * target.outer_stride + (r % target.inner) * target.inner_stride
        ] += bias[r]


# The same over the rows of a chunk, for the prefill.

cdef enum:
    TASK_ROWS = 16  # whatever the number of threads


cdef struct _Rows:
    void (*row)(const _Rows* job, Py_ssize_t i) noexcept nogil
    Py_ssize_t n, size, heads
    float* x
    const float* other
    const float* weight
    float* out
    float eps
    bint halves, gelu


cdef void _rows_task(void* context, int64_t task) noexcept nogil:
    cdef const _Rows* job = <const _Rows*> context
    cdef Py_ssize_t i, first = task * TASK_ROWS
    for i in range(first, min(first + <Py_ssize_t> TASK_ROWS, job.n)):
        job.row(job, i)


cdef void _each_row(_Rows* job, int threads) noexcept nogil:
    parallel_for(_rows_task, job, (job.n + TASK_ROWS - 1) // TASK_ROWS, threads)


cdef void _norm_row(const _Rows* job, Py_ssize_t i) noexcept nogil:
    _rms_norm(job.other + i * job.size, job.weight, job.size, job.eps, job.out + i * job.size)


cdef void _gate_row(const _Rows* job, Py_ssize_t i) noexcept nogil:
    _gate(job.x + i * job.size, job.other + i * job.size, job.size, job.gelu)


cdef void _rotate_row(const _Rows* job, Py_ssize_t i) noexcept nogil:
    _rotate(
        job.x + i * job.heads * job.size, job.heads, job.size, 1, job.size // 2, job.halves,
        job.other + i * job.size,
    )


def rms_norm_rows(
    const float[:, ::1] x, const float[::1] weight, float eps, float[:, ::1] out, int threads
):
    """RMSNorm of each row of x (n, size) into out (at least n, size), which may be x itself."""
    cdef _Rows job
    if out.shape[0] < x.shape[0] or not x.shape[1] == weight.shape[0] == out.shape[1]:
        raise ValueError(f"rows {x.shape[0]} by {x.shape[1]} do not fit their weight or their output")
    if not x.shape[0]:
        return
    job.row, job.n, job.size = _norm_row, x.shape[0], x.shape[1]
    job.other, job.weight, job.eps, job.out = &x[0, 0], &weight[0], eps, &out[0, 0]
    with nogil:
        _each_row(&job, threads)


def gate_rows(float[:, ::1] gate, const float[:, ::1] up, bint gelu, int threads):
    """silu(gate) * up, or gelu(gate) * up, into gate (n, ffn)."""
    cdef _Rows job
    if up.shape[0] != gate.shape[0] or up.shape[1] != gate.shape[1]:
        raise ValueError(
            f"up has {up.shape[0]} by {up.shape[1]} floats, gate {gate.shape[0]} by {gate.shape[1]}"
        )
    if not gate.shape[0]:
        return
    job.row, job.n, job.size = _gate_row, gate.shape[0], gate.shape[1]
    job.x, job.other, job.gelu = &gate[0, 0], &up[0, 0], gelu
    with nogil:
        _each_row(&job, threads)


def rotate_rows(float[:, :, ::1] x, const float[:, :, ::1] turns, bint halves, int threads):
    """RoPE in place of x (n, heads, head_dim) by turns (n, 2, head_dim / 2)."""
    cdef _Rows job
    if turns.shape[0] != x.shape[0] or 2 * turns.shape[2] != x.shape[2]:
        raise ValueError(
            f"turns are {turns.shape[0]} of {2 * turns.shape[2]} floats, rows {x.shape[0]} of {x.shape[2]}"
        )
    if not x.shape[0]:
        return
    job.row, job.n, job.size, job.heads = _rotate_row, x.shape[0], x.shape[2], x.shape[1]
    job.x, job.other, job.halves = &x[0, 0, 0], &turns[0, 0, 0], halves
    with nogil:
        _each_row(&job, threads)


def rope_turns(const long long[::1] positions, const double[::1] frequencies):
    """Cosines and sines of positions (n,) at frequencies (half,): float32 (n, 2, half)."""
    cdef Py_ssize_t i, n = positions.shape[0], half = frequencies.shape[0]
    cdef float[:, :, ::1] turns = np.empty((n, 2, half), np.float32)
    with nogil:
        for i in range(n):
            _angles(positions[i], &frequencies[0], half, &turns[i, 0, 0])
    return np.asarray(turns)


# --- a step ---

cdef class Scratch:
    """Buffers of a decoder for up to ``batch`` vectors.

    Attributes
    ----------
    q, attended : float32 (batch, q_heads, head_dim)
    k, v : float32 (batch, kv_heads, head_dim)
        Where K and V go for a session that hands out no slot.
    logits : float32 (batch, vocab)
    """

    cdef readonly Py_ssize_t batch, hidden_size, kv_heads, head_dim, q_heads
    cdef readonly int threads
    cdef readonly object q, k, v, attended, logits
    cdef float[:, ::1] hidden
    cdef Activations normed, outputs, inner
    cdef float[:, :, ::1] _q, _k, _v
    cdef float[:, ::1] _up, _logits, _turns, _delta
    cdef const double[::1] _frequencies
    cdef Target* _targets  # (6, batch): q, k, v, then gate, up, delta or logits
    cdef bint _halves, _gelu
    cdef float _eps, _embedding_scale

    def __cinit__(self, config, Py_ssize_t batch, bint quantised, int threads, frequencies):
        self.batch = batch
        self.threads = threads
        self.hidden_size = config.hidden
        self.q_heads = config.q_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self._halves = config.architecture.halves
        self._gelu = config.architecture.gelu
        self._embedding_scale = config.embedding_scale
        self._eps = config.rms_eps
        self._frequencies = frequencies
        self.hidden = np.zeros((batch, config.hidden), np.float32)
        self.normed = Activations(batch, config.hidden, quantised)
        self.outputs = Activations(batch, config.q_heads * config.head_dim, quantised)
        self.inner = Activations(batch, config.ffn, quantised)
        self.q = np.zeros((batch, config.q_heads, config.head_dim), np.float32)
        self.k = np.zeros((batch, config.kv_heads, config.head_dim), np.float32)
        self.v = np.zeros((batch, config.kv_heads, config.head_dim), np.float32)
        self.attended = np.asarray(self.outputs.values).reshape(self.q.shape)
        self.logits = np.zeros((batch, config.vocab), np.float32)
        self._q, self._k, self._v = self.q, self.k, self.v
        self._logits = self.logits
        self._up = np.zeros((batch, config.ffn), np.float32)
        self._delta = np.zeros((batch, config.hidden), np.float32)
        self._turns = np.zeros((batch, config.head_dim), np.float32)
        self._targets = <Target*> calloc(6 * batch, sizeof(Target))
        if self._targets == NULL:
            raise MemoryError(f"no memory for a batch of {batch}")

    def __dealloc__(self):
        free(self._targets)

    def begin(self, Matrix embedding, const long long[::1] ids, const long long[::1] positions):
        """Embed the step's tokens and turn to their positions."""
        cdef Py_ssize_t b, i
        with nogil:
            for b in range(ids.shape[0]):
                embedding.dequantise_row(ids[b], &self.hidden[b, 0])
                if self._embedding_scale != 1:
                    for i in range(self.hidden_size):
                        self.hidden[b, i] *= self._embedding_scale
                _angles(
                    positions[b], &self._frequencies[0], self.head_dim // 2, &self._turns[b, 0]
                )


cdef inline Target _contiguous(float* data, Py_ssize_t n) noexcept nogil:
    return Target(data, n, n, 1)


cdef class Layer:
    """Weights of one layer and its two regions around the attention."""

    cdef readonly Matrix q, k, v, out, gate, up, down
    cdef readonly object attention_norm, ffn_norm, q_bias, k_bias, v_bias, q_norm, k_norm
    cdef const float[::1] _attention_norm, _ffn_norm, _q_bias, _k_bias, _v_bias, _q_norm, _k_norm
    cdef bint _biased, _normed

    def __cinit__(
        self, Matrix q, Matrix k, Matrix v, Matrix out, Matrix gate, Matrix up, Matrix down,
        attention_norm, ffn_norm, biases, norms
    ):
        self.q, self.k, self.v, self.out = q, k, v, out
        self.gate, self.up, self.down = gate, up, down
        self.attention_norm = self._attention_norm = attention_norm
        self.ffn_norm = self._ffn_norm = ffn_norm
        self._biased = biases is not None
        if self._biased:
            self.q_bias, self.k_bias, self.v_bias = biases
            self._q_bias, self._k_bias, self._v_bias = biases
        self._normed = norms is not None
        if self._normed:
            self.q_norm, self.k_norm = norms
            self._q_norm, self._k_norm = norms

    def project(self, Scratch s, list slots):
        """Norm, Q, K, V, bias, norm of each head, RoPE; K and V of vector b go to its slot or to scratch.

        Parameters
        ----------
        slots : list of (k, v) or None, one per vector
            Views (1, kv_heads, head_dim) from ``reserve_slot``, any strides.
        """
        cdef Py_ssize_t n = len(slots), b
        cdef Target* targets = s._targets
        cdef Target* k_targets = targets + s.batch
        cdef Target* v_targets = targets + 2 * s.batch
        cdef Product products[3]
        for b in range(n):
            targets[b] = _contiguous(&s._q[b, 0, 0], self.q.rows)
            slot = slots[b]
            if slot is None:
                k_targets[b] = _contiguous(&s._k[b, 0, 0], self.k.rows)
                v_targets[b] = _contiguous(&s._v[b, 0, 0], self.v.rows)
            else:
                k_targets[b] = _slot_target(slot[0], s)
                v_targets[b] = _slot_target(slot[1], s)
        with nogil:
            for b in range(n):
                _rms_norm(
                    &s.hidden[b, 0], &self._attention_norm[0], s.hidden_size, s._eps,
                    &s.normed.values[b, 0],
                )
            s.normed.prepare(n)
            products[0] = self.q.product(targets, s.normed.quantised)
            products[1] = self.k.product(k_targets, s.normed.quantised)
            products[2] = self.v.product(v_targets, s.normed.quantised)
            multiply(products, 3, s.normed.items, n, s.threads)
            for b in range(n):
                if self._biased:
                    _add_bias(targets + b, &self._q_bias[0], self.q.rows)
                    _add_bias(k_targets + b, &self._k_bias[0], self.k.rows)
                    _add_bias(v_targets + b, &self._v_bias[0], self.v.rows)
                self._turn(s, targets[b], s.q_heads, &self._q_norm[0] if self._normed else NULL, b)
                self._turn(s, k_targets[b], s.kv_heads, &self._k_norm[0] if self._normed else NULL, b)

    cdef void _turn(
        self, Scratch s, Target row, Py_ssize_t heads, const float* norm, Py_ssize_t b
    ) noexcept nogil:
        # A contiguous row is one run of heads * head_dim; a slot has a stride for each head.
        cdef Py_ssize_t head_stride = (
            row.outer_stride if row.inner == s.head_dim else s.head_dim * row.inner_stride
        )
        cdef Py_ssize_t h
        if norm != NULL:
            for h in range(heads):
                _norm_head(
                    row.data + h * head_stride, row.inner_stride, norm, s.head_dim, s._eps
                )
        _rotate(
            row.data, heads, head_stride, row.inner_stride, s.head_dim // 2, s._halves,
            &s._turns[b, 0],
        )

    def feed_forward(self, Scratch s, Py_ssize_t n):
        """Output projection of ``s.attended``, residual, norm, gated feed-forward, residual."""
        cdef Py_ssize_t b, i
        cdef Target* gates = s._targets + 3 * s.batch
        cdef Target* ups = s._targets + 4 * s.batch
        cdef Target* deltas = s._targets + 5 * s.batch
        cdef Product products[2]
        with nogil:
            for b in range(n):
                gates[b] = _contiguous(&s.inner.values[b, 0], self.gate.rows)
                ups[b] = _contiguous(&s._up[b, 0], self.up.rows)
                deltas[b] = _contiguous(&s._delta[b, 0], s.hidden_size)
            s.outputs.prepare(n)
            products[0] = self.out.product(deltas, s.outputs.quantised)
            multiply(products, 1, s.outputs.items, n, s.threads)
            for b in range(n):
                for i in range(s.hidden_size):
                    s.hidden[b, i] += s._delta[b, i]
                _rms_norm(
                    &s.hidden[b, 0], &self._ffn_norm[0], s.hidden_size, s._eps,
                    &s.normed.values[b, 0],
                )
            s.normed.prepare(n)
            products[0] = self.gate.product(gates, s.normed.quantised)
            products[1] = self.up.product(ups, s.normed.quantised)
            multiply(products, 2, s.normed.items, n, s.threads)
            for b in range(n):
                _gate(&s.inner.values[b, 0], &s._up[b, 0], self.gate.rows, s._gelu)
            s.inner.prepare(n)
            products[0] = self.down.product(deltas, s.inner.quantised)
            multiply(products, 1, s.inner.items, n, s.threads)
            for b in range(n):
                for i in range(s.hidden_size):
                    s.hidden[b, i] += s._delta[b, i]


cdef Target _slot_target(float[:, :, :] view, Scratch s):
    if view.shape[0] != 1 or view.shape[1] != s.kv_heads or view.shape[2] != s.head_dim:
        raise ValueError(
            f"slot has shape ({view.shape[0]}, {view.shape[1]}, {view.shape[2]}); a step needs "
            f"(1, {s.kv_heads}, {s.head_dim})"
        )
    return Target(&view[0, 0, 0], s.head_dim, view.strides[1] // 4, view.strides[2] // 4)


cdef class Head:
    """The final norm and the output matrix."""

    cdef readonly Matrix output
    cdef readonly object norm
    cdef const float[::1] _norm

    def __cinit__(self, norm, Matrix output):
        self.norm = self._norm = norm
        self.output = output

    def run(self, Scratch s, Py_ssize_t n):
        """Logits of the first n vectors into ``s.logits``."""
        cdef Py_ssize_t b
        cdef Target* targets = s._targets + 5 * s.batch
        cdef Product product
        with nogil:
            for b in range(n):
                targets[b] = _contiguous(&s._logits[b, 0], self.output.rows)
                _rms_norm(
                    &s.hidden[b, 0], &self._norm[0], s.hidden_size, s._eps, &s.normed.values[b, 0]
                )
            s.normed.prepare(n)
            product = self.output.product(targets, s.normed.quantised)
            multiply(&product, 1, s.normed.items, n, s.threads)
