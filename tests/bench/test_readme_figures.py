"""The figures in README.md are those of docs/benchmarks.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A row of README.md's table of ops, by what it begins with: the rows of docs/benchmarks.md that it is about.
ROWS = {
    "`rms_norm` 32768x4096": ["rms_norm, forward: 32768x4096"],
    "`softmax` 32768x4096 / 4096x128256": [
        "softmax, forward: 32768x4096",
        "softmax, forward: Llama-3.1-8B, 4096 tokens",
    ],
    "`silu_and_mul` 8192x14336": ["silu_and_mul, forward: 8192x14336"],
    "`apply_rope_base` B4 H32/8 S4096 D128": ["apply_rope_base, forward: B4 H32/8 S4096 D128"],
    "`cross_entropy` 8192x128256": ["cross_entropy, both: 8192x128256"],
    "`fused_linear_cross_entropy` 8192x4096x128256": ["fused_linear_cross_entropy, both: 8192x4096x128256"],
    "`fmha` B4 H32/8 T4096 D128": [f"fmha, forward: B4 H32/8 T4096 D128 {kind}" for kind in ("causal", "full")],
    "`fmha` backward": [f"fmha, backward: B4 H32/8 T4096 D128 {kind}" for kind in ("causal", "full")],
    "D256, causal": [f"fmha, {passes}: B4 H32/8 T4096 D256 causal" for passes in ("forward", "backward")],
    "Phi-3-mini's, D96": [f"fmha, {passes}: Phi-3-mini, 4096 tokens" for passes in ("forward", "backward")],
    "gpt-oss-20b's, D64": [f"fmha, {passes}: gpt-oss-20b, 8192 tokens" for passes in ("forward", "backward")],
    "`mla` B4 H16 T4096": ["mla, forward: B4 H16 T4096 causal"],
    "`mla` backward": ["mla, backward: B4 H16 T4096 causal"],
    "`mla_decoding` B64 T8192": [f"mla_decoding, forward: B64 H{heads} T8192" for heads in (16, 128)],
    "`fmha_decode` B8 H32/8 T8192": ["fmha_decode, forward: B8 H32/8 T8192 D128"],
    "`chunk_gated_delta_rule` T8192": ["chunk_gated_delta_rule, forward: B1 T8192 H16/32 D128"],
    "`matmul` 4096, `group_gemm` 4 of 4096": ["matmul, forward: 4096", "group_gemm, forward: 4 of 4096"],
    "`linear`, one token, 28672x4096": ["linear, forward: gate_up 28672x4096, 1 token"],
    "GPT-2's output layer": ["linear, forward: GPT-2 lm_head, 2048 tokens"],
    "`fused_moe` Qwen3-30B-A3B": [f"fused_moe, forward: Qwen3-30B-A3B, {n} tokens" for n in (16, 8192)],
    "`ragged_group_gemm` Qwen3-30B-A3B": ["ragged_group_gemm, forward: Qwen3-30B-A3B, 65500 rows"],
}
COLUMNS = {
    "Liger": "liger",
    "FlashAttention-2": "flash",
    "the kernels": "cutile backend",
    "flash-linear-attention": "fla",
}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text):
    """Every table, as the heading above it and its lines' cells."""
    heading, found = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            found.append((heading, []))
        elif not re.fullmatch(r"[|\- ]+", line):
            found[-1][1].append(cells(line))
    return [(heading, lines) for heading, lines in found if lines]


@pytest.fixture(scope="module")
def measured():
    """The lines of docs/benchmarks.md by heading and first cell, each a dict by column."""
    return {
        f"{heading}: {line[0]}": dict(zip(lines[0], line, strict=True))
        for heading, lines in tables((ROOT / "docs/benchmarks.md").read_text())
        for line in lines[1:]
    }


def readme_table(first):
    return next(lines[1:] for _, lines in tables((ROOT / "README.md").read_text()) if lines[0][0] == first)


def first_number(text):
    found = re.match(r"\d+(?:\.\d+)?", text)
    return float(found.group()) if found else None


def is_rounded(shown, value):
    """Whether ``shown``, a number's text, is ``value``, of which docs/benchmarks.md has four digits, rounded to it."""
    unit = 10.0 ** -len(shown.partition(".")[2])
    return abs(float(shown) - value) <= unit / 2 + 2e-3 * abs(value)


def time_of(row, provider="TileGym"):
    if provider == "torch" and "torch, us" not in row:
        provider = "pytorch backend"
    return first_number(row.get(f"{provider}, us", ""))


def test_the_table_of_ops(measured):
    table, above = readme_table("op"), ""
    found = {}
    for label, ours, others in table:
        label = f"{above} backward" if label == "its backward" else label
        above = label.split(" ")[0]
        key = next((key for key in ROWS if label.startswith(key)), None)
        assert key, f"{label}: say here which rows it is about"
        found[key] = [measured[row] for row in ROWS[key]], ours, others
    assert found.keys() == ROWS.keys()
    for key, (rows, ours, others) in found.items():
        own = [first_number(row[column]) for row in rows for column in ("Rate", "Of the roofline", "Peak memory, MB")]
        own += [time_of(row) / 1000 for row in rows]
        for shown in re.findall(r"\d+(?:\.\d+)?", ours):
            assert any(is_rounded(shown, value) for value in own), f"{key}: {shown}, measured: {own}"
        name = ""
        for before, shown in re.findall(r"([^,/]*?)(\d+\.\d+)x", others):
            name = before.strip() or name
            column = COLUMNS.get(name, name)
            ratios = [time_of(row) / time for row in rows if (time := time_of(row, column))]
            assert any(is_rounded(shown, ratio) for ratio in ratios), f"{key}: {name} {shown}x, measured: {ratios}"


def test_the_table_of_models(measured):
    text = (ROOT / "docs/benchmarks.md").read_text()
    for model, decoding, first_token, coverage in readme_table("model"):
        shown = re.findall(r"\d+(?:\.\d+)?", f"{decoding} {first_token} {coverage}")
        rows = measured[f"{model.lower()}: Decoding, tokens/s"], measured[f"{model.lower()}: Time to first token, ms"]
        found = [float(row[side]) for row in rows for side in ("Unpatched", "TileGym")]
        section = text.partition(f"\n### {model.lower()}\n")[2]
        found.append(float(re.search(r"Kernel coverage \(GPU time\): ([\d.]+)%", section).group(1)))
        assert len(shown) == 5
        for number, value in zip(shown, found, strict=True):
            assert is_rounded(number, value), f"{model}: {number}, measured: {value}"


def test_the_table_of_training_steps(measured):
    table = readme_table("trained model")
    assert len(table) > 1
    for model, *cells_of_providers in table:
        rows = [measured[f"{model.lower()}: {figure}"] for figure in ("Tokens/s", "Peak memory, GB")]
        for column, cell in zip(("Unpatched", "Liger 0.8.5", "TileGym"), cells_of_providers, strict=True):
            shown = re.findall(r"\d+(?:\.\d+)?", cell)
            for number, row in zip(shown, rows, strict=True):
                assert is_rounded(number, first_number(row[column])), f"{model}, {column}: {number}, measured: {row}"


def test_training_by_graphs(measured):
    text = (ROOT / "README.md").read_text()
    found = re.search(r"its layers as CUDA graphs: (\d+) tokens/s, (\d+\.\d) GB", text).groups()
    for figure, shown in zip(("Tokens/s", "Peak memory, GB"), found, strict=True):
        assert is_rounded(shown, first_number(measured[f"qwen3-0.6b, graph: {figure}"]["TileGym"]))


def test_the_host_times(measured):
    sentence = re.search(r"A call of an op on tiny tensors costs.*?Calls", (ROOT / "README.md").read_text(), re.DOTALL)
    times = re.findall(r"`(\w+)` (\d+\.\d)(?: where torch's took|\s+and)\s+(\d+\.\d)", sentence.group())
    assert len(times) == 6
    for op, ours, torchs in times:
        row = measured[f"Host time of one call: {op}"]
        other = row["torch"] if row["torch"] != "-" else row["cuBLAS"]
        assert is_rounded(ours, first_number(row["TileGym"])), (op, row)
        assert is_rounded(torchs, first_number(other)), (op, row)
