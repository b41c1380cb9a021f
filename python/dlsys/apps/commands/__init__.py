"""The commands of `dlsys`, a module each: its name is the command's, its first line the help's.

A module has `add_arguments(parser)`, which declares what the command takes, and `run(options,
parser)`, which does it and returns the exit status, None for 0. It imports what is heavy in `run`,
since the help loads every module. ALIASES, where a module has it, names other commands that are
also found under this one.
"""
