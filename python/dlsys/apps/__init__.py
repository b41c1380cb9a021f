"""Programs on top of the library, and the command line that runs them: see `cli`."""
