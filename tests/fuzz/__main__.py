"""Fuzzes ops and the interfaces over them: calls each with random arguments, and compares the two backends.

    python tests/fuzz                                                       # on the CPU, in the interpreter
    python tests/fuzz --device cuda --jobs 14 --reuse 3 --seconds 300       # on a GPU, where compiling takes longest
    python tests/fuzz --models --jobs 2                                     # small models, patched and not
    python tests/fuzz --one fmha:17                                         # a case again

A kernel's outputs and gradients are to be as near to PyTorch's in fp64 as PyTorch's in the call's dtype are, NaN and
infinities where it has them. Arguments that are wrong are to raise the same in both; no call may write to memory that
is not its own, which holds NaN; repeated calls are to give the same as the first.

Some calls are compiled, under autocast, in several threads, from a CUDA graph or in another stream, besides.

With --models, models of random sizes with random weights are called as programs call them: prompts with and without
padding, chats, gradients, generation. Patched they are to give in fp32 what they gave, call after call, in bf16 about
as far from fp32; and reverted, every bit.

A case is a function of op, seed, --device, --reuse, --way and --over. A failure's line says which case it is, what is
wrong, and after a bar what the call was: ``--one OP:SEED``, with the same options, repeats it. "FAIL" is a fault of
an op; "TIMEOUT" may be one; "RAISES" is a call that should be allowed but both backends refuse; "ERROR" is a fault of
the fuzzer.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

if not __package__:  # as ``python tests/fuzz`` starts it, which looks for modules in this folder, not beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from fuzz.generators import OPS  # noqa: E402
from fuzz.models import FAMILIES  # noqa: E402
from fuzz.ways import GPU_WAYS  # noqa: E402
from fuzz.ways import WAYS  # noqa: E402
from fuzz.workers import BAD  # noqa: E402
from fuzz.workers import Pool  # noqa: E402
from fuzz.workers import Tally  # noqa: E402
from fuzz.workers import prepare  # noqa: E402
from fuzz.workers import run_here  # noqa: E402
from fuzz.workers import run_one  # noqa: E402


def case(text: str) -> tuple[str, int]:
    name, _, seed = text.partition(":")
    if name not in (*OPS, *FAMILIES) or not seed.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not OP:SEED, as in rms_norm:17, or FAMILY:SEED")
    return name, int(seed)


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - {*OPS, *FAMILIES}:
        there = ", ".join((*OPS, *FAMILIES))
        raise argparse.ArgumentTypeError(f"no generator for {', '.join(sorted(unknown))}; there are {there}")
    return chosen


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed of each op (0)")
    parser.add_argument("--count", type=int, default=20, help="seeds of each op (20)")
    parser.add_argument("--ops", type=names, metavar="OP,OP", help="only these, or families")
    parser.add_argument("--models", action="store_true", help="calls of models, patched and not, instead of ops")
    parser.add_argument("--skip", type=names, default=[], metavar="OP,OP", help="all but these")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no case after so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1: none besides this one")
    parser.add_argument(
        "--reuse",
        type=int,
        default=0,
        metavar="N",
        help="only N choices of shapes and options an op, of 1000 seeds each",
    )
    parser.add_argument("--way", choices=WAYS, help="call all cases in this way, too, instead of some in each")
    parser.add_argument(
        "--over",
        type=int,
        default=0,
        metavar="N",
        help="models spread over N GPUs by accelerate; with --device cpu only under its hooks",
    )
    parser.add_argument("--alarm", type=int, default=120, metavar="SECONDS", help="a case takes at most so long (120)")
    parser.add_argument("--row", type=int, default=4, help="seeds of one op in a row, without --reuse (4)")
    parser.add_argument("--one", type=case, metavar="OP:SEED", help="run this case, and say what it is first")
    args = parser.parse_args(argv)
    if args.way in GPU_WAYS and args.device == "cpu":
        parser.error(f"--way {args.way} needs --device cuda")
    chosen = args.ops or (FAMILIES if args.models else OPS)
    args.ops = [name for name in chosen if name not in args.skip]
    args.deadline = time.time() + args.seconds
    return args


def main() -> int:
    args = parse()
    if args.one:
        prepare(args.device)
        outcome, seconds, _ = run_one(*args.one, args, lambda text: print(text, flush=True))
        what, bar, _ = outcome.text.partition(" | ")  # behind the bar is what was said already
        print(outcome.status, what if bar or outcome.status in BAD else "", f"({seconds:.1f} s)")
        return int(outcome.status in BAD)
    tally = Tally()
    if args.jobs == 1:
        run_here(args, tally)
    else:
        Pool(args, tally).run()
    print(f"\n{tally.summary()}")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
