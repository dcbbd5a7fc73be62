"""What `kvtrial try` says of what it measured: the sentence, the table, Markdown for a pull request."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from kvtrial.decision import labels
from kvtrial.decision.contrasts import ContrastRow
from kvtrial.host import printed
from kvtrial.show import answers, tables


class Suite(TypedDict):
    """What the conformance suite says, with the words of each failure."""

    passed: bool
    passed_tests: int
    failed: dict[str, str]
    gaps: list[str]
    crash: str


class Part(ContrastRow):
    """The contrast of the two arms, and figures of each."""

    arms: dict[str, dict[str, float | None]]


class Decode(Part):
    """Whole decodes; how the logits agree: ``kld``, ``top1``, ``shift`` and ``bitwise``."""

    agreement: dict[str, Any]


class Figures(TypedDict):
    """What came out at a context."""

    decode: Decode
    attention: Part
    failed: list[str]
    void_blocks: int


class TriedCell(Figures):
    """The same with its context, in positions."""

    context: int


class Tried(TypedDict):
    """What `kvtrial.tools.trying.measure` returns."""

    candidate: str
    against: str
    ref: str | None
    commit: str | None
    layouts_differ: bool
    model: str
    synthetic: bool
    context_length: int
    threads: int
    conformance: Suite
    cells: list[TriedCell]
    note: str


def sound(document: Tried) -> bool:
    """Whether the candidate passed the suite and could be measured at every context."""
    timed = all(cell["decode"]["ratio"] is not None for cell in document["cells"])
    return bool(document["conformance"]["passed"]) and timed


def slower(document: Tried, limit: float) -> list[int]:
    """Contexts at which the whole interval lies below ``limit``: of the decode, or of its attention.

    Attention is a part of the decode: what slows a kernel by 5% slows a short context's step by much less.
    """
    return [
        cell["context"]
        for cell in document["cells"]
        if any(
            part["ci95"] is not None and part["ci95"][1] < limit
            for part in (cell["decode"], cell["attention"])
        )
    ]


def _positions(document: Tried, cell: TriedCell) -> str:
    return labels.of_context(cell["context"], document["context_length"])


def sentence(document: Tried, cell: TriedCell) -> str:
    """The result at a context: ``MINE is 1.08x K1 at 4,096 [1.06, 1.10]: faster``."""
    name, against, decode = document["candidate"], document["against"], cell["decode"]
    if decode["ci95"] is None:
        return f"{name} at {_positions(document, cell)}: no interval, {decode['problem']}"
    low, high = decode["ci95"]
    reading = "no difference is shown"
    if low > 1 or high < 1:
        reading = "faster" if low > 1 else "slower"
    attention = (
        f"; its attention {answers.interval(cell['attention'], 3)}" if document["ref"] else ""
    )
    return (
        f"{name} is {decode['ratio']:.3f}x {against} at {_positions(document, cell)} [{low:.3f}, {high:.3f}]: "
        f"{reading}{attention}"
    )


#: Column of the table → the figure of an arm at a context: of its decode, then of its attention alone.
_COLUMNS: dict[str, tuple[Literal["decode", "attention"], str]] = {
    "tokens/s": ("decode", "tokens_per_s"),
    "p50 ms": ("decode", "step_ms_p50"),
    "p95 ms": ("decode", "step_ms_p95"),
    "attention GB/s": ("attention", "unique_gb_per_s"),
    "of ceiling": ("attention", "ceiling_fraction"),
}


def rows(document: Tried) -> list[dict[str, str]]:
    """Context, store and the figures of `_COLUMNS`, as text; without columns that nobody has."""
    found = [
        {
            "context": _positions(document, cell),
            "store": arm,
            **{
                column: _number(cell[part]["arms"][arm][key])
                for column, (part, key) in _COLUMNS.items()
            },
        }
        for cell in document["cells"]
        for arm in (document["candidate"], document["against"])
    ]
    empty = {column for column in _COLUMNS if all(row[column] == "-" for row in found)}
    return [{k: v for k, v in row.items() if k not in empty} for row in found]


def _title(document: Tried) -> str:
    model = document["model"] + (" (synthetic weights)" if document["synthetic"] else "")
    ref = f" ({document['ref']})" if document["ref"] else ""
    pair = (
        f"{document['candidate']} against {document['against']}{ref}{labels.of_contrast(document)}"
    )
    threads = f", {document['threads']} threads" if document["threads"] > 1 else ""
    return f"{pair}, {model}{threads}"


def _suite(document: Tried) -> str:
    suite = document["conformance"]
    word = f"conformance: {suite['passed_tests']} passed, {len(suite['failed'])} failed"
    return word + (f"; {suite['crash']}" if suite["crash"] else "")


def _troubles(document: Tried) -> list[str]:
    """What failed: checks of the suite, then arms."""
    suite = document["conformance"]
    found = [f"{test}: {why}" for test, why in suite["failed"].items()]
    return found + [f"failed: {text}" for cell in document["cells"] for text in cell["failed"]]


def render(document: Tried) -> Any:
    """The document as rich text, worst news first and the result last."""
    from rich.console import Group
    from rich.text import Text

    passed = document["conformance"]["passed"]
    parts: list[Any] = [Text(_title(document), "bold")]
    parts.append(Text(_suite(document), "green" if passed else "bold red"))
    parts += [Text(f"  {text}", "red") for text in _troubles(document)]
    parts += [Text(f"  gap: {gap}") for gap in document["conformance"]["gaps"]]
    parts.append(tables.table(rows(document), right={"context", *_COLUMNS}))
    for cell in document["cells"]:
        parts += [Text(text, "dim") for text in _details(document, cell)]
    parts += [Text(note, "dim") for note in (_past_trained(document), document["note"]) if note]
    parts += [Text(sentence(document, cell), "bold") for cell in document["cells"]]
    return Group(*parts)


def _past_trained(document: Tried) -> str:
    contexts = [cell["context"] for cell in document["cells"]]
    return labels.past_trained(contexts, document["context_length"])


def _details(document: Tried, cell: TriedCell) -> list[str]:
    """What else was seen at a context."""
    attention, decode = cell["attention"], cell["decode"]
    agreement, against = decode["agreement"], document["against"]
    found = []
    if attention["ratio"] is not None:
        which = "of the decode's steps" if document["ref"] else "alone"
        found.append(
            f"attention {which} {answers.interval(attention, 3)}x, "
            f"{printed.count(attention['n_blocks'], 'block')}; "
            f"decode {printed.count(decode['n_blocks'], 'block')}"
        )
    if agreement["kld"] is not None:
        found.append(
            f"compared with {against}'s logits: KLD {agreement['kld']:.2g}, top token equal in "
            f"{agreement['top1']:.0%}"
        )
    elif agreement["bitwise"] is not None:
        same = "the same as" if agreement["bitwise"] else "not the same as"
        found.append(f"its logits are {same} {against}'s, bit for bit")
    if cell["void_blocks"]:
        found.append(
            f"{printed.count(cell['void_blocks'], 'run')} of blocks discarded as disturbed, and repeated"
        )
    return [f"{cell['context']:,}: {text}" for text in found]


def markdown(document: Tried) -> str:
    """The same for a pull request: the sentences, then the table."""
    lines = [f"**{sentence(document, cell)}**" for cell in document["cells"]]
    lines += ["", _title(document), "", _suite(document)]
    lines += [f"- {text}" for text in _troubles(document)]
    table = tables.markdown(rows(document), right={"context", *_COLUMNS})
    details = [f"- {text}" for cell in document["cells"] for text in _details(document, cell)]
    past = _past_trained(document).replace("*", "\\*")
    return "\n".join([*lines, "", table, *details, *([past] if past else []), ""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
