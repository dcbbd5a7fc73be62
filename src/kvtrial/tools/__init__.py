"""What a person types. `command` is the command ``kvtrial``; a new verb is a function and a line there.

=============  =====================================================================================
`command`      the verbs and their options
`doctor`       what this machine offers to a trial, and what is missing
`trying`       a candidate at work on, against the store in use
`comparing`    the same arms in other runs: one run against another, all of them by time
`generate`     text from a model, with the cold tier where asked
=============  =====================================================================================
"""
