"""A decode step as named regions; the attention region is the swap point.

Per step: ``embed``, then for every layer ``project``, ``attention``, ``feed_forward``, then ``head``.
The store under trial is called in ``project`` (it gets its K and V rows there) and in ``attention``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

REGIONS = ("embed", "project", "attention", "feed_forward", "head")


@dataclass
class Regions:
    """What each region runs; those of a layer get its index. Any of them may be replaced."""

    embed: Callable[[], None]
    project: Callable[[int], None]
    attention: Callable[[int], None]
    feed_forward: Callable[[int], None]
    head: Callable[[], None]


class Scheduler:
    """Runs steps and knows where the time of the last one went.

    Attributes
    ----------
    region_ns : dict of str to int
        Nanoseconds of each region in the last whole step, summed over layers.
    """

    def __init__(self, regions: Regions, layers: int) -> None:
        self.regions = regions
        self.layers = layers
        self.region_ns = dict.fromkeys(REGIONS, 0)

    def run(self) -> None:
        """One step."""
        now = time.perf_counter_ns
        regions = self.regions
        project, attention, feed_forward = regions.project, regions.attention, regions.feed_forward
        project_ns = attention_ns = feed_forward_ns = 0
        start = now()
        regions.embed()
        embedded = done = now()
        for layer in range(self.layers):
            project(layer)
            projected = now()
            attention(layer)
            attended = now()
            feed_forward(layer)
            project_ns += projected - done
            attention_ns += attended - projected
            done = now()
            feed_forward_ns += done - attended
        regions.head()
        self.region_ns = {
            "embed": embedded - start,
            "project": project_ns,
            "attention": attention_ns,
            "feed_forward": feed_forward_ns,
            "head": now() - done,
        }
