import pytest
import torch
from common import PyTestCase
from common import backends
from common import device
from common import randn
from common import sanitized
from test_mla import OPTIONS
from test_mla import SHAPES
from test_mla import tensors
from test_mla_decoding import OPTIONS as DECODING_OPTIONS
from test_mla_decoding import tensors as decoding_tensors

from tilegym.backend import use_backend
from tilegym.errors import BackendError
from tilegym.ops.attn_interface import latent_attention
from tilegym.ops.attn_interface import mla_decoding_interface
from tilegym.ops.attn_interface import mla_interface
from tilegym.ops.pytorch.mla import mla as reference
from tilegym.ops.pytorch.mla_decoding import mla_decoding as decoding_reference

transformers = pytest.importorskip("transformers")


class Test_MLA_Interface(PyTestCase):
    @backends("mla")
    @pytest.mark.parametrize("name", ["full", "scaling", "lengths", "padding mask", "additive mask", "all"])
    def test_op(self, backend, name):
        kwargs = tensors(*SHAPES[1]) | OPTIONS[name]
        torch.testing.assert_close(mla_interface(**kwargs, backend=backend), reference(**kwargs))

    @backends("mla_decoding")
    @pytest.mark.parametrize("name", ["scale", "lengths", "padding mask", "additive mask"])
    @pytest.mark.parametrize("split", [None, 40])
    def test_decoding(self, backend, name, split):
        kwargs = decoding_tensors(2, 16, 150, 64, 16) | DECODING_OPTIONS[name]
        got = mla_decoding_interface(**kwargs, kv_len_per_split=split, backend=backend)
        torch.testing.assert_close(got, decoding_reference(**kwargs)[0])
        with pytest.raises(ValueError, match="transpose or kv_len_per_split, not both"):
            mla_decoding_interface(**kwargs, transpose=True, kv_len_per_split=4)

    def test_dropout(self):
        kwargs = tensors(1, 2, 1, 64, 64, 16, 16, 16)
        ones = kwargs | {"v": torch.ones_like(kwargs["v"])}
        with use_backend("cutile"):
            out = mla_interface(**ones, dropout=0.5)
        # Rows of weights sum to one; half of them are dropped, and the others doubled.
        assert not torch.allclose(out, torch.ones_like(out))
        assert abs(out.mean() - 1) < 0.2
        for call, arguments in ((mla_interface, kwargs), (latent_attention, latent_tensors(1))):
            with pytest.raises(ValueError, match=f"{call.__name__}: dropout is -0.1"):
                call(**arguments, dropout=-0.1)
            with pytest.raises(BackendError, match="no backend is called 'none'"):
                call(**arguments, dropout=0.1, backend="none")

    def test_autocast(self):
        kwargs = tensors(*SHAPES[0])
        mixed = kwargs | {"v": kwargs["v"].bfloat16()}
        with pytest.raises(TypeError, match="one dtype"):
            mla_interface(**mixed)
        expected = mla_interface(**{name: t.bfloat16() for name, t in kwargs.items()})
        with torch.autocast(device(), torch.bfloat16):
            assert torch.equal(mla_interface(**mixed), expected)
            assert torch.equal(mla_interface(**kwargs), expected)


def latent_tensors(queries, keys=30, batch=2, heads=4, dim=16, rope_dim=8, v_dim=12, rank=32):
    q, qpe = randn(batch, queries, heads, dim + rope_dim).transpose(1, 2).split((dim, rope_dim), -1)
    return dict(
        q=q,
        qpe=qpe,
        latents=randn(batch, 1, keys, rank, seed=1),
        kpe=randn(batch, 1, keys, rope_dim, seed=2),
        kv_b_weight=randn(heads * (dim + v_dim), rank, seed=3) / 4,
        scaling=0.2,
    )


class Test_Latent_Attention:
    @backends("mla")
    @pytest.mark.parametrize("name", ["plain", "lengths", "padding mask"])
    def test_absorbed_equals_expanded(self, backend, name):
        masked = randn(2, 1, 1, 30, seed=5) > -0.5
        lengths = torch.tensor([30, 7], dtype=torch.int32, device=device())
        options = {"plain": {}, "lengths": {"kv_len": lengths}, "padding mask": {"attention_mask": masked}}[name]
        kwargs = latent_tensors(1) | options
        with sanitized():
            absorbed = latent_attention(**kwargs, absorb=True, backend=backend)
            expanded = latent_attention(**kwargs, absorb=False, backend=backend)
        torch.testing.assert_close(absorbed, expanded)
        assert torch.equal(latent_attention(**kwargs, backend=backend), absorbed)

    def test_expands_where_it_must(self):
        several = latent_tensors(3)
        torch.testing.assert_close(latent_attention(**several), latent_attention(**several, absorb=False))
        with pytest.raises(ValueError, match="one query a row"):
            latent_attention(**several, absorb=True)
        one = latent_tensors(1)
        with pytest.raises(ValueError, match="no dropout"):
            latent_attention(**one, dropout=0.1, absorb=True)
        one["kv_b_weight"].requires_grad_()
        with pytest.raises(ValueError, match="no gradients"):
            latent_attention(**one, absorb=True)
        assert latent_attention(**one).requires_grad
        with torch.no_grad():
            assert torch.equal(latent_attention(**one), latent_attention(**one, absorb=True))

    def test_autocast(self):
        kwargs = latent_tensors(1)
        expected = latent_attention(**{n: t.bfloat16() if n != "scaling" else t for n, t in kwargs.items()})
        with torch.autocast(device(), torch.bfloat16):
            assert torch.equal(latent_attention(**kwargs), expected)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (dict(latents=randn(2, 30, 32)), "latents \\[B, 1, S, R\\]"),
            (dict(kv_b_weight=randn(112, 16)), "kv_b_weight must be \\[4 \\* \\(D \\+ Dv\\), 32\\]"),
            (dict(kv_b_weight=randn(64, 32)), "too few"),
        ],
        ids=["latents", "rank", "rows"],
    )
    def test_wrong_arguments(self, wrong, message):
        with pytest.raises(ValueError, match=f"latent_attention: .*{message}"):
            latent_attention(**latent_tensors(1) | wrong)

    @pytest.mark.parametrize("queries", [1, 3])
    def test_batches(self, queries):
        """None at all, and one of latents for two of queries, which are not parts of it."""
        assert latent_attention(**latent_tensors(queries, batch=0)).shape == (0, 4, queries, 12)
        with pytest.raises(ValueError, match="mla.*: expected q"):
            latent_attention(**latent_tensors(queries) | dict(latents=randn(1, 1, 60, 32)))
        with pytest.raises(ValueError, match="mla.*: expected q"):
            latent_attention(**latent_tensors(queries) | dict(latents=randn(1, 1, 60, 32), kpe=randn(1, 1, 60, 8)))


SIZES = dict(
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    max_position_embeddings=64,
    num_hidden_layers=1,
    attn_implementation="eager",
)


def deepseek(version):
    """An attention layer of DeepSeek-V2 or V3, its config, and the rotation of given positions."""
    if version == 2:
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

        config = transformers.DeepseekV2Config(**SIZES)
        layer, rotary = modeling.DeepseekV2Attention(config, 0), modeling.DeepseekV2RotaryEmbedding(config)
        rotate = modeling.apply_rotary_emb
    else:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        config = transformers.DeepseekV3Config(**SIZES)
        layer, rotary = modeling.DeepseekV3Attention(config, 0), modeling.DeepseekV3RotaryEmbedding(config)

        def rotate(q, k, embeddings):
            return modeling.apply_rotary_pos_emb_interleave(q, k, *embeddings)

    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i) * 0.3)
    return layer.to(device()).eval(), config, rotary.to(device()), rotate


def with_latent_attention(layer, rotate, hidden, embeddings, mask, cache, kv_len, backend):
    """The layer's forward as a patch of it would be."""
    batch, length, _ = hidden.shape
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    q = q.view(batch, length, -1, layer.qk_head_dim).transpose(1, 2)
    q, qpe = q.split((layer.qk_nope_head_dim, layer.qk_rope_head_dim), -1)
    latents, kpe = layer.kv_a_proj_with_mqa(hidden)[:, None].split((layer.kv_lora_rank, layer.qk_rope_head_dim), -1)
    latents = layer.kv_a_layernorm(latents)
    qpe, kpe = rotate(qpe, kpe, embeddings)
    latents, kpe = cache.update(latents, kpe, 0)
    out = latent_attention(
        q,
        qpe,
        latents,
        kpe,
        layer.kv_b_proj.weight,
        layer.scaling,
        attention_mask=mask,
        kv_len=kv_len,
        backend=backend,
    )
    return layer.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Test_Transformers:
    """A prompt and two steps of decoding, in transformers' own layers and with latents in transformers' own caches."""

    @backends("mla")
    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize("static", [False, True], ids=["dynamic cache", "static cache"])
    @pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
    @torch.no_grad()
    def test_equals_the_layer(self, backend, version, static, padded):
        layer, config, rotary, rotate = deepseek(version)
        theirs = transformers.DynamicCache()
        ours = transformers.StaticCache(config=config, max_cache_len=12) if static else transformers.DynamicCache()
        done, padding = 0, torch.tensor([0, 3], device=device()) if padded else torch.zeros(2, device=device())
        for length in (6, 1, 1):
            hidden = randn(2, length, config.hidden_size, seed=length + done)
            positions = torch.arange(done, done + length, device=device())[None]
            embeddings = rotary(hidden, positions)
            done += length
            keys = torch.arange(12 if static else done, device=device())
            visible = (keys <= positions[0][:, None]) & (keys >= padding.view(2, 1, 1, 1))  # [B, 1, Sq, Skv]
            additive = torch.zeros(2, 1, length, done, device=device()).masked_fill(
                ~visible[..., :done], torch.finfo(torch.float32).min
            )
            expected = layer(hidden, position_embeddings=embeddings, attention_mask=additive, past_key_values=theirs)[0]
            kv_len = torch.full((2,), done, dtype=torch.int32, device=device()) if static else None
            mask = visible if padded or (static and length > 1) else None
            got = with_latent_attention(layer, rotate, hidden, embeddings, mask, ours, kv_len, backend)
            seen = torch.arange(done - length, done, device=device()) >= padding[:, None]  # not of padding itself
            torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-5)
        cached = ours.layers[0]
        assert cached.keys.shape[1:] == (1, 12 if static else 8, 32) and cached.values.shape[3] == 8
