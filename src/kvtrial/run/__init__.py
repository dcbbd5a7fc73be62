"""A run: what was asked for, under which name, and where its events lie. The only room that reads config.

Read `layout` first.

=============  =====================================================================================
`layout`       the run's name, and the place of each of its files
`protocol`     the registration: loaded, checked, hashed
`models`       models by name: where a file lies, how it gets there, its hash
`corpus`       the registered text that contexts are filled with
`events`       the table of raw events; every column and its meaning
`journal`      attempts and finished blocks on disk
`schemas`      what a document says that its schema does not allow
`loading`      Ctrl-C before everything is loaded
`exits`        errors become one line and an exit code
`ending`       SIGTERM is handed on to the stage that runs
=============  =====================================================================================
"""
