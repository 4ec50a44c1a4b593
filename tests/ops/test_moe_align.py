import pytest
import torch
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from test_fused_moe import BEYOND_INT32
from test_fused_moe import choice

from tilegym.ops import moe_align_block_size
from tilegym.ops.pytorch.moe_align import moe_align_block_size as reference_align


class Test_Align(PyTestCase):
    @backends("moe_align_block_size")
    @pytest.mark.parametrize(
        ("tokens", "top_k", "experts", "block"),
        [
            (1, 2, 4, 16),
            (5, 3, 7, 16),
            (60, 4, 33, 32),
            (97, 8, 128, 16),
            (600, 8, 16, 16),
            (3, 2, 300, 4),
            (0, 2, 4, 16),
        ],
    )
    @dtypes(torch.int32, torch.int64)
    def test_op(self, backend, dtype, tokens, top_k, experts, block):
        # The last id is left out.
        ids = torch.stack([randn(experts + 1, seed=t).topk(top_k).indices for t in range(tokens)]) if tokens else None
        ids = torch.empty(0, top_k, device=device()) if ids is None else ids
        ids = ids.to(dtype)
        with sanitized():
            sorted_ids, expert_ids, padded = moe_align_block_size(ids, block, experts, backend=backend)
        for got, expected in zip((sorted_ids, expert_ids, padded), reference_align(ids, block, experts), strict=True):
            assert torch.equal(got, expected)
        # By the definition: every block's pairs are its expert's.
        flat = ids.reshape(-1).tolist() + [None]
        rows = [flat[pair] for pair in sorted_ids.tolist()]
        for i, expert in enumerate(expert_ids.tolist()):
            inside = set(rows[i * block : (i + 1) * block]) - {None}
            assert inside == ({expert} if expert >= 0 else set())
        assert sorted(x for x in rows if x is not None) == sorted(x for x in flat[:-1] if x < experts)
        assert padded.item() == block * (expert_ids >= 0).sum().item()

    @backends("moe_align_block_size")
    @pytest.mark.parametrize("tokens", [3, 100])
    def test_left_out(self, backend, tokens):
        ids = choice(tokens, 2, 6)
        left_out = ids.clone()
        ids[1, 1] = -1
        expected = reference_align(ids, 16, 6)
        for value in (7, *BEYOND_INT32):
            left_out[1, 1] = value
            results = moe_align_block_size(left_out, 16, 6, backend=backend)
            assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))

    def test_not_contiguous(self):
        ids = choice(40, 4, 8)[:, ::2]
        with sanitized():
            results = moe_align_block_size(ids, 16, 8, backend="cutile")
        for got, expected in zip(results, reference_align(ids, 16, 8), strict=True):
            assert torch.equal(got, expected)

    @backends("moe_align_block_size")
    def test_wrong_arguments(self, backend):
        ids = torch.zeros(3, 2, dtype=torch.int64)
        with pytest.raises(ValueError, match="power of two"):
            moe_align_block_size(ids, 12, 4, backend=backend)
        with pytest.raises(ValueError, match=r"must be \[T, k\]"):
            moe_align_block_size(ids[0], 16, 4, backend=backend)
        with pytest.raises(TypeError, match="int32 or int64"):
            moe_align_block_size(ids.float(), 16, 4, backend=backend)

    def test_compiles_for_every_architecture(self):
        with recorded_launches() as launches:
            moe_align_block_size(torch.zeros(8192, 8, dtype=torch.int64), 128, 128, backend="cutile")
        assert len(launches) == 2
        assert_launches_compile(
            lambda: moe_align_block_size(torch.zeros(8192, 8, dtype=torch.int64), 128, 128, backend="cutile")
        )

    @gpu
    def test_graph_capture(self):
        ids = choice(64, 4, 8)
        self.assertCaptures(lambda t: moe_align_block_size(t, 16, 8, backend="cutile"), ids)
