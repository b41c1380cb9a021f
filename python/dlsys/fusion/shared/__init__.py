"""What fusions share: patterns and the exchange of nodes, bodies, and the operators that several of
them make or read.
"""
