"""What a person types. `command` is the command ``kvtrial``; a new verb is a function and a line there.

=============  =====================================================================================
`command`      the verbs and their options
`doctor`       what this machine offers to a trial, and what is missing
`pipeline`     the whole trial: `kvtrial run`
`trying`       a candidate at work on, against the store in use or a git ref (`ref_build`); `tried` tells it
`comparing`    arms from run to run: `kvtrial compare` and `kvtrial history`
`generate`     text from a model, with the cold tier where asked
=============  =====================================================================================
"""
