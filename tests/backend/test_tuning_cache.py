"""Tuning results on disk: round trips, several processes at once, and files that cannot be used."""

import contextlib
import importlib
import multiprocessing
import sqlite3
import time

import pytest

from tilegym.backend.cutile import tuning_cache
from tilegym.backend.cutile.tuning_cache import TuningCache
from tilegym.backend.cutile.tuning_cache import TuningKey
from tilegym.backend.cutile.tuning_cache import TuningResult
from tilegym.backend.cutile.tuning_key import kernel_fingerprint


def _key(shape: str = "x=float32[8]", gpu: str = "Some GPU") -> TuningKey:
    return TuningKey(gpu=gpu, kernel="module.kernel", source="abc", space="def", shape=shape)


def _result(shape: str = "x=float32[8]", us: float = 1.5, gpu: str = "Some GPU", **options) -> TuningResult:
    return TuningResult(_key(shape, gpu), options or {"TILE": 64, "occupancy": None, "fast": True}, us)


@pytest.fixture
def cache(tmp_path) -> TuningCache:
    return TuningCache(tmp_path / "deep" / "tuning.sqlite")


def test_round_trip(cache):
    assert cache.get(_key()) is None and cache.all() == []
    cache.put(_result())
    assert cache.get(_key()) == _result()
    assert TuningCache(cache.path).get(_key()) == _result()
    cache.put(_result(us=1.0, TILE=128))
    assert cache.all() == [_result(us=1.0, TILE=128)]


@pytest.mark.parametrize("part", TuningKey._fields)
def test_every_part_of_the_key_counts(cache, part):
    cache.put(_result())
    assert cache.get(_key()._replace(**{part: "other"})) is None


def test_relatives(cache):
    cache.put(_result("a")._replace(family="f", sizes=(724, 64)))
    cache.put(_result("b")._replace(family="f", sizes=(3000, 64)))
    cache.put(_result("c")._replace(family="g", sizes=(724, 64)))
    assert [result.sizes for result in cache.relatives(*_key()[:3], "f")] == [(724, 64), (3000, 64)]
    assert cache.relatives("Another GPU", *_key()[1:3], "f") == []
    assert cache.relatives(*_key()[:2], "another source", "f") == []


def test_clear(cache):
    cache.put(_result())
    cache.put(_result("x=float32[16]"))
    assert cache.clear() == 2
    assert cache.all() == []


def test_default_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEGYM_CACHE_DIR", str(tmp_path))
    TuningCache().put(_result())
    assert (tmp_path / "tuning.sqlite").is_file()


def test_user_without_a_home(tmp_path, monkeypatch):
    for name in ("TILEGYM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    TuningCache().put(_result())
    assert (tmp_path / "tilegym" / "tuning.sqlite").is_file()


def _write_many(path, process: int, start, done) -> None:
    start.wait()
    for i in range(25):
        TuningCache(path).put(_result(f"x=float32[{process},{i}]", us=process))
        TuningCache(path).put(_result("shared", us=process))
    done.put(process)


def test_several_processes_write_at_once(cache):
    _race(cache, before=lambda: None)
    assert len(cache.all()) == 3 * 25 + 1


def test_several_processes_find_a_corrupt_file(cache):
    """One of them sets it aside; none of them throws another one's new file away."""

    def corrupt():
        cache.path.parent.mkdir()
        cache.path.write_bytes(b"no database" * 1000)

    _race(cache, before=corrupt)
    assert len(cache.all()) == 3 * 25 + 1
    assert len(list(cache.path.parent.glob("*.unusable"))) == 1


def _race(cache, before) -> None:
    before()
    context = multiprocessing.get_context("spawn")
    start, done = context.Event(), context.Queue()
    workers = [context.Process(target=_write_many, args=(cache.path, i, start, done)) for i in range(3)]
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sorted(done.get(timeout=10) for _ in workers) == [0, 1, 2]


def test_waits_for_another_writer(cache):
    """A process that holds the file delays the others, and no result is lost."""
    cache.put(_result())
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_hold, args=(cache.path, held))
    holder.start()
    assert held.wait(60)
    began = time.monotonic()
    cache.put(_result("later"))
    assert time.monotonic() - began > 0.2
    holder.join(30)
    assert len(cache.all()) == 2


def _hold(path, held) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    held.set()
    time.sleep(0.6)
    connection.execute("COMMIT")


def test_corrupt_file_is_set_aside(cache):
    cache.path.parent.mkdir()
    cache.path.write_bytes(b"this is no database at all, but long enough to look at" * 10)
    with pytest.warns(RuntimeWarning, match="the file is corrupt.*it is now .*unusable"):
        assert cache.get(_key()) is None
    cache.put(_result())
    assert cache.get(_key()) == _result()
    (aside,) = cache.path.parent.glob("*.unusable")
    assert aside.read_bytes().startswith(b"this is no database")


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE results SET config = '{broken'",
        "UPDATE results SET sizes = 'null'",
        "DROP TABLE results",
        "ALTER TABLE results RENAME COLUMN family TO other",
    ],
)
def test_database_whose_content_is_damaged_is_set_aside(cache, damage):
    cache.put(_result())
    with contextlib.closing(sqlite3.connect(cache.path)) as connection, connection:
        connection.execute(damage)
    with pytest.warns(RuntimeWarning, match="the file is corrupt.*it is now .*unusable"):
        assert cache.get(_key()) is None
    cache.put(_result())
    assert cache.all() == [_result()]


def test_file_that_is_damaged_in_the_middle_is_set_aside(cache):
    for i in range(20):
        cache.put(_result(f"x=float32[{i}]" + " and more" * 200))
    with sqlite3.connect(cache.path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(cache.path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    cache.path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="corrupt"):
        assert cache.all() == []
    cache.put(_result())
    assert cache.all() == [_result()]


def test_older_schema_is_set_aside(cache):
    cache.path.parent.mkdir()
    with sqlite3.connect(cache.path) as connection:
        connection.execute("CREATE TABLE winners (kernel TEXT)")
    connection.close()
    with pytest.warns(RuntimeWarning, match="older schema 0"):
        cache.put(_result())
    assert cache.all() == [_result()]
    assert len(list(cache.path.parent.glob("*.unusable"))) == 1


def test_later_schema_is_left_alone(cache):
    cache.put(_result())
    with sqlite3.connect(cache.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.warns(RuntimeWarning, match="later version of TileGym"):
        assert cache.get(_key()) is None
    assert list(cache.path.parent.glob("*.unusable")) == []


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = TuningCache(tmp_path / "file" / "tuning.sqlite")
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*TILEGYM_CACHE_DIR"):
        cache.put(_result())
    assert cache.get(_key()) is None


def test_shipped_results(tmp_path):
    results = [_result("b", us=2.25), _result("a", TILE=32)]
    path = tuning_cache.shipped_file("Some GPU", tmp_path)
    assert path.name == "some-gpu.json"
    tuning_cache.save_results(path, results)
    assert tuning_cache.load_results(path) == sorted(results)
    assert tuning_cache.shipped_results("Some GPU", tmp_path)[_key("a")].config == {"TILE": 32}
    assert tuning_cache.shipped_results("Another GPU", tmp_path) == {}


def test_results_of_two_gpus_are_not_one_file(tmp_path):
    with pytest.raises(ValueError, match="A, B"):
        tuning_cache.save_results(tmp_path / "x.json", [_result(gpu="A"), _result(gpu="B")])
    with pytest.raises(ValueError, match="none"):
        tuning_cache.save_results(tmp_path / "x.json", [])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 2, "gpu": "A", "results": []}'])
def test_file_that_holds_no_results(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="x.json is no file of tuning results"):
        tuning_cache.load_results(tmp_path / "x.json")


def test_package_ships_readable_results_under_the_right_names():
    for path in tuning_cache.SHIPPED.glob("*.json"):
        results = tuning_cache.load_results(path)
        assert results and path == tuning_cache.shipped_file(results[0].key.gpu)


def test_shipped_results_are_of_the_kernels_as_they_are():
    """A kernel that has changed would be measured anew at its first call, on every machine."""
    for path in tuning_cache.SHIPPED.glob("*.json"):
        for kernel, source in {(r.key.kernel, r.key.source) for r in tuning_cache.load_results(path)}:
            module, name = kernel.rsplit(".", 1)
            assert source == kernel_fingerprint(getattr(importlib.import_module(module), name)), (path.name, kernel)
