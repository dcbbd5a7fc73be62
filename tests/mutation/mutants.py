"""The faults that are put into the code on purpose, and the tests that must go red for each.

A mutant replaces one text of one file. The text must occur there exactly once: one that no longer does
is an error that names the mutant (`test_mutants` looks on every run of the tests, `harness` before it
builds), so that the table can't outlive the code that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class MutantError(RuntimeError):
    """A mutant proves nothing: it does not apply, does not build, or names a test that isn't there."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes
    ----------
    name : str
        What is broken, and where.
    arms : tuple of str
        Candidates and cold stores that run the mutated source.
    file : str
        Relative to the project.
    old, new : str
        What is replaced, and by what.
    red : tuple of str
        Pytest node ids; each must fail.
    """

    name: str
    arms: tuple[str, ...]
    file: str
    old: str
    new: str
    red: tuple[str, ...]

    def apply(self, source: str) -> str:
        """The mutated source; `MutantError` unless the old text occurs exactly once."""
        found = source.count(self.old)
        if found != 1:
            raise MutantError(
                f"mutant {self.name!r}: its text occurs {found} times in {self.file}, not once; "
                f"adapt tests/mutation/mutants.py: {self.old!r}"
            )
        return source.replace(self.old, self.new)

    @property
    def is_native(self) -> bool:
        """Whether the kernels have to be built again."""
        return Path(self.file).suffix != ".py"


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

_SEGMENTS, _DISK = "src/kvtrial/cold/segments.py", "src/kvtrial/cold/disk.py"
_RECORDS, _RECOVERY = "src/kvtrial/cold/records.py", "src/kvtrial/cold/recovery.py"
_FAULTS, _LOG = "tests/unit/test_cold_faults.py", "tests/unit/test_cold_segments.py"
_DURABLE = "tests/unit/test_cold_durable.py"
_Z1, _Z2, _BOTH = ("Z1",), ("Z2",), ("Z1", "Z2")
_ACKNOWLEDGED = tuple(f"{_DURABLE}::test_what_is_acknowledged_is_durable[{kind}]" for kind in _BOTH)


def _cold(name: str, arms: tuple[str, ...], file: str, old: str, new: str, *red: str) -> Mutant:
    return Mutant(name, arms, file, old, new, red)


COLD = [
    _cold(
        "fsync: of a batch",
        _Z2,
        _SEGMENTS,
        "        try:\n            disk.fsync(file.fd)\n",
        "        try:\n            pass\n",
        f"{_FAULTS}::test_the_payload_is_durable_before_the_index_hears_of_it",
        f"{_DURABLE}::test_what_is_acknowledged_is_durable[Z2]",
    ),
    _cold(
        "fsync: of the file, at the system call",
        _BOTH,
        _DISK,
        "os.fdatasync(fd)",
        "pass",
        f"{_LOG}::test_a_failed_sync_leaves_nothing_that_could_pass_for_durable",
        *_ACKNOWLEDGED,
    ),
    _cold(
        "fsync: of a folder, at the system call",
        _BOTH,
        _DISK,
        "        os.fsync(fd)\n",
        "        pass\n",
        *_ACKNOWLEDGED,
    ),
    _cold(
        "fsync: of the folder of a new segment",
        _Z2,
        _SEGMENTS,
        "            disk.fsync_dir(self.folder)\n        except",
        "            pass\n        except",
        f"{_FAULTS}::test_the_payload_is_durable_before_the_index_hears_of_it",
        f"{_FAULTS}::test_a_new_store_is_durable_in_its_folder_too",
        f"{_DURABLE}::test_what_is_acknowledged_is_durable[Z2]",
    ),
    _cold(
        "fsync: of the folder of a removed segment",
        _Z2,
        _SEGMENTS,
        "        self.path(segment).unlink()\n        disk.fsync_dir(self.folder)\n",
        "        self.path(segment).unlink()\n",
        f"{_DURABLE}::test_a_collected_segment_is_gone_for_good",
    ),
    _cold(
        "fsync: of a new folder's parent",
        _BOTH,
        _DISK,
        "at the same time\n    fsync_dir(path.parent)\n",
        "at the same time\n",
        f"{_FAULTS}::test_a_new_store_is_durable_in_its_folder_too",
        *_ACKNOWLEDGED,
    ),
    _cold(
        "fsync: of the folder after a rename",
        _BOTH,
        _DISK,
        "    beside.replace(path)\n    fsync_dir(path.parent)\n",
        "    beside.replace(path)\n",
        f"{_FAULTS}::test_a_new_store_is_durable_in_its_folder_too",
        f"{_DURABLE}::test_a_file_is_there_whole_once_it_was_written",
    ),
    _cold(
        "fsync: of a file before it is renamed",
        _BOTH,
        _DISK,
        "        write_all(fd, [data], 0)\n        fsync(fd)\n",
        "        write_all(fd, [data], 0)\n",
        *_ACKNOWLEDGED,
        f"{_DURABLE}::test_a_file_is_there_whole_once_it_was_written",
    ),
    _cold(
        "fsync: of what recovery found and cut",
        _Z2,
        _RECOVERY,
        "synced it.\n        disk.fsync(file.fd)\n",
        "synced it.\n",
        f"{_DURABLE}::test_what_recovery_serves_is_durable",
    ),
    _cold(
        "fsync: of the names that recovery found",
        _Z2,
        _RECOVERY,
        "        disk.fsync_dir(log.folder)\n",
        "",
        f"{_DURABLE}::test_names_that_a_killed_maker_left_unsynced_are_made_durable[Z2]",
    ),
    _cold(
        "fsync: of a folder that was there already",
        _BOTH,
        _DISK,
        "            fsync_dir(path.parent)\n        return\n",
        "            pass\n        return\n",
        *(
            f"{_DURABLE}::test_names_that_a_killed_maker_left_unsynced_are_made_durable[{kind}]"
            for kind in _BOTH
        ),
    ),
    _cold(
        "reading: an error of the disk taken for a torn tail",
        _Z2,
        _SEGMENTS,
        "        except CorruptSegment:\n            return None\n        return record",
        "        except ColdError:\n            return None\n        return record",
        f"{_FAULTS}::test_what_can_not_be_read_as_a_store_opens_is_not_cut_off",
    ),
    _cold(
        "fsync: of the index before a segment is removed",
        _Z2,
        "src/kvtrial/cold/segmented.py",
        "            self._index.sync()\n            self._log.remove(number)",
        "            self._log.remove(number)",
        f"{_FAULTS}::test_gc_makes_the_index_durable_before_it_removes_a_segment",
    ),
    _cold(
        "fsync: of the name of RocksDB's folder",
        _Z1,
        "src/kvtrial/cold/index.py",
        "        disk.make_dir(path, disk.FOLDER_MODE)\n",
        "        path.mkdir(exist_ok=True)\n",
        f"{_DURABLE}::test_what_is_acknowledged_is_durable[Z1]",
    ),
    _cold(
        "fsync: of a batch (RocksDB)",
        _Z1,
        "src/kvtrial/cold/values.py",
        "spilled.encode())\n        self._index.write(batch, sync=True)",
        "spilled.encode())\n        self._index.write(batch, sync=False)",
        "tests/unit/test_cold_store.py::test_every_acknowledgement_costs_one_sync_in_either_store[Z1]",
    ),
    _cold(
        "fsync: of a deletion (RocksDB)",
        _Z1,
        "src/kvtrial/cold/values.py",
        'batch.delete("pages", key)\n        self._index.write(batch, sync=True)',
        'batch.delete("pages", key)\n        self._index.write(batch, sync=False)',
        "tests/unit/test_cold_store.py::test_every_acknowledgement_costs_one_sync_in_either_store[Z1]",
    ),
    _cold(
        "fsync: of RocksDB's log, as it is asked for",
        _Z1,
        "src/kvtrial/cold/index.py",
        "options.sync = sync",
        "options.sync = False",
        "tests/unit/test_cold_store.py::test_every_acknowledgement_costs_one_sync_in_either_store[Z1]",
    ),
    _cold(
        "truncation: of a torn tail",
        _Z2,
        _RECOVERY,
        "    if last:\n        os.ftruncate(file.fd, offset)\n",
        "    if last:\n",
        f"{_LOG}::test_a_cut_at_any_byte_of_the_last_batch_costs_that_batch_alone",
    ),
    _cold(
        "truncation: of a batch that could not be written",
        _Z2,
        _SEGMENTS,
        "        try:\n            disk.truncate(file.fd, offset)\n",
        "        try:\n            pass\n",
        f"{_LOG}::test_a_failed_write_is_rolled_back_whole[28-DiskFull]",
        f"{_LOG}::test_a_failed_sync_leaves_nothing_that_could_pass_for_durable",
    ),
    _cold(
        "fsync: of a batch that was rolled back",
        _Z2,
        _DISK,
        "    os.ftruncate(fd, size)\n    fsync(fd)\n",
        "    os.ftruncate(fd, size)\n",
        f"{_LOG}::test_a_batch_that_was_rolled_back_stays_so_once_another_segment_has_begun",
    ),
    _cold(
        "fsync: of an index that was built again",
        _Z2,
        "src/kvtrial/cold/segmented.py",
        "            # that have grown since.\n            self._index.sync()\n",
        "            # that have grown since.\n            pass\n",
        f"{_DURABLE}::test_an_index_that_is_built_again_is_durable_before_anything_is_added",
    ),
    _cold(
        "numbers: of a segment that is used twice",
        _Z2,
        "src/kvtrial/cold/segmented.py",
        "            if number == self._log.end.segment:\n",
        "            if False:\n",
        f"{_FAULTS}::test_a_store_emptied_by_gc_goes_on",
    ),
    _cold(
        "checksum: of a payload that is read",
        _Z2,
        _SEGMENTS,
        "        if state >= 0:\n            raise",
        "        if False:\n            raise",
        f"{_LOG}::test_a_flipped_bit_anywhere_in_a_record_is_named_on_read[250]",
        f"{_LOG}::test_a_damaged_batch_with_later_ones_behind_it_is_no_torn_tail",
        f"{_FAULTS}::test_a_damaged_page_is_named_and_the_session_stays_empty[Z2]",
    ),
    _cold(
        "checksum: of a record's meta and of its pages' sums",
        _Z2,
        _RECORDS,
        "        if checksum(body) != self.head_sum:\n",
        "        if False:\n",
        f"{_LOG}::test_a_flipped_bit_anywhere_in_a_record_is_named_on_read[250]",
    ),
    _cold(
        "checksum: of a record's header",
        _Z2,
        _RECORDS,
        " or checksum(memoryview(data)[: HEADER_BYTES - _SUM]) != check",
        "",
        f"{_LOG}::test_a_flipped_bit_anywhere_in_a_record_is_named_on_read[250]",
        f"{_LOG}::test_a_damaged_batch_with_later_ones_behind_it_is_no_torn_tail",
    ),
    _cold(
        "checksum: of a file header",
        _Z2,
        _RECORDS,
        "        if checksum(memoryview(data)[:-_SUM]) != check:\n            return None\n",
        "",
        f"{_LOG}::test_a_flipped_bit_anywhere_in_a_file_header_is_named",
    ),
    _cold(
        "checksum: the content address",
        _BOTH,
        "src/kvtrial/cold/store.py",
        "if content_address([buffer]) != meta.address:",
        "if False:",
        f"{_FAULTS}::test_verify_compares_contents_with_their_address",
    ),
]

_PANELS, _UNPACKED = "src/kvtrial/native/panels.h", "src/kvtrial/native/unpacked.h"


def _weights(name: str, old: str, new: str, *ways: str, file: str = _PANELS) -> Mutant:
    """A fault in the products of packed weights: ``ways`` are kinds of block and kernels."""
    test = "test_quantised_products_round_each_block_of_activations"
    red = tuple(f"tests/unit/test_engine_weights.py::{test}[5-66-96-{way}]" for way in ways)
    return Mutant(f"weights: {name}", ("engine",), file, old, new, red)


ENGINE = [
    _weights(
        "which activations meet the high nibbles",
        "q_add_sums(dots[i], high, q_load_four(at + 16))",
        "q_add_sums(dots[i], high, q_load_four(at))",
        "Q4_1-decoded",
    ),
    _weights(
        "where the high nibbles are unpacked to",
        "q_store_i8(to + 8 * 32, q_high_nibbles(both))",
        "q_store_i8(to + 6 * 32, q_high_nibbles(both))",
        "Q4_1-prefilled",
        file=_UNPACKED,
    ),
    _weights(
        "what a byte was raised by",
        "q_mul(scale, q_set(-128))",
        "q_mul(scale, q_set(-127))",
        "Q8_0-prefilled",
        file=_UNPACKED,
    ),
    _weights(
        "a row's place in its panel of nibbles",
        "memcpy(vectors + 32 * s + 4 * r, both + 4 * s, 4);",
        "memcpy(vectors + 32 * s + 4 * (r ^ 1), both + 4 * s, 4);",
        "Q4_1-decoded",
        "Q4_1-prefilled",
    ),
    _weights(
        "a row's place in its panel of bytes",
        "memcpy(vectors + 32 * s + 4 * r, unit->codes + 4 * s, 4);",
        "memcpy(vectors + 32 * s + 4 * (r ^ 1), unit->codes + 4 * s, 4);",
        "Q8_0-decoded",
        "Q8_0-prefilled",
    ),
]

_DECISION, _UNIT = "src/kvtrial/decision", "tests/unit"
_PLAN, _FIGURES = "src/kvtrial/measure/plan.py", "src/kvtrial/measure/figures.py"


def _rule(name: str, file: str, old: str, new: str, *red: str) -> Mutant:
    """A fault in the decision or in what it asks of the measuring: ``red`` are ids under tests/unit."""
    return Mutant(name, ("decision",), file, old, new, tuple(f"{_UNIT}/{test}" for test in red))


DECISION = [
    _rule(
        "plan: the spread of the first blocks is not allowed for",
        _PLAN,
        "        if n > self.first >= 2:\n",
        "        if False:\n",
        "test_plan.py::test_bounds_after_an_extension_are_the_wider_of_the_two[False-24]",
        "test_plan.py::test_the_interval_covers_whatever_number_the_spread_asks_for[0.02]",
    ),
    _rule(
        "plan: blocks beyond the first have a say in their number",
        _PLAN,
        "spread = logs[..., : self.first].std(",
        "spread = logs.std(",
        "test_plan.py::test_blocks_beyond_the_first_have_no_say_in_their_number",
    ),
    _rule(
        "plan: the cap on void runs is one more",
        _PLAN,
        "np.asarray(void) > self.most_void",
        "np.asarray(void) > self.most_void + 1",
        "test_plan.py::test_a_cell_is_lost_past_the_registered_void_runs[9-True]",
    ),
    _rule(
        "void: a stop is let through",
        "src/kvtrial/measure/void.py",
        "past = own & ~(value <= limits[ceiling.limit])",
        "past = own & (value > 1000 * limits[ceiling.limit])",
        "test_validity.py::test_a_stop_in_one_step_is_void_and_enters_no_average",
    ),
    _rule(
        "figures: steps are paired in their order, whatever their rounds",
        _FIGURES,
        "pairs += [(ours[n], theirs[n]) for n in sorted(ours.keys() & theirs.keys())]",
        "pairs += list(zip(ours.values(), theirs.values()))",
        "test_figures.py::test_only_rounds_that_both_took_part_in_count",
    ),
    _rule(
        "figures: a time of 0 hides in the total",
        _FIGURES,
        "return bool(np.isfinite(pairs).all() and (pairs > 0).all())",
        "return bool(np.isfinite(pairs).all() and (pairs.sum(axis=0) > 0).all())",
        "test_decide.py::test_a_bad_step_does_not_hide_in_a_blocks_total[0.0]",
    ),
    _rule(
        "rotation: the mirrored rows of an odd square are left out",
        "src/kvtrial/measure/rotation.py",
        "return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]",
        "return rows",
        "test_rotation.py::test_a_square_is_balanced_in_places_and_in_successors[5]",
    ),
    _rule(
        "rule: the veto asks for the interval",
        f"{_DECISION}/rule.py",
        "return np.asarray(bounds.mean >= worst_allowed(",
        "return np.asarray(bounds.low >= worst_allowed(",
        "test_decide.py::test_a_veto_passed_without_its_interval_clearing_is_said",
    ),
    _rule(
        "rule: without its slack",
        f"{_DECISION}/rule.py",
        'math.log1p(decision[at_least]) - decision["relative_slack"]',
        "math.log1p(decision[at_least])",
        "test_decide.py::test_the_edge_of_adoption[within-the-slack]",
    ),
    _rule(
        "eligibility: a doubt removes an incumbent from what has to be beaten",
        f"{_DECISION}/eligibility.py",
        "if self.built(n) and n not in controls",
        "if not self.doubts(n) and n not in controls",
        "test_decide.py::test_issue_19_a_doubt_about_k1_does_not_adopt_an_arm_that_is_7_percent_faster",
    ),
    _rule(
        "verdict: a stage without a complete attempt is decided by what there is",
        f"{_DECISION}/verdict.py",
        'if not attempts.get(stage, {}).get("complete"):',
        "if stage not in attempts:",
        "test_decide.py::test_a_stage_without_a_complete_attempt_decides_nothing[m2]",
    ),
    _rule(
        "verdict: the extension is not waited for",
        f"{_DECISION}/verdict.py",
        "if (why := measured.short(cell)) is not None:",
        "if False and (why := measured.short(cell)) is not None:",
        "test_decide.py::test_a_primary_cell_that_was_not_extended_as_its_plan_asks_decides_nothing",
    ),
    _rule(
        "contrasts: a block that lacks an arm is cut out",
        f"{_DECISION}/contrasts.py",
        "            if lacking:\n",
        "            if False:\n",
        "test_decide.py::test_an_arm_missing_from_one_block_is_inconclusive_never_cut_to_fit",
    ),
    _rule(
        "language: the better mean stays",
        f"{_DECISION}/language.py",
        'if primary.low[0] > decision["relative_slack"] and',
        'if primary.mean[0] > decision["relative_slack"] and',
        "test_decide.py::test_the_arm_that_stays_does_not_flip_with_noise",
    ),
    _rule(
        "known answers: any miss voids",
        f"{_DECISION}/known_answers.py",
        "CERTAIN = 0.999",
        "CERTAIN = 0.95",
        "test_known_answers.py::test_only_an_interval_at_99_9_percent_that_misses_voids_the_method[1-second]",
    ),
    _rule(
        "output: what was not compared is right",
        f"{_DECISION}/output.py",
        "    for metric in _EVIDENCE:\n",
        "    for metric in ():\n",
        "test_output.py::test_timed_steps_without_evidence_show_nothing[m2/output_error]",
    ),
    _rule(
        "running: the confidence does not allow for the number of profiles",
        f"{_DECISION}/running.py",
        '(1 - decision["confidence"]) / max(1, len(names))',
        '(1 - decision["confidence"])',
        "test_what_to_run.py::test_the_confidence_allows_for_the_number_of_profiles",
    ),
    _rule(
        "running: the quality is not asked",
        f"{_DECISION}/running.py",
        'if not evidence["shown"]:',
        "if False:",
        "test_what_to_run.py::test_a_profile_whose_quality_is_not_shown_is_not_run",
    ),
    _rule(
        "error rates: the simulation has an interval of its own",
        f"{_DECISION}/error_rates.py",
        "cell.plan.bounds(logs[own, :, :n])",
        "SamplingPlan(int(n), int(n)).bounds(logs[own, :, :n])",
        "test_error_rates.py::test_a_planted_fault_is_seen[plain-0.0275]",
    ),
    _rule(
        "error rates: void runs end nothing",
        f"{_DECISION}/error_rates.py",
        "finished &= ~cell.plan.lost(void)",
        "finished &= True",
        "test_error_rates.py::test_void_runs_past_the_cap_end_a_run[0.5]",
    ),
]

MUTANTS = [*HOT, *COLD, *ENGINE, *DECISION]
