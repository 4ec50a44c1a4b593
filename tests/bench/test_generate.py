import pytest
import torch
from bench.tiny import tiny_batches
from bench.tiny import tiny_model

from tilegym.bench import generate


def test_runs_make_the_tokens_of_plain_greedy_generation():
    model, batches = tiny_model(), tiny_batches()
    run = generate.run_once(model, batches, output_length=6)
    for batch, tokens in zip(batches, run.tokens, strict=True):
        expected = model.generate(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=6, do_sample=False
        )
        assert torch.equal(tokens, expected[:, batch.prompt_length :])
    assert run.num_tokens == 18
    assert 0 < sum(run.first_token_seconds) < run.seconds
    assert run.time_per_output_token == pytest.approx((run.seconds - sum(run.first_token_seconds)) / 10)


def test_summary_of_several_runs():
    tokens = [torch.zeros(2, 5, dtype=torch.long)]
    runs = [generate.Run(tokens, 1.0, [0.2]), generate.Run(tokens, 2.0, [0.4]), generate.Run(tokens, 4.0, [0.4])]
    summary = generate.Measurement(runs, peak_memory=7).summary()
    assert summary["throughput_tokens_per_second"] == pytest.approx((10 + 5 + 2.5) / 3)
    assert summary["throughput_stdev"] == pytest.approx(3.8188, rel=1e-4)
    assert summary["time_to_first_token_ms"] == pytest.approx(400)
    assert summary["time_per_output_token_ms"] == pytest.approx(400)
    assert summary["decode_tokens_per_second"] == pytest.approx(2 / 0.4)
    assert summary["peak_memory_bytes"] == 7


def test_one_token_has_no_time_per_output_token():
    measurement = generate.measure(tiny_model(), tiny_batches(), output_length=1, num_runs=1, warmup_runs=0)
    summary = measurement.summary()
    assert summary["time_per_output_token_ms"] is None
    assert summary["decode_tokens_per_second"] is None
    assert summary["throughput_stdev"] == 0.0


def test_measure_tells_of_every_run_and_counts_only_the_timed_ones():
    lines = []
    measurement = generate.measure(tiny_model(), tiny_batches(), 2, num_runs=2, warmup_runs=1, tell=lines.append)
    assert len(measurement.runs) == 2
    assert [line.split(":")[0] for line in lines] == ["warm-up 1/1", "run 1/2", "run 2/2"]


def test_replay_follows_the_given_tokens_and_agrees_with_a_full_forward():
    model, batch = tiny_model(), tiny_batches()[0]
    forced = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])  # not what the model would choose
    steps = torch.stack(generate.replay(model, batch, forced), dim=1)
    full = generate.forward_logits(model, batch, forced)
    assert steps.shape == full.shape == (2, 4, 300)
    torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-4)
    other = torch.stack(generate.replay(model, batch, forced.flip(1)), dim=1)
    assert torch.equal(steps[:, 0], other[:, 0])
    assert not torch.allclose(steps[:, 1], other[:, 1])
