"""Seeded walks over all verbs, a store beside the dictionary model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtrial.conformance.lockstep import Lockstep
from kvtrial.conformance.trial import CheckFailed, Trial
from kvtrial.contract import Capability

MAX_SESSIONS = 5


def random_walks(trial: Trial, walks: int = 5, verbs: int = 64) -> None:
    """Seeded walks over all verbs: sessions, branches, exhaustion, holes, stale handles."""
    for seed in range(walks):
        choose = np.random.default_rng([seed, trial.page_tokens])
        with trial.store(pages=14, q_heads=4, kv_heads=2, head_dim=8) as store:
            lockstep = Lockstep(trial, store)
            try:
                for _ in range(verbs):
                    _stride(lockstep, choose)
                    lockstep.compare()
            except CheckFailed as error:
                raise CheckFailed(f"walk {seed}: {error}") from error


def _stride(lockstep: Lockstep, choose: np.random.Generator) -> None:
    trial, pairs = lockstep.trial, lockstep.pairs
    if not pairs:
        lockstep.open(holes=bool(choose.integers(2)))
        return
    which = int(choose.integers(len(pairs)))
    model = pairs[which][0]
    layer = int(choose.integers(lockstep.model.layers))
    page = trial.page_tokens
    n = int(choose.choice([1, 2, page - 1, page, page + 1]))
    strides: dict[str, Callable[[], None]] = {
        "step": lambda: lockstep.step(which, n),
        "step again": lambda: lockstep.step(which, 1),
        "append": lambda: lockstep.append(which, layer, int(choose.integers(3))),
        "attend": lambda: lockstep.attend(which, layer),
        "direct": lambda: lockstep.direct(
            which, layer, 2, str(choose.choice(["commit", "append", "abandon"]))
        ),
        "stale": lockstep.stale,
        "close": lambda: lockstep.close(which),
    }
    if len(pairs) < MAX_SESSIONS:
        strides["open"] = lambda: lockstep.open(holes=bool(choose.integers(2)))
    if trial.has(Capability.ROLLBACK):
        strides["rollback"] = lambda: lockstep.rollback(which, int(choose.integers(-1, n + 2)))
        strides["abandon"] = lambda: lockstep.abandon(which)
    if trial.has(Capability.HOLES):
        held = max(1, model.ends[layer] - model.store.base)
        holes = (model.store.base + choose.integers(0, held, 3)).tolist()
        strides["gap"] = lambda: lockstep.step(which, n, gap=int(choose.integers(1, page + 2)))
        strides["invalidate"] = lambda: lockstep.invalidate(which, layer, sorted(set(holes)))
    if trial.has(Capability.BRANCH):
        if len(pairs) < MAX_SESSIONS:
            strides["branch"] = lambda: lockstep.branch(which)
        if model.parent is not None or not choose.integers(8):
            appended = max(0, model.ends[0] - model.fork)
            strides["commit"] = lambda: lockstep.commit(
                which, int(choose.integers(-1, appended + 2))
            )
    strides[str(choose.choice(list(strides)))]()
