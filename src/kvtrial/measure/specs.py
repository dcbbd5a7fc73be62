"""What measured processes are told: a record for each work, handed over as JSON.

A stage makes one, `kvtrial.measure.child` writes and reads it, and the module that measures uses its attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtrial.registration import ProbePasses, Rotation


@dataclass(frozen=True, kw_only=True)
class Ends:
    """One side's ends of the pipes between two processes: arguments of `kvtrial.measure.baton.Baton`."""

    receive: int | None = None
    send: int | None = None
    held: bool = True


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What every measured process is told.

    The parent obeys ``step_limit_s``, seconds past which a piece of an arm's work counts as hung, and ``pythons``,
    arm → the interpreter of the process that it has to itself: by default all share one.
    """

    candidates: list[str]  #: names of the arms
    step_limit_s: float | None = None
    pythons: dict[str, str] = field(default_factory=dict)
    #: of this process, where others take turns in another
    own: list[str] = field(default_factory=list)
    baton: Ends = Ends()  #: with ``own``
    fingerprint: str = ""  #: of the code as the stage began; empty where another build runs


@dataclass(frozen=True, kw_only=True)
class BlockSpec(Spec):
    """One block of whole decodes: of `kvtrial.measure.block` and `kvtrial.measure.peers.decode`."""

    gguf: str  #: path of the model
    snapshots: list[str]  #: folders of the filled contexts, one a session
    #: whose rows slow arms are given, and whose logits the others' are compared with
    reference: str
    #: arm → its candidate, where another (A/A)
    stands_for: dict[str, str] = field(default_factory=dict)
    #: arm → share of its step that it spins inside
    spins: dict[str, float] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)  #: arm → "direct", the default, or "append"
    threads: int  #: of decoder and stores
    page_tokens: int
    rotation: Rotation  #: the protocol's
    rounds: int  #: counted ones, at least; whole cycles are run
    slow: list[str] | None  #: arms that are known to be slow; None: found in the first round
    seed: int  #: of orders, of pages handed out, and of what is checked
    compare: bool = False  #: whether logits are compared with the reference's
    alone_steps: int = 0  #: steps that an arm which would fit into the cache decodes alone
    probes: ProbePasses | None = None  #: as registered; None where the machine is not probed
    cpu: int | None = None  #: the one that the process keeps to


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Spec):
    """Attention regions: of `kvtrial.measure.attention` and `kvtrial.measure.peers.attention`."""

    shape: dict[str, int]  #: layers, q_heads, kv_heads, head_dim
    orders: list[list[str]]  #: one order of the candidates for each iteration, warm-up first
    snapshots: list[str]  #: folder of the filled context, alone in a list; or an empty list, and
    synthetic_tokens: int = 0  #: so many positions of rows drawn at random
    threads: int  #: of the stores
    page_tokens: int
    warmup_iterations: int  #: dropped
    probes: ProbePasses | None = None  #: as registered; by default those of `Probes`
    #: regions rotate through so many times the threads' last-level caches
    rotation_llc_multiple: float
    seed: int  #: of queries, of pages handed out, and of the iterations that are checked


@dataclass(frozen=True, kw_only=True)
class ParitySpec(Spec):
    """Logits of the same texts: of `kvtrial.measure.parity`."""

    gguf: str  #: path of the model
    snapshot: str | None  #: folder of the filled context; None: the texts stand alone
    texts: list[list[int]]  #: token ids, fed in the causal block form after the context
    reference: str  #: the candidate that the others are compared with
    positions: dict[str, list[int]]  #: candidate → positions of each text that it is compared over
    chunk: int | None  #: positions that one row tells of, as their mean; None: a text is one chunk
    decode: dict[str, int]  #: candidate → decoded steps of the first text that are compared too
    page_tokens: int
    threads: int  #: of prefill, decoder and stores


@dataclass(frozen=True, kw_only=True)
class PrefillSpec(Spec):
    """A prompt: of `kvtrial.measure.peers.prefill` and `kvtrial.measure.peers.llama_prefill`."""

    gguf: str  #: path of the model
    ids: list[int]  #: tokens of the prompt
    threads: int  #: of BLAS and of the stores
    page_tokens: int


@dataclass(frozen=True, kw_only=True)
class AllocationSpec(Spec):
    """So many steps' allocation calls: of `kvtrial.measure.allocation_pass`."""

    shape: dict[str, int]  #: layers, q_heads, kv_heads, head_dim
    threads: int
    page_tokens: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Filling:
    """How contexts are filled, ``chunk`` positions at a time."""

    store: str
    activations: str
    chunk: int


@dataclass(frozen=True, kw_only=True)
class CalibrateSpec(Spec):
    """How fast this machine is: of `kvtrial.measure.calibrate`."""

    gguf: str  #: path of the model
    contexts: dict[str, list[int]]  #: candidate → positions at which it is measured
    page_tokens: int
    probes: ProbePasses  #: as registered
    baseline: str  #: of the parity check
    prompts: list[list[int]]  #: token ids of its prompts
    prefill: Filling | None  #: None where all contexts are there


@dataclass(frozen=True, kw_only=True)
class RestoreSpec(Spec):
    """One block of the cold tier: of `kvtrial.measure.cold.restore`."""

    order: list[str]  #: "Z1", "Z2", "plain" and "recompute" in this block's order
    folder: str  #: an empty one on the disk to be measured
    snapshot: str  #: folder of a filled context
    store: str  #: the hot store whose pages travel
    shape: dict[str, int]  #: layers, q_heads, kv_heads, head_dim
    model_sha256: str  #: of the model's file, and the name of the snapshot's workload
    activations: str  #: of the snapshot's rows
    page_tokens: int
    prefix_tokens: int  #: rows that are spilled and restored
    batches: int  #: of the spill, each with one sync
    repetitions: int  #: warm restores
    gguf: str  #: path of the model, for "recompute"
    recompute_tokens: int  #: up to which a prefill is measured


@dataclass(frozen=True, kw_only=True)
class CrashSpec(Spec):
    """The crash matrix: of `kvtrial.measure.cold.crash`."""

    folder: str  #: an empty one on the disk in question
    rounds: int  #: kills a store; of each other fault a fifth of that
    batches: int  #: of the spill whose syncs are counted
    seed: int  #: of what chance draws
