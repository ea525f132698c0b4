"""Sphinx configuration: ``python -m sphinx -W docs build/docs`` after ``launch/setup --docs``."""

import importlib.metadata

project = "uncut_mpi"
author = "uncut_mpi developers"
release = importlib.metadata.version("uncut_mpi")
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["build"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
default_role = "py:obj"
# Members are listed with their own docstrings, not in a second table.
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
