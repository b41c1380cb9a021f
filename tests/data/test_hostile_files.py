"""Files made to harm: they are refused in a sentence, at once, and cost no more than they hold."""

from __future__ import annotations

import copy
import gzip
import io
import json
import logging
import math
import os
import random
import shutil
import struct
import tarfile
import tempfile
import tracemalloc
import unittest
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from data.test_datasets import Quiet, Served
from dlsys import data, train
from dlsys.apps.pictures import read_pictures
from dlsys.apps.setup import Setup, choose
from dlsys.data.formats import cifar
from dlsys.errors import DataError, DlsysError, printable, quoted
from support import sample
from support.devices import slow
from support.small_digits import Folder, run
from support.small_runs import loader, model, sgd

try:
    from PIL import Image
except ImportError:
    Image = None

MIB = 1 << 20


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def refused(self, pattern: str, function: Any, *arguments: Any, mib: float = 40) -> str:
        """DataError, of one printable line, for less memory than `mib`."""
        tracemalloc.start()
        try:
            with self.assertRaisesRegex(DataError, pattern) as caught:
                function(*arguments)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.assertLess(peak, mib * MIB)
        text = str(caught.exception)
        self.assertTrue(text.isprintable(), text)
        return text


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG of one gray byte a pixel, as its header says; its pixels may be too few."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@unittest.skipIf(Image is None, "no Pillow: pip install Pillow")
class Images(InFolder):
    def setUp(self) -> None:
        super().setUp()
        quiet = warnings.catch_warnings()
        quiet.__enter__()
        self.addCleanup(quiet.__exit__, None, None, None)
        warnings.simplefilter("ignore")  # Pillow's, of what it reads in spite of a fault
        logging.disable()
        self.addCleanup(logging.disable, logging.NOTSET)
        (self.folder / "a").mkdir()
        self.path = self.folder / "a" / "x.png"

    def both_refuse(self, pattern: str) -> None:
        """As an image of a folder and as a picture to classify."""
        for read, path in ((data.image_folder, self.folder), (read_one, self.path)):
            with self.subTest(read=read.__name__):
                self.refused(pattern, read, path)

    def test_a_bomb_is_refused_by_its_header(self) -> None:
        for side in (8_000, 12_000, 60_000):  # Pillow would take it, warn, refuse it
            self.path.write_bytes(png(side, side))
            never = mock.patch.object(Image.Image, "convert", side_effect=AssertionError)
            with never, self.subTest(side=side):
                self.both_refuse("pixels")

    def test_a_large_image_is_read(self) -> None:
        side = 3_000
        self.path.write_bytes(png(side, side, bytes(side * (side + 1))))
        images = data.image_folder(self.folder, size=(4, 4), mode="L").in_memory().images
        self.assertEqual((images.shape, int(images.max())), ((1, 1, 4, 4), 0))

    def test_a_pipe_and_other_formats_are_not_opened(self) -> None:
        os.mkfifo(self.path)
        self.both_refuse("expected a file")
        self.path.unlink()
        for content in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n", b"P9 nothing"):
            self.path.write_bytes(content)
            self.both_refuse("none of BMP, GIF, JPEG")

    def test_what_pillow_stumbles_over_is_one_sentence(self) -> None:
        Image.new("L", (5, 5)).save(self.path)
        for error in (struct.error("short"), IndexError(), MemoryError(), ZeroDivisionError("0")):
            with mock.patch.object(Image.Image, "convert", side_effect=error):
                self.both_refuse("cannot be read as an image")

    def test_mutated_images_are_read_or_refused(self) -> None:
        rng = random.Random(0)
        whole = np.random.default_rng(0).integers(0, 255, (9, 7, 3)).astype(np.uint8)
        for kind in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
            buffer = io.BytesIO()
            Image.fromarray(whole).save(buffer, kind)
            for _ in range(60):
                content = bytearray(buffer.getvalue())
                for _ in range(rng.randint(1, 4)):
                    content[rng.randrange(len(content))] = rng.randrange(256)
                self.path.write_bytes(content[: rng.choice([None, rng.randrange(len(content))])])
                for read, path in ((data.image_folder, self.folder), (read_one, self.path)):
                    try:
                        read(path)
                    except DlsysError as error:
                        self.assertTrue(str(error).isprintable())

    def test_folders_that_link_in_circles(self) -> None:
        Image.new("L", (5, 5)).save(self.path)
        inner = self.folder / "a"
        for depth in range(12):  # 4 ** 12 ways down
            inner = inner / str(depth)
            inner.mkdir()
            for name in "abc":
                (inner.parent / name).symlink_to(inner, target_is_directory=True)
            (inner / "up").symlink_to(self.folder / "a", target_is_directory=True)
        Image.new("L", (5, 5)).save(inner / "y.png")
        self.assertEqual(len(data.image_folder(self.folder)), 2)


def read_one(path: Path) -> Any:
    """The picture in a file."""
    return read_pictures(path, digits=True)


class Packed(InFolder):
    def test_a_packed_file_that_promises_too_much(self) -> None:
        path = self.folder / "x.gz"
        header = bytes([0, 0, 8, 2]) + struct.pack(">II", 1 << 19, 1 << 10)  # half a GiB
        path.write_bytes(gzip.compress(header) + bytes(600_000))
        self.refused("asks for 536870912 bytes, there are at most 268435456", data.read_idx, path)

    def test_no_more_is_unpacked_than_promised(self) -> None:
        path = self.folder / "x.gz"
        header = bytes([0, 0, 8, 1]) + struct.pack(">I", 10)
        path.write_bytes(gzip.compress(header + bytes(64 * MIB)))
        self.refused("bytes follow the 10", data.read_idx, path, mib=4)

    def test_a_pipe(self) -> None:
        os.mkfifo(self.folder / "x")
        self.refused("expected a file", data.read_idx, self.folder / "x")

    def test_an_archive_of_other_things(self) -> None:
        for kind, size in ((tarfile.REGTYPE, 5), (tarfile.SYMTYPE, 0), (tarfile.DIRTYPE, 0)):
            path = self.folder / "x.tar.gz"
            with tarfile.open(path, "w:gz") as tar:
                entry = tarfile.TarInfo(f"{cifar.FOLDER}/{cifar.FILES[0]}")
                entry.type, entry.size, entry.linkname = kind, size, "/etc/passwd"
                tar.addfile(entry, io.BytesIO(bytes(size)))
            self.refused("is no file of 10000 records", cifar._unpack, path, self.folder)


class Redirecting(Quiet):
    """Answers with a redirect to what is no URL, by turns, then with the file."""

    targets = ["http://[::1", "http://127.0.0.1:port/", "http://\udcff/", "file:///etc/passwd",
               "//", "http://%zz\x7f/"]  # fmt: skip

    def do_GET(self) -> None:
        kind, *rest = self.path.strip("/").split("/")
        if not kind.isdigit():
            self.path = "/".join(["", kind, *rest])
            return super().do_GET()
        self.send_response_only(302)
        target = self.targets[int(kind)]
        self._headers_buffer.append(b"Location: " + target.encode("latin-1", "replace") + b"\r\n")
        self.end_headers()
        return None


class Redirects(Served):
    handler = Redirecting

    def test_a_malformed_redirect_moves_on_to_the_next_mirror(self) -> None:
        from dlsys.data.formats import download, mnist

        array = np.arange(5, dtype=np.uint8)
        data.write_idx(self.remote / "x.gz", array)
        file = mnist.IdxFile("x", (5,))
        for number in range(len(Redirecting.targets)):
            base = self.base / str(number)
            mirrors = [f"{self.url}{number}/", self.url]
            with self.subTest(target=Redirecting.targets[number]):
                download.download([file], base, mirrors=mirrors, timeout_s=5)
                np.testing.assert_array_equal(data.read_idx(base / "x.gz"), array)


class Names(InFolder):
    """Control characters are escaped."""

    def test_names_of_files(self) -> None:
        for name, wanted in (
            ("a\x1b[2Jb", r"a\x1b[2Jb"), ("a\nerror: b", r"a\nerror: b"), ("a\udcffb", r"a\udcffb"),
            ("a\u202eb", r"a\u202eb"), ("é ü", "é ü"),
        ):  # fmt: skip
            path = self.folder / name
            for read in (train.load, train.safetensors.read, train.History.load, data.image_folder):
                path.write_bytes(b"[]")
                self.assertIn(wanted, self.refused("", read, path))
            self.assertIn(wanted, self.refused("", read_one, self.folder / f"{name}.none"))

    def test_values(self) -> None:
        self.assertLess(len(quoted("x" * 10**6)), 200)
        deep: Any = []
        for _ in range(200):
            deep = [deep]
        self.assertLess(len(quoted(deep)), 200)
        self.assertEqual(printable("plain"), "plain")


class Forged(InFolder):
    """Checkpoints with a right checksum and a header that no run has written."""

    STRANGE = (
        None,
        True,
        -1,
        2,
        1.5,
        1e400,
        math.nan,
        10**30,
        "x",
        "\u2028",
        [],
        [[]],
        {},
        {"a": 1},
    )

    def setUp(self) -> None:
        super().setUp()
        self.run_once(self.folder / "run")
        self.saved = train.load(self.folder / "run")

    def run_once(self, folder: Path, resume: Path | None = None) -> dict[str, np.ndarray]:
        callbacks = [
            train.Checkpoint(folder),
            train.EarlyStopping(9),
            train.JsonLog(folder / "log.jsonl"),
        ]
        net = model()
        epochs = 2 if resume is None else 3
        train.fit(net, loader(20), sgd(), epochs=epochs, validation=loader(20), callbacks=callbacks,
                  resume=resume, quiet=True)  # fmt: skip
        return net.state_dict()

    @slow
    def test_every_field_changed(self) -> None:
        self.run_once(self.folder / "next", self.folder / "run")
        outcomes = {"refused": 0, "taken": 0}
        with mock.patch("os.fsync"):
            for place, header in sample.of(self.changed(), 120):
                outcomes[self.outcome(place, header)] += 1
        self.assertGreater(outcomes["refused"], 80 if sample.SAMPLED else 400)
        self.assertGreater(outcomes["taken"], 3 if sample.SAMPLED else 20)

    def outcome(self, place: str, header: Any) -> str:
        path = self.folder / "forged.safetensors"
        train.save(path, self.saved.tensors, header)
        shutil.rmtree(self.folder / "next", ignore_errors=True)  # no checkpoint stands in the way
        try:
            self.run_once(self.folder / "next", path)
        except DataError as error:
            self.assertTrue(str(error).isprintable() and len(str(error)) < 1000, place)
            return "refused"
        except Exception as error:
            raise AssertionError(f"{place}: {error!r}") from error
        return "taken"

    def changed(self) -> Iterator[tuple[str, Any]]:
        """The header with one of its values exchanged or left out, everywhere."""
        for keys in list(places(self.saved.header)):
            for value in (*self.STRANGE, KeyError):
                header = copy.deepcopy(self.saved.header)
                at = header
                for key in keys[:-1]:
                    at = at[key]
                if value is KeyError:
                    del at[keys[-1]]
                elif at[keys[-1]] == value:
                    continue
                else:
                    at[keys[-1]] = value
                yield f"{keys} = {value!r}", header

    def test_headers_that_are_no_headers(self) -> None:
        path = self.folder / "x.safetensors"
        for text in ("[" * 100_000, "[]", "5", "{}", '{"format": 1e999}', '{"format": "1"}',
                     '{"format": %s}' % ("9" * 5000)):  # fmt: skip
            train.safetensors.write(path, {}, {"dlsys": text, "sha256": ""})
            self.refused("is corrupt|is damaged or forged", train.load, path)

    def test_histories(self) -> None:
        path = self.folder / "history.json"
        record = '{"epochs": [{"epoch": 1, "step": 1, %s}], "curve": [], "kept": 1, "logged": 0}'
        for text in (
            "[" * 100_000, "[]", "{}", '{"epochs": 5, "curve": [], "kept": 1, "logged": 0}',
            record % '"loss": "x"', record % '"epoch": "x"',
            record % f'"f1": {"[" * 500}{"]" * 500}',
        ):  # fmt: skip
            path.write_text(text)
            self.refused("is no history of a run", train.History.load, path)
        path.write_text(record % '"loss": null, "f1": [1, null]')
        self.assertEqual(train.History.load(path).column("f1"), [[1, None]])


def places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys to each value within a JSON value; of lists only to the first."""
    if keys:
        yield keys
    inside = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        inside = list(enumerate(value))[: 9 if keys == ("callbacks",) else 1]
    for key, item in inside:
        yield from places(item, (*keys, key))


class ForgedSetups(Folder):
    """Checkpoints of the command line whose setup no options could have made."""

    def setUp(self) -> None:
        super().setUp()
        self.kept = self.folder / "run"
        options = ("-m", "mlp", "--hidden", 4, "-c", "numpy", "-e", 1, "--batch-size", 100)
        self.done(*options, "--optimizer", "momentum", "--schedule", "constant",
                  "--checkpoint", self.kept)  # fmt: skip

    def test_an_answer_names_its_file_escaped(self) -> None:
        images = self.folder / "a\x1b[2J\n\udcff.idx"
        images.write_bytes((self.data / "t10k-images-idx3-ubyte").read_bytes())
        answer = run("predict", self.kept, images, "-c", "numpy").out
        self.assertIn(r"a\x1b[2J\n\udcff.idx[0]", answer)

    def test_no_network_is_built_that_the_arrays_are_not_of(self) -> None:
        saved = train.load(self.kept)
        entry = next(x for x in saved.header["callbacks"] if x["name"] == "Chosen")
        path = self.folder / "forged.safetensors"
        changes: list[dict[str, Any]] = [
            {"hidden": [10**9]}, {"hidden": [10**6] * 40}, {"hidden": [2**63] * 3},
            {"model": "vgg"}, {"hidden": [-4]}, {"hidden": 4}, {"batch_size": 10**12},
            {"augment": [["shift", 1e9]]},
            {"augment": ["x"]}, {"lr": "1"}, {"dropout": 2}, {"assignment": True}, {"seed": -1},
            {"optimizer": "x"}, {"early_stop": 0}, {"epochs": 1.5}, {"schedule": None},
        ]  # fmt: skip
        for change in changes:
            entry["state"].update(change)
            train.save(path, saved.tensors, saved.header)
            for arguments in (
                ("--resume", path),
                ("predict", path, self.data / "t10k-images-idx3-ubyte"),
            ):
                with self.subTest(change=change, ask=arguments[0]):
                    self.refused("^error: .* is damaged or forged: .*\n$", *arguments, status=1)
            entry["state"].update(train.load(self.kept).header["callbacks"][0]["state"])

    def test_every_setup_that_can_be_chosen_is_taken(self) -> None:
        for name in ("logreg", "mlp", "cnn", "resnet"):
            setup = choose(name, {})
            self.assertEqual(Setup.from_dict("x", json.loads(json.dumps(setup.as_dict()))), setup)
