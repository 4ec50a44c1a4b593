"""Researches every causal language model of the installed transformers, and says what was not recognised.

python tests/integrate/sweep_families.py [model_type ...]

A family counts as correct if everything in it that is a norm, an MLP, a rotation, attention, experts with their
routing, a convolution, linear attention or the loss was recognised, each by a formula that reproduces it to rounding.
"""

import sys
import time
import warnings

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tilegym.errors import ModelError
from tilegym.integrate.research import research


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts = {"correct": 0, "incomplete": 0, "not small": 0, "failed": 0}
    for family in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        start, lines = time.perf_counter(), []
        try:
            found = research(family)
        except ModelError as error:
            verdict, lines = "not small", [str(error)]
        except Exception as error:  # a defect of research itself: say where, and go on
            verdict, lines = "failed", [f"{type(error).__name__}: {error}"]
        else:
            known = [u for u in found.unrecognised if u.resembles]
            verdict = "incomplete" if known else "correct"
            for missed in found.unrecognised:
                name = missed.implementation.rpartition(".")[2]
                lines.append(f"{name} at {missed.modules[:1]}: {missed.why} [{missed.resembles}]")
        counts[verdict] += 1
        print(f"{verdict:11} {family:28} {time.perf_counter() - start:5.1f} s", flush=True)
        for line in lines:
            print(f"            {line[:200]}", flush=True)
    small = sum(counts.values()) - counts["not small"]
    share = counts["correct"] / max(small, 1)
    print(f"transformers {transformers.__version__}: {counts}; correct: {share:.0%} of {small}")


if __name__ == "__main__":
    main()
