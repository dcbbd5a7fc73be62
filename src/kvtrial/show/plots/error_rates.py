"""How often the rule adopts, against the challenger's true improvement."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show import answers
from kvtrial.show.plots import style

SECTION = "error rates"
TITLE = "How often the rule would adopt"
CAPTION = (
    "Chance that the whole procedure adopts a challenger of a given true improvement, simulated with the "
    "noise that this run showed (bars: two Monte Carlo standard errors). As measured: the improvement is over "
    "the fastest incumbent, and the others are as far behind it as they were. All equal: over every incumbent "
    "alike. Dashed: the improvement that adopts, and the chance claimed there."
)

#: Colour and marker of each arrangement.
_LOOKS = {"as_measured": ("#D55E00", "o"), "all_equal": ("#0072B2", "s")}


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One line an arrangement of the incumbents."""
    rates = verdict["error_rates"]
    if rates["arrangements"] is None:
        return None
    drawn, (axis,) = style.figure()
    improvements = [100 * x for x in rates["true_improvement"]]
    for name, label in answers.ARRANGEMENTS.items():
        own, (color, marker) = rates["arrangements"][name], _LOOKS[name]
        axis.errorbar(
            improvements,
            own["adopt_probability"],
            yerr=[2 * error for error in own["standard_error"]],
            label=label,
            color=color,
            marker=marker,
            markersize=5,
            capsize=3,
        )
    edge = 100 * rates["adopt_at"]
    claim = rates["claim"]
    axis.axvline(edge, color="#444444", linewidth=1, linestyle="--")
    axis.axhline(claim, color="#444444", linewidth=1, linestyle="--")
    axis.annotate(
        f"claim: at most {claim:.1%} at {edge:g}%",
        (0, claim),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=8,
    )
    axis.set_ylim(-0.03, 1.03)
    labels = [f"{x:+g}%" if x else "0%" for x in improvements]
    axis.set_xticks(improvements, labels, fontsize=8, rotation=45)
    axis.set_xlabel(f"true improvement of {rates['challenger']} over the incumbents")
    axis.set_ylabel(f"chance of adopting ({rates['simulations']:,} simulated runs)")
    axis.legend(fontsize=8, loc="upper left")
    return drawn
