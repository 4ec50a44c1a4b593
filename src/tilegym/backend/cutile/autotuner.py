"""Picks the fastest configuration of a kernel for the GPU and the sizes at hand, measures once, and remembers.

    @autotune(search_space=[Config(TILE=64, occupancy=4), Config(TILE=128, occupancy=2)])
    def scale(x, out, autotuner=None):
        autotuner(
            None,
            grid_fn=lambda args, cfg: (ct.cdiv(x.shape[0], cfg.TILE),),
            kernel=scale_kernel,
            args_fn=lambda cfg: (x, out, cfg.TILE),
        )

A configuration is looked for among what this process has used, what this machine has measured (see
:mod:`tilegym.backend.cutile.tuning_cache`) and what TileGym ships, for sizes that round to the same powers of two; then
among what was used here, or measured, for nearly the same sizes (:func:`tuning_key.near`), so that a prompt that is one
token longer never tunes again. Else it is measured, on copies of the arguments.
The first configuration is taken unmeasured where it is the only one that suits, with ``TILEGYM_DISABLE_AUTOTUNE=1``, in
the interpreter, and, for as long as nothing is known, while a CUDA graph is captured or torch.compile traces.
``logging`` at level INFO for ``tilegym.autotuner`` tells what is measured, at level DEBUG what each configuration took.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym import env
from tilegym.backend import recording
from tilegym.backend.cutile import tuning
from tilegym.backend.cutile import tuning_cache
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.tuning_cache import TuningKey
from tilegym.backend.cutile.tuning_key import Call
from tilegym.backend.cutile.tuning_key import describe
from tilegym.backend.cutile.tuning_key import kernel_fingerprint
from tilegym.backend.cutile.tuning_key import kernel_name
from tilegym.backend.cutile.tuning_key import near
from tilegym.backend.cutile.tuning_key import parameter_names
from tilegym.backend.cutile.tuning_key import space_fingerprint
from tilegym.backend.cutile.tuning_space import Config
from tilegym.backend.cutile.tuning_space import NamedArgs
from tilegym.backend.cutile.tuning_space import SearchSpace
from tilegym.errors import BackendError

__all__ = ["Autotuner", "Config", "SearchSpace", "autotune"]

# Lengths that grow by one, as in decoding, give a new exact shape each time.
_MAX_REMEMBERED_CALLS = 8192

_tuning_lock = threading.RLock()  # two measurements at once would disturb each other
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def autotune(
    search_space: Iterable[Config] | Callable[[str], Iterable[Config]] | SearchSpace,
    *,
    bench: tuning.Bench | None = None,
    cache: tuning_cache.TuningCache | None = None,
) -> Callable[[Callable], Callable]:
    """Gives the decorated function an :class:`Autotuner` over ``search_space`` as its argument ``autotuner``.

    Args:
        search_space: the configurations, a function of the architecture that returns them, or a SearchSpace.
        bench: the device to measure on; by default the GPU that a launch's tensors are on.
        cache: where results are kept; by default under ``tilegym.env.cache_dir()``.
    """
    space = search_space if isinstance(search_space, SearchSpace) else SearchSpace(search_space)

    def decorate(function: Callable) -> Callable:
        tuner = Autotuner(space, bench, cache)
        tuned = functools.update_wrapper(functools.partial(function, autotuner=tuner), function)
        tuned.autotuner = tuner
        return tuned

    return decorate


class Autotuner:
    """Launches kernels with the best configuration of one search space. Made by :func:`autotune`."""

    def __init__(
        self, space: SearchSpace, bench: tuning.Bench | None = None, cache: tuning_cache.TuningCache | None = None
    ) -> None:
        self.space = space
        self._bench = bench
        self._cache = cache
        # The hot path: what a call looks like -> the configuration, the kernel built with its hints, the grid.
        self._calls: dict[tuple, _Choice] = {}
        self._latest: dict[ct.kernel, Config] = {}
        self._winners: dict[TuningKey, Config] = {}
        self._served: dict[tuple, dict[tuple[int, ...], Config]] = {}  # sizes of earlier calls, by family
        self.version = 0  # grows when results are forgotten: what a caller has kept of them is out of date

    def __call__(
        self,
        stream: Any,
        grid_fn: Callable[[NamedArgs, Config], tuple[int, ...]],
        kernel: ct.kernel,
        args_fn: Callable[[Config], tuple],
        hints_fn: Callable[[Config], dict[str, Any]] | None = None,
        *,
        key: tuple | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> Config:
        """Launches ``kernel`` with the best configuration for these arguments, which is measured if it is not known.

        Args:
            stream: the stream to launch on (a ``torch.cuda.Stream`` or its handle); None for the current one. Ignored
                in the interpreter.
            grid_fn: (arguments by parameter name, configuration) to the grid.
            kernel: a ``@ct.kernel`` function.
            args_fn: configuration to the kernel's arguments. May be called several times for a launch.
            hints_fn: configuration to the compiler hints; by default the configuration's own (``Config.hints``).
            key: anything hashable that is equal for two calls only if all arguments' dtypes, sizes and devices are, and
                the grid for each configuration. Saves looking at them; worth giving where a microsecond counts.
            outputs: the parameters that candidates must agree on, by name; by default every tensor that the kernel
                writes. For kernels one of whose buffers has a content that depends on the configuration.

        Returns:
            The configuration that was launched.

        Raises:
            BackendError: no configuration can be compiled and run on this GPU.
            ValueError: no configuration of the search space suits these arguments.
        """
        guess = args = call = None
        if key is not None:
            call = (kernel, key)
            known = self._calls.get(call)
            if known is not None and stream is None:
                args = args_fn(known.config)
                launch(_first_tensor(args), known.grid, known.kernel, args)
                return known.config
        elif (guess := self._latest.get(kernel)) is not None:
            # The arguments are needed to know the configuration that they are made from: the latest one is likely it.
            args = args_fn(guess)
            call = _look(kernel, args)
        choice, lasting = self._calls.get(call), False
        if choice is None:
            choice, lasting = self._choose(grid_fn, kernel, args_fn, hints_fn, key, outputs)
        config = choice.config
        if config is not guess:
            args = args_fn(config)
            if key is None:
                self._latest[kernel] = config
        like = _first_tensor(args)
        grid = grid_fn(NamedArgs(choice.parameters, args), config)
        if lasting:
            self._remember(call or _look(kernel, args), choice._replace(grid=grid))
        if stream is None or not like.is_cuda:
            launch(like, grid, choice.kernel, args)
        else:
            with _on_stream(stream, like.get_device()):
                launch(like, grid, choice.kernel, args)
        return config

    def known(self, kernel: ct.kernel, key: tuple) -> "_Choice | None":
        """What a call with this ``key`` launches, the configuration, the kernel and the grid; None if not yet sure."""
        return self._calls.get((kernel, key))

    def forget(self) -> None:
        """Forgets what this process knows; what is on disk is looked up again."""
        recording.forget()
        self.version += 1
        self._calls.clear()
        self._latest.clear()
        self._winners.clear()
        self._served.clear()

    def _remember(self, call: tuple, choice: "_Choice") -> None:
        if len(self._calls) >= _MAX_REMEMBERED_CALLS:
            self._calls.clear()
        self._calls[call] = choice

    def _choose(
        self,
        grid_fn: Callable,
        kernel: ct.kernel,
        args_fn: Callable,
        hints_fn: Callable | None,
        call_key: tuple | None,
        outputs: tuple[str, ...] | None,
    ) -> tuple["_Choice", bool]:
        """The configuration for a call that looks like none before, and whether that is the last word."""
        recording.put_off()  # later calls may launch another configuration
        if not isinstance(kernel, ct.kernel):
            raise TypeError(f"kernel is a {type(kernel).__name__}: give a function that @ct.kernel decorates")
        parameters = {name: i for i, name in enumerate(parameter_names(kernel))}
        bench, arch = self._device(args_fn)
        configs = self.space.configs(arch)
        suitable = [
            config
            for config in configs
            if self.space.suits(config, arch, lambda config=config: NamedArgs(parameters, args_fn(config)))
        ]
        name = kernel_name(kernel)
        if unknown := set(outputs or ()).difference(parameters):
            raise ValueError(f"kernel {name} has no parameters {', '.join(sorted(unknown))} for outputs to name")
        if not suitable:
            raise ValueError(f"kernel {name}: no configuration of its search space suits these arguments on {arch}")

        def choice_of(config: Config) -> _Choice:
            hints = config.hints if hints_fn is None else hints_fn(config)
            return _Choice(config, _with_hints(kernel, hints), parameters)

        if bench is None or len(suitable) == 1 or env.disable_autotune():
            return choice_of(suitable[0]), True
        written = {config: f"{config} {hints_fn(config) if hints_fn else ''}" for config in configs}
        key = TuningKey(
            gpu=bench.gpu,
            kernel=name,
            source=_fingerprint(kernel),
            space=space_fingerprint([written[config] for config in suitable]),
            shape=describe(kernel, args_fn(suitable[0])),
        )
        call = Call.of_arguments(kernel, args_fn(configs[0])) if call_key is None else Call.of_key(call_key)
        family = space_fingerprint([call.form, *written.values()])
        served = self._served.setdefault((*key[:3], family), {})
        with _tuning_lock:
            winner = self._winners.get(key) or self._look_up(key, suitable)
            if winner is not None:
                self._winners[key] = winner
            else:
                winner = self._nearest(key, family, call.sizes, served, suitable)
            if winner is None:
                if not bench.ready():
                    return choice_of(suitable[0]), False
                choices = _choices(name, suitable, choice_of)
                winner, time_us = self._measure(key, choices, grid_fn, args_fn, bench, outputs)
                self._winners[key] = winner
                if time_us is not None:
                    result = tuning_cache.TuningResult(key, winner.options, time_us, family, call.sizes)
                    (self._cache or tuning_cache.TuningCache()).put(result)
            if len(served) >= _MAX_REMEMBERED_CALLS:
                served.clear()
            served[call.sizes] = winner
        return choice_of(winner), True

    def _device(self, args_fn: Callable) -> tuple[tuning.Bench | None, str]:
        """The bench of the device that the arguments are on, None for the CPU, and the architecture."""
        if self._bench is not None:
            return self._bench, self._bench.arch
        from tilegym.backend.cutile import tuning_bench  # cuTile's compiler, a tenth of a second to import

        # Some configuration is needed to see the arguments, and the architecture to have a configuration.
        current = "cpu"
        if torch.cuda.is_available():
            current = "sm_{}{}".format(*torch.cuda.get_device_capability())
        like = _first_tensor(args_fn(self.space.configs(current)[0]))
        if not like.is_cuda:
            return None, "cpu"
        bench = tuning_bench.gpu_bench(like.get_device())
        return bench, bench.arch

    def _look_up(self, key: TuningKey, suitable: list[Config]) -> Config | None:
        for result in ((self._cache or tuning_cache.TuningCache()).get(key), tuning_cache.shipped(key)):
            for config in suitable:
                if result is not None and tuning_cache.same_options(result.config, config.options):
                    return config
        return None

    def _nearest(
        self,
        key: TuningKey,
        family: str,
        sizes: tuple[int, ...],
        served: dict[tuple[int, ...], Config],
        suitable: list[Config],
    ) -> Config | None:
        """The configuration of a call that differs from this one in little but its sizes, the latest first."""
        for others in reversed(served):
            if served[others] in suitable and near(sizes, others):
                return served[others]
        for result in (self._cache or tuning_cache.TuningCache()).relatives(*key[:3], family):
            for config in suitable:
                if near(sizes, result.sizes) and tuning_cache.same_options(result.config, config.options):
                    return config
        return None

    def _measure(
        self,
        key: TuningKey,
        choices: list["_Choice"],
        grid_fn: Callable,
        args_fn: Callable,
        bench: tuning.Bench,
        outputs: tuple[str, ...] | None,
    ) -> tuple[Config, float | None]:
        """The fastest, and the microseconds of a launch; the first, and None, where there is no room to measure."""
        parameters = choices[0].parameters
        candidates = [
            tuning.Candidate(
                config=choice.config,
                kernel=choice.kernel,
                grid=lambda args, config=choice.config: grid_fn(NamedArgs(parameters, args), config),
                make_args=functools.partial(args_fn, choice.config),
            )
            for choice in choices
        ]
        compared = tuple if outputs is None else lambda args: tuple(args[parameters[name]] for name in outputs)
        try:
            winner, time_us = tuning.find_fastest(key.kernel, candidates, bench, compared)
        except torch.OutOfMemoryError:
            warnings.warn(
                f"kernel {key.kernel} is not tuned: there is no room for a copy of its arguments on {key.gpu}",
                RuntimeWarning,
                stacklevel=5,
            )
            return choices[0].config, None
        return winner.config, time_us


class _Choice(NamedTuple):
    config: Config
    kernel: ct.kernel  # built with the configuration's hints
    parameters: dict[str, int]  # the kernel's, name to position
    grid: tuple[int, ...] | None = None  # of the call that it was first chosen for


_hinted_kernels: dict[tuple, ct.kernel] = {}
_fingerprint = functools.cache(kernel_fingerprint)


def _choices(name: str, configs: list[Config], choice_of: Callable[[Config], _Choice]) -> list[_Choice]:
    """The choices whose hints the compiler takes."""
    choices, refusals = [], []
    for config in configs:
        try:
            choices.append(choice_of(config))
        except ValueError as error:  # a hint beyond its range
            refusals.append(f"{config} does not compile: {error}")
            tuning.logger.info("tuning %s: %s", name, refusals[-1])
    if not choices:
        raise BackendError(f"kernel {name}: no configuration can be used: {'; '.join(refusals)}")
    return choices


def _with_hints(kernel: ct.kernel, hints: dict[str, Any]) -> ct.kernel:
    """The kernel with other compiler hints, built once: it takes longer than many launches, and compiles anew."""
    if not hints:
        return kernel
    key = (kernel, repr(sorted(hints.items())))
    if key not in _hinted_kernels:
        _hinted_kernels[key] = kernel.replace_hints(**hints)
    return _hinted_kernels[key]


def _look(kernel: ct.kernel, args: Iterable[Any]) -> tuple:
    """What a launch looks like to the table of known calls: two that look alike get the same configuration."""
    look = [kernel]
    for arg in args:
        if isinstance(arg, torch.Tensor):
            look += (arg.dtype, arg.shape, arg.stride(), arg.get_device())
        elif isinstance(arg, list | tuple):
            look.append(_look(kernel, arg))
        else:
            look.append(arg)
    return tuple(look)


def _first_tensor(args: Iterable[Any]) -> torch.Tensor:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg
    for arg in args:
        if isinstance(arg, list | tuple):
            return _first_tensor(arg)
    raise ValueError("a launch needs a tensor among the kernel's arguments, to know the device")


@contextlib.contextmanager
def _on_stream(stream: Any, device: int) -> Iterator[None]:
    handle = getattr(stream, "cuda_stream", stream)
    if handle == _raw_stream(device):
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device)):
        yield
