"""A language model of no known family, whose names say nothing, for the tests of integration."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast


class UnseenConfig(PreTrainedConfig):
    model_type = "unseen"

    def __init__(self, vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
                 num_attention_heads=8, **kwargs):  # fmt: skip
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**kwargs)


class Thing(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w, self.small = nn.Parameter(torch.zeros(n)), 1e-3

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.small)
        return (y * (1 + self.w.float())).to(x.dtype)


class Middle(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.alpha, self.beta, self.gamma = nn.Linear(n, m), nn.Linear(n, m), nn.Linear(m, n)

    def forward(self, x):
        return self.gamma(self.alpha(x) * torch.relu(self.beta(x)).square())


def turn(a, b, s, c):
    def once(x):
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)

    return once(a), once(b)


def mix(module, query, key, value, attention_mask, scaling):
    weights = (query @ key.transpose(-1, -2) * scaling + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class Mixing(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.heads, self.one, self.two = heads, nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.one(x).chunk(3, -1))
        length, width = q.shape[-2:]
        place = torch.arange(length, device=x.device)[:, None]
        angle = place * 100.0 ** -torch.linspace(0, 1, width // 2, device=x.device)
        q, k = turn(q, k, angle.sin()[None], angle.cos()[None])
        mask = torch.full((1, 1, length, length), -1e9, device=x.device).triu(1)
        return self.two(mix(self, q, k, v, mask, 0.2)[0].flatten(-2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        n = config.hidden_size
        self.p, self.q = Thing(n), Thing(n)
        self.r, self.s = Mixing(n, config.num_attention_heads), Middle(n, config.intermediate_size)

    def forward(self, x):
        x = x + self.r(self.p(x))
        return x + self.s(self.q(x))


class Unseen(PreTrainedModel, GenerationMixin):
    config_class = UnseenConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.last, self.out = Thing(config.hidden_size), nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.out

    def forward(self, input_ids, labels=None, use_cache=None, **kwargs):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.out(self.last(x))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
