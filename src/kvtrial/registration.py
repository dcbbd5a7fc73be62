"""The registration as types: what `kvtrial.run.protocol` lets through, key by key.

A protocol stays the JSON document that is hashed, written beside a run and read by a decision; these types let
a wrong key or kind be seen before anything runs. ``workflow/schemas/protocol.schema.yaml`` says what values are
allowed, ``config/README.md`` what each means.
"""

from typing import Literal, NotRequired, TypedDict


class Cell(TypedDict):
    """Filled positions, concurrent sessions and threads; what is measured of it is a cell's.

    A registered cell has its role and profile. One of ``m1`` at another head shape names it.
    """

    context: int
    sessions: int
    threads: int
    role: NotRequired[Literal["primary", "veto", "extra"]]
    profile: NotRequired[Literal["default", "full"]]
    rounds: NotRequired[int]
    shape: NotRequired[str]


class Rotation(TypedDict):
    """Rounds of a block."""

    warmup_rounds: int
    rounds: int
    slow_ratio: float
    slow_every: int
    step_limit_s: float
    output_steps: int
    alone_steps: int


class Sampling(TypedDict):
    """Blocks of a cell."""

    blocks: int
    most: int
    half_width: float
    pairs: list[list[str]]


class Void(TypedDict):
    """Past one of them a block is run again."""

    stood_still_s: float
    disk_faults: int
    throttled: int
    most: int


class KnownAnswers(TypedDict):
    """One candidate beside itself, and beside itself with a planted slowness."""

    candidate: str
    planted: float
    blocks: int


class Conformance(TypedDict):
    """Page sizes at which the suite runs."""

    page_tokens: list[int]


class HeadShape(TypedDict):
    """A shape of attention that is measured beside the model's own."""

    q_heads: int
    kv_heads: int
    head_dim: int


class AttentionAlone(TypedDict):
    """``m1``."""

    warmup_iterations: int
    iterations: int
    blocks: int
    rotation_llc_multiple: float
    shapes: list[HeadShape]
    shape_blocks: int


class ProbePasses(TypedDict):
    """How long the machine is probed."""

    llc_multiple: float
    read_passes: int
    passes: int


class Parity(TypedDict):
    """Logits beside the baseline's."""

    baseline: str
    comparison: str
    prompts: int
    prompts_sha256: str
    chunks: int
    slow: list[str]
    slow_chunks: int
    decode_steps: int
    logits_tolerance: dict[str, float]
    tolerance_beyond: dict[str, float]


class QualityDecode(TypedDict):
    """The cross-check by whole decodes."""

    context: int
    steps: int


class Quality(TypedDict):
    """Evidence for reduced precision."""

    kld_upper: float
    top1_lower: float
    chunks: int
    reported_chunks: int
    chunk_tokens: int
    places: int
    decode: QualityDecode
    confidence: float
    resamples: int
    seed: int


class DirectWrite(TypedDict):
    """Rows written in place, beside rows appended."""

    context: int
    rounds: int
    blocks: int
    non_inferiority: float


class Cold(TypedDict):
    """The cold tier's measurements."""

    prefix_tokens: int
    batches: int
    blocks: int
    decide_by: Literal["restore_cold_ms", "restore_warm_ms"]
    crash_rounds: int


class Decision(TypedDict):
    """The rule's numbers and names."""

    confidence: float
    adopt_lower_bound: float
    run_lower_bound: float
    tied_within: float
    veto_regression: float
    relative_slack: float
    reference: str
    challengers: list[str]
    incumbents: list[str]
    profiles: list[str]
    seed: int


#: A contrast that is attributed to one difference. ``from`` is a word of Python's, hence this form.
Hypothesis = TypedDict(
    "Hypothesis",
    {
        "id": str,
        "claim": str,
        "from": str,
        "to": str,
        "threads": NotRequired[int | Literal["all"]],
    },
)


class Control(TypedDict):
    """What is measured once, beside the pairs."""

    candidate: str
    context: int


class Protocol(TypedDict):
    """The registration of a trial."""

    version: int
    name: str
    page_tokens: int
    candidates: list[str]
    timed_in_full: list[str]
    control: NotRequired[Control]
    cells: list[Cell]
    rotation: Rotation
    sampling: Sampling
    void: Void
    known_answers: KnownAnswers
    conformance: Conformance
    m1: AttentionAlone
    probes: ProbePasses
    parity: Parity
    quality: Quality
    direct_write: DirectWrite
    cold: Cold
    decision: Decision
    hypotheses: list[Hypothesis]
