"""``tilegym tune``: what the autotuner has measured on this machine."""

from pathlib import Path

import typer

from tilegym.backend.cutile.tuning_cache import TuningCache
from tilegym.backend.cutile.tuning_cache import TuningResult
from tilegym.backend.cutile.tuning_cache import save_results
from tilegym.errors import TileGymError


def tune(
    list_results: bool = typer.Option(False, "--list", help="Show every result. This is what happens by default."),
    clear: bool = typer.Option(False, "--clear", help="Delete every result; kernels are then measured anew."),
    export: Path | None = typer.Option(None, metavar="FILE", help="Write one GPU's results, as TileGym ships them."),
    gpu: str | None = typer.Option(None, help="Only the results of this GPU, by its full name."),
) -> None:
    """Lists, clears or exports the configurations that the autotuner has found to be the fastest."""
    if sum((list_results, clear, export is not None)) > 1:
        raise TileGymError("--list, --clear and --export exclude each other")
    cache = TuningCache()
    if clear:
        if gpu is not None:
            raise TileGymError("--clear deletes the results of all GPUs; it does not go with --gpu")
        print(f"Deleted {cache.clear()} results from {cache.path}.")
        return
    everything = cache.all()
    gpus = sorted({result.key.gpu for result in everything})
    if gpu is not None and gpus and gpu not in gpus:
        raise TileGymError(f"no tuning results of {gpu!r} in {cache.path}, only of {', '.join(map(repr, gpus))}")
    results = [result for result in everything if gpu in (None, result.key.gpu)]
    if export is None:
        _print(results, cache.path)
        return
    if not results:
        raise TileGymError(f"nothing to export: no tuning results in {cache.path}")
    try:
        save_results(export, results)
    except ValueError as error:
        raise TileGymError(f"cannot export to {export}: {error}; --gpu NAME chooses one") from error
    except OSError as error:
        raise TileGymError(f"{export} cannot be written: {error.strerror}") from error
    print(f"Wrote {len(results)} results to {export}.")


def _print(results: list[TuningResult], path: Path) -> None:
    if not results:
        print(f"No tuning results in {path}.")
        return
    for gpu in sorted({result.key.gpu for result in results}):
        print(f"{gpu} ({path})")
        for result in results:
            if result.key.gpu == gpu:
                options = " ".join(f"{name}={value}" for name, value in result.config.items())
                print(f"  {result.key.kernel}  {result.key.shape}")
                print(f"    {result.time_us:10.1f} us  {options}")
