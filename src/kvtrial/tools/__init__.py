"""What a person types: the command ``kvtrial``. A new verb is a function of `verbs` and a few lines of `command`.

===============  ===================================================================================
`command`        the parser; `verbs` does what was asked for
`completion`     the parser as a script of a shell
`pipeline`       the whole trial: `kvtrial run`
`registering`    a registration with another candidate, or with the cells of recorded `traffic`
`doctor`         what this machine offers to a trial, and what is missing
`conforming`     the conformance suite, told as it goes
`trying`         a candidate at work on, against the store in use or a git ref (`ref_build`); `tried` tells it
`comparing`      arms from run to run: `kvtrial compare` and `kvtrial history`
`needs`          what a model needs, and what of it fits this machine: `kvtrial models`
`generate`       text from a model, with the cold tier where asked
===============  ===================================================================================
"""
