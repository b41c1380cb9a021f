"""A library that was built from other declarations is refused when it is loaded."""

import ctypes
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import numpy as np

from dlsys.errors import DeviceError
from dlsys.fusion.shared.body import ACTIVATIONS
from dlsys.ops.optim.rules import RULES
from dlsys.runtime.interface import difference, interface
from dlsys.runtime.interface_text import TEXT
from dlsys.runtime.library import CODE_DTYPES, Library, load
from support.devices import slow

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("g++") or shutil.which("clang++")


@unittest.skipUnless(CXX, "no C++ compiler (g++, clang++)")
class OtherLibraryTest(unittest.TestCase):
    """The runtime of a library, without kernels, is built from an edited copy of src/."""

    def build(self, folder: Path, file: str, old: str, new: str) -> str:
        source = folder / "src"
        for part in ("runtime", "include", "math", "operators", "cpu/runtime"):
            shutil.copytree(ROOT / "src" / part, source / part)
        text = (source / file).read_text(encoding="utf-8")
        self.assertIn(old, text)
        (source / file).write_text(text.replace(old, new, 1), encoding="utf-8")
        files = [*source.glob("runtime/*.cc"), *source.glob("cpu/runtime/*.cc")]
        library = folder / "libother.so"
        flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-pthread", f"-I{source}"]
        subprocess.run([str(CXX), *flags, "-o", library, *files, "-ldl"], check=True)
        return str(library)

    @slow
    def test_an_edited_enum(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            edit = "DL_INT64 = 3", "DL_INT64 = 9"
            path = self.build(Path(folder), "include/dlsys.h", *edit)
            with self.assertRaises(DeviceError) as caught:
                Library(path)
        said = str(caught.exception)
        self.assertIn("does not fit this package", said)
        self.assertIn("in the package; run `make lib` to build it again", said)


class InterfaceTest(unittest.TestCase):
    def test_the_library_says_what_the_package_holds(self) -> None:
        self.assertEqual(difference(load().cdll.DLInterface().decode()), "")
        self.assertIn('"enum DL_OK 7" in the library', difference("enum DL_OK 7"))

    def test_a_library_without_a_text(self) -> None:
        found = shutil.which("ls")
        with self.assertRaisesRegex(DeviceError, "cannot be loaded|does not fit"):
            Library(str(found))

    def test_structs_are_laid_out_as_it_says(self) -> None:
        told = [line.split() for line in TEXT.splitlines()]
        for struct, size in ((name, int(*rest)) for kind, name, *rest in told if kind == "struct"):
            base = ctypes.Union if struct == "DLValue" else ctypes.Structure
            made = type(struct, (base,), {"_fields_": interface.fields(struct)})
            self.assertEqual(ctypes.sizeof(made), size, struct)
            for _, _, name, _, *place in (x for x in told if x[:2] == ["field", struct]):
                field = getattr(made, name)
                self.assertEqual([field.offset, field.size], [*map(int, place)], (struct, name))

    def test_a_struct_shows_its_fields(self) -> None:
        made = interface.struct("HeadLayer")(activation=3)
        text = "HeadLayer(transposed=0, has_bias=0, activation=3, dact=0)"
        self.assertEqual(str(made), text)
        self.assertIn(f"[{text}, ", str(interface.struct("HeadOptions")(layers=(made,))))

    def test_rules_of_optimizers_are_numpys(self) -> None:
        self.assertEqual(list(RULES), list(interface.rules))
        for name, rule in RULES.items():
            attrs = {key: 0.5 if x is None else x for key, x in rule.attributes.items()}
            self.assertEqual(rule.every_run, bool(interface.rules[name]), name)
            self.assertEqual(rule.slots, interface.slots[name], name)
            self.assertEqual(tuple(rule.constants(attrs)), interface.constants[name])

    def test_constants_are_read_from_it(self) -> None:
        self.assertEqual(CODE_DTYPES[interface.dtypes["int64"]], np.int64)
        self.assertEqual(ACTIVATIONS[0], "relu")
        self.assertEqual(interface.limits["max_ndim"], 8)
        self.assertEqual(interface.opcodes["where"], len(interface.opcodes) - 3)
