"""Programs on top of the library; `mnist_dlsys.py` is their command line."""
