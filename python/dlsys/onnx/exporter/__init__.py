"""Graphs and models as ONNX files: tracing, the rules of operators, free extents, the file."""

from . import rules  # isort: skip  # which fills the table
from .export import export
from .table import Exportable, exportable
