"""The cold tier measured and broken on purpose. Read `restore` first, then `crash`.

=============  =====================================================================================
`restore`      spill and restore, timed: one block
`pagecache`    evicting files from it, and seeing that they are gone
`crash`        one fault a round at a place drawn by chance, in a process that dies of it
`faults`       the disk that fails on request, and the power cut (``native/disk_faults.c``)
`pattern`      a stand-in for a hot store whose rows say where they belong
`aftermath`    what must hold when a store is opened again
=============  =====================================================================================
"""
