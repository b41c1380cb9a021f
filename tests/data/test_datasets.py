"""Data sets: their files in the right formats, folders of images, normalization."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import tarfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np

from data.test_data import MNIST_FOLDER, InFolder
from dlsys import data
from dlsys.data.dataset import as_dataset
from dlsys.data.formats import cifar, cifar_pickles, download, mnist
from dlsys.data.formats import paths as source
from dlsys.data.transforms.normalize import normalization_of, normalized
from dlsys.errors import DataError

try:
    from PIL import Image
except ImportError:
    Image = None

RECORDS = 20  # of a file of the small CIFAR-10 here


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Served(InFolder):
    """A folder, and a server on this machine for the files of another."""

    handler = Quiet

    def setUp(self):
        super().setUp()
        self.remote = self.folder / "remote"
        self.remote.mkdir()
        self.base = self.folder / "base"
        handler = functools.partial(self.handler, directory=str(self.remote))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}/"
        for patch in (
            mock.patch.dict(os.environ, {"no_proxy": "*"}),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            patch.__enter__()
            self.addCleanup(patch.__exit__, None, None, None)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


class TestFashionMnist(Served):
    """Four small files in the place of the real ones."""

    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.arrays, files = [], []
        for file, n in zip(mnist.FASHION_MNIST.files, (12, 12, 5, 5)):
            shape = (n, *file.shape[1:])
            array = rng.integers(0, 10 if len(shape) == 1 else 256, shape).astype(np.uint8)
            data.write_idx(self.remote / file.file_name, array)
            self.arrays.append(array)
            files.append(file._replace(shape=shape, packed_md5=md5(self.remote / file.file_name)))
        small = mnist.FASHION_MNIST._replace(files=tuple(files), mirrors=(self.url,))
        for name, value in (("FASHION_MNIST", small), ("N_TRAIN", 8)):
            patch = mock.patch.object(mnist, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_downloaded_once_then_offline(self):
        first = data.fashion_mnist_sets(self.base)
        for file in self.remote.iterdir():
            file.unlink()
        for sets in (first, data.fashion_mnist_sets(self.base)):
            self.assertEqual([len(part) for part in sets], [8, 4, 5])
            self.assertEqual(sets.train.sample_shape, (1, 28, 28))
            self.assertEqual(sets.train.dtype, np.uint8)
            self.assertEqual(sets.test.classes[9], "ankle boot")
            np.testing.assert_array_equal(sets.validation.images[:, 0], self.arrays[0][8:])
            np.testing.assert_array_equal(sets.test.labels, self.arrays[3])

    def test_in_floats(self):
        splits = data.load_fashion_mnist(self.base)
        self.assertEqual(splits.train.images.shape, (8, 784))
        pixels = np.rint(splits.test.images * 255).reshape(5, 28, 28)
        np.testing.assert_array_equal(pixels, self.arrays[2])
        self.fails("load_fashion_mnist|floating-point", data.load_fashion_mnist, self.base, np.int8)

    def test_a_changed_packed_file(self):
        data.fashion_mnist_sets(self.base)
        path = self.base / "t10k-labels-idx1-ubyte.gz"
        data.write_idx(path, np.zeros(5, np.uint8))
        self.fails(f"{path}|MD5", data.fashion_mnist_sets, self.base)

    def test_unpacked_files(self):
        self.base.mkdir()
        for path in self.remote.iterdir():
            content = gzip.decompress(path.read_bytes())
            (self.base / path.stem).write_bytes(content)
        sets = data.fashion_mnist_sets(self.base)
        np.testing.assert_array_equal(sets.test.images[:, 0], self.arrays[2])

    def test_a_mirror_with_other_content(self):
        data.write_idx(self.remote / "t10k-labels-idx1-ubyte.gz", np.ones(5, np.uint8))
        self.fails("t10k-labels|the content is not", data.fashion_mnist_sets, self.base)
        self.assertFalse((self.base / "t10k-labels-idx1-ubyte.gz").exists())


class TestMnistIsNotFashion(InFolder):
    def test_packed(self):
        self.fails("expected one|MD5", data.load_fashion_mnist, MNIST_FOLDER)

    def test_unpacked(self):
        for file in mnist.MNIST.files:
            packed = (MNIST_FOLDER / file.file_name).read_bytes()
            (self.folder / file.name).write_bytes(gzip.decompress(packed))
        self.fails("another set's file of that name", data.fashion_mnist_sets, self.folder)

    def test_mnist_as_sets(self):
        sets, splits = data.mnist_sets(MNIST_FOLDER), data.load_mnist(MNIST_FOLDER)
        for part, split in zip(sets, splits):
            np.testing.assert_array_equal(part.labels, split.labels)
            pixels = np.divide(part.images[::50].reshape(-1, 784), 255, dtype=np.float32)
            np.testing.assert_array_equal(pixels, split.images[::50])


class TestCifar(Served):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(1)
        self.records = {}
        packed = self.remote / cifar.ARCHIVE.file_name
        with tarfile.open(packed, "w:gz") as tar:
            for name in ("../escape", *(f"{cifar.FOLDER}/{name}" for name in cifar.FILES)):
                records = rng.integers(0, 256, (RECORDS, 3073)).astype(np.uint8)
                records[:, 0] %= 10
                self.records[name.rsplit("/", 1)[1]] = records
                entry = tarfile.TarInfo(name)
                entry.size = records.nbytes
                tar.addfile(entry, io.BytesIO(records.tobytes()))
        archive = cifar.ARCHIVE._replace(md5=md5(packed))
        for name, value in (
            ("ARCHIVE", archive), ("MIRRORS", (self.url,)), ("N_RECORDS", RECORDS), ("N_TRAIN", 90),
        ):  # fmt: skip
            patch = mock.patch.object(cifar, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def check(self, sets):
        self.assertEqual([len(part) for part in sets], [90, 10, 20])
        self.assertEqual((sets.train.sample_shape, sets.train.dtype), ((3, 32, 32), np.uint8))
        self.assertEqual(sets.test.classes[3], "cat")
        last = self.records["data_batch_5.bin"][10:]
        np.testing.assert_array_equal(sets.validation.labels, last[:, 0])
        pixel = sets.validation.images[4, 2, 31, 7]  # blue, last row
        self.assertEqual(pixel, last[4, 1 + 2 * 1024 + 31 * 32 + 7])
        np.testing.assert_array_equal(
            sets.test.images.reshape(20, -1), self.records["test_batch.bin"][:, 1:]
        )

    def test_downloaded_unpacked_and_then_offline(self):
        self.check(data.cifar10_sets(self.base))
        self.assertEqual(
            sorted(path.name for path in self.base.iterdir()),
            [cifar.FOLDER, cifar.ARCHIVE.file_name],
        )
        self.assertFalse((self.folder / "escape").exists())
        (self.remote / cifar.ARCHIVE.file_name).unlink()
        self.check(data.cifar10_sets(self.base))
        self.check(data.cifar10_sets(self.base / cifar.FOLDER))

    def test_the_python_version(self):
        """As Python 2 wrote it, bytes under keys of bytes; and as Python 3 does, in protocol 2."""
        folder = self.base / cifar_pickles.FOLDER
        folder.mkdir(parents=True)
        names = dict(zip(cifar_pickles.FILES, cifar.FILES))
        for k, (name, binary) in enumerate(names.items()):
            records = self.records[binary]
            batch = {b"labels": records[:, 0].tolist(), b"data": records[:, 1:].copy()}
            (folder / name).write_bytes(pickle.dumps(batch, 2 + k % 2))
        self.check(data.cifar10_sets(self.base))
        self.check(data.cifar10_sets(folder))

    def test_a_pickle_runs_no_code_and_is_checked(self):
        path = self.folder / "data_batch_1"

        class Ran:
            def __reduce__(self):
                return os.mkdir, ("ran",)

        pixels = np.zeros((4, 3072), np.uint8)
        for batch, said in (
            ({b"data": Ran(), b"labels": [1]}, "mkdir', which is not run here"),
            ({b"data": pixels, b"labels": [1, 2, 3]}, "expected 4 images with labels below 10"),
            ({b"data": pixels, b"labels": [1, 2, 3, 10]}, "expected 4 images"),
            ({b"data": pixels.astype(np.float32), b"labels": [0] * 4}, "expected rows of uint8"),
            ({b"labels": [1]}, "no batch of CIFAR-10's Python version"),
            ([1], "no batch of CIFAR-10's Python version"),
        ):
            path.write_bytes(pickle.dumps(batch, 2))
            with self.assertRaisesRegex(DataError, said):
                cifar_pickles.read_cifar_pickle(path, (3, 32, 32), 10, 4)
        self.assertFalse(Path("ran").exists())

    def test_an_archive_that_lies_there(self):
        self.base.mkdir()
        os.replace(self.remote / cifar.ARCHIVE.file_name, self.base / cifar.ARCHIVE.file_name)
        (self.base / cifar.FOLDER).mkdir()
        (self.base / cifar.FOLDER / cifar.FILES[0]).write_bytes(b"half")
        self.check(data.cifar10_sets(self.base))

    def test_it_is_unpacked_once_where_many_begin_together(self):
        together, find, unpack = threading.Barrier(4), cifar._find, cifar._unpack
        met, unpacked = threading.local(), []

        def find_after_all_came(base):
            found = find(base)
            if not hasattr(met, "others"):
                met.others = together.wait(timeout=30)
            return found

        def counted(archive, folder):
            unpacked.append(folder)
            unpack(archive, folder)

        with (
            mock.patch.object(cifar, "_find", find_after_all_came),
            mock.patch.object(cifar, "_unpack", counted),
            ThreadPoolExecutor(4) as pool,
        ):
            for sets in pool.map(data.cifar10_sets, [self.base] * 4):
                self.check(sets)
        self.assertEqual(len(unpacked), 1)

    def test_a_damaged_archive_is_refused_and_nothing_is_unpacked(self):
        self.base.mkdir()
        path = self.base / cifar.ARCHIVE.file_name
        path.write_bytes((self.remote / path.name).read_bytes()[:-1000])
        self.fails(f"{path}|MD5", data.cifar10_sets, self.base)
        with mock.patch.object(cifar, "ARCHIVE", cifar.ARCHIVE._replace(md5=md5(path))):
            self.fails(f"{path}: cannot be unpacked", data.cifar10_sets, self.base)
        self.assertEqual([path], list(self.base.iterdir()))

    def test_a_mirror_that_has_it_not(self):
        (self.remote / cifar.ARCHIVE.file_name).unlink()
        self.fails(f"{cifar.ARCHIVE.file_name}|404", data.cifar10_sets, self.base)

    def test_files_that_are_none(self):
        path = self.folder / "a.bin"
        records = self.records["test_batch.bin"].copy()
        path.write_bytes(records.tobytes()[:-1])
        self.fails(f"{path}|records of 3073 bytes|fetch", data.read_cifar, path)
        path.write_bytes(records[:7].tobytes())
        self.assertEqual(len(data.read_cifar(path).labels), 7)
        self.fails("expected 8 records", data.read_cifar, path, 8)
        records[5, 0] = 10
        path.write_bytes(records.tobytes())
        self.fails("record 5 has the label 10", data.read_cifar, path)
        path.write_bytes(b"")
        self.fails("the file has 0 bytes", data.read_cifar, path)


class TestDownloadOfAnyFile(Served):
    """download() takes whatever has a name and a check."""

    def test_two_mirrors_and_a_check(self):
        (self.remote / "good").mkdir()
        (self.remote / "a.txt").write_bytes(b"bad")
        (self.remote / "good" / "a.txt").write_bytes(b"content")
        file = cifar.Archive("a.txt", hashlib.md5(b"content").hexdigest())
        download.download([file], self.base, mirrors=[self.url, self.url + "good/"])
        self.assertEqual((self.base / "a.txt").read_bytes(), b"content")

    def test_md5_of_large_files(self):
        path = self.folder / "large"
        path.write_bytes(bytes(range(256)) * 5000)
        source.check_md5(path, md5(path))
        self.fails(f"{path}|its MD5 is {md5(path)}", source.check_md5, path, "0" * 32)


@unittest.skipIf(Image is None, "Pillow is not installed")
class TestImageFolder(InFolder):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(2)
        self.pixels = {}
        for name in ("b/2.png", "b/10.png", "a/x.png", "c/y.bmp"):
            pixels = rng.integers(0, 256, (5, 7, 3)).astype(np.uint8)
            self.save(name, pixels)
            self.pixels[name] = pixels.transpose(2, 0, 1)
        (self.folder / "b" / "notes.txt").write_text("no image")
        (self.folder / "top.png").write_bytes(b"in no class")

    def save(self, name, pixels):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)

    def test_classes_and_pixels(self):
        dataset = data.image_folder(self.folder)
        self.assertEqual(dataset.classes, ("a", "b", "c"))
        self.assertEqual(dataset.labels.tolist(), [0, 1, 1, 2])
        self.assertEqual((len(dataset), dataset.sample_shape), (4, (3, 5, 7)))
        images = dataset.take(np.array([3, 1])).images
        np.testing.assert_array_equal(images[0], self.pixels["c/y.bmp"])
        np.testing.assert_array_equal(images[1], self.pixels["b/10.png"])

    def test_decoded_only_when_taken(self):
        dataset = data.image_folder(self.folder, size=(5, 7))
        (self.folder / "c" / "y.bmp").write_bytes(b"BM garbage")
        dataset.take(np.arange(3))
        part = dataset.subset(slice(2, None))
        self.assertEqual((len(part), part.sample_shape), (2, (3, 5, 7)))
        np.testing.assert_array_equal(part.take(np.array([0])).images[0], self.pixels["b/2.png"])
        self.fails("c/y.bmp|cannot be read as an image|remove", part.take, np.array([1]))
        self.fails("c/y.bmp", dataset.in_memory)

    def test_a_truncated_image_is_named(self):
        path = self.folder / "a" / "x.png"
        path.write_bytes(path.read_bytes()[:-40])
        self.fails(f"{path}|cannot be read", data.image_folder, self.folder)
        path.unlink()
        dataset = data.image_folder(self.folder)
        (self.folder / "b" / "2.png").unlink()
        self.fails("2.png|has gone", dataset.take, slice(None))

    def test_sizes_and_modes(self):
        self.save("a/large.png", np.full((20, 28, 3), (90, 30, 0), np.uint8))
        dataset = data.image_folder(self.folder)  # the large one is first
        self.fails("x.png|(5, 7)|(20, 28)|size=", dataset.take, np.array([1]))
        for mode, channels in (("L", 1), ("RGB", 3), ("RGBA", 4)):
            images = data.image_folder(self.folder, size=(6, 4), mode=mode).in_memory().images
            self.assertEqual(images.shape, (5, channels, 6, 4))
            value = [round(0.299 * 90 + 0.587 * 30)] if mode == "L" else [90, 30, 0, 255][:channels]
            np.testing.assert_array_equal(images[0, :, 3, 2], value)

    def test_folders_within_classes_count_and_what_is_hidden_does_not(self):
        for name in ("b/more/of it/3.png", "b/more/x.png", ".cache/z.png", "b/.old/z.png"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self.save(name, np.zeros((5, 7, 3), np.uint8))
        (self.folder / "a" / "._x.png").write_bytes(b"what another system knows of x.png")
        (self.folder / "a" / "folder.png").mkdir()
        dataset = data.image_folder(self.folder)
        self.assertEqual(dataset.classes, ("a", "b", "c"))
        self.assertEqual(dataset.labels.tolist(), [0, 1, 1, 1, 1, 2])
        self.assertEqual(len(dataset.in_memory()), 6)

    def test_more_bits_than_eight(self):
        wide = np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800
        for suffix in ("png", "tif"):
            for path in (self.folder / "a").iterdir():
                path.unlink()
            self.save(f"a/x.{suffix}", wide)
            for mode in ("L", "RGB"):
                image = data.image_folder(self.folder, mode=mode).take([0]).images[0]
                for plane in image:
                    np.testing.assert_array_equal(plane, wide >> 8)
        for values in (wide.astype(np.int32), wide.astype(np.float32)):
            self.save("a/x.tif", values)
            self.fails("x.tif|32 bits|no known range", data.image_folder, self.folder)

    def test_refusals(self):
        for size in (28, (0, 5), (5,), (2.5, 3)):
            self.fails("expected (height, width)", data.image_folder, self.folder, size)
        self.fails("mode 'CMYK'|L, RGB", data.image_folder, self.folder, None, "CMYK")
        self.fails("no such folder", data.image_folder, self.folder / "nowhere")
        self.fails("no images|subfolder a class", data.image_folder, self.folder / "a")

    def test_without_pillow(self):
        with mock.patch.dict("sys.modules", {"PIL": None}):
            self.fails("pip install Pillow", data.image_folder, self.folder)


class TestDataset(InFolder):
    def test_parts(self):
        images = np.arange(24, dtype=np.uint8).reshape(6, 4)
        dataset = data.Dataset(images, [0, 1, 2, 0, 1, 2], ["x", "y", "z"])
        part = dataset.subset([4, 1]).subset(slice(1, 2))
        self.assertEqual((part.labels.tolist(), part.images.tolist()), ([1], [[4, 5, 6, 7]]))
        self.assertEqual(repr(part), "Dataset(1 samples (4,) uint8, 3 classes)")
        self.assertEqual(dataset.labels.dtype, np.int64)
        weights = data.Dataset(images, np.full((6, 2), 0.5))
        self.assertEqual(weights.labels.dtype, np.float32)

    def test_refusals(self):
        images = np.zeros((3, 4), np.uint8)
        self.fails("labels are float64 ()|(n, …)", data.Dataset, images, 0.5)
        self.fails("images are no array", as_dataset, ([np.zeros(2), np.zeros(3)], [0, 1]))
        self.fails("labels are no array", data.Dataset, images, [[0], [1, 2], 3])
        self.fails("got generator|images[indices]", as_dataset, (x for x in range(3)))
        self.fails("one label an image", data.Dataset, images, [0, 1])
        self.fails("at least one image", data.Dataset, images[:0], np.zeros(0, np.int64))
        self.fails("images are bool", data.Dataset, images.astype(bool), [0, 1, 2])
        self.fails("a pair (images, labels), got int", data.Loader, 5, 1)


class TestNormalization(InFolder):
    def test_of_a_set(self):
        rng = np.random.default_rng(3)
        for dtype, low, high in ((np.uint8, 0, 256), (np.float32, -3, 9)):
            images = rng.uniform(low, high, (500, 3, 8, 6)) * [[[[1.0]], [[0.5]], [[0.1]]]]
            images = images.astype(dtype)
            found = data.Normalization.of(data.Dataset(images, np.zeros(500, np.int64)))
            levels = 255 if dtype == np.uint8 else 1
            exact = images.astype(np.float64) / levels
            np.testing.assert_allclose(found.mean, exact.mean(axis=(0, 2, 3)), rtol=1e-12)
            np.testing.assert_allclose(found.std, exact.std(axis=(0, 2, 3)), rtol=1e-12)
            made = normalized(images, *found.affine(images.dtype))
            self.assertEqual((made.shape, made.dtype), (images.shape, np.float32))
            np.testing.assert_allclose(made.mean(axis=(0, 2, 3)), 0, atol=1e-5)
            np.testing.assert_allclose(made.std(axis=(0, 2, 3)), 1, rtol=1e-5)

    def test_one_number_for_flattened_images_and_constant_channels(self):
        flat = data.Dataset(np.full((5, 12), 51, np.uint8), np.zeros(5, np.int64))
        found = data.Normalization.of(flat)
        self.assertEqual((found.mean, found.std), ((0.2,), (1.0,)))
        np.testing.assert_allclose(normalized(flat.images, *found.affine(flat.dtype)), 0, atol=1e-7)

    def test_without_normalization(self):
        pixels = np.arange(256, dtype=np.uint8).reshape(2, 128)
        made = normalized(pixels, *normalization_of(None, (128,)).affine(pixels.dtype))
        np.testing.assert_allclose(made, pixels / 255, rtol=2e-7)
        floats = pixels.astype(np.float32) - 9
        same = normalized(floats, *normalization_of(None, (128,)).affine(floats.dtype))
        np.testing.assert_array_equal(same, floats)

    def test_numbers(self):
        found = normalization_of((0.5, 0.25), (1, 28, 28))
        pixels = np.array([[255, 0, 51]], np.uint8)
        made = normalized(pixels, *found.affine(pixels.dtype))
        np.testing.assert_allclose(made, [[2, -2, -1.2]], rtol=5e-7)
        for given in ((0.5, 0), ((1, 2), (1, 2)), ((1,), (1, 2)), 3, (0.5,)):
            self.fails("normalize", normalization_of, given, (1, 5, 5))
