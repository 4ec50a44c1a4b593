"""Tries tiles and compiler hints of the gated delta rule and its convolution on one GPU: a tool for authors.

Used as ``sweep_gemm_attention.py``, whose docstring says how. Sizes are those of Qwen3-Next-80B: 16 key and 32 value
heads of 128.
"""

import itertools

import cuda.tile as ct
import torch
from sweep_common import GROUPS
from sweep_common import VARIANTS
from sweep_common import Group
from sweep_common import Variant
from sweep_common import empty_or_random
from sweep_common import hints
from sweep_common import main

from tilegym.ops.cutile import causal_conv1d as conv
from tilegym.ops.cutile import gated_delta_rule_backward as backward
from tilegym.ops.cutile import gated_delta_rule_chunk as chunk
from tilegym.ops.cutile import gated_delta_rule_tiles as tiles
from tilegym.ops.cutile.gated_delta_rule import recurrent_kernel
from tilegym.ops.cutile.gated_delta_rule_solve import LEVELS
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.pytorch import causal_conv1d as torch_conv
from tilegym.ops.pytorch import gated_delta_rule as torch_rule

HK, HV, D = 16, 32, 128
GROUP, SCALE = HV // HK, D**-0.5
WARPS = (4, 8)


def inputs(device, batch, tokens):
    t = {name: empty_or_random(device, batch, tokens, HK, D) for name in ("q", "k")}
    t["v"] = empty_or_random(device, batch, tokens, HV, D)
    t["g"] = -0.1 * empty_or_random(device, batch, tokens, HV, dtype=torch.float32).abs()
    t["beta"] = empty_or_random(device, batch, tokens, HV).sigmoid()
    t["out"] = torch.empty_like(t["v"])
    return t


def of(t):
    return tuple(t[name] for name in ("q", "k", "v", "g", "beta"))


# A decoding step


def step_group(batch):
    name = f"step B{batch}"

    def tensors(device):
        t = inputs(device, batch, 1)
        t["state"] = empty_or_random(device, batch, HV, D, D, dtype=torch.float32)
        t["final"] = torch.empty_like(t["state"])
        return t

    def reference(t):
        return torch_rule.recurrent_gated_delta_rule(*of(t), t["state"], True, True)[1]

    GROUPS[name] = Group(tensors, lambda t: t["final"], {"torch": reference}, 8 * batch * HV * D * D / 1e9, "GB/s")
    for tile_v in (8, 16, 32, 64, 128):

        def launches(t, tile_v=tile_v):
            args = (*of(t), t["state"], t["out"], t["final"], SCALE, GROUP, D, tile_v, True, True, True)
            return [((batch * HV, D // tile_v), recurrent_kernel, args)]

        for warps in WARPS:
            for occupancy in (None, 2, 4, 8):
                VARIANTS.append(Variant(name, f"columns {tile_v}", hints(warps, occupancy), launches))


# Prompts


def chunk_tensors(batch, tokens):
    def tensors(device):
        t = inputs(device, batch, tokens)
        rows, chunks = batch * HV, -(-tokens // tiles.CHUNK)
        if device == "cpu":
            t["solved"] = t["v"].new_empty(rows, chunks, tiles.CHUNK, 2 * tiles.CHUNK)
            t["scores"] = torch.empty_like(t["solved"])
            t["factors"] = torch.empty(rows, chunks, tiles.FACTORS, tiles.CHUNK)
        else:
            t["solved"], t["scores"], t["factors"] = chunk.chunk_matrices(t["q"], t["k"], t["g"], t["beta"], True)
        t["states"] = t["v"].new_zeros(rows, chunks, 2, D, D)
        t["missed"] = t["v"].new_zeros(rows, chunks, 2, tiles.CHUNK, D)
        t["dstates"], t["dall"] = torch.zeros_like(t["states"]), torch.zeros_like(t["missed"])
        t["dq"] = torch.empty(batch, tokens, HV, D, device=device)
        t["dk"], t["dv"] = torch.empty_like(t["dq"]), torch.empty_like(t["v"])
        t["dg"], t["dbeta"] = torch.empty_like(t["g"]), torch.empty_like(t["beta"])
        return t

    return tensors


def flops(batch, tokens, with_state, in_chunk):
    """Of so many products of a chunk with the state, and so many within it, in TFLOP."""
    return 2 * batch * tokens * HV * (with_state * D * D + in_chunk * tiles.CHUNK * D) / 1e12


def matrices_group(batch, tokens):
    name = f"matrices B{batch} T{tokens}"

    def reference(t):
        return chunk.chunk_matrices(t["q"], t["k"], t["g"], t["beta"], True)[0]

    GROUPS[name] = Group(
        chunk_tensors(batch, tokens), lambda t: t["solved"], {"op": reference}, flops(batch, tokens, 0, 3), "TFLOP/s"
    )
    for solve_warps in WARPS:
        for solve_occupancy in (2, 3, 4, 6):
            solve = hinted(chunk.chunk_solve_kernel, num_worker_warps=solve_warps, occupancy=solve_occupancy)

            def launches(t, solve=solve):
                systems = t["solved"].shape[0] * t["solved"].shape[1]
                written = (t["solved"], t["scores"], t["factors"])
                args = (t["q"], t["k"], t["g"], t["beta"], *written, SCALE, GROUP, D, True, tiles.BF16_PAIR)
                then = ((systems,), solve, (t["solved"], t["factors"], LEVELS, tiles.TF32))
                return [((systems // GROUP,), chunk.chunk_matrices_kernel, args), then]

            for warps in WARPS:
                for occupancy in (2, 3, 4):
                    label = f"solve w{solve_warps} occ{solve_occupancy}, products"
                    VARIANTS.append(Variant(name, label, hints(warps, occupancy), launches))


def scan_group(batch, tokens):
    def forward_reference(t):
        return torch_rule.chunk_gated_delta_rule(*of(t), use_qk_l2norm_in_kernel=True)[0]

    def backward_args(t, tile_v):
        given = (t["q"], t["k"], t["v"], t["solved"], t["scores"], t["factors"])
        written = (t["dstates"], t["dall"])
        return (*given, t["factors"], t["factors"], *written, GROUP, D, tile_v, False, False, tiles.BF16_PAIR)

    def backward_reference(t):
        ct.launch(torch.cuda.current_stream(), (batch * HV, 8), backward.backward_scan_kernel, backward_args(t, 16))
        return t["dall"].clone()

    scan, scan_back = f"scan B{batch} T{tokens}", f"backward scan B{batch} T{tokens}"
    work, tensors = flops(batch, tokens, 3, 2), chunk_tensors(batch, tokens)
    GROUPS[scan] = Group(tensors, lambda t: t["out"], {"torch": forward_reference}, work, "TFLOP/s")
    GROUPS[scan_back] = Group(tensors, lambda t: t["dall"], {"16 columns": backward_reference}, work, "TFLOP/s")
    for tile_v in (16, 32, 64, 128):
        grid = (batch * HV, D // tile_v)

        def launches(t, tile_v=tile_v, grid=grid):
            given = (t["q"], t["k"], t["v"], t["solved"], t["scores"], t["factors"])
            args = (*given, t["out"], t["out"], t["out"], t["factors"], t["factors"], GROUP, D, tile_v)
            return [(grid, chunk.chunk_scan_kernel, (*args, False, False, False, tiles.BF16_PAIR))]

        def backward_launches(t, tile_v=tile_v, grid=grid):
            return [(grid, backward.backward_scan_kernel, backward_args(t, tile_v))]

        for warps in WARPS:
            VARIANTS.append(Variant(scan, f"columns {tile_v}", hints(warps), launches))
            VARIANTS.append(Variant(scan_back, f"columns {tile_v}", hints(warps), backward_launches))


def gradients_group(batch, tokens):
    name = f"gradients B{batch} T{tokens}"

    def args_of(t, tile_v):
        given = (t["q"], t["k"], t["g"], t["beta"], t["out"], t["states"], t["missed"], t["dstates"], t["dall"])
        written = (t["dq"], t["dk"], t["dv"], t["dg"], t["dbeta"])
        return (*given, *written, SCALE, D // tile_v, GROUP, D, tile_v, True, tiles.BF16_PAIR)

    def filled(device):
        t = chunk_tensors(batch, tokens)(device)
        for tensor in ("out", "states", "missed", "dstates", "dall"):
            t[tensor] = empty_or_random(device, *t[tensor].shape, dtype=t[tensor].dtype)
        return t

    def reference(t):
        grid = (t["states"].shape[0] * t["states"].shape[1],)
        ct.launch(torch.cuda.current_stream(), grid, backward.backward_chunk_kernel, args_of(t, 32))
        return t["dk"].clone()

    GROUPS[name] = Group(filled, lambda t: t["dk"], {"32 columns": reference}, flops(batch, tokens, 3, 8), "TFLOP/s")
    for tile_v in (16, 32, 64):

        def launches(t, tile_v=tile_v):
            grid = (t["states"].shape[0] * t["states"].shape[1],)
            return [(grid, backward.backward_chunk_kernel, args_of(t, tile_v))]

        for warps in WARPS:
            VARIANTS.append(Variant(name, f"columns {tile_v}", hints(warps), launches))


# The convolution


def conv_group(tokens, channels=8192):
    name = f"conv T{tokens}"

    def tensors(device):
        t = {"x": empty_or_random(device, 1, tokens, channels).mT, "w": empty_or_random(device, channels, 4)}
        return t | {"y": torch.empty_like(t["x"])}

    def reference(t):
        return torch_conv.causal_conv1d_fn(t["x"], t["w"], None, "silu")

    work = 2 * 2 * tokens * channels / 1e9
    GROUPS[name] = Group(tensors, lambda t: t["y"], {"torch": reference}, work, "GB/s")
    for rows, span, tile_c, occupancy in itertools.product((1, 4, 8), (4, 8, 16), (128, 256, 512), (3, 4, 5)):
        if rows * tile_c not in (512, 1024):
            continue

        def launches(t, sizes=(rows, span, tile_c)):
            pieces = ct.cdiv(tokens, sizes[0] * sizes[1])
            args = (t["x"].mT, t["w"].view(-1), t["w"], t["y"].mT, pieces, *sizes, 4, False, True, True, False, False)
            return [((1, channels // sizes[2], pieces), conv.conv_last_kernel, args)]

        label = f"{rows} x {span} tokens x {tile_c} channels"
        VARIANTS.append(Variant(name, label, hints(4, occupancy), launches))


for sequences in (1, 64):
    step_group(sequences)
for length in (512, 8192):
    matrices_group(1, length)
    scan_group(1, length)
    gradients_group(1, length)
    conv_group(length)

if __name__ == "__main__":
    main(__doc__)
