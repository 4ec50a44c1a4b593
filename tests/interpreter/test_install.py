"""The interpreter in the place of cuda.tile.launch: in a process, for a script, and for a test suite."""

import io
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda.tile as ct
import pytest
import torch
from cuda.tile import tune

from tilegym import interpreter
from tilegym.interpreter.cuda_on_cpu import redirect


@ct.kernel
def double(x, y):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (4,)) * 2)


SCRIPT = """
    import sys
    import torch
    import cuda.tile as ct
    from cuda.tile import launch


    @ct.kernel
    def double(x, y):
        ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (4,)) * 2)


    x = torch.arange(8.0, device="cuda")
    y = torch.empty_like(x)
    ct.launch(torch.cuda.current_stream(), (1,), double, (x, y))
    launch(torch.cuda.current_stream(), (2,), double, (x, y))
    torch.cuda.synchronize()
    print(y.cpu().tolist(), sys.argv[1:])
"""

TEST_FILE = """
    import pytest
    import torch
    import cuda.tile as ct

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


    @ct.kernel
    def row_sums(x, y, masked: ct.Constant[bool]):
        tile = ct.load(x, (ct.bid(0), 0), (1, 8))
        if masked:
            tile = ct.where(ct.arange(8, dtype=ct.int32)[None, :] < 5, tile, 0)
        ct.store(y, (ct.bid(0),), ct.sum(tile, axis=1))


    @pytest.mark.parametrize("masked", [True, False])
    def test_row_sums(masked):
        x = torch.ones(3, 5).cuda()
        y = torch.zeros(3, device="cuda:0")
        ct.launch(torch.cuda.current_stream(), (3,), row_sums, (x, y, masked))
        assert torch.equal(y, x.sum(1))
"""


def test_install_and_uninstall():
    real = ct.launch
    assert not interpreter.is_installed()
    interpreter.install()
    try:
        interpreter.install()
        assert interpreter.is_installed() and ct.launch is not real
        x, y = torch.ones(8), torch.zeros(8)
        ct.launch(None, (2,), double, (x, y))
        ct.launch(None, (2,), double, (x, y), programmatic_dependent_launch=True)
        assert y.tolist() == [2] * 8
    finally:
        interpreter.uninstall()
    assert ct.launch is real and not interpreter.is_installed()
    interpreter.uninstall()


ARRAYS = torch.ones(8), torch.ones(8)


@pytest.mark.parametrize(
    ("grid", "args"),
    [
        ([2], ARRAYS),
        (2, ARRAYS),
        ((1.5,), ARRAYS),
        ((torch.tensor(2),), ARRAYS),
        ((-1,), ARRAYS),
        ((2**24, 0), ARRAYS),
        ((1, 1, 1, 1), ARRAYS),
        ((2,), list(ARRAYS)),
        ((2,), torch.ones(2, 8)),
    ],
)
def test_what_the_real_launch_refuses(grid, args):
    errors = (TypeError, ValueError, OverflowError)
    with pytest.raises(errors):
        ct.launch(0, grid, double, args)
    interpreter.install()
    try:
        with pytest.raises(errors):
            ct.launch(0, grid, double, args)
    finally:
        interpreter.uninstall()


def test_names_imported_before_are_replaced_too():
    real = ct.launch
    globals()["imported_launch"] = real
    interpreter.install()
    try:
        assert globals()["imported_launch"] is ct.launch is not real
    finally:
        interpreter.uninstall()
    assert globals().pop("imported_launch") is real


@pytest.mark.parametrize("limit", [None, 10])
def test_a_search_for_the_fastest_configuration(limit):
    measure = tune._tune._benchmark
    x, y = torch.ones(8), torch.zeros(8)
    options = {"hints_fn": lambda config: {"occupancy": config["o"]}, "quiet": True, "single_run_timeout_sec": limit}
    interpreter.install()
    try:
        configs = [{"n": n, "o": n} for n in (1, 2)]
        found = tune.exhaustive_search(configs, None, lambda c: (c["n"],), double, lambda c: (x, y), **options)
    finally:
        interpreter.uninstall()
    assert len(found.successes) == 2 and found.best.config in configs and found.best.mean_us > 0
    assert y.tolist() == [2] * 8
    assert tune._tune._benchmark is measure


def test_cuda_devices_are_the_cpu():
    before = torch.cuda.is_available
    with redirect():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        cpu = torch.zeros(4)
        on_gpu = cpu.cuda()
        on_gpu += 1
        assert cpu.sum() == 0 and on_gpu.cpu().sum() == 4
        made = [
            torch.ones(2, device="cuda"),
            torch.ones(2, device=torch.device("cuda", 0)),
            torch.ones(2).to("cuda:0"),
            torch.ones(2).to(device="cuda", dtype=torch.float64),
            torch.ones(2).to(torch.device("cuda"), torch.float16),
            torch.ones(2).to(0),
            torch.ones(2).cuda(0),
            torch.ones(2, device=0),
            torch.ones(2, device=torch.accelerator.current_accelerator()),
            torch.nn.Linear(2, 2).to(0).weight,
            torch.nn.Linear(2, 2).to("cuda:0", torch.float16).weight,
            torch.tensor([1, 1], device="cuda"),
            torch.ones(2).pin_memory(),
            torch.nn.Linear(2, 2, device="cuda").weight,
            torch.nn.Linear(2, 2).cuda().weight,
        ]
        generator = torch.Generator(device="cuda").manual_seed(1)
        assert isinstance(generator, torch.Generator)
        made.append(torch.randn(2, device="cuda", generator=generator))
        with torch.device("cuda"):
            made.append(torch.ones(2))
        torch.set_default_device("cuda")
        made.append(torch.ones(2))
        torch.set_default_device(None)
        with io.BytesIO() as file:
            torch.save(cpu, file)
            file.seek(0)
            made.append(torch.load(file, map_location="cuda"))
        with ThreadPoolExecutor(1) as pool:
            made.append(pool.submit(torch.ones, 2, device="cuda").result())
        assert {tensor.device.type for tensor in made} == {"cpu"}
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            start.record()
            end.record()
        torch.cuda.synchronize()
        torch.cuda._sleep(1000)
        torch.ones(2, device="cuda").record_stream(torch.cuda.current_stream())
        assert start.elapsed_time(end) >= 0
        assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor > 0
        assert torch.accelerator.is_available() and torch.accelerator.max_memory_allocated() == 0
        with torch.random.fork_rng():
            torch.cuda.manual_seed(3)
            torch.rand(1, device="cuda")
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.ExternalStream(0)), torch.cuda.nvtx.range("a range"):
            assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.is_available is before


def run(tmp_path, name: str, text: str, *command: str, interpret: bool = True) -> subprocess.CompletedProcess:
    (tmp_path / name).write_text(textwrap.dedent(text))
    environment = {name: value for name, value in os.environ.items() if name != "TILEGYM_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    if interpret:
        environment["TILEGYM_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *command, name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_script_for_a_gpu(tmp_path):
    done = run(tmp_path, "script.py", SCRIPT, "-m", "tilegym.interpreter", interpret=False)
    assert (done.returncode, done.stdout) == (0, "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0] []\n"), done.stderr


def test_a_script_for_a_gpu_that_imports_tilegym(tmp_path):
    text = """
        import torch
        import tilegym

        x = torch.linspace(-1, 1, 24, device="cuda").view(3, 8)
        y = tilegym.ops.softmax(x)
        torch.testing.assert_close(y, torch.softmax(x, -1))
        print(tilegym.backend.get_current_backend())
    """
    done = run(tmp_path, "script.py", text, "-m", "tilegym.interpreter", interpret=False)
    assert (done.returncode, done.stdout) == (0, "cutile\n"), done.stderr


def test_a_script_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "tilegym.interpreter", "missing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip() == "no such script: missing.py"


def test_the_environment_variable(tmp_path):
    text = "import tilegym.interpreter as i, cuda.tile as ct; print(i.is_installed(), ct.launch.__name__)"
    assert run(tmp_path, "script.py", text).stdout == "True interpreted_launch\n"


def at_start(then: str) -> tuple[str, ...]:
    """Options for Python to read what lies beside the package in site-packages, and to do ``then``."""
    folder = Path(__file__).parents[2] / "src"
    return "-c", f"import site, sys; site.addpackage({str(folder)!r}, 'tilegym_interpret.pth', set()); {then}"


AS_A_SCRIPT = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def test_a_script_that_never_imports_tilegym(tmp_path):
    done = run(tmp_path, "script.py", SCRIPT, *at_start(AS_A_SCRIPT))
    assert (done.returncode, done.stdout) == (0, "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0] []\n"), done.stderr
    assert done.stderr == ""


def test_a_script_that_sets_a_default_device_before_it_imports_cutile(tmp_path):
    text = SCRIPT.replace("import torch", 'import torch; torch.set_default_device("cuda")').replace(
        ', device="cuda"', ""
    )
    done = run(tmp_path, "script.py", text, *at_start(AS_A_SCRIPT))
    assert (done.returncode, done.stdout) == (0, "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0] []\n"), done.stderr


def test_importing_under_another_default_device(tmp_path):
    text = """
        import torch
        with torch.device("meta"):
            import tilegym.interpreter
        from cuda.tile import float4_e2m1fn
        from tilegym.interpreter.values import decode
        print(decode(torch.arange(16, dtype=torch.uint8), float4_e2m1fn)[5:12].tolist())
    """
    done = run(tmp_path, "script.py", text)
    assert done.stdout == "[3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5]\n", done.stderr


def test_a_process_that_never_imports_cutile(tmp_path):
    text = "import json, sys; print({'torch', 'tilegym', 'numpy'} & set(sys.modules), 'tilegym_startup' in sys.modules)"
    assert run(tmp_path, "script.py", text, *at_start(AS_A_SCRIPT)).stdout == "set() True\n"
    assert run(tmp_path, "script.py", text, *at_start(AS_A_SCRIPT), interpret=False).stdout == "set() False\n"


def test_a_script_that_imports_tilegym_first_keeps_its_devices(tmp_path):
    text = "import tilegym, torch, cuda.tile as ct; print(ct.launch.__name__, torch.cuda.is_available.__module__)"
    assert run(tmp_path, "script.py", text, *at_start(AS_A_SCRIPT)).stdout == "interpreted_launch torch.cuda\n"


PLUGIN = ("-m", "pytest", "-p", "no:cacheprovider", "-rs")


def test_a_test_suite_for_a_gpu(tmp_path):
    done = run(tmp_path, "test_suite.py", TEST_FILE, *PLUGIN)
    assert "2 passed" in done.stdout and "kernels run in the interpreter" in done.stdout, done.stdout + done.stderr


def test_a_sanitized_test_suite(tmp_path):
    done = run(tmp_path, "test_suite.py", TEST_FILE, *PLUGIN, "--tilegym-sanitize")
    assert "1 failed, 1 passed" in done.stdout and "depends on undetermined padding" in done.stdout, done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_plugin_is_inert_without_the_variable(tmp_path):
    done = run(tmp_path, "test_suite.py", TEST_FILE, *PLUGIN, interpret=False)
    assert "2 skipped" in done.stdout and "interpreter" not in done.stdout.lower(), done.stdout + done.stderr


def test_the_plugin_imports_nothing_without_the_variable(tmp_path):
    text = "import tilegym_pytest_plugin, sys; print({'torch', 'tilegym'} & set(sys.modules))"
    assert run(tmp_path, "script.py", text, interpret=False).stdout == "set()\n"
    suite = "def test(): import sys; assert 'torch' not in sys.modules and 'tilegym_pytest_plugin' in sys.modules"
    done = run(tmp_path, "test_suite.py", suite, *PLUGIN, interpret=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
