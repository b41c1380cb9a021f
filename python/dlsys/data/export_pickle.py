"""Writes MNIST as `mnist.pkl.gz`, for old course scripts; dlsys itself never reads a pickle.

python -m dlsys.data.export_pickle [--data-dir FOLDER] [-o mnist.pkl.gz]
"""

from __future__ import annotations

import argparse
import gzip
import os
import pickle
import sys
from pathlib import Path

from ..errors import DataError
from ..files import replacing
from .formats.mnist import Mnist, load_mnist

_PROTOCOL = 2  # the newest that Python 2 reads
_GZIP_LEVEL = 3  # level 9 takes ten times as long for a tenth of the size


def export_pickle(mnist: Mnist, path: str | os.PathLike[str]) -> None:
    """Writes the (images, labels) pairs of train, validation and test as one tuple."""
    content = tuple((split.images, split.labels) for split in mnist)
    with replacing(Path(path)) as file, gzip.GzipFile("", "wb", _GZIP_LEVEL, file, 0) as packed:
        pickle.dump(content, packed, protocol=_PROTOCOL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dlsys.data.export_pickle", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data-dir", help="folder of the IDX files")
    parser.add_argument("-o", "--output", default="mnist.pkl.gz", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        export_pickle(load_mnist(options.data_dir), options.output)
    except (DataError, OSError) as error:
        print(f"export_pickle: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
