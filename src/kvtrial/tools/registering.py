"""``kvtrial protocol``: a registration to run, made from another one.

A candidate is added where it can win: an FP32 one as the challenger that is tested, one of reduced precision among
the profiles. Cells may be made from recorded traffic (`kvtrial.tools.traffic`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvtrial import candidates
from kvtrial.contract import FP32, Candidate
from kvtrial.contract.arguments import shown
from kvtrial.host import paths
from kvtrial.host.files import is_file
from kvtrial.run import protocol
from kvtrial.run.layout import ConfigError
from kvtrial.tools import traffic as recorded

#: Names of protocols that are not paths → files of config/.
DEFAULT, SMOKE = "protocol.yaml", "smoke"


def registration(
    names: Sequence[str] = (), *, base: str | None = None, traffic: Path | None = None
) -> str:
    """The text of a registration.

    Parameters
    ----------
    names : sequence of str
        Candidates to add.
    base : str, optional
        The registration to begin with: a path, or ``smoke``; by default config/protocol.yaml.
    traffic : Path, optional
        JSONL of lengths, from which the cells are made.

    Returns
    -------
    str
        YAML; comments say what was changed.

    Raises
    ------
    ConfigError
        No such base, or a candidate that is in it already or that can't win.
    UnknownCandidate, ProtocolError
    TrafficInvalid
        A line is not what it may be.
    """
    source = path_of(base)
    registered: Any = copy.deepcopy(protocol.load(source))
    said = [
        f"Made from {source.name} by `kvtrial protocol`; docs/protocol.md explains each choice."
    ]
    for name in names:
        said.append(add(registered, candidates.get(name)))
    if traffic is not None:
        said += recorded.replace_cells(registered, recorded.read(traffic), traffic.name)
    protocol.check(registered, "the registration")
    text = yaml.safe_dump(
        registered, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    return "".join(f"# {line}\n" for line in said) + text


def path_of(asked: str | None) -> Path:
    """The file of a registration: ``smoke``, a path, or the default where nothing is asked for.

    Raises
    ------
    ConfigError
        There is none.
    """
    if asked is None:
        return paths.config_file(DEFAULT)
    if asked == SMOKE and not is_file(Path(asked)):
        return paths.config_file(f"protocol-{SMOKE}.yaml")
    if not is_file(Path(asked)):
        raise ConfigError(
            f"no protocol {shown(asked)}; give the path of a registration (kvtrial protocol prints one), or smoke "
            "for the small one that decides nothing"
        )
    return Path(asked)


def add(registered: Any, candidate: Candidate) -> str:
    """Add a candidate to a registration, in place; what was done, in words.

    Raises
    ------
    ConfigError
        It is there already, or a control.
    """
    name, decision = candidate.name, registered["decision"]
    if name in protocol.entrants(registered):
        raise ConfigError(
            f"{name} is in the registration already; add another, or give --base another file"
        )
    if candidate.role == "control":
        raise ConfigError(f"{name} is a control: it is measured and never wins; add a contender")
    registered["candidates"].append(name)
    registered["name"] += "-" + re.sub(r"[^a-z0-9.-]", "-", name.lower())
    reference = decision["reference"]
    registered["sampling"]["pairs"].append([name, reference])
    registered["hypotheses"].append(
        {"id": name, "claim": f"{name} instead of {reference}", "from": reference, "to": name}
    )
    if candidate.profile.name == FP32.name:
        others = decision["challengers"]
        decision["challengers"] = [name, *others]
        after = f"; {', '.join(others)} only where it can't be" if others else ""
        return f"{name} is the challenger that is tested{after}. It wins only as the rule says."
    decision["profiles"].append(name)
    profile = candidate.profile.name
    tolerance = registered["parity"]["logits_tolerance"]
    if profile in tolerance:
        return f"{name} ({profile}) is a profile: it may become what to run where its quality is shown."
    # As wide as the widest: what a new profile may lose is for `quality` to judge.
    tolerance[profile] = max(tolerance.values())
    return (
        f"{name} ({profile}) is a profile: it may become what to run where its quality is shown. "
        f"parity.logits_tolerance.{profile} is the widest of the others: set what yours may lose."
    )
