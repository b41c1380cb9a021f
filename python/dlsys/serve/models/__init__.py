"""The models of a service: their files, their programs, and the batches in which requests run."""
