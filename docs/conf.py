"""The documentation as a website. Sphinx, because the docstrings are reStructuredText: the contract is
shown as it stands in the package `contract`, its one home. Neither building nor viewing uses the network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # reference.py

project = "kvtrial"
author = "The kvtrial developers"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes, dtypes and units are in the text
napoleon_use_rtype = False

html_theme = "furo"
html_title = "kvtrial"
html_copy_source = True  # and html_show_sourcelink: the search reads pages for its excerpts
html_show_sourcelink = True
exclude_patterns = ["img"]
