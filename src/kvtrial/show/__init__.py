"""What people look at: made from a verdict and its events, deciding nothing.

Read `answers` first: the three answers and the table of arms, which all the others show in the same order.

=============  =====================================================================================
`answers`      what to run, which language, which cold store; one row an arm
`summary`      a verdict as Markdown, tables and named numbers
`terminal`     the verdict at a terminal
`report`       one HTML page, with `templates`
`fleet`        the verdicts of many machines
`tables`       rows at a terminal, as Markdown, as CSV
`plots`        one figure a module; a new one is a module and a line in its ``FIGURES``
=============  =====================================================================================
"""
