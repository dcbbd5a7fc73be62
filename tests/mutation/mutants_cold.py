"""Faults of the cold stores."""

from __future__ import annotations

from mutant import Mutant

_SEGMENTS, _DISK = "src/kvtrial/cold/segments.py", "src/kvtrial/cold/disk.py"
_RECORDS, _RECOVERY = "src/kvtrial/cold/records.py", "src/kvtrial/cold/recovery.py"
_FAULTS, _DAMAGE = "tests/unit/test_cold_faults.py", "tests/unit/test_cold_damage.py"
_LOG, _DURABLE = "tests/unit/test_cold_segments.py", "tests/unit/test_cold_durable.py"
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
        f"{_DAMAGE}::test_what_can_not_be_read_as_a_store_opens_is_not_cut_off",
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
        f"{_DAMAGE}::test_a_damaged_page_is_named_and_the_session_stays_empty[Z2]",
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
        f"{_DAMAGE}::test_verify_compares_contents_with_their_address",
    ),
]
