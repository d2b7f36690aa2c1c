"""sentence-transformers: embeddings are eager's, for sentences of many lengths and in training."""

import pytest
import torch
from sentence_transformers import SentenceTransformer, losses, models
from transformers import BertConfig, BertModel, BertTokenizer

from tests.spine import counted

pytestmark = pytest.mark.slow
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
SENTENCES = [" ".join("abcdefgh"[:length]) for length in (1, 8, 3, 5, 2, 7)]
# Embeddings of size 1 from sums of 32 and 64 terms in two layers: some ten roundings of 1e-7.
CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes, **dropout)).save_pretrained(
        tmp_path
    )
    return str(tmp_path)


def embedder(folder):
    return SentenceTransformer(
        modules=[models.Transformer(folder), models.Pooling(32), models.Normalize()], device="cpu"
    )


def compile_inside(model, **how):
    options = {"precision": "float32", **how.pop("options", {})}
    model[0].auto_model.compile(backend="kp_tpu", options=options, **how)
    return model


def encoded(model, **how):
    return model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False, **how)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_embeddings_are_those_of_eager(folder, batch_size):
    mine = compile_inside(embedder(folder))
    with counted() as count:
        found = encoded(mine, batch_size=batch_size)
    assert count.graphs + count.capture_hits >= 1
    torch.testing.assert_close(found, encoded(embedder(folder), batch_size=batch_size), **CLOSE)


def test_buckets_serve_all_lengths_with_few_programs(folder):
    mine = compile_inside(embedder(folder), dynamic=True, options={"buckets": [6, 10]})
    with counted() as count:
        found = encoded(mine, batch_size=1)
    torch.testing.assert_close(found, encoded(embedder(folder), batch_size=1), **CLOSE)
    assert count.programs <= 3  # one a bucket, and one for a length that Dynamo first takes as fixed


def test_compile_of_the_whole_has_no_effect_on_encode(folder):
    """The pitfall of the page. If it is gone, so may the line there."""
    model = embedder(folder)
    model.compile(backend="kp_tpu")
    with counted() as count:
        encoded(model)
    assert count.graphs == 0


def test_training_steps_are_those_of_eager(folder):
    found = []
    for model in (compile_inside(embedder(folder)), embedder(folder)):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loss_of = losses.CosineSimilarityLoss(model)
        features = [model.tokenize(SENTENCES), model.tokenize(SENTENCES[::-1])]
        target = torch.linspace(0, 1, len(SENTENCES))
        for _ in range(5):
            loss = loss_of(features, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    torch.testing.assert_close(torch.tensor(found[:5]), torch.tensor(found[5:]), rtol=1e-5, atol=1e-7)


def test_the_model_is_saved_with_the_keys_of_the_original(folder, tmp_path):
    model = compile_inside(embedder(folder))
    before = encoded(model)
    model.save(str(tmp_path / "saved"))
    torch.testing.assert_close(encoded(SentenceTransformer(str(tmp_path / "saved"), device="cpu")), before, **CLOSE)
