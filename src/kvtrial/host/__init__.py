"""This machine and this installation; everything above asks here, and nothing here knows a candidate.

Read `machine` first.

=============  =====================================================================================
`machine`      what the machine is and has: its class, CPUs, caches, memory, counters
`cgroups`      what the control groups allow: CPUs, memory
`build`        what the kernels were built from, and whether that still lies in the source tree
`paths`        where configuration, results and schemas lie
`files`        the one way to write a file: beside, then renamed
`records`      a JSON document as a frozen dataclass, checked key by key
`printed`      what is printed for people: consoles, tables and bars whose texts are literal
`arguments`    what parsers of commands understand: numbers within bounds, near misses of a name
`shapes`       names of head shapes
`selection`    the adopted outcome by head shape: the default store, what is retired
=============  =====================================================================================
"""
