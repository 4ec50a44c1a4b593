"""Attention of a batch of requests: some prompts and many tokens to decode, packed; and of tokens over pages."""

import torch
import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main
from tilegym.ops.pytorch.attention_varlen import visible_keys


def lengths(prompts, prompt, tokens, keys):
    """Queries and keys of each sequence; those of tokens to decode are of many lengths, up to ``keys``."""
    past = [keys - keys * n // (2 * tokens) for n in range(tokens)]
    return [prompt] * prompts + [1] * tokens, [prompt] * prompts + past


def inputs(make, prompts, prompt, tokens, keys, heads, kv_heads, head_dim):
    queries, seen = (torch.tensor([0, *n]).cumsum(0) for n in lengths(prompts, prompt, tokens, keys))
    q = make(int(queries[-1]), heads, head_dim)
    k, v = (make(int(seen[-1]), kv_heads, head_dim) for _ in range(2))
    starts = (n.to(q.device, torch.int32) for n in (queries, seen))
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    mask = visible_keys(*given.values(), q.shape[0], k.shape[0], True, None)
    return {"q": q, "k": k, "v": v, **given, "longest_q": prompt if prompts else 1, "longest_k": keys, "mask": mask}


def ours(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, mask):
    return ops.fmha_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)


def masked(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, mask):
    """As transformers calls it for a batch of requests."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(0, 1)


def one_by_one(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, mask):
    bounds = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
    outs, i, j = [], 0, 0
    for queries, keys in bounds:
        here = (x.transpose(0, 1)[None] for x in (q[i : i + queries], k[j : j + keys], v[j : j + keys]))
        out = F.scaled_dot_product_attention(*here, is_causal=queries > 1, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
        i, j = i + queries, j + keys
    return torch.cat(outs)


def forward(itemsize, prompts, prompt, tokens, keys, heads, kv_heads, head_dim):
    queries, seen = lengths(prompts, prompt, tokens, keys)
    scores = sum(n * (m - (n - 1) / 2) for n, m in zip(queries, seen, strict=True))
    once = itemsize * sum(queries) * heads * head_dim
    read = once + 2 * itemsize * sum(seen) * kv_heads * head_dim + 2 * 4 * (len(seen) + 1)
    return Work(read=read, written=once, flops=int(4 * scores * heads * head_dim))


def batch(prompts, prompt, tokens, keys, heads=32, kv_heads=8, head_dim=128):
    name = f"{prompts} of {prompt}, {tokens} tokens of {keys} keys, H{heads}/{kv_heads} D{head_dim}"
    sizes = dict(prompts=prompts, prompt=prompt, tokens=tokens, keys=keys)
    return shape(name, **sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def pages(make, tokens, keys, size, heads, kv_heads, head_dim):
    """Of sequences of many lengths, up to ``keys``, whose pages are dealt out in no order."""
    seen = torch.tensor(lengths(0, 0, tokens, keys)[1])
    each = -(-keys // size)
    q = make(tokens, heads, head_dim)
    k, v = (make(tokens, kv_heads, head_dim) for _ in range(2))
    k_pages, v_pages = (make(tokens * each, size, kv_heads, head_dim) for _ in range(2))
    order = torch.randperm(tokens * each, generator=torch.Generator().manual_seed(0)).view(tokens, each)
    table = order.to(q.device, torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), seen.cumsum(0))).to(q.device, torch.int32)
    return {"q": q, "k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "block_table": table, "starts": starts}


def ours_paged(q, k, v, k_pages, v_pages, block_table, starts):
    return ops.fmha_paged_decode(q, k, v, k_pages, v_pages, block_table, starts)


def copied(q, k, v, k_pages, v_pages, block_table, starts):
    return ops.fmha_paged_decode(q, k, v, k_pages, v_pages, block_table, starts, backend="pytorch")


def paged_one_by_one(q, k, v, k_pages, v_pages, block_table, starts):
    outs = []
    for n, length in enumerate(starts.diff().tolist()):
        own = (p[block_table[n].long()].flatten(0, 1)[: length - 1] for p in (k_pages, v_pages))
        keys, values = (
            torch.cat((old, new[n][None])).transpose(0, 1)[None] for old, new in zip(own, (k, v), strict=True)
        )
        out = F.scaled_dot_product_attention(q[n][None, :, None], keys, values, enable_gqa=True)
        outs.append(out[0, :, 0])
    return torch.stack(outs)


def paged_forward(itemsize, tokens, keys, size, heads, kv_heads, head_dim):
    seen = sum(lengths(0, 0, tokens, keys)[1])
    once, new = itemsize * tokens * heads * head_dim, 2 * itemsize * tokens * kv_heads * head_dim
    read = once + new + 2 * itemsize * (seen - tokens) * kv_heads * head_dim
    return Work(read=read, written=once, flops=4 * seen * heads * head_dim)


def paged(tokens, keys, size=256, heads=32, kv_heads=8, head_dim=128):
    name = f"{tokens} tokens of {keys} keys, H{heads}/{kv_heads} D{head_dim}"
    name = name if size == 256 else f"{name}, pages of {size}"
    return shape(name, tokens=tokens, keys=keys, size=size, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


BENCHMARKS = [
    Benchmark(
        op="fmha_varlen",
        inputs=inputs,
        ours=ours,
        oracle=one_by_one,
        peers={"torch": Provider(masked)},
        forward=forward,
        reads_all=False,  # the mask is for others
        host={"prompts": 1, "prompt": 16, "tokens": 4, "keys": 64, "heads": 8, "kv_heads": 2, "head_dim": 128},
        shapes=(
            batch(0, 0, 8, 2048),
            batch(0, 0, 32, 2048),
            batch(0, 0, 128, 1024),
            batch(1, 512, 31, 1024),
            batch(2, 1024, 32, 2048),
            batch(4, 1024, 0, 0),
            batch(1, 512, 31, 1024, 16, 8, 256),
        ),
        quick=(batch(0, 0, 32, 2048), batch(1, 512, 31, 1024)),
        small=(batch(1, 9, 3, 40, 4, 2, 64), batch(0, 0, 3, 65, 2, 2, 64)),
    ),
    Benchmark(
        op="fmha_paged_decode",
        inputs=pages,
        ours=ours_paged,
        oracle=paged_one_by_one,
        peers={"torch": Provider(copied)},
        forward=paged_forward,
        reads_all=False,  # pages are not full
        host={"tokens": 4, "keys": 64, "size": 16, "heads": 8, "kv_heads": 2, "head_dim": 128},
        shapes=(
            paged(8, 2048),
            paged(32, 2048),
            paged(128, 1024),
            paged(8, 8192),
            paged(32, 2048, 256, 16, 8, 256),
            paged(20, 2048),
            paged(24, 2048, 64),
            paged(32, 2048, 16),
            paged(32, 2048, 16, 64, 8, 128),
            paged(32, 2048, 16, 64, 8, 64),
            paged(32, 2048, 32, 64, 8, 64),
        ),
        quick=(paged(32, 2048),),
        small=(paged(3, 40, 16, 4, 2, 64), paged(3, 65, 16, 2, 2, 64)),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)
