"""What the autotuner chooses from: configurations, and search spaces of them."""

import inspect
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from typing import Any

HINTS = ("num_ctas", "occupancy", "num_worker_warps", "opt_level")


class Config:
    """One configuration: named options, read as attributes.

    The options called ``num_ctas``, ``occupancy``, ``num_worker_warps`` and ``opt_level`` are hints to the compiler
    (None: let it choose); the others are what ``grid_fn`` and ``args_fn`` make of them. Hashable; two with the same
    options are equal.
    """

    def __init__(self, **options: bool | int | float | str | None) -> None:
        clashes = [name for name in options if name.startswith("_") or hasattr(Config, name)]
        if clashes:
            raise ValueError(f"an option cannot be called {', '.join(clashes)}")
        for name, value in options.items():
            if not isinstance(value, Hashable):
                raise TypeError(f"option {name} is {value!r}: options are numbers, strings, or tuples of them")
        self.__dict__.update(options)  # plain attributes: read at each launch

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self} has no option {name!r}")

    @property
    def options(self) -> dict[str, Any]:
        """All options."""
        return dict(self.__dict__)

    @property
    def hints(self) -> dict[str, int]:
        """The compiler hints that are given."""
        return {name: self.__dict__[name] for name in HINTS if self.__dict__.get(name) is not None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(frozenset(self.__dict__.items()))

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in sorted(self.__dict__.items()))})"


class SearchSpace:
    """The configurations to choose from, which may depend on the architecture and on the arguments.

    Args:
        configs: the configurations, the one to take unmeasured first; or a function of the architecture ("sm_80",
            "sm_90", "sm_100", ...; "cpu" in the interpreter) that returns them.
        predicate: which of them suit a launch. Called with its own parameters by name: any of the kernel's parameters,
            ``cfg`` and ``arch``, as in ``lambda x, cfg: cfg.TILE <= x.shape[0]``.
    """

    def __init__(
        self,
        configs: Iterable[Config] | Callable[[str], Iterable[Config]],
        predicate: Callable[..., bool] | None = None,
    ) -> None:
        if not callable(configs) and (isinstance(configs, str) or not isinstance(configs, Iterable)):
            raise TypeError(f"a search space is a list of Config or a function that returns one, not {configs!r}")
        self._configs = configs if callable(configs) else list(configs)
        self._predicate = predicate
        self._wanted = () if predicate is None else tuple(inspect.signature(predicate).parameters)

    def configs(self, arch: str) -> list[Config]:
        """The configurations for an architecture, whatever the arguments, each once.

        Raises:
            ValueError: there are none.
            TypeError: one is no Config.
        """
        given = list(self._configs(arch) if callable(self._configs) else self._configs)
        for config in given:
            if not isinstance(config, Config):
                raise TypeError(f"the search space holds {config!r}: write Config(TILE=64), say")
        chosen = list(dict.fromkeys(given))
        if not chosen:
            raise ValueError(f"the search space has no configuration for {arch}: give it one at least")
        return chosen

    def suits(self, cfg: Config, arch: str, arguments: Callable[[], "NamedArgs"]) -> bool:
        """Whether the predicate holds for a configuration and the arguments that ``arguments()`` returns."""
        if self._predicate is None:
            return True
        known, named_args = {"cfg": cfg, "arch": arch}, arguments()
        return bool(self._predicate(**{n: known[n] if n in known else getattr(named_args, n) for n in self._wanted}))


class NamedArgs:
    """The arguments of a launch by the names of the kernel's parameters."""

    __slots__ = ("_args", "_index")

    def __init__(self, index: dict[str, int], args: tuple) -> None:
        self._index = index
        self._args = args

    def __getattr__(self, name: str) -> Any:
        try:
            return self._args[self._index[name]]
        except KeyError:
            raise AttributeError(f"the kernel has no parameter {name!r}, only {', '.join(self._index)}") from None

    __getitem__ = __getattr__
