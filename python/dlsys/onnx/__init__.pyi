from .exporter import Exportable as Exportable
from .exporter import export as export
from .exporter import exportable as exportable
from .importer import ImportedModel as ImportedModel
from .importer import load as load
