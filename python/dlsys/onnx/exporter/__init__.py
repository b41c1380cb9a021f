"""Graphs and models as ONNX files: tracing, the rules of operators, dynamic extents, the file."""

from .export import export
from .table import exportable
