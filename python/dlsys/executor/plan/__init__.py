"""From a graph to a plan: an order of its nodes, the lifetimes of buffers, and one arena. No
device.
"""
