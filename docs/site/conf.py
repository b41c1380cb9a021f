"""How Sphinx makes the site of docs/: `make docs`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

import dlsys  # noqa: E402

project = "dlsys"
author = "the dlsys contributors"
release = version = dlsys.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "reference"]
exclude_patterns = ["site"]
suppress_warnings = ["toc.not_included"]  # a test asks that, and of chapters that come
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4  # links to #a-heading, as a repository's browser makes them
myst_enable_extensions = ["colon_fence"]

add_module_names = False  # the section says the module
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as they are written
autodoc_type_aliases = {"Array": "Array"}

html_theme = "furo"
html_title = f"dlsys {release}"
html_static_path = ["static"]
html_css_files = ["dlsys.css"]
smartquotes = False
html_copy_source = html_show_sourcelink = False
html_show_copyright = False
html_show_search_summary = False  # it is read with requests, which browsers refuse for files
pygments_style, pygments_dark_style = "friendly", "monokai"
