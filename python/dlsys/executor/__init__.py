"""From a graph to a run: schedule (an order), plan (memory), reference (numpy) and program
(native).
"""
