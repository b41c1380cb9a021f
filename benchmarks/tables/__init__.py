"""The tables and pictures that table.py makes of the records."""
