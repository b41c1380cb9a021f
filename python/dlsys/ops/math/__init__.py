"""Functions of mathematics beyond arithmetic, elementwise."""
