from types import SimpleNamespace

import pytest
import torch

from tilegym.bench import prompts
from tilegym.errors import ModelError

CONFIG = SimpleNamespace(vocab_size=100, pad_token_id=None, max_position_embeddings=16)


def test_bytes_stand_for_tokens_where_there_is_no_tokenizer():
    [batch] = prompts.make_batches(["az"], None, CONFIG, None, None)
    assert batch.input_ids.tolist() == [[97, 22]]


def test_padding_is_on_the_left():
    [batch] = prompts.make_batches(["abc", "d"], None, CONFIG, None, None)
    assert batch.input_ids.tolist() == [[97, 98, 99], [0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    "batch_size, sizes",
    [(None, [3]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (5, [5])],
)
def test_batch_sizes(batch_size, sizes):
    batches = prompts.make_batches(["a", "b", "c"], None, CONFIG, batch_size, None)
    assert [batch.size for batch in batches] == sizes
    ids = torch.cat([batch.input_ids for batch in batches]).flatten().tolist()
    assert ids == [97, 98, 99, 97, 98][: len(ids)]


@pytest.mark.parametrize("length, expected", [(1, [97]), (3, [97, 98, 97]), (4, [97, 98, 97, 98])])
def test_input_length_cuts_or_repeats(length, expected):
    [batch] = prompts.make_batches(["ab"], None, CONFIG, None, length)
    assert batch.input_ids.tolist() == [expected]


def test_check_length():
    batches = prompts.make_batches(["abcdefgh"], None, CONFIG, None, None)
    prompts.check_length(batches, 8, CONFIG)
    with pytest.raises(ModelError, match="8 tokens and --output_length 9 exceed the model's 16 positions"):
        prompts.check_length(batches, 9, CONFIG)


def test_sentence_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    assert prompts.read_prompts(None, path) == ["one", "two"]
    path.write_bytes("one\r\ntwo\r\n".encode("utf-8-sig"))  # as Windows writes it
    assert prompts.read_prompts(None, path) == ["one", "two"]


def test_one_source_of_prompts(tmp_path):
    assert prompts.read_prompts(None, None) == [prompts.TEXT] and prompts.read_prompts("a b", None) == ["a b"]
    with pytest.raises(ModelError, match="--input_text and --sentence_file: give one of them"):
        prompts.read_prompts("a b", tmp_path / "prompts.txt")


@pytest.mark.parametrize(
    "content, message", [(b"\n \n", "is empty"), (b"\xff\xfe\x00", "not UTF-8"), (None, "cannot be read")]
)
def test_bad_sentence_file(tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        prompts.read_prompts(None, path)
