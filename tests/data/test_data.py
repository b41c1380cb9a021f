"""IDX files, MNIST, the downloader against a server on this machine, the pickle for old scripts."""

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys import data
from dlsys.data import export_pickle
from dlsys.data.formats import download, mnist
from dlsys.data.formats import paths as source
from dlsys.errors import DataError
from support.devices import slow

REPOSITORY = Path(__file__).resolve().parents[2]
MNIST_FOLDER = REPOSITORY / "data" / "mnist"


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def fails(self, words, function, *args, **kwargs):
        with self.assertRaises(DataError) as caught:
            function(*args, **kwargs)
        for word in words.split("|"):
            self.assertIn(word, str(caught.exception))

    def files(self):
        return sorted(path.name for path in self.folder.iterdir())


class TestIdx(InFolder):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "a"

    def bytes_of(self, array, name="a"):
        data.write_idx(self.folder / name, array)
        return (self.folder / name).read_bytes()

    def read(self, content, **kwargs):
        self.path.write_bytes(content)
        return data.read_idx(self.path, **kwargs)

    def test_every_type_plain_and_packed(self):
        for name in ("uint8", "int8", "int16", "int32", "float32", "float64"):
            for file in ("a", "a.gz"):
                array = np.array([[-3, 0, 1], [100, 5, 7]]).astype(name)
                data.write_idx(self.folder / file, array)
                back = data.read_idx(self.folder / file)
                self.assertEqual(back.dtype, np.dtype(name))
                self.assertTrue(back.dtype.isnative)
                np.testing.assert_array_equal(back, array)

    def test_layout_on_disk(self):
        content = self.bytes_of(np.array([1, -2], np.int16))
        self.assertEqual(content, bytes([0, 0, 0x0B, 1, 0, 0, 0, 2, 0, 1, 0xFF, 0xFE]))

    def test_a_big_endian_and_a_strided_array(self):
        array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
        np.testing.assert_array_equal(self.read(self.bytes_of(array)), array)

    def test_content_tells_gzip_not_the_name(self):
        packed = self.bytes_of(np.arange(3, dtype=np.uint8), "b.gz")
        np.testing.assert_array_equal(self.read(packed), [0, 1, 2])
        self.path = self.folder / "c.gz"
        np.testing.assert_array_equal(self.read(gzip.decompress(packed)), [0, 1, 2])

    def test_same_bytes_each_time(self):
        array = np.arange(5, dtype=np.uint8)
        self.assertEqual(self.bytes_of(array, "a.gz"), self.bytes_of(array, "b.gz"))

    def test_empty_arrays(self):
        for shape in ((0,), (3, 0), (0, 2)):
            self.assertEqual(self.read(self.bytes_of(np.zeros(shape, np.float32))).shape, shape)

    def test_truncated(self):
        content = self.bytes_of(np.arange(10, dtype=np.int32))
        for length in range(len(content)):
            self.fails("a: the file is truncated", self.read, content[:length])

    def test_truncated_inside_whole_gzip(self):
        content = self.bytes_of(np.arange(10, dtype=np.int32))
        for length in range(len(content)):
            self.fails("a: the file is truncated", self.read, gzip.compress(content[:length]))

    def test_truncated_gzip(self):
        packed = self.bytes_of(np.arange(200, dtype=np.int32), "a.gz")
        for length in range(2, len(packed)):
            self.fails("a: the gzip data ends early", self.read, packed[:length])

    def test_corrupt_gzip(self):
        packed = self.bytes_of(np.arange(200, dtype=np.uint8), "a.gz")
        crc_off = bytearray(packed)
        crc_off[-8] ^= 1
        self.fails("a: the gzip data is corrupt|fetch", self.read, bytes(crc_off))
        self.fails("a: the gzip data is corrupt", self.read, packed + b"more")
        self.fails("a: the gzip data is corrupt", self.read, packed[:10] + b"\xff" * 50)

    def test_wrong_magic(self):
        for start in (b"\1\0\x08\1", b"\0\0\x07\1", b"\0\0\x08\0", b"\0\0\x08\x21", b"PK\3\4"):
            self.fails("a: not an IDX file|" + start.hex(" "), self.read, start + bytes(200))

    def test_trailing_bytes(self):
        content = self.bytes_of(np.arange(3, dtype=np.uint8)) + b"\0"
        self.fails("bytes follow the 3", self.read, content)
        self.fails("bytes follow the 3", self.read, gzip.compress(content))

    def test_dimensions_are_checked_before_memory_is_taken(self):
        header = bytes([0, 0, 0x0E, 3]) + b"\xff" * 12
        with mock.patch.object(np, "empty", side_effect=AssertionError("memory was taken")):
            self.fails("truncated|4294967295", self.read, header + bytes(100))
            self.fails("truncated|at most", self.read, gzip.compress(header + bytes(100)))

    def test_dimensions_that_numpy_does_not_have(self):
        header = bytes([0, 0, 0x08, 4]) + bytes(4) + b"\xff" * 12
        self.fails("its header asks for an array (0, 4294967295", self.read, header)

    def test_expectations(self):
        array = np.arange(6, dtype=np.uint8).reshape(2, 3)
        content = self.bytes_of(array)
        good = hashlib.sha256(content).hexdigest()
        for stored in (content, gzip.compress(content)):
            np.testing.assert_array_equal(self.read(stored, shape=(2, 3), sha256=good), array)
        self.fails("expected an array of shape (6,)|(2, 3)", self.read, content, shape=(6,))
        self.fails("not the expected one|SHA-256", self.read, content, sha256="0" * 64)

    def test_what_idx_cannot_hold(self):
        self.fails("IDX has no int64|uint8", self.bytes_of, np.zeros(2, np.int64))
        self.fails("IDX has no shape ()", self.bytes_of, np.zeros((), np.uint8))
        self.assertEqual(self.files(), [])

    def test_a_write_that_fails_leaves_the_old_file(self):
        content = self.bytes_of(np.arange(3, dtype=np.uint8))
        with mock.patch.object(np, "ascontiguousarray", side_effect=OSError("disk full")):
            with self.assertRaisesRegex(OSError, "disk full"):
                data.write_idx(self.path, np.zeros(9, np.uint8))
        self.assertEqual((self.files(), self.path.read_bytes()), (["a"], content))

    def test_a_missing_file(self):
        with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
            data.read_idx(self.folder / "nowhere")


class TestMnist(InFolder):
    @classmethod
    def setUpClass(cls):
        cls.mnist = data.load_mnist(MNIST_FOLDER)

    def link_all_but(self, name):
        for file in mnist.MNIST.files:
            if file.name != name:
                (self.folder / f"{file.name}.gz").symlink_to(MNIST_FOLDER / f"{file.name}.gz")
        return self.folder / f"{name}.gz"

    def test_splits(self):
        sizes = []
        for split in self.mnist:
            sizes.append(len(split.labels))
            self.assertEqual(split.images.shape, (len(split.labels), 784))
            self.assertEqual((split.images.dtype, split.labels.dtype), (np.float32, np.int64))
            self.assertEqual((split.images.min(), split.images.max()), (0, 1))
            self.assertEqual(set(np.unique(split.labels)), set(range(10)))
        self.assertEqual(sizes, [50_000, 10_000, 10_000])

    def test_order_and_scale(self):
        images = data.read_idx(MNIST_FOLDER / "train-images-idx3-ubyte.gz").reshape(-1, 784)
        labels = data.read_idx(MNIST_FOLDER / "train-labels-idx1-ubyte.gz")
        train, validation = self.mnist.train, self.mnist.validation
        for split, part in ((train, slice(0, 50_000)), (validation, slice(50_000, None))):
            np.testing.assert_array_equal(split.labels, labels[part])
            np.testing.assert_array_equal(np.rint(split.images[::100] * 255), images[part][::100])

    def test_dtype(self):
        self.assertEqual(data.load_mnist(MNIST_FOLDER, np.float64).test.images.dtype, np.float64)
        self.fails("floating-point|int32", data.load_mnist, MNIST_FOLDER, np.int32)

    def test_unpacked_files(self):
        name = "t10k-labels-idx1-ubyte"
        packed = self.link_all_but(name)
        source = MNIST_FOLDER / packed.name
        (self.folder / name).write_bytes(gzip.decompress(source.read_bytes()))
        labels = data.load_mnist(self.folder).test.labels
        np.testing.assert_array_equal(labels, self.mnist.test.labels)

    def test_a_mislabeled_file(self):
        path = self.link_all_but("train-labels-idx1-ubyte")
        path.symlink_to(MNIST_FOLDER / "t10k-images-idx3-ubyte.gz")
        words = "train-labels-idx1-ubyte.gz|expected an array of shape (60000,)|(10000, 28, 28)"
        self.fails(words, data.load_mnist, self.folder)

    def test_changed_content(self):
        path = self.link_all_but("t10k-labels-idx1-ubyte")
        data.write_idx(path, np.zeros(10_000, np.uint8))
        words = "t10k-labels-idx1-ubyte.gz|not the expected one"
        self.fails(words, data.load_mnist, self.folder)

    def test_missing_files_and_no_mirror(self):
        path = self.link_all_but("t10k-labels-idx1-ubyte")
        with mock.patch.object(mnist, "MNIST", mnist.MNIST._replace(mirrors=())):
            words = f"{path.name} cannot be downloaded into {self.folder}|--data-dir"
            self.fails(words, data.load_mnist, self.folder)

    def test_default_folder(self):
        self.assertEqual(source.default_folder("mnist"), MNIST_FOLDER)
        with mock.patch.object(
            source, "__file__", str(self.folder / "a" / "b" / "c" / "d" / "s.py")
        ):
            for cache, folder in (
                ("/cache", Path("/cache")),
                ("", Path("/home/a/.cache")),
                ("relative", Path("/home/a/.cache")),
            ):
                with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache, "HOME": "/home/a"}):
                    self.assertEqual(source.default_folder("mnist"), folder / "dlsys" / "mnist")


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.content` with what `server.plan` says of each request, by turns."""

    def do_GET(self):
        server = self.server
        plan = server.plan.pop(0) if server.plan else ""
        server.requests.append((self.path, self.headers.get("Range")))
        start = 0
        if "404" in plan:
            self.send_error(404)
            return
        if self.headers.get("Range") and "norange" not in plan:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if "wrong" in plan:
            body = bytes(len(body))
        if "hang" in plan:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            server.release.wait(10)
            return
        self.wfile.write(body[: len(body) // 2] if "cut" in plan else body)

    def log_message(self, *_):
        pass


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestDownload(InFolder):
    def setUp(self):
        super().setUp()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.plan, self.server.requests = [], []
        self.server.release = threading.Event()
        self.addCleanup(self.server.server_close)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(self.server.shutdown)
        self.addCleanup(self.server.release.set)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.array = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
        data.write_idx(self.folder / "content.gz", self.array)
        self.server.content = (self.folder / "content.gz").read_bytes()
        digest = hashlib.sha256(gzip.decompress(self.server.content)).hexdigest()
        self.file = mnist.IdxFile("digits", self.array.shape, digest)
        (self.folder / "content.gz").unlink()
        self.partial = self.folder / ".digits.gz.part"
        self.progress = io.StringIO()
        no_proxy = mock.patch.dict(os.environ, {"no_proxy": "*"})
        no_proxy.start()
        self.addCleanup(no_proxy.stop)

    def fetch(self, *plan, mirrors=None, timeout_s=5.0):
        self.server.plan[:] = plan
        self.server.requests.clear()
        with contextlib.redirect_stderr(self.progress):
            download.download(
                [self.file], self.folder, mirrors=mirrors or [self.url], timeout_s=timeout_s
            )

    def assert_fetched(self, n_requests):
        self.assertEqual(self.files(), ["digits.gz"])
        np.testing.assert_array_equal(data.read_idx(self.folder / "digits.gz"), self.array)
        self.assertEqual(len(self.server.requests), n_requests)

    def test_whole(self):
        self.fetch()
        self.assert_fetched(1)
        self.assertEqual(self.progress.getvalue(), f"downloading {self.url}digits.gz\n")

    def test_what_is_there_is_left_alone(self):
        (self.folder / "digits.gz").write_bytes(b"mine")
        self.fetch()
        self.assertEqual((self.folder / "digits.gz").read_bytes(), b"mine")
        self.assertEqual(self.server.requests, [])

    def test_progress_on_a_terminal(self):
        self.progress = Terminal()
        self.fetch()
        self.assertIn("digits.gz: 100%", self.progress.getvalue())

    def test_a_new_folder(self):
        self.folder = self.folder / "new" / "folder"
        self.fetch()
        self.assert_fetched(1)

    def test_a_cut_transfer_is_resumed(self):
        self.fetch("cut", "cut", "")
        self.assert_fetched(3)
        half = len(self.server.content) // 2
        self.assertEqual(self.server.requests[1], ("/digits.gz", f"bytes={half}-"))

    def test_a_later_call_resumes(self):
        self.fails("the connection ended after", self.fetch, "cut", "cut", "cut")
        self.assertEqual(self.files(), [".digits.gz.part"])
        self.fetch()
        self.assert_fetched(1)
        self.assertIsNotNone(self.server.requests[0][1])

    def test_another_mirror_resumes(self):
        self.fetch("cut", "404", "", mirrors=[self.url + "a/", self.url + "b/"])
        self.assert_fetched(3)
        self.assertEqual(self.server.requests[2][0], "/b/digits.gz")

    def test_a_server_without_ranges(self):
        self.partial.write_bytes(self.server.content[:100])
        self.fetch("norange")
        self.assert_fetched(1)

    def test_a_complete_partial_file(self):
        self.partial.write_bytes(self.server.content)
        self.fetch()
        self.assert_fetched(1)

    def test_a_partial_file_of_other_content(self):
        self.partial.write_bytes(bytes(100))
        self.fetch()
        self.assert_fetched(2)

    def test_wrong_content_is_never_kept(self):
        self.fails("the content is not that of the file", self.fetch, "wrong")
        self.assertEqual(self.files(), [])
        self.fetch("wrong", "", mirrors=[self.url, self.url])
        self.assert_fetched(2)

    def test_404_then_the_next_mirror(self):
        self.fetch("404", "", mirrors=[self.url, self.url])
        self.assert_fetched(2)

    def test_a_server_that_falls_silent(self):
        self.fetch("hang", "", timeout_s=0.2)
        self.assert_fetched(2)

    def test_endless_content(self):
        with mock.patch.object(download, "_MAX_NBYTES", 100):
            self.fails("the content is not that of the file", self.fetch)
        self.assertEqual(self.files(), [])

    def test_all_fail(self):
        closed = "http://127.0.0.1:1/"
        words = f"digits.gz cannot be downloaded into {self.folder}|{self.url}: HTTP 404 Not Found"
        words += f"|{closed}: |Connection refused|by hand|--data-dir"
        self.fails(words, self.fetch, "404", mirrors=[self.url, closed])
        self.assertEqual(self.files(), [])

    def test_a_folder_that_cannot_be_made(self):
        (self.folder / "file").write_bytes(b"")
        self.folder = self.folder / "file" / "below"
        self.fails("digits.gz cannot be downloaded|Not a directory", self.fetch)

    def test_two_at_once(self):
        self.server.plan[:] = ["cut"]
        errors = []

        def fetch():
            try:
                download.download([self.file], self.folder, mirrors=[self.url], timeout_s=5.0)
            except Exception as error:
                errors.append(error)

        with contextlib.redirect_stderr(io.StringIO()):
            threads = [threading.Thread(target=fetch) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(errors, [])
        self.assert_fetched(2)


@slow
class TestExportPickle(InFolder):
    def setUp(self):
        super().setUp()
        splits = []
        for n in (5, 3, 2):
            images = np.linspace(0, 1, n * 784, dtype=np.float32).reshape(n, 784)
            splits.append(data.Split(images, np.arange(n)))
        self.mnist = data.Mnist(*splits)
        self.path = self.folder / "mnist.pkl.gz"

    def test_an_old_script_reads_it(self):
        export_pickle.export_pickle(self.mnist, self.path)
        with gzip.open(self.path, "rb") as file:
            content = pickle.load(file, encoding="latin1")
        self.assertEqual([type(part) for part in content], [tuple] * 3)
        for (images, labels), split in zip(content, self.mnist, strict=True):
            self.assertEqual((images.dtype, labels.dtype), (np.float32, np.int64))
            np.testing.assert_array_equal(images, split.images)
            np.testing.assert_array_equal(labels, split.labels)

    def test_protocol_and_name_in_the_header(self):
        export_pickle.export_pickle(self.mnist, self.path)
        self.assertEqual(gzip.decompress(self.path.read_bytes())[:2], b"\x80\x02")
        self.assertEqual(self.files(), ["mnist.pkl.gz"])

    def run_command(self, *arguments):
        command = [sys.executable, "-m", "dlsys.data.export_pickle", *arguments]
        python_path = os.pathsep.join(
            [str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
        )
        environment = {**os.environ, "PYTHONPATH": python_path}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def test_command(self):
        done = self.run_command("--data-dir", str(MNIST_FOLDER), "-o", str(self.path))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, f"wrote {self.path}\n")
        self.assertGreater(self.path.stat().st_size, 10_000_000)

    def test_command_that_fails(self):
        target = str(self.folder / "no" / "such" / "file")
        done = self.run_command("--data-dir", str(MNIST_FOLDER), "-o", target)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, "^export_pickle: .*No such file or directory.*\n$")

    def test_nothing_of_ours_unpickles(self):
        """What reads the pickles of others knows a few names and refuses all else; test_pretrained
        and test_datasets have files that name more.
        """
        package, restricted = REPOSITORY / "python" / "dlsys", set()
        for path in package.rglob("*.py"):
            text = path.read_text()
            if "(pickle.Unpickler)" in text:
                restricted.add(str(path.relative_to(package)))
                self.assertIn("def find_class(", text, path)
                text = text.replace("(pickle.Unpickler)", "")
            for word in ("pickle.load", "Unpickler", "allow_pickle=True"):
                self.assertNotIn(word, text.replace("unpickler", ""), path)
        self.assertEqual(
            restricted, {"train/files/torch_files.py", "data/formats/cifar_pickles.py"}
        )
