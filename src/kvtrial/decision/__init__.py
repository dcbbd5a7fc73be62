"""From events to a verdict: pure functions of (events, protocol). No clock, no file, no candidate.

Read `verdict` first; it calls all others in this order:

================  ==================================================================================
`verdict`         `decide`: the first complete attempts, then everything below
`validity`        which attempts and which blocks count
`facts`           what the run knows of itself and of its candidates
`contrasts`       what was measured, by block, and the ratio of two arms with its interval
`parity`          whose logits are the baseline's
`quality`         what reduced precision costs, with bounds
`output`          whose timed output was right
`eligibility`     who may win, and why not
`language`        does a challenger replace the incumbents: ADOPT, KEEP or INCONCLUSIVE
`running`         what to run: the FP32 arm, or a profile whose quality is shown
`rule`            that rule for one challenger, on arrays: the simulation asks the same lines
`attribution`     the hypotheses, the profiles, the control, direct write
`error_rates`     how often the rule errs, by simulation under the run's own noise
`known_answers`   A/A and a planted slowness: ratios that are known
`cold`            which cold store
`break_even`      restore against recompute
`peers`           other engines, for the optional target
`stats`           intervals
`document`        verdict.json key by key
`labels`          words that stand behind a contrast wherever it is shown
================  ==================================================================================
"""
