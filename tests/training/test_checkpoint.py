"""Checkpoint files: what is written is read, everything else is refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import train
from dlsys.dtypes import bfloat16, rounded
from dlsys.errors import DataError
from dlsys.train.files import safetensors

ENTRY = b'"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
ENTRY_OF_DIGITS = b'{"x":{"dtype":"U8","shape":[0,%s],"data_offsets":[0,0]}}'
DTYPES = "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 ?".split()


def arrays() -> dict[str, np.ndarray]:
    """One of every dtype, and shapes that need care."""
    rng = np.random.default_rng(0)
    made = {f"of {t}": (rng.random((3, 5)) * 100).astype(t) for t in DTYPES}
    made["scalar"] = np.array(2.5, np.float32)
    made["empty"] = np.zeros((0, 4), np.float32)
    made["turned"] = np.arange(12, dtype=np.int32).reshape(3, 4).T
    made["big-endian"] = np.arange(3, dtype=">i4")
    made["special"] = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)
    return made


def raw(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of a header, in whichever order it is right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "a.safetensors"

    def same(self, got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
        self.assertEqual(sorted(got), sorted(wanted))
        for name, array in wanted.items():
            self.assertEqual(got[name].dtype, array.dtype.newbyteorder("="), name)
            self.assertEqual(got[name].shape, array.shape, name)
            native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
            self.assertEqual(got[name].tobytes(), native.tobytes(), name)


class Safetensors(InFolder):
    def test_every_dtype_comes_back(self) -> None:
        safetensors.write(self.path, arrays(), {"a": "b", "ü": "€"})
        got = safetensors.read(self.path)
        self.same(got.tensors, arrays())
        self.assertEqual(got.metadata, {"a": "b", "ü": "€"})
        got.tensors["of f4"][0, 0] = 7  # writable

    def test_nothing_is_a_file_too(self) -> None:
        safetensors.write(self.path, {}, {})
        self.assertEqual(safetensors.read(self.path), ({}, {}))

    def test_the_layout_is_that_of_the_format(self) -> None:
        safetensors.write(self.path, {"x": np.array([1, 2], np.int16)}, {})
        content = self.path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        self.assertEqual(length % 8, 0)
        header = json.loads(content[8 : 8 + length])
        self.assertEqual(header, {"x": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}})
        self.assertEqual(content[8 + length :], b"\1\0\2\0")

    def test_the_library_of_the_format_reads_it_and_is_read(self) -> None:
        try:
            from safetensors.numpy import load_file, save_file
        except ImportError:
            self.skipTest("not here: safetensors")
        ours = {n: a for n, a in arrays().items() if n not in ("turned", "big-endian")}
        safetensors.write(self.path, ours, {"a": "b"})
        theirs = load_file(self.path)
        self.same({name: theirs[name] for name in ours}, ours)
        other = self.folder / "other.safetensors"
        save_file(ours, other, {"c": "d"})
        got = safetensors.read(other)
        self.same({name: got.tensors[name] for name in ours}, ours)
        self.assertEqual(got.metadata, {"c": "d"})

    def test_bfloat16_is_read_as_float32(self) -> None:
        values = np.array([1.5, -2.0, 0.0078125], np.float32)
        halves = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        entry = {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}
        self.path.write_bytes(raw({"x": entry}, halves))
        np.testing.assert_array_equal(safetensors.read(self.path).tensors["x"], values)

    def test_bfloat16_is_stored_in_two_bytes(self) -> None:
        values = rounded(np.linspace(-3, 7, 1000), bfloat16).reshape(10, 100)
        arrays = {"a": values, "b": np.arange(3), "empty": values[:0]}
        safetensors.write(self.path, arrays, {"c": "d"}, narrow={"a", "empty"})
        self.same(safetensors.read(self.path).tensors, arrays)
        self.assertLess(self.path.stat().st_size, 3 * values.size)
        ours = safetensors.in_file_order(arrays, narrow={"a", "empty"})
        self.assertEqual(list(safetensors.read(self.path).tensors), list(ours))

    def test_what_it_cannot_hold_is_refused_by_name(self) -> None:
        for array in (np.array([1j]), np.array(["text"]), np.array([None])):
            with self.assertRaisesRegex(DataError, "^x is .*, which safetensors cannot hold"):
                safetensors.write(self.path, {"x": array}, {})
        self.assertEqual(os.listdir(self.folder), [])

    def test_malformed_files_are_refused(self) -> None:
        def entry(start: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
            shape = [end - start] if shape is None else shape
            return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

        refused: dict[str, bytes] = {
            "empty": b"",
            "text": b"these are no weights at all, but a text\n" * 9,
            "pickle": pickle.dumps({"x": np.zeros(3)}),
            "header too long": raw({})[:8] + b"{",
            "no JSON": raw(b"{]"),
            "deep JSON": raw(b"[" * 100_000),
            "no object": raw([1, 2]),
            "a name twice": raw(b"{%s,%s}" % (ENTRY, ENTRY), b"12"),
            "metadata": raw({"__metadata__": {"a": 1}}),
            "entry": raw({"x": 5}),
            "negative": raw({"x": entry(-2, 0, shape=[2])}, b"12"),
            "not a number": raw({"x": entry(0, 1, shape=["1"])}, b"1"),
            "size": raw({"x": entry(0, 2, shape=[3])}, b"12"),
            "gap": raw({"x": entry(0, 1), "y": entry(2, 3)}, b"123"),
            "overlap": raw({"x": entry(0, 2), "y": entry(1, 3)}, b"123"),
            "short": raw({"x": entry(0, 2)}, b"1"),
            "long": raw({"x": entry(0, 2)}, b"123"),
            "digits": raw(ENTRY_OF_DIGITS % b",".join([b"9" * 4000] * 500)),
            "too many numbers": raw({"x": entry(0, 0, shape=[2**40] * 9 + [0])}),
        }
        cases = {
            name: ("is no safetensors file, or a damaged one", c) for name, c in refused.items()
        }
        cases["dtype"] = (
            "'x' is F8_E4M3, expected one of",
            raw({"x": entry(0, 2, "F8_E4M3")}, b"12"),
        )
        cases["axes"] = "'x' is .1, 1, .*axes|dim", raw({"x": entry(0, 1, shape=[1] * 99)}, b"1")
        cases["extent"] = "'x' is .0, ", raw({"x": entry(0, 0, shape=[0, 2**63])})
        for name, (message, content) in cases.items():
            with self.subTest(name=name):
                self.path.write_bytes(content)
                with self.assertRaisesRegex(DataError, message) as caught:
                    safetensors.read(self.path)
                self.assertIn(str(self.path), str(caught.exception))

    def test_a_file_that_is_not_there(self) -> None:
        with self.assertRaisesRegex(DataError, "a.safetensors: No such file"):
            safetensors.read(self.path)


class Checkpoints(InFolder):
    HEADER = {"step": 12, "loss": 0.1, "names": ["ä", None]}

    def save(self) -> bytes:
        train.save(self.path, {"model.w": np.arange(6.0).reshape(2, 3)}, self.HEADER)
        return self.path.read_bytes()

    def test_what_is_saved_is_loaded(self) -> None:
        train.save(self.path, arrays(), self.HEADER)
        saved = train.load(self.path)
        self.same(saved.tensors, arrays())
        self.assertEqual({key: saved.header[key] for key in self.HEADER}, self.HEADER)
        self.assertEqual(saved.header["format"], 1)

    def test_parts_are_found_by_their_prefix(self) -> None:
        train.save(self.path, {"model.a": np.ones(1), "model.b.c": np.ones(2), "m": np.ones(3)}, {})
        self.assertEqual(list(train.load(self.path).part("model")), ["a", "b.c"])

    def test_every_truncation_is_refused(self) -> None:
        content = self.save()
        for length in range(len(content)):
            self.path.write_bytes(content[:length])
            with self.assertRaises(DataError, msg=length):
                train.load(self.path)

    def test_every_flipped_byte_is_refused(self) -> None:
        content = self.save()
        end = 8 + int.from_bytes(content[:8], "little")
        for at in range(len(content)):
            if content[at : at + 1] == b" " and at < end:
                continue  # padding may be any white space
            self.path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with self.assertRaises(DataError, msg=at):
                train.load(self.path)
        self.path.write_bytes(content)
        train.load(self.path)

    def test_another_format_or_program_is_told_apart(self) -> None:
        safetensors.write(self.path, {"x": np.ones(2)}, {"format": "pt"})
        with self.assertRaisesRegex(DataError, "a safetensors file but no checkpoint of dlsys"):
            train.load(self.path)
        text = json.dumps({"format": 2, "version": "9.1"})
        safetensors.write(self.path, {}, {"dlsys": text})
        with self.assertRaisesRegex(DataError, "by dlsys 9.1 in format 2; .* install the newer"):
            train.load(self.path)

    def test_a_folder_stands_for_its_last_checkpoint(self) -> None:
        with self.assertRaisesRegex(DataError, "has no last.safetensors"):
            train.load(self.folder)
        train.save(self.folder / "last.safetensors", {}, {"step": 3})
        self.assertEqual(train.load(self.folder).header["step"], 3)

    def test_a_full_disk_leaves_the_previous_file(self) -> None:
        content = self.save()
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for call in ("os.fsync", "os.replace"):
            with self.subTest(call=call), mock.patch(call, side_effect=full):
                with self.assertRaisesRegex(
                    DataError, "No space left .* previous one is as it was"
                ):
                    train.save(self.path, {"model.w": np.zeros(9)}, {})
            self.assertEqual(self.path.read_bytes(), content)
            self.assertEqual(os.listdir(self.folder), [self.path.name])

    def test_a_file_has_the_rights_that_any_new_one_has(self) -> None:
        before = os.umask(0o027)
        self.addCleanup(os.umask, before)
        with mock.patch("os.umask", side_effect=AssertionError):  # it is the whole process's
            self.save()
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o640)

    def test_a_folder_that_vanishes(self) -> None:
        def vanish(handle: int) -> None:
            shutil.rmtree(self.folder)

        with mock.patch("os.fsync", vanish), self.assertRaisesRegex(DataError, "No such file"):
            self.save()
        self.save()  # into a new one

    def test_a_header_that_is_no_json(self) -> None:
        with self.assertRaisesRegex(DataError, "header is not JSON values: .*set"):
            train.save(self.path, {}, {"seen": {1, 2}})
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_file_is_on_the_disk_before_it_has_its_name(self) -> None:
        calls: list[str] = []
        sync, replace = os.fsync, os.replace

        def log_sync(handle: int) -> None:
            calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
            sync(handle)

        def log_replace(*names: Any) -> None:
            calls.append("name")
            replace(*names)

        with mock.patch("os.fsync", log_sync), mock.patch("os.replace", log_replace):
            self.save()
        self.assertEqual(calls, ["file", "name", "folder"])
