"""Runs a whole model in a worker: unpatched, or with kernels in the place of its regions."""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import tensors
from tilegym.autokernel.harness import Files
from tilegym.autokernel.harness import timed
from tilegym.errors import ModelError
from tilegym.errors import UnsupportedError
from tilegym.inventory import Solution
from tilegym.inventory import load_solution
from tilegym.inventory import reference

# How a run goes, the least noisy way first: prompts and decoding steps replayed, the steps alone, or nothing.
REPLAYED, STEPS, EAGER = WAYS = ("replayed", "steps replayed", "eager")
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then it",
    "In 1905 Albert Einstein published four papers which",
    "def fibonacci(n):\n    ",
)


@dataclass(frozen=True)
class ModelSpec:
    """Which model: everything that a process needs to build the same one.

    Attributes:
        model_id: a Hub id, folder, config file or preset, as for ``tilegym infer``; or ``FILE.py::FUNCTION``, where the
            function takes no arguments and returns a causal language model of transformers.
        precision: of weights and computation, as for ``tilegym infer``.
        random_weights: whether a config is enough.
        num_layers: how many of its layers to keep; None for all.
        attention: the implementation of attention, as transformers names it; "" for its default.
        seed: of random weights.
        trust_remote_code: whether code that comes with the model may run.
    """

    model_id: str
    precision: str = "bfloat16"
    random_weights: bool = False
    num_layers: int | None = None
    attention: str = ""
    seed: int = 0
    trust_remote_code: bool = False

    def config(self) -> Any:
        """The model's config, cut to ``num_layers``; None where a function makes the model.

        Raises:
            ModelError: there is no such model, or it is no decoder-only language model.
        """
        from tilegym.bench import models
        from tilegym.integrate.steps import check_kind

        if "::" in self.model_id:
            if self.num_layers is not None:
                raise ModelError(
                    "--num-layers does nothing with FILE.py::FUNCTION: have the function make fewer layers"
                )
            _code_of(Path(self.model_id.partition("::")[0]))
            return None
        config = models.load_config(self.model_id, self.random_weights, self.trust_remote_code)
        check_kind(config, self.model_id, self.trust_remote_code)
        if self.num_layers is not None:
            models.cut_layers(config, self.num_layers)
        if self.attention:
            config._attn_implementation = self.attention
        return config

    def load(self, device: torch.device) -> tuple[Any, Any | None]:
        """(the model in evaluation mode on ``device``, its tokenizer if it has one).

        Raises:
            ModelError: there is no such model, or it cannot be used.
        """
        from tilegym.bench import models

        dtype, config = models.PRECISIONS[self.precision], self.config()
        if config is None:
            model = _from_file(self.model_id, self.seed).to(device, dtype).eval()
            if model.generation_config is not None:
                model.generation_config.eos_token_id = None
            return model, None
        trusted = self.trust_remote_code
        loaded = models.load(self.model_id, dtype, device, self.random_weights, config, self.seed, trusted)
        return loaded.model, loaded.tokenizer


def _code_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None:
        raise ModelError(f"{file} is no Python file: give FILE.py::FUNCTION, the function returns a model")
    return spec


def _from_file(name: str, seed: int) -> Any:
    from tilegym.integrate.steps import refuse_encoder

    path, _, function = name.partition("::")
    file = Path(path)
    spec = _code_of(file)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[file.stem] = module  # where inspect looks for the source of its classes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise ModelError(f"{path} has no function {function!r}")
    torch.manual_seed(seed)
    try:
        model = getattr(module, function)()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{name} failed: {reason}; it is called without arguments, and returns a model") from error
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model, "generate")):
        raise ModelError(f"{name} returned a {type(model).__name__}: return a causal language model of transformers")
    refuse_encoder(model.config, name)
    return model


def batches_of(model: Any, tokenizer: Any | None, input_length: int) -> list[Any]:
    """The prompts that models are judged on, in batches of one or two, of ``input_length`` tokens and a few more."""
    from tilegym.bench import prompts

    made = []
    for extra, prompt in enumerate(PROMPTS):
        text = model.config.get_text_config(decoder=True)
        made += prompts.make_batches([prompt] * (1 + extra % 2), tokenizer, text, None, input_length + 3 * extra)
    return made


class ModelRuns:
    """A model, with Solutions in some of its regions, that generates when it is asked to.

    Args:
        spec: a :class:`ModelSpec` as a dictionary.
        kernels: by region: ``root``, ``solution`` (JSON).
        input_length, output_length: tokens of the prompts, and how many to generate.
        device: "cpu" or "cuda".
    """

    def __init__(
        self, spec: dict[str, Any], kernels: dict[str, Any], input_length: int, output_length: int, device: str
    ):
        from tilegym.autokernel.regions import find_regions
        from tilegym.autokernel.regions import install
        from tilegym.autokernel.replay import Replays

        self.device, self.output_length = torch.device(device), output_length
        self.model, tokenizer = ModelSpec(**spec).load(self.device)
        self.batches = batches_of(self.model, tokenizer, input_length)
        regions = {region.key: region for region in find_regions(self.model)} if kernels else {}
        missing = set(kernels) - set(regions)
        if missing:
            raise ModelError(f"the model has no region {', '.join(sorted(missing))}")
        chosen = {key: or_original(_solution(kernel), regions[key].source) for key, kernel in kernels.items()}
        self.patches = install(self.model, chosen)
        self.replays = Replays(self.model, self.batches, output_length)

    def generate(self, output: str | None = None, way: str = EAGER) -> dict[str, Any]:
        """One run over all prompts, one of :data:`WAYS`; writes the tokens to ``output``.

        Returns:
            "tokens", their number, and "peak", bytes of memory; or "refused", why there is no run that way.
        """
        from tilegym.autokernel.replay import Refused
        from tilegym.bench import generate

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            if way == EAGER:
                tokens = generate.run_once(self.model, self.batches, self.output_length).tokens
            else:
                tokens = self.replays.run(prompts=way == REPLAYED)
        except Refused as refused:
            return {"refused": str(refused)}
        if output is not None:
            tensors.write(Path(output), {f"tokens{i}": t for i, t in enumerate(tokens)})
        return {"tokens": sum(t.numel() for t in tokens), "peak": generate.peak_memory(self.device)}

    def logits(self, tokens: str, output: str, oracle: bool = False) -> dict[str, Any]:
        """Writes the logits along given tokens: of cached decoding, or, as an oracle, in the next wider precision."""
        from tilegym.bench import compare
        from tilegym.bench import generate

        chosen = [t for _, t in sorted(tensors.read(Path(tokens)).items())]
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        steps = compare.compared_steps(self.batches, self.output_length, vocab_size, self.model.dtype)
        if oracle:
            with compare.widened(self.model):
                found = [
                    generate.forward_logits(self.model, batch, t[:, :steps])
                    for batch, t in zip(self.batches, chosen, strict=True)
                ]
        else:
            found = compare.collect_logits(self.model, self.batches, chosen, steps)
        tensors.write(Path(output), {f"logits{i}": t for i, t in enumerate(found)})
        return {"dtype": str(self.model.dtype).removeprefix("torch.")}


class ReferenceRuns:
    """A Definition's reference on a device, for its time; runs in a worker in which no candidate is."""

    def __init__(self, definition_reference: str, device: str) -> None:
        self.files = Files(torch.device(device))
        self.function = reference.load(definition_reference, "reference")

    def time(self, files: list[str], described: str, calls: int, cold: bool) -> dict[str, Any]:
        """As of a candidate."""
        inputs = list(tensors.unpack(self.files.load(files), json.loads(described)).values())
        return timed(self.function, inputs, calls, cold, self.files.device)


def or_original(function: Callable, source: str) -> Callable:
    """``function``, and for calls that it does not support the region's own computation."""
    original = reference.load(source, "region")

    def run(*inputs: Any) -> Any:
        try:
            return function(*inputs)
        except UnsupportedError:
            return original(*inputs)

    return run


def _solution(kernel: dict[str, Any]) -> Callable:
    """A kernel's function. Its files are copied: the model may run for longer than they stay where they are."""
    solution, root = Solution.from_json(kernel["solution"]), Path(tempfile.mkdtemp(prefix="kernel-"))
    for source in solution.sources:
        target = root / source.path
        if (Path(kernel["root"]) / source.path).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(kernel["root"]) / source.path, target)
    return load_solution(solution, root)
