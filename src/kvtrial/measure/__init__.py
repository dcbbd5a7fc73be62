"""Measures candidates: probes, orders, blocks. Knows neither mlflow nor snakemake, writes no table.

A measured process (`child`) answers with rows: dicts with ``metric``, ``candidate``, ``place``,
``index`` and ``value`` or ``text``. A stage adds the other columns of `kvtrial.run.events.COLUMNS`.

============================  ===========================================================================
metric                        meaning
============================  ===========================================================================
m2/step_ms                    one greedy step of all sessions, ms; index: step
m2/attention_ms               the part of that step inside the attention region, ms; index: step
m2/tokens                     tokens decoded in the counted steps, all sessions together
m2/kv_bytes_per_token         bytes of K and V that one token's step reads once, mean over the steps
m2/resident_bytes             bytes of KV pages in use after the last step
m2/append_us                  one token's rows into every layer, microseconds; index: repetition
m2/rollback_us                dropping that token again, microseconds
m2/branch_us                  beginning a branch and closing it, microseconds
m2/agreed_steps               steps until the first token that is not the baseline's; index: session
m2/margin_at_difference       the baseline's two largest logits apart there; index: session
m2/output_error               attention after the last step, off the oracle, in bounds; index: layer
m2/allocations                allocation calls inside one step's store calls; index: step (untimed)
m1/attention_ms               one attention region, ms; index: iteration
m1/in_cache_attention_ms      the same on one region again and again, ms
m1/in_cache_ceiling_fraction  its share of the nearer ceiling, with the read from the cache
m1/unique_gb_per_s            bytes of K and V of the region over its time, each counted once
m1/loaded_gb_per_s            the same, each counted as often as query heads ask for it
m1/ceiling_fraction           time at the nearer of the machine's two ceilings over the time taken
m1/output_error               a timed output's distance from the oracle, in units of its bound
m1/rotation_bytes             bytes of KV that the iterations rotate through
probe/spin_ms                 fixed integer work, ms; index of all probes: 0 before the arm, 1 after
probe/read_gb_per_s           streaming read over all threads
probe/cached_read_gb_per_s    the same from a quarter of the last-level cache
probe/fma_gflop_per_s         FP32 multiply-adds over all threads
probe/stolen_fraction         CPU time that went to other machines over that of the arm's threads
probe/cpus_short              CPUs that the arm's threads wanted and other processes had
probe/throttled               throttling events of CPU and control group between the two probes
probe/load                    load average of the last minute
probe/frequency_mhz           clock of the fastest CPU as the system says it
env/<variable>                text: thread settings that the arm ran under
env/blas_threads              threads of the largest BLAS pool in the process
env/affinity                  text: CPUs that the process may use
parity/positions              positions of a chunk; index: chunk, or prompt where context is 0
parity/max_abs_logit_difference  from the reference's logits, the largest of the chunk
quality/kld                   Kullback-Leibler divergence from the reference, nats, mean over the chunk
quality/worst_kld             of its worst position
quality/top1_agrees           positions of the chunk whose likeliest token is the reference's
quality/decode_kld            divergence of one decoded step; index: step
quality/decode_top1_agrees    1 where its likeliest token is the reference's
direct/step_ms                one step; text: "append" or "direct"; index: step
direct/identical              1 where logits and cache are bytewise the same both ways
direct/bytes_not_copied       bytes a token that the direct way does not copy
direct/reserved_share         rows that were written through a reserved slot, of all rows
output_sha256                 text: hash of the tokens that an arm gave
failed                        text: why an arm gave nothing
not_run                       text: why an arm was not run at all
cell/skipped                  text: why the machine can't hold a cell
block/taken_s                 seconds that one run of a block took, process and all
attempt/estimated_s           seconds that the stage was said to take when it began
attempt/taken_s               seconds that it took, from the machine's lock to the last block
attempt/complete              1: every unit of this attempt is there
============================  ===========================================================================

What is counted: a step is the whole of `Decoder.step` and picking the token. Prefill, loading the
snapshot and the warm-up steps are outside. n counted steps of s sessions are n * s tokens.
"""
