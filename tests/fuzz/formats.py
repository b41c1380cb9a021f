"""Mutated files over every reader of the package.

A good file is changed by bit flips, truncation, splices, other numbers, more digits and deeper
nesting; where a checksum would end the attack at the door it is made right again, as somebody who
forges a file would. A case holds if the file loads or one of our errors says, in one printable line
that names the file, what is wrong, within SECONDS of the processor and ROOM bytes of memory beside
what the process had before.
"""

from __future__ import annotations

import atexit
import functools
import gc
import gzip
import hashlib
import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import support.small_runs as small
from dlsys import train
from dlsys.apps import trained
from dlsys.apps.pictures import read_pictures
from dlsys.apps.setup import choose
from dlsys.data import image_folder, read_idx, write_idx
from dlsys.data.formats import cifar
from dlsys.errors import DlsysError
from dlsys.runtime.tuning_cache import Measurement, TuningCache
from dlsys.train.files import checkpoint, safetensors

from .harness import Finding, Slow, Source, Trial

SECONDS = 5.0
ROOM = 512 << 20
PILLOW = importlib.util.find_spec("PIL") is not None
NUMBERS = (
    0, 1, -1, 2, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63,
    2**64, -(2**63), 10**30,
)  # fmt: skip


class Reader(NamedTuple):
    """Good files, how else than by their bytes they are changed, and what reads them."""

    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], Any]
    forge: Callable[[Source, bytes], bytes] | None = None
    suffix: str = ""
    weight: int = 10
    names: bool = True  # whether errors name the file


def missing() -> str | None:
    """Why these cases cannot be tried here."""
    return None


def trial(devices: Sequence[str], parts: Sequence[str]) -> Trial:
    """A mutated file for one of the readers whose name has one of the parts."""
    del devices
    if not PILLOW:
        print("formats: readers of images are SKIPPED: install Pillow", file=sys.stderr)
    names = [name for name in READERS if not parts or any(part in name for part in parts)]
    weighted = [name for name in names for _ in range(READERS[name].weight)]
    folder = Path(tempfile.mkdtemp(prefix="fuzz", dir=_memory_folder()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.simplefilter("ignore")
    for name in names:
        READERS[name].seeds()
    small.model()
    limit_memory()
    return lambda source: attack(source, source.one(*weighted), folder)


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def limit_memory(room: int = ROOM) -> None:
    """No case may take more than `room` bytes beside what is taken now."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + room, hard))


# ---- a case ----
class TooLong(BaseException):
    """A reader took longer than it may; nothing on the way may take it for an error of the file."""


def attack(source: Source, name: str, folder: Path) -> None:
    """Raises Finding unless the reader loads the file or refuses it as it should."""
    reader = READERS[name]
    data = source.one(*reader.seeds())
    if reader.forge is not None and source.number(0, 2):
        data = reader.forge(source, data)
    else:
        data = mutated(source, data)
    path = folder / f"f{reader.suffix}"
    path.write_bytes(data)
    check(name, reader, path, data)


def check(name: str, reader: Reader, path: Path, data: bytes) -> None:
    """Reads a file under the bounds."""

    def late(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader.read(path)
    except DlsysError as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _check_refusal(name, reader, path, error, data)
    except TooLong:
        raise Slow(f"{name} takes too long", _shown(path, data)) from None
    except Exception as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        kind = type(error).__name__
        gc.collect()
        raise Finding(
            f"{name} raises {kind}", f"{str(error)[:200]}: {_shown(path, data)}"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _check_refusal(
    name: str, reader: Reader, path: Path, error: BaseException, data: bytes
) -> None:
    text = str(error)
    shown = f"{text[:300]!r}: {_shown(path, data)}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            raise Finding(f"{name} asks for memory", shown)
        cause = cause.__cause__ or cause.__context__
    if not text.isprintable():
        raise Finding(f"{name} prints what is no text", shown)
    if len(text) > 2000:
        raise Finding(f"{name} says too much", shown)
    if reader.names and path.stem not in text:
        raise Finding(f"{name} does not name the file", shown)


def _shown(path: Path, data: bytes) -> str:
    text = repr(data) if len(data) < 300 else f"{data[:280]!r}…"
    return f"{len(data)} bytes as {path.name}: {text}"


# ---- mutations ----
def mutated(source: Source, data: bytes) -> bytes:
    """The bytes with one to four changes."""
    changed = bytearray(data)
    for _ in range(source.number(1, 4)):
        size = len(changed)
        at = source.number(0, max(size - 1, 0))
        if source.flag():
            at = min(at, source.number(0, 63))  # headers are at the front
        kind = source.one("flip", "byte", "cut", "number", "splice", "insert", "drop", "append")
        if kind == "flip" and size:
            changed[at] ^= 1 << source.number(0, 7)
        elif kind == "byte" and size:
            changed[at] = source.number(0, 255)
        elif kind == "cut":
            del changed[at:]
        elif kind == "number":
            width, order = source.one(1, 2, 4, 8), source.one("little", "big")
            number = source.one(*NUMBERS) % 256**width
            changed[at : at + width] = number.to_bytes(width, order)
        elif kind == "splice":
            start = source.number(0, max(size - 1, 0))
            changed[at:at] = changed[start : start + source.number(0, 64)]
        elif kind == "insert":
            changed[at:at] = source.data(16)
        elif kind == "drop":
            del changed[at : at + source.number(1, 64)]
        else:
            changed += source.data(16)
    return bytes(changed)


def odd_value(source: Source, depth: int = 0) -> Any:
    """A JSON value that nobody expects."""
    kind = source.one("number", "none", "text", "list", "dict", "float", "digits", "flag", "deep")
    if kind == "number":
        return source.one(*NUMBERS)
    if kind == "float":
        return source.one(0.5, -0.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
    if kind == "text":
        return source.one("", "x", "\x1b[31m", "0", "nan", "é", "\0", "a" * 3000, source.text(8))
    if kind == "flag":
        return source.flag()
    if kind == "digits":
        return 10 ** source.one(400, 3000)
    if kind == "deep":
        value: Any = 1
        for _ in range(source.one(50, 500)):
            value = [value] if source.number(0, 1) else {"a": value}
        return value
    if depth < 2 and kind in ("list", "dict"):
        items = [odd_value(source, depth + 1) for _ in range(source.number(0, 2))]
        return items if kind == "list" else {str(k): item for k, item in enumerate(items)}
    return None


def other_json(source: Source, value: Any) -> Any:
    """A JSON value with something in it changed, taken away, doubled or put in."""
    if isinstance(value, dict) and value and source.number(0, 9):
        made = dict(value)
        key = source.one(*sorted(made, key=str))
        kind = source.one("inside", "drop", "rename", "add")
        if kind == "inside":
            made[key] = other_json(source, made[key])
        elif kind == "drop":
            del made[key]
        elif kind == "rename":
            made[source.one("x", "", str(key).upper(), "__metadata__")] = made.pop(key)
        else:
            made[source.one("x", "", "model.x")] = odd_value(source)
        return made
    if isinstance(value, list) and value and source.number(0, 9):
        made_list = list(value)
        at = source.number(0, len(made_list) - 1)
        kind = source.one("inside", "drop", "add", "double")
        if kind == "inside":
            made_list[at] = other_json(source, made_list[at])
        elif kind == "drop":
            del made_list[at]
        elif kind == "add":
            made_list.insert(at, odd_value(source))
        else:
            made_list *= 2
        return made_list
    return odd_value(source)


def as_bytes(value: Any) -> bytes:
    """JSON, with numbers of any length."""
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    finally:
        sys.set_int_max_str_digits(most)


def other_json_file(source: Source, data: bytes) -> bytes:
    if source.rarely(100):
        return source.one(b"[", b'{"a":') * source.one(10, 1000, 100_000)
    return as_bytes(other_json(source, json.loads(data)))


# ---- IDX ----
@functools.cache
def idx_files() -> list[bytes]:
    arrays = [
        np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28),
        np.arange(10, dtype=np.uint8), np.linspace(0, 1, 12).reshape(3, 4),
        np.arange(6, dtype=np.int32).reshape(1, 2, 3), np.zeros((0, 28, 28), np.uint8),
    ]  # fmt: skip
    return [_written(lambda path, x=x: write_idx(path, x), "x.idx") for x in arrays]


def _written(write: Callable[[Path], Any], name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return path.read_bytes()


def packed_idx_files() -> list[bytes]:
    return _packed_all()


@functools.cache
def _packed_all() -> list[bytes]:
    bomb = bytes([0, 0, 8, 3]) + struct.pack(">III", 60_000, 28, 28) + bytes(1000)
    return [gzip.compress(data) for data in (*idx_files(), bomb)]


def packed_again(source: Source, data: bytes) -> bytes:
    """The inner bytes mutated, the outer ones right; or two files one after the other."""
    inner = mutated(source, gzip.decompress(data))
    made = gzip.compress(inner, source.one(1, 9))
    return made + made if not source.number(0, 9) else made


def read_any_idx(path: Path) -> None:
    for more in ({}, {"shape": (2, 28, 28)}, {"sha256": "0" * 64}):
        try:
            array = read_idx(path, **more)  # type: ignore[arg-type]
        except DlsysError:
            if not more:
                raise
        else:
            assert array.dtype.isnative and array.ndim >= 1


# ---- images ----
@functools.cache
def image_files() -> list[bytes]:
    if not PILLOW:
        return [b""]
    from PIL import Image

    rng = np.random.default_rng(0)
    found = []
    grey = Image.fromarray(rng.integers(0, 255, (20, 17), np.uint8))
    color = Image.fromarray(rng.integers(0, 255, (9, 11, 4), np.uint8), "RGBA")
    wide = Image.fromarray(rng.integers(0, 65535, (5, 6), np.uint16))
    for image, kinds in (
        (grey, ("PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP")),
        (color, ("PNG", "TIFF", "WEBP")), (wide, ("PNG", "TIFF")),
        (color.convert("P"), ("PNG", "GIF")), (grey.convert("1"), ("PNG", "PPM")),
    ):  # fmt: skip
        for kind in kinds:
            file = io.BytesIO()
            image.save(file, kind)
            found.append(file.getvalue())
    return found


def forged_image(source: Source, data: bytes) -> bytes:
    """A PNG whose header says another size, with the right checksums, or any mutated image."""
    if not data.startswith(b"\x89PNG"):
        return mutated(source, data)
    if source.number(0, 3):
        size = [source.one(0, 1, 28, 100, 2000, 2**31 - 1, 2**32 - 1) for _ in range(2)]
        if source.rarely(50):
            size = [12_000, 13_000]
        head = struct.pack(">II", *size) + bytes(
            [source.one(1, 8, 2, 16, 3), source.one(0, 2, 3, 4, 6, 5), 0, 0, source.one(0, 1)]
        )
        return data[:12] + _chunk(b"IHDR", head)[4:] + data[33:]
    at, changed = 8, bytearray(data[:8])
    while at + 12 <= len(data):
        (count,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + count]
        if not source.number(0, 2):
            body = mutated(source, body)
        changed += _chunk(kind, body)
        at += 12 + count
    return bytes(changed)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def read_picture(path: Path) -> None:
    pixels = read_pictures(path, digits=True)
    assert pixels.dtype == np.uint8 and pixels.shape[1:] == (1, 28, 28)


def read_folder(path: Path) -> None:
    """The image in a class of its own, with a loop of links beside it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        (folder / "a").mkdir()
        shutil.copy(path, folder / "a" / "f.png")
        os.symlink(folder, folder / "a" / "loop")
        images = image_folder(folder, size=(8, 8)).images[:3]
        assert images.dtype == np.uint8 and images.shape[1:] == (3, 8, 8)


# ---- CIFAR ----
RECORDS = 4


@functools.cache
def cifar_files() -> list[bytes]:
    rng = np.random.default_rng(0)
    records = rng.integers(0, 255, (RECORDS, 3073), np.uint8)
    records[:, 0] %= 10
    return [records.tobytes()]


@functools.cache
def cifar_archives() -> list[bytes]:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in cifar.FILES:
            entry = tarfile.TarInfo(f"{cifar.FOLDER}/{name}")
            entry.size = len(cifar_files()[0])
            tar.addfile(entry, io.BytesIO(cifar_files()[0]))
    return [file.getvalue()]


def read_records(path: Path) -> None:
    images, labels = cifar.read_cifar(path)
    assert images.dtype == np.uint8 and labels.max() < 10


def read_archive(path: Path) -> None:
    """With the right MD5."""
    known = cifar.ARCHIVE._replace(md5=hashlib.md5(path.read_bytes()).hexdigest())
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
        mock.patch.object(cifar, "ARCHIVE", known),
        mock.patch.object(cifar, "N_RECORDS", RECORDS),
        mock.patch.object(cifar, "N_TRAIN", 15),
    ):
        shutil.copy(path, Path(folder) / known.file_name)
        cifar.cifar10_sets(folder)


# ---- safetensors, checkpoints and what is in them ----
@functools.cache
def tensor_files() -> list[bytes]:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.int64),
        "c": np.array(True), "é": np.float64(3),
    }  # fmt: skip
    return [
        _written(lambda path, m=m: safetensors.write(path, arrays, m), "x.safetensors")
        for m in ({}, {"k": "v"})
    ]


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    count = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + count]), data[8 + count :]


def joined(header: Any, data: bytes) -> bytes:
    text = as_bytes(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def forged_tensors(source: Source, data: bytes) -> bytes:
    """Another header over the same data."""
    header, rest = parts_of(data)
    if source.rarely(100):
        header["a"]["shape"] = [10 ** source.one(400, 4000)] * source.one(10, 1000)
        return joined(header, rest)
    return joined(other_json(source, header), rest)


def read_tensors(path: Path) -> None:
    for array in safetensors.read(path).tensors.values():
        array.sum()


def resealed(header: dict[str, Any], data: bytes) -> bytes:
    """A checkpoint with the checksum that its contents have."""
    texts = header.get("__metadata__")
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        path = Path(folder) / "x"
        path.write_bytes(joined(header, data))
        try:
            tensors, _ = safetensors.read(path)
            texts["sha256"] = checkpoint._digest(texts["dlsys"], tensors)
        except (DlsysError, AttributeError, TypeError, KeyError, MemoryError, ValueError):
            pass  # it will be refused before its checksum is looked at
    return joined(header, data)


def forged_state(source: Source, data: bytes) -> bytes:
    """A checkpoint that says something else about the run, or whose arrays are others."""
    header, rest = parts_of(data)
    said = json.loads(header["__metadata__"]["dlsys"])
    if source.number(0, 4):
        said = other_json(source, said)
        header["__metadata__"]["dlsys"] = as_bytes(said).decode()
        return resealed(header, rest)
    names = [name for name in header if name != "__metadata__"]
    entry = header[source.one(*names)]
    if source.flag():
        entry["shape"] = source.one(
            [*entry["shape"], 1], [1, *entry["shape"]], entry["shape"][::-1]
        )
    else:
        entry["dtype"] = {"F32": "I32", "I32": "F32", "F64": "I64", "I64": "F64"}.get(
            entry["dtype"], "F32"
        )
    if source.number(0, 3) == 0:
        header[source.one("model.x", "optimizer.x", "callback.0.x")] = header.pop(names[0])
    return resealed(header, rest)


def _fit(folder: Path, resume: Path | None, epochs: int = 1) -> None:
    callbacks = [train.Checkpoint(folder), train.EarlyStopping(5)]
    train.fit(
        small.model(), small.loader(16), small.sgd(), epochs=epochs, callbacks=callbacks,
        validation=small.loader(16, seed=1), resume=resume, quiet=True,
    )  # fmt: skip


@functools.cache
def checkpoints() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _fit(Path(folder), None)
        return [(Path(folder) / "last.safetensors").read_bytes()]


def read_checkpoint(path: Path) -> None:
    train.load(path).part("model")


def resume_from(path: Path) -> None:
    """Goes on for a step."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _fit(Path(folder), path, epochs=2)


@functools.cache
def app_checkpoints() -> list[bytes]:
    """What the command line writes, of a small network."""
    setup = choose("mlp", {"hidden": (2,)})
    state = {f"model.{n}": p.asnumpy() for n, p in setup.build_model().named_state()}
    header = {"callbacks": [{"name": "Chosen", "state": setup.as_dict()}]}
    return [_written(lambda path: checkpoint.save(path, state, header), "x.safetensors")]


def read_app_checkpoint(path: Path) -> None:
    setup, model = trained.load_model(path)
    trained.run_of(path)
    if sum(setup.hidden) < 1000:
        trained.probabilities(model, np.zeros((1, 1, 28, 28), np.uint8), None)


# ---- texts ----
@functools.cache
def histories() -> list[bytes]:
    history = train.History(epochs=[{"epoch": 1, "step": 2, "loss": 0.5}])
    return [_written(history.save, "history.json")]


def read_history(path: Path) -> None:
    history = train.History.load(path)
    history.column("loss")
    history.as_dict()


@functools.cache
def tuning_caches() -> list[bytes]:
    def write(path: Path) -> None:
        TuningCache(path).add("chip", {"matmul": Measurement("own", "", 1.0, 2.0)})

    return [_written(write, "tuning.json")]


def read_tuning_cache(path: Path) -> None:
    """It is advice: a bad one is warned of, and never an error."""
    file = TuningCache(path)
    for made in file.measurements("chip").values():
        assert isinstance(made.algorithm, str) and made.us + made.us_heuristic is not None
    file.is_empty()


@functools.cache
def logs() -> list[bytes]:
    lines = [json.dumps({"epoch": 1, "step": k, "loss": 0.5}) for k in range(1, 4)]
    return [("\n".join(lines) + "\n").encode()]


def forged_log(source: Source, data: bytes) -> bytes:
    lines = [json.loads(line) for line in data.decode().splitlines()]
    at = source.number(0, len(lines) - 1)
    lines[at] = other_json(source, lines[at])
    return b"\n".join(map(as_bytes, lines)) + b"\n" * source.number(0, 1)


def resume_log(path: Path) -> None:
    """A run goes on whose log is this one."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        start = folder / "last.safetensors"
        start.write_bytes(checkpoints()[0])
        log = folder / "f.jsonl"
        shutil.copy(path, log)
        train.fit(
            small.model(), small.loader(16), small.sgd(), epochs=2, resume=start,
            callbacks=[train.JsonLog(log)], validation=small.loader(16, seed=1), quiet=True,
        )  # fmt: skip


READERS: dict[str, Reader] = {
    "idx": Reader(idx_files, read_any_idx, weight=30),
    "idx.gz": Reader(packed_idx_files, read_any_idx, packed_again, ".gz", 30),
    "picture": Reader(image_files, read_picture, forged_image, ".png", 15),
    "image folder": Reader(image_files, read_folder, forged_image, ".png", 5),
    "cifar": Reader(cifar_files, read_records, suffix=".bin", weight=5),
    "cifar archive": Reader(cifar_archives, read_archive, packed_again, ".tar.gz", 3, names=False),
    "safetensors": Reader(tensor_files, read_tensors, forged_tensors, ".safetensors", 30),
    "checkpoint": Reader(checkpoints, read_checkpoint, forged_state, ".safetensors", 20),
    "resume": Reader(checkpoints, resume_from, forged_state, ".safetensors", 3),
    "app checkpoint": Reader(app_checkpoints, read_app_checkpoint, forged_state, ".safetensors"),
    "history": Reader(histories, read_history, other_json_file, ".json", 20),
    "tuning cache": Reader(tuning_caches, read_tuning_cache, other_json_file, ".json", 20),
    "log": Reader(logs, resume_log, forged_log, ".jsonl", 2),
}
if not PILLOW:
    for unread in ("picture", "image folder"):
        del READERS[unread]
