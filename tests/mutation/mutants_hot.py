"""Faults of pools and kernels; the conformance suite has to notice each."""

from __future__ import annotations

from mutant import Mutant

#: What every contender's suite has to notice.
KERNEL_FAULTS = ("page index", "copy-on-write test", "softmax rescale", "hole mask", "generation")


def _suite(test: str, *arms: str) -> tuple[str, ...]:
    """The named conformance test on each arm, at one page size."""
    file = "tests/conformance/test_candidates.py"
    return tuple(f"{file}::test_conforms[{arm}-{test}-16]" for arm in arms)


def _hot(name: str, arms: tuple[str, ...], file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(name, arms, file, old, new, _suite(test, *arms))


_K1T, _K3T = ("K1T",), ("K3T",)
_CYTHON_KERNEL, _RUST_KERNEL = ("K1", "K1T"), ("K3", "K3T", "K4")
_CYTHON_POOL, _RUST_POOL = ("K1", "K4", "K1T"), ("K3", "K3T")
_PAGES, _PAGED = "src/kvtrial/hot/_pages.pyx", "src/kvtrial/hot/_paged.pyx"
_TILE, _PANEL = "src/kvtrial/hot/_tile.pxd", "src/kvtrial/hot/_kernels_panel_simd.pyx"
_ATTEND = "src/kvtrial/hot/_attend.pyx"
_RUST_STORE, _RUST_ATTEND = "rust/src/store.rs", "rust/src/attend.rs"

HOT = [
    _hot(
        "generation: any owner of the slot will do",
        _CYTHON_POOL,
        _PAGED,
        "if not owner.open or owner.generation != self.generation:",
        "if not owner.open:",
        "KvAppendRequiresOwner",
    ),
    _hot(
        "page index: a row at a page's end is put into the next page",
        _CYTHON_POOL,
        _PAGED,
        "pool.copy_on_write(self.slot, lay, slot // store.tokens)",
        "pool.copy_on_write(self.slot, lay, (slot + 1) // store.tokens)",
        "KvAppendMatchesSingles",
    ),
    _hot(
        "copy-on-write test: a shared page is written",
        _CYTHON_POOL,
        _PAGES,
        "if old >= 0 and self.references[old] == 1:",
        "if old >= 0:",
        "KvBranchCopyOnWrite",
    ),
    _hot(
        "page index: the kernel reads every other page twice",
        _CYTHON_KERNEL,
        _TILE,
        "span.page_ids[page] * span.page_bytes",
        "span.page_ids[page // 2 * 2] * span.page_bytes",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "softmax rescale: what was summed stays as it was",
        _CYTHON_KERNEL,
        _TILE,
        "keep = expf(top[h] - peaks[h])",
        "keep = 1",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "hole mask: every row counts",
        _CYTHON_KERNEL,
        _TILE,
        "bits = span.valid[page]",
        "bits = ~<uint64_t>0",
        "AttentionMasksHoles",
    ),
    _hot(
        "hole mask: V rows are added whatever the mask says",
        _K1T,
        _PANEL,
        "rows = tile.mask\n",
        "rows = ~<uint64_t>0 >> (64 - tile.tokens)\n",
        "AttentionMasksHoles",
    ),
    _hot(
        "page index: elements of a transposed K row change places",
        _K1T,
        "src/kvtrial/hot/formats/_fp32.pyx",
        "(<float *>at)[i * tiles.page_tokens + token] = k[i]",
        "(<float *>at)[(i ^ 1) * tiles.page_tokens + token] = k[i]",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "softmax rescale: spans are joined without it",
        _CYTHON_POOL,
        _ATTEND,
        "other = expf(more_top[h] - peak)",
        "other = 1",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "softmax rescale: in the causal block",
        _CYTHON_POOL,
        _ATTEND,
        "keep = expf(top[0] - peak)",
        "keep = 1",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "hole mask: in the causal block",
        _CYTHON_POOL,
        _ATTEND,
        "if span.valid[slot // tokens] >> (slot % tokens) & 1:",
        "if True:",
        "AttentionMasksHoles",
    ),
    _hot(
        "generation: any owner of the slot will do (Rust)",
        _RUST_POOL,
        _RUST_STORE,
        " && session.generation == generation",
        "",
        "KvAppendRequiresOwner",
    ),
    _hot(
        "copy-on-write test: a shared page is written (Rust)",
        _RUST_POOL,
        _RUST_STORE,
        "if id != NO_PAGE && !self.pool.is_shared(id) {",
        "if id != NO_PAGE {",
        "KvBranchCopyOnWrite",
    ),
    _hot(
        "page index: a row at a page's end is put into the next page (Rust)",
        _RUST_POOL,
        "rust/src/pool.rs",
        "(position as usize / self.page_tokens, position as usize % self.page_tokens)",
        "((position as usize + 1) / self.page_tokens, position as usize % self.page_tokens)",
        "KvAppendMatchesSingles",
    ),
    _hot(
        "page index: the kernel reads every other page twice (Rust)",
        _RUST_KERNEL,
        _RUST_ATTEND,
        "page_of(pages.ids[index])",
        "page_of(pages.ids[index / 2 * 2])",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "softmax rescale: what was summed stays as it was (Rust)",
        _RUST_KERNEL,
        "rust/src/tile.rs",
        "exp(*max - top)",
        "1.0",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "softmax rescale: spans are joined without it (Rust)",
        _RUST_POOL,
        _RUST_ATTEND,
        "let weight = exp(",
        "let weight = 1.0 + 0.0 * exp(",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "hole mask: V rows are added whatever the mask says (Rust)",
        _K3T,
        "rust/src/panel_kernel.rs",
        "let mut left = self.mask;",
        "let mut left = low_bits(self.tokens);",
        "AttentionMasksHoles",
    ),
    _hot(
        "page index: elements of a transposed K row are not where the kernel reads them (Rust)",
        _K3T,
        "rust/src/pool.rs",
        "(self.page_tokens, 1)",
        "(self.page_tokens - 1, 1)",
        "AttentionMatchesReferenceInterpreter",
    ),
    _hot(
        "hole mask: every row counts (Rust)",
        _RUST_KERNEL,
        _RUST_ATTEND,
        "let mask = bits & below(",
        "let mask = below(",
        "AttentionMasksHoles",
    ),
]
