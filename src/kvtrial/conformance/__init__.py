"""The conformance suite: importable, and the same for a candidate from another package.

>>> from kvtrial.conformance import run
>>> failed = [o for o in run(candidate) if o.status is Status.FAILED]      # doctest: +SKIP

`trial` holds what checks are written with, one module a topic holds the checks, `suite` names the
tests, `model` is the dictionary that `lockstep` keeps a store beside, `isolated` runs a candidate in
a process of its own.
"""

from kvtrial.conformance.isolated import run_isolated
from kvtrial.conformance.suite import TESTS, ConformanceTest, Outcome, Status, run, run_test
from kvtrial.conformance.trial import CheckFailed, Trial

__all__ = [
    "TESTS",
    "CheckFailed",
    "ConformanceTest",
    "Outcome",
    "Status",
    "Trial",
    "run",
    "run_isolated",
    "run_test",
]
