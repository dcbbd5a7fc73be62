"""Measures candidates: arms in rotation, blocks, probes. Knows neither mlflow nor snakemake, writes no table.

Read `block` first, then `rotation` and `plan`.

========================  ===============================================================================
`plan`                    which blocks a cell has, which comes next, which interval is valid for them
`rotation`                balanced orders of a round, slow arms, groups where memory is short
`block`                   one block of whole decodes: the timed rounds
`figures`                 the figure of two arms in a block
`void`                    when a block is run again
`accounts`, `heartbeat`   where a step's time went; which arm is at work, and since when
`kept`                    timed calls, compared with the oracle when the clock has stopped
`attention`               M1: one attention region
`parity`                  logits of the same text, teacher-forced
`calibrate`               what the estimate is made of
`child`, `exclusive`      a measured process; the machine for one of them at a time
`baton`                   two processes of two builds that step by turns
`specs`                   what such a process is told
`stores`                  stores and sessions, filled from a snapshot; `aliases` of one candidate
`probes`, `surroundings`  what the machine does right now (``_probes.pyx``); rows about it
`allocations`             allocation calls, counted (``_allocations.pyx``) in `allocation_pass`
`clock`, `shapes`         the one clock; head shapes by name
`cold`, `peers`           the cold tier, measured and broken; other people's engines
========================  ===============================================================================

Another measured work is a module here with ``measure(spec, note)`` and `child.main`, and a stage that runs it.

A measured process (`child`) answers with rows: dicts with ``metric``, ``candidate``, ``place``,
``index`` and ``value`` or ``text``. A stage adds the other columns of `kvtrial.run.events.COLUMNS`.

============================  ===========================================================================
metric                        meaning
============================  ===========================================================================
m2/step_ms                    one step of all sessions, ms; index: round
m2/attention_ms               the part of that step inside the attention region, ms; index: round
m2/tokens                     tokens decoded in the timed steps, all sessions together
m2/row_bytes                  bytes of K and V of one position in all layers
m2/kv_bytes_per_token         bytes of K and V that one token's step reads once, mean over the steps
m2/resident_bytes             bytes of KV pages in use after the last step
m2/append_us                  one token's rows into every layer, microseconds; index: repetition
m2/rollback_us                dropping that token again, microseconds
m2/branch_us                  beginning a branch and closing it, microseconds
m2/output_error               a timed attention's distance from the oracle, in units of its bound; index: call
m2/row_error                  a row that comes back, off the one handed in, in units of its storage bound
m2/by_slot                    1 where the kept row was written into a reserved slot
m2/logits_shift               largest difference of a logit from the reference's; index: round
m2/logits_kld                 divergence from the reference's, nats; index: round
m2/logits_top1                share of sessions whose likeliest token is the reference's; index: round
m2/alone_step_ms              one step of an arm that would fit into the cache, decoding alone, ms
m2/allocations                allocation calls inside one step's store calls; index: step (untimed)
m1/attention_ms               one attention region, ms; index: iteration
m1/in_cache_attention_ms      the same on one region again and again, ms
m1/in_cache_ceiling_fraction  its share of the nearer ceiling, with the read from the cache
m1/unique_gb_per_s            bytes of K and V of the region over its time, each counted once
m1/loaded_gb_per_s            the same, each counted as often as query heads ask for it
m1/ceiling_fraction           time at the nearer of the machine's two ceilings over the time taken
m1/output_error               a timed output's distance from the oracle, in units of its bound
m1/rotation_bytes             bytes of KV that the iterations rotate through
probe/spin_ms                 fixed integer work, ms; index of all probes: 0 before the block, 1 after it
probe/read_gb_per_s           streaming read over all threads
probe/cached_read_gb_per_s    the same from a quarter of the last-level cache
probe/fma_gflop_per_s         FP32 multiply-adds over all threads
probe/throttled               throttling events of CPU and control group while the arms ran
probe/load                    load average of the last minute
probe/frequency_mhz           clock of the fastest CPU as the system says it
rotation/stood_still_s        longest time of a timed step in which nothing ran or waited, seconds
rotation/disk_faults          pages read from disk in timed steps
rotation/slow                 1: the arm takes part in every eighth round only
env/<variable>                text: thread settings that the arm ran under
env/blas_threads              threads of the largest BLAS pool in the process
env/affinity                  text: CPUs that the process may use
parity/positions              positions of a chunk; index: chunk, or prompt where context is 0
parity/max_abs_logit_difference  from the reference's logits, the largest of the chunk
quality/kld                   Kullback-Leibler divergence from the reference, nats, mean over the chunk
quality/worst_kld             of its worst position
quality/top1_agrees           positions of the chunk whose likeliest token is the reference's
parity/decode_max_abs_logit_difference  the same of one decoded step; index: step
quality/decode_kld            divergence of one decoded step; index: step
quality/decode_top1_agrees    1 where its likeliest token is the reference's
output_xxh3                   text: hash of the logits of the registered rounds
rows_xxh3                     text: hash of the rows that those rounds appended
failed                        text: why an arm gave nothing
not_run                       text: why an arm was not run at all
cell/skipped                  text: why the machine can't hold a cell
cell/lost                     text: why a cell can't be decided any more
block/opened_s                seconds of opening and filling all arms
block/taken_s                 seconds that one run of a block took, process and all
attempt/estimated_s           seconds that the stage was said to take when it began
attempt/taken_s               seconds that it took, from the machine's lock to the last block
attempt/complete              1: every unit of this attempt is there
============================  ===========================================================================

What is counted: a step is the whole of `Decoder.step` and picking the token. Prefill, loading the
snapshot and the warm-up steps are outside. n counted steps of s sessions are n * s tokens.
"""
