"""Writes how kernels are launched: plans, outputs, launch functions."""

import torch

from tilegym.autokernel.generate.body import LINE
from tilegym.autokernel.generate.body import call
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.kernels import POINTWISE
from tilegym.autokernel.generate.kernels import ROW_NORMS
from tilegym.autokernel.generate.kernels import TILING
from tilegym.autokernel.generate.kernels import repeats
from tilegym.autokernel.generate.kernels import rows_like
from tilegym.autokernel.generate.plan import Kernel
from tilegym.autokernel.generate.plan import Tuning

LAUNCH = "tilegym.backend.cutile.launch"
LIBRARY = "tilegym.backend.cutile.library"
Imports = set[tuple[str, str]]

HEAD = """@functools.lru_cache(maxsize=1024)
def {plan}(m: int, n: int, device: int) -> tuple[{types}]:
    \"\"\"({names}) for [m, n] on CUDA device ``device`` (-1: CPU).\"\"\"
"""
# On an H200, rows of 4096 in bf16: where all blocks run at once, half as many to a multiprocessor took 5.9 us instead
# of 6.9 for a row and 9.2 instead of 9.8 for 512 (add_rms_norm), 6.0 instead of 6.7 for a row (cohere_layer_norm).
PLANS = {
    "flat": (
        "tuple[int], int, int",
        "grid, TILE_M, TILE_N",
        """    elements = {elements} if m * n >= 4096 * sm_count(device) else 512
    tile_n = min(elements, next_power_of_2(n))
    tile_m = elements // tile_n
    return (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n
""",
    ),
    "rows": (
        "ct.kernel, tuple[int], int, int",
        "kernel, grid, TILE_M, TILE_N",
        """    m = m if n else 0  # without columns there is nothing to launch
    tile_m, tile_n = whole_rows(m, n, device)
    elements = tile_m * tile_n
    tiles, occupancy = ct.cdiv(m, tile_m), max(1, min(8, {registers} // elements))
    # With fewer blocks than multiprocessors what counts is how long one takes.
    warps = 8 if elements >= {eight_warps} or (elements >= 2048 and tiles < sm_count(device)) else 4
    # Blocks that run at once anyway may as well have more registers.
    at_once = tiles <= occupancy * sm_count(device)
    occupancy = max(1, occupancy // 2) if at_once else occupancy
    kernel = hinted({kernel}, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (tiles,), tile_m, tile_n{at_once}
""",
    ),
    "wide": (
        "ct.kernel, tuple[int], int",
        "kernel, grid, TILE_N",
        """    m = m if n else 0  # without columns there is nothing to launch
    kernel = hinted({kernel}, num_worker_warps={wide_warps}, occupancy={wide_occupancy})
    return kernel, (m,), min({wide}, next_power_of_2(n))
""",
    ),
    "striding": (
        "ct.kernel, tuple[int], int, int",
        "kernel, grid, TILE_M, TILE_N",
        """    m = m if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    warps, occupancy = (8 if tile_n >= {eight_warps} else 4), max(1, min(4, {held} // tile_n))
    blocks = occupancy * sm_count(device)
    tile_m = max(1, min({short} // tile_n, next_power_of_2(m // blocks)))
    kernel = hinted({kernel}, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (min(ct.cdiv(m, tile_m), blocks),), tile_m, tile_n
""",
    ),
    "columns": (
        "ct.kernel, tuple[int, int], int, int",
        "kernel, grid, TILE_M, TILE_N",
        """    tile_m, tile_n = 4, min({columns}, next_power_of_2(n))
    across = ct.cdiv(n, tile_n)
    blocks = min(ct.cdiv(m, tile_m), max(1, 8 * sm_count(device) // max(1, across)))
    return {kernel}, (blocks, across), tile_m, tile_n
""",
    ),
}
PLANS["tiles"] = PLANS["flat"]
PLAN_NAMES = ("whole_rows", "next_power_of_2", "sm_count", "hinted")
PLAN_MODULES = {"whole_rows": ROW_NORMS}


def plan_source(kernel: Kernel, name: str, tuning: Tuning, imports: Imports, late: bool) -> str:
    """The function that chooses tiles and hints; empty where the ops' own does."""
    # One load of 16 bytes by a thread for each tile, or two where tiles are few: six of them took 37 us with one and 41
    # with two (rope_halves), three took 55 and 54, five 87 and 86 (gpt_oss_gate; 8192 tokens in bf16 on an H200).
    tiles = sum(v.is_tile for v in kernel.inputs.values()) + len(kernel.outputs)
    elements = tuning.elements // (4 if tiles > 5 else 2)
    if kernel.kind in ("flat", "tiles") and elements == Tuning().elements // 2:
        imports.add((POINTWISE, "plan"))
        return ""
    types, names, text = PLANS[kernel.kind]
    if late:
        types, names = f"{types}, bool", f"{names}, AT_ONCE"
    text = text.format(
        kernel=kernel.name,
        elements=elements,
        eight_warps=tuning.eight_warps if kernel.kind == "rows" else tuning.eight_warps // 2,
        registers=tuning.registers,
        at_once=", at_once" if late else "",
        # The gradients of weights are held besides. Three blocks of 4096 took 73 us instead of 86 (llama_rms_norm), 82
        # instead of 98 (cohere_layer_norm) and 106 instead of 126 (add_rms_norm): 8192 rows in bf16 on an H200.
        # A third spills where two inputs have gradients: 296 us instead of 136 (mamba2_rms_norm_gated).
        held=tuning.registers // 4 * (3 if sum(o.value.cols and not o.vector for o in kernel.outputs) < 2 else 2),
        wide=tuning.wide,
        wide_warps=tuning.wide_warps,
        wide_occupancy=tuning.wide_occupancy,
        short=tuning.elements // 4,
        columns=tuning.elements // 8,
    )
    imports.update((PLAN_MODULES.get(n, TILING), n) for n in PLAN_NAMES if f"{n}(" in text)
    imports.add(("", "functools"))
    return HEAD.format(plan=name, types=types, names=names) + text


def dtype_text(dtype: torch.dtype, working: torch.dtype, arrays: dict[str, Value]) -> str:
    """An expression for the dtype of a result: of an input where that is the working dtype."""
    generic = next((n for n, v in arrays.items() if v.dtype == working), None)
    return f"{generic}.dtype" if dtype == working and generic else str(dtype)


def empty(output: Output, inputs: dict[str, Value], working: torch.dtype, imports: Imports) -> str:
    """An expression that makes an empty tensor for a result."""
    like, dtype = output.like.hint, dtype_text(output.dtype, working, inputs)
    if output.vector:
        return f"{like}.new_empty({output.width or f'{like}.shape[-1]'}, dtype={dtype})"
    if output.value.cols and output.shape == output.like.shape and output.dtype == output.like.dtype:
        imports.add((ROW_NORMS, "contiguous_like"))
        return f"contiguous_like({like})"
    if output.width and output.width != output.like.width:
        lead = f"{like}.shape[:-1]" if len(output.shape) == len(output.like.shape) else f"{like}.shape"
        return f"{like}.new_empty(*{lead}, {output.width}, dtype={dtype})"
    if output.keepdim:
        last = f"{like}.shape[-1]" if output.value.cols or output.shape == output.like.shape else "1"
        return f"{like}.new_empty(*{like}.shape[:-1], {last}, dtype={dtype})"
    return f"{like}.new_empty({like}.shape[:-1], dtype={dtype})"


def returned_values(made: list[str]) -> str:
    """The statement that returns expressions, on as few lines as the formatter needs."""
    line = f"    return {', '.join(made)}"
    if len(line) <= LINE or len(made) == 1:
        return line
    return "    return (\n" + "".join(f"        {text},\n" for text in made) + "    )"


def as_bytes(name: str, value: Value) -> str:
    """An expression for an input as its kernel reads it: booleans as bytes.

    Where a loop reads booleans ahead, tileiras 13.4 counts a bit for each on sm_90, and copies one byte in eight.
    """
    return f"{name}.view(torch.uint8)" if value.dtype == torch.bool else name


def as_rows(name: str, value: Value, imports: Imports) -> str:
    """An expression for an input as its kernel takes it: [M, N], [M, 1], [N] or [1]."""
    name = as_bytes(name, value)
    if value.steps:
        return f"{name}.reshape(-1, {(value.width or 'n') if value.cols else 1})"
    if value.is_tile or (value.rows and value.shape and value.shape[-1] == 1):
        imports.add((TILING, "rows_of"))
        return f"rows_of({name})"
    if value.rows:
        return f"{name}.reshape(-1, 1)"
    if value.cols:
        return name
    return f"{name}.reshape(1)"


def result_rows(output: Output) -> str:
    if not output.shape:  # a statistic, made as [M, 1]
        return output.name
    width = (output.width or "n") if output.value.cols or output.shape == output.like.shape else 1
    return f"{output.name}.view(m, {width})"


def launch_lines(
    kernel: Kernel,
    plan: str,
    working: torch.dtype,
    known: set[str],
    imports: Imports,
    n: str = "n",
    width: int | None = None,
    late: bool = False,
) -> list[str]:
    """The statements that plan and launch one kernel.

    Args:
        known: arrays that are [M, ...] already.
        n: what the number of columns is called.
        width: their number, where it is fixed.
        late: whether the kernel reads at once what is needed late.
    """
    imports.add((LAUNCH, "launch"))
    outputs = list(kernel.outputs)
    if kernel.kind == "flat":
        imports.update({(POINTWISE, "small_or_flat"), (TILING, "size_of")})
        first, place = kernel.arrays[0], -1 if kernel.pairs else 0
        arrays = [as_bytes(n, kernel.inputs[n]) if n in kernel.inputs else n for n in kernel.arrays]
        return [
            call("arrays = small_or_flat", arrays, 4),
            f"    grid, tile_m, tile_n = {plan}(*size_of(arrays[{place}]), {first}.get_device())",
            f"    launch({first}, grid, {kernel.name}, (*arrays, tile_m, tile_n))",
        ]
    like = rows_like(kernel.inputs)
    arrays = []
    for name, value in kernel.inputs.items():
        arrays.append("rows" if name == like else name if name in known else as_rows(name, value, imports))
    sums = kernel.sums
    arrays += [f"{o.name}_parts" if o.vector else o.name if o.name in known else result_rows(o) for o in outputs]
    for first, second in repeats(kernel):
        arrays += [f"{like}.shape[{first}:-1].numel()", f"{like}.shape[{second}:-1].numel()"]
    lines = []
    if "rows" not in known:
        lines.append(f"    rows = {as_rows(like, kernel.inputs[like], imports)}")
        lines.append("    m, n = rows.shape" if width is None else f"    m, n = rows.shape[0], {width}")
    chosen = {"tiles": "grid, tile_m, tile_n", "wide": "kernel, grid, tile_n"}.get(
        kernel.kind, "kernel, grid, tile_m, tile_n"
    )
    if late:
        chosen += ", at_once"
    lines.append(f"    {chosen} = {plan}(m, {n}, {like}.get_device())")
    for o in sums:
        imports.add((ROW_NORMS, "sums_of_blocks"))
        dtype = dtype_text(o.dtype, working, kernel.inputs)
        lines.append(f"    {o.name}_parts, {o.name} = sums_of_blocks({like}, grid[0], {o.width or 'n'}, True, {dtype})")
    constants = {"wide": f"{n}, tile_n"}.get(kernel.kind, f"{n}, tile_m, tile_n")
    constants += ", at_once" if late else ""
    function = kernel.name if kernel.kind == "tiles" else "kernel"
    line = f"    launch({like}, grid, {function}, ({', '.join(arrays)}, {constants}))"
    if len(line) > 120:
        lines.append(call("arrays = ", arrays, 4) if len(arrays) > 1 else f"    arrays = ({arrays[0]},)")
        line = f"    launch({like}, grid, {function}, (*arrays, {constants}))"
    lines.append(line)
    for width in dict.fromkeys(o.width for o in sums):
        pairs = [f"({o.name}_parts, {o.name})" for o in sums if o.width == width]
        imports.add((ROW_NORMS, "add_blocks"))
        lines += [f"    add_blocks(grid[0], {', '.join(pairs[i : i + 2])})" for i in range(0, len(pairs), 2)]
    return lines
