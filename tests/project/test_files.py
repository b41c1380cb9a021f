"""Writing through a name: what is there is replaced whole, written to as it is, or refused."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import dlsys
from dlsys import system, train
from dlsys.data import read_idx, write_idx
from dlsys.errors import DataError
from dlsys.files import FolderLock, appending, opened, replacing, sweep

FINDING = os.environ | {"PYTHONPATH": str(Path(dlsys.__file__).parents[1])}


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "file"

    def write(self, path: Path, content: bytes = b"new") -> None:
        with replacing(path) as file:
            file.write(content)

    def device(self, name: str, minor: int) -> Path:
        """A node of its own where that is allowed, so that a failure destroys no machine's."""
        node = self.folder / name
        try:
            os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            open(node, "wb").close()
        except PermissionError:
            return Path("/dev") / name
        return node

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


class Kinds(InFolder):
    def test_a_device_is_written_to_and_stays(self) -> None:
        null = self.device("null", 3)
        self.write(null)
        self.assertTrue(stat.S_ISCHR(null.stat().st_mode))
        write_idx(null, np.zeros(3, np.uint8))
        train.History().save(null)
        train.save(null, {"x": np.zeros(3)}, {})
        self.assertTrue(stat.S_ISCHR(null.stat().st_mode))

    def test_a_full_device_is_named(self) -> None:
        full = self.device("full", 7)
        with self.assertRaisesRegex(OSError, f"No space left on device: '{full}'"):
            self.write(full)
        with self.assertRaisesRegex(DataError, f"^{full}: .*cannot be written: No space left"):
            train.save(full, {"x": np.zeros(3)}, {})
        self.assertTrue(stat.S_ISCHR(full.stat().st_mode))

    def test_standard_output_is_written_to_under_any_name(self) -> None:
        program = (
            "import sys; from dlsys.files import replacing\n"
            "from pathlib import Path\n"
            "print('before')\n"
            "for name in sys.argv[1:]:\n"
            "    with replacing(Path(name)) as file: file.write(name.encode() + b'\\n')\n"
            "print('after')\n"
        )
        names = ["/dev/stdout", "/proc/self/fd/1", str(self.path)]
        line = [sys.executable, "-c", program, *names]
        wanted = "".join(f"{name}\n" for name in ["before", *names, "after"])
        with open(self.path, "wb") as output:
            subprocess.run(line, stdout=output, check=True, env=FINDING)
        self.assertEqual(self.path.read_text(), wanted)
        self.path.unlink()
        done = subprocess.run(line[:-1], capture_output=True, text=True, check=True, env=FINDING)
        self.assertEqual(done.stdout, wanted.replace(f"{self.path}\n", ""))

    def test_a_fifo_takes_what_its_reader_wants_and_nobody_waits_for_one(self) -> None:
        os.mkfifo(self.path)
        for act in (self.write, appending):
            with self.assertRaisesRegex(DataError, "file is a FIFO that nobody reads"):
                act(self.path)
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(self.path.read_bytes()))
        reader.start()
        content = b"x" * 300_000  # more than a pipe holds
        while reader.is_alive():
            try:
                self.write(self.path, content)
                break
            except DataError:
                continue  # the reader has not opened it yet
        reader.join(10)
        self.assertEqual(read, [content])
        self.assertTrue(stat.S_ISFIFO(self.path.stat().st_mode))
        self.assertEqual(self.names(), ["file"])

    def test_what_cannot_be_written_is_refused(self) -> None:
        (self.folder / "folder").mkdir()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self.folder / "socket"))
            for name in ("folder", "socket"):
                with self.assertRaisesRegex(DataError, f"{name} is a {name}: name a file"):
                    self.write(self.folder / name)
                with self.assertRaisesRegex(DataError, f"{name} is a {name}: name a file"):
                    write_idx(self.folder / name, np.zeros(3, np.uint8))
        with self.assertRaisesRegex(DataError, "is a folder"):
            self.write(Path(""))
        with self.assertRaises(DataError), mock.patch("os.access", return_value=False):
            self.path.write_text("protected")
            self.write(self.path)
        self.assertEqual(self.names(), ["file", "folder", "socket"])
        missing = self.folder / "none" / "file"
        with self.assertRaisesRegex(OSError, f"No such file or directory: '{missing}'"):
            self.write(missing)

    def test_only_files_are_read(self) -> None:
        os.mkfifo(self.path)
        for read in (opened, read_idx, train.load, train.History.load):
            with self.assertRaisesRegex(DataError, "file is a FIFO, expected a file"):
                read(self.path)
        for read in (opened, read_idx, train.History.load):
            with self.assertRaisesRegex(DataError, "is a folder, expected a file"):
                read(self.folder)


class Links(InFolder):
    def test_a_link_stays_and_its_target_is_replaced(self) -> None:
        (self.folder / "deep").mkdir()
        target = self.folder / "deep" / "target"
        (self.folder / "second").symlink_to(Path("deep") / "target")
        self.path.symlink_to("second")
        for content in (b"a new target", b"the next"):
            self.write(self.path, content)
            self.assertEqual(target.read_bytes(), content)
            self.assertTrue(self.path.is_symlink())
        self.assertTrue((self.folder / "second").is_symlink())
        self.assertEqual(os.listdir(target.parent), ["target"])
        with self.assertRaises(ValueError), replacing(self.path) as file:
            file.write(b"half")
            raise ValueError
        self.assertEqual(target.read_bytes(), b"the next")
        self.assertEqual(os.listdir(target.parent), ["target"])

    def test_a_link_to_itself(self) -> None:
        self.path.symlink_to(self.path)
        with self.assertRaisesRegex(OSError, "Too many levels"):
            self.write(self.path)
        self.assertTrue(self.path.is_symlink())


class Modes(InFolder):
    def test_a_file_keeps_its_mode_and_a_new_one_has_the_umasks(self) -> None:
        before = os.umask(0o027)
        self.addCleanup(os.umask, before)
        self.write(self.path)
        self.assertEqual(self.path.stat().st_mode & 0o7777, 0o640)
        for mode in (0o600, 0o666, 0o755):
            self.path.chmod(mode)
            seen: list[int] = []
            with replacing(self.path) as file:
                seen.append(os.fstat(file.fileno()).st_mode & 0o777)
                file.write(b"secret")
            self.assertEqual(self.path.stat().st_mode & 0o7777, mode)
            self.assertEqual(seen, [mode], "before anything is in it")

    @unittest.skipIf(os.geteuid(), "not here: root")
    def test_a_file_keeps_its_owner(self) -> None:
        self.write(self.path)
        os.chown(self.path, 12345, 54321)
        self.write(self.path, b"next")
        found = self.path.stat()
        self.assertEqual((found.st_uid, found.st_gid), (12345, 54321))


class Leftovers(InFolder):
    def test_only_what_replacing_left_is_swept(self) -> None:
        """One process is killed while it writes, another one is still writing."""
        program = (
            "import os, sys, time; from dlsys.files import replacing\n"
            "from pathlib import Path\n"
            "with replacing(Path(sys.argv[1])) as file:\n"
            "    print('in it', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        line = [sys.executable, "-c", program, str(self.path)]
        processes = []
        for _ in range(2):
            processes.append(subprocess.Popen(line, stdin=-1, stdout=-1, env=FINDING))
            processes[-1].stdout.readline()
        killed, writing = processes
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        written = [name for name in self.names() if name.startswith(".file.")]
        self.assertEqual(len(written), 2)
        kept = [".file.notes", ".file.0123456789abcdef", ".file.old.dlsys-partial", "file",
                ".other.0123456789abcdef.dlsys-partial"]  # fmt: skip
        for name in kept:
            (self.folder / name).write_text("a user's")
        (self.folder / ".file.0123456789abcdef.dlsys-partial").mkdir()
        sweep(self.path)
        left = set(self.names()) - {".file.0123456789abcdef.dlsys-partial", *kept}
        self.assertEqual(len(left), 1, "what is being written stays")
        self.assertLess(left, set(written))
        writing.communicate(b"")
        self.assertEqual(writing.returncode, 0)
        self.assertEqual(len(self.names()), len(kept) + 1)
        killed.stdin.close()
        killed.stdout.close()


class Locks(InFolder):
    def test_one_at_a_time(self) -> None:
        first = FolderLock(self.folder)
        with self.assertRaises(BlockingIOError):
            FolderLock(self.folder)
        first.release()
        FolderLock(self.folder).release()

    def test_another_folder_of_that_name_is_told(self) -> None:
        folder = self.folder / "run"
        folder.mkdir()
        lock = FolderLock(folder)
        self.addCleanup(lock.release)
        self.assertTrue(lock.holds)
        folder.rename(self.folder / "moved")
        self.assertFalse(lock.holds)
        folder.mkdir()
        self.assertFalse(lock.holds)

    def test_a_forks_child_does_not_hold_it(self) -> None:
        """It outlives its parent, which is killed."""
        program = (
            "import os, signal, sys; from dlsys.files import FolderLock\n"
            "from pathlib import Path\n"
            "lock = FolderLock(Path(sys.argv[1]))\n"
            "if not os.fork():\n"
            "    print(lock.holds, flush=True)\n"
            "    sys.stdin.read()\n"
            "    os._exit(0)\n"
            "signal.pause()\n"
        )
        line = [sys.executable, "-c", program, str(self.folder)]
        with subprocess.Popen(line, stdin=-1, stdout=-1, env=FINDING) as parent:
            assert parent.stdout is not None
            self.assertEqual(parent.stdout.readline(), b"False\n")
            with self.assertRaises(BlockingIOError):
                FolderLock(self.folder)
            parent.kill()
            parent.wait()
            FolderLock(self.folder).release()

    def test_where_there_are_no_locks_everybody_has_it(self) -> None:
        nothing = OSError(errno.EOPNOTSUPP, "not supported")
        with mock.patch.object(system.fcntl, "flock", side_effect=nothing):
            locks = [FolderLock(self.folder), FolderLock(self.folder)]
            self.write(self.path)
            sweep(self.path)
        for lock in locks:
            self.assertTrue(lock.holds)
            lock.release()
