"""Tuning results on disk: what this machine measured, in SQLite, and what the package ships, as JSON.

The file is shared by all processes of a user. Each access opens it anew (accesses are rare: one per kernel and shape
bucket and process), in WAL mode with a busy timeout, so that readers and writers wait for each other.
"""

import contextlib
import functools
import json
import re
import sqlite3
import time
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import NamedTuple

from tilegym import env
from tilegym.backend.same_chip import others_like

SCHEMA_VERSION = 2  # of the SQLite file
FILE_VERSION = 1  # of the JSON
SHIPPED = Path(__file__).parent / "tuned"
_BUSY_SECONDS = 30.0


class TuningKey(NamedTuple):
    """One tuning result's key; all parts are strings, so that it can be stored, shipped and read."""

    gpu: str  # the device's name, "NVIDIA H200"
    kernel: str  # module and qualified name
    source: str  # hash of the kernel's source
    space: str  # hash of the configurations that were allowed
    shape: str  # dtypes and bucketed sizes of the arguments


class TuningResult(NamedTuple):
    """The winner for one key: its options, and the microseconds that one launch took.

    ``family`` is equal for calls of one kernel and search space that differ in sizes only; ``sizes`` are those that
    were measured. Only this machine's own results have them.
    """

    key: TuningKey
    config: dict[str, Any]
    time_us: float
    family: str = ""
    sizes: tuple[int, ...] = ()


_COLUMNS = (*TuningKey._fields, "config", "time_us", "family", "sizes")
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM results"


class TuningCache:
    """The results in one SQLite file; by default ``tuning.sqlite`` under ``env.cache_dir()``.

    Trouble with the file never stops a run: a corrupt file, or one with an older schema, is renamed and a new one
    begun; where the file cannot be used at all, nothing is remembered. Each of these warns, once per process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or env.cache_dir() / "tuning.sqlite"

    def get(self, key: TuningKey) -> TuningResult | None:
        """The result for ``key``, or None."""
        where = " AND ".join(f"{column} = ?" for column in TuningKey._fields)
        results = self._select(f"WHERE {where}", key)
        return results[0] if results else None

    def relatives(self, gpu: str, kernel: str, source: str, family: str) -> list[TuningResult]:
        """The results for calls of one family."""
        return self._select("WHERE gpu = ? AND kernel = ? AND source = ? AND family = ?", (gpu, kernel, source, family))

    def put(self, result: TuningResult) -> None:
        """Stores a result, in place of an earlier one for its key."""
        values = (*result.key, _as_json(result.config), result.time_us, result.family, json.dumps(result.sizes))
        marks = ", ".join("?" for _ in values)
        self._run(f"INSERT OR REPLACE INTO results VALUES ({marks}, ?)", (*values, time.time()))

    def all(self) -> list[TuningResult]:
        """Every result, by GPU, kernel and shape."""
        return self._select(f"ORDER BY {', '.join(TuningKey._fields)}")

    def clear(self) -> int:
        """Deletes every result and returns how many there were."""
        count = len(self.all())
        self._run("DELETE FROM results")
        return count

    def _select(self, condition: str, values: Iterable[Any] = ()) -> list[TuningResult]:
        return self._run(f"{_SELECT} {condition}", values, _as_results)

    def _run(self, statement: str, values: Iterable[Any] = (), read: Callable[[list[tuple]], list] = list) -> list:
        for _ in range(2):
            try:
                with self._locked(), self._connection() as connection:
                    return read(connection.execute(statement, tuple(values)).fetchall())
            except _Unusable as reason:
                self._set_aside(str(reason))
            except (sqlite3.OperationalError, OSError) as error:
                _warn(f"tuning results cannot be kept in {self.path}: {error}; set TILEGYM_CACHE_DIR to another folder")
                return []
        return []

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS)
        try:
            self._prepare(connection)
            with connection:
                yield connection
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            raise _Unusable(f"is corrupt ({error})") from error
        finally:
            connection.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA_VERSION:
            there = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('results')")}
            if not there.issuperset(_COLUMNS):
                raise _Unusable("is corrupt (its table of results is not there, or is another one)")
            return
        if version > SCHEMA_VERSION:
            raise sqlite3.OperationalError(f"it was written by a later version of TileGym (schema {version})")
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _Unusable(f"has the older schema {version}")
        connection.execute("PRAGMA journal_mode = WAL")
        columns = ", ".join(f"{column} TEXT NOT NULL" for column in (*TuningKey._fields, "config"))
        with connection:
            connection.execute(
                f"CREATE TABLE results ({columns}, time_us REAL NOT NULL, family TEXT NOT NULL, sizes TEXT NOT NULL, "
                f"created REAL NOT NULL, PRIMARY KEY ({', '.join(TuningKey._fields)}))"
            )
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps two processes from creating, or setting aside, the file at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _set_aside(self, reason: str) -> None:
        with self._locked():
            try:
                with self._connection() as connection:
                    if connection.execute("PRAGMA quick_check").fetchone()[0] == "ok":
                        _as_results(connection.execute(_SELECT).fetchall())
                        return  # another process has set it aside already
            except _Unusable:
                pass
            aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}.unusable")
            _warn(f"the tuning results in {self.path} cannot be used: the file {reason}; it is now {aside.name}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")


class _Unusable(Exception):
    """The file is not a database, or not one of this schema."""


def _as_results(rows: list[tuple]) -> list[TuningResult]:
    try:
        return [
            TuningResult(TuningKey(*row[:-4]), json.loads(row[-4]), row[-3], row[-2], tuple(json.loads(row[-1])))
            for row in rows
        ]
    except (ValueError, TypeError) as error:
        raise _Unusable(f"is corrupt (a result in it cannot be read: {error})") from error


@functools.cache  # says each thing once
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def shipped_file(gpu: str, folder: Path = SHIPPED) -> Path:
    """Where the shipped results for a GPU stand: "NVIDIA H200" in ``nvidia-h200.json``."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def _as_json(options: dict[str, Any]) -> str:
    return json.dumps(options, sort_keys=True, default=str)


def same_options(stored: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether a configuration's options are those that were stored, as far as JSON can tell."""
    return _as_json(stored) == _as_json(options)


def shipped(key: TuningKey) -> TuningResult | None:
    """The result that the package ships for ``key``, or for another GPU with the same chip; None if there is none.

    What is shipped was measured in bf16, and serves fp16, which the GPU multiplies and moves as fast.
    """
    gpus = (key.gpu, *others_like(key.gpu))
    shapes = dict.fromkeys((key.shape, re.sub(r"\bfloat16\b", "bfloat16", key.shape)))
    keys = (key._replace(gpu=gpu, shape=shape) for shape in shapes for gpu in gpus)
    return next((result for key in keys if (result := shipped_results(key.gpu).get(key))), None)


@functools.cache
def shipped_results(gpu: str, folder: Path = SHIPPED) -> dict[TuningKey, TuningResult]:
    """The results that the package ships for a GPU; none if it has no file."""
    path = shipped_file(gpu, folder)
    return {result.key: result for result in load_results(path)} if path.is_file() else {}


def load_results(path: Path) -> list[TuningResult]:
    """Reads results from a file that :func:`save_results` wrote.

    Raises:
        ValueError: the file is none of those.
    """
    try:
        content = json.loads(path.read_text())
        if content["schema"] != FILE_VERSION:
            raise ValueError(f"its schema is {content['schema']}, not {FILE_VERSION}")
        return [
            TuningResult(TuningKey(content["gpu"], *(row[c] for c in TuningKey._fields[1:])), row["config"], row["us"])
            for row in content["results"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of tuning results: {error}") from error


def save_results(path: Path, results: list[TuningResult]) -> None:
    """Writes the results of one GPU as JSON, one a line, so that changes can be read in a diff.

    Raises:
        ValueError: there are no results, or they are of several GPUs.
    """
    gpus = sorted({result.key.gpu for result in results})
    if len(gpus) != 1:
        raise ValueError(f"one file holds the results of one GPU; these are of {', '.join(gpus) or 'none'}")
    rows = []
    for result in sorted(results, key=lambda result: result.key):
        row = {**result.key._asdict(), "config": result.config, "us": round(result.time_us, 3)}
        del row["gpu"]  # the file names it once
        rows.append(_as_json(row))
    body = ",\n".join("  " + row for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"schema": {FILE_VERSION}, "gpu": {json.dumps(gpus[0])}, "results": [\n{body}\n]}}\n')
