"""Data sets and their file formats."""

from .idx import read_idx, write_idx
from .mnist import Mnist, Split, load_mnist
