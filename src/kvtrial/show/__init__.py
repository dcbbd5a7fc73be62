"""What people look at: made from a verdict and its events, deciding nothing.

Read `summary` first: its tables and numbers are what all the others show.

=============  =====================================================================================
`summary`      a verdict as Markdown, tables and named numbers
`terminal`     the verdict at a terminal
`report`       one HTML page, with `templates`
`fleet`        the verdicts of many machines
`plots`        one figure a module; a new one is a module and a line in its ``FIGURES``
=============  =====================================================================================
"""
