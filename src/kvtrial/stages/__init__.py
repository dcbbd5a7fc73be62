"""One module a stage: files in, files out. ``python -m kvtrial.stages.NAME --help`` says which.

A measuring stage asks `common.Stage` for the run's facts and `common.run_cells` to run its blocks; its
own text is what a block is told. Read `m2` first. A new one is a module here, a file in workflow/rules/
and its name in `kvtrial.run.layout.STAGES`. Whatever lies here is part of the build's identity; what only
reads finished events is in `after`.
"""

import sys

from kvtrial.run import loading

# What runs as `python -m kvtrial.stages.NAME` is looked for under this name; then the stage is loaded.
if sys.argv[:1] == ["-m"]:
    loading.begun()
