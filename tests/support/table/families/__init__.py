"""The rows of the operator table, a file a family; samples.py gathers them."""
