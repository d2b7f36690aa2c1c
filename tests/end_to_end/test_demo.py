"""The parts of the demo that decide: its data, its schedule, and whether training agrees with eager."""

from __future__ import annotations

import math

import torch
from expecttest import assert_expected_inline

from demo import agreement, training
from demo.generation import Reader, printable
from demo.model import Gpt
from demo.summary import what_was_done
from demo.text import Corpus, batch_at, read_corpus
from kp_dynamo.graph.places import Place
from kp_dynamo.passes.base import PassReport
from kp_dynamo.telemetry.counters import Telemetry

EAGER_LOSSES = [5.5, 5.0, 4.5]


def losses_of(ours: list[float]) -> dict[str, list[float]]:
    """Losses with a rounding of 1e-6 in float32 and of 1e-3 in bfloat16; `ours` at the default level."""
    return {
        "eager": EAGER_LOSSES,
        "eager float64": [loss - 1e-6 for loss in EAGER_LOSSES],
        "eager autocast": [loss + 1e-3 for loss in EAGER_LOSSES],
        "kp_tpu float32": EAGER_LOSSES,
        "kp_tpu": ours,
    }


def test_losses_within_rounding_agree():
    assert all(v.is_met for v in agreement.verdicts(losses_of([5.501, 5.001, 4.499])))


def test_training_without_progress_disagrees():
    float32, default = agreement.verdicts(losses_of([5.5, 5.5, 5.5]))
    assert float32.is_met
    assert not default.is_met
    assert default.difference == 1.0


def test_a_loss_that_is_not_a_number_disagrees():
    assert not agreement.verdicts(losses_of([5.5, math.nan, 4.5]))[1].is_met


def test_batches_depend_on_their_number_only():
    text = torch.arange(1000)
    tokens, targets = batch_at(text, 3, num_rows=2, context=16)
    assert tokens.shape == (2, 16)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(batch_at(text, 3, 2, 16)[0], tokens)
    assert not torch.equal(batch_at(text, 4, 2, 16)[0], tokens)


def test_the_corpus_is_there_and_a_tenth_of_it_is_held_out():
    corpus = read_corpus()
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert corpus.num_files > 40
    assert abs(share - 0.1) < 0.001


def test_the_learning_rate_rises_and_falls_to_the_end():
    rates = [training.learning_rate(step, 300) for step in range(300)]
    assert rates[0] == training.PEAK_RATE / training.NUM_WARM_UP
    assert max(rates) == rates[50] == training.PEAK_RATE
    assert 0 < rates[-1] < training.PEAK_RATE / 100


def test_what_is_padded_does_not_change_what_is_read():
    torch.manual_seed(0)
    eager = training.Training(agreement.EAGER, Corpus(torch.zeros(0), torch.zeros(0), 0), num_steps=1)
    tokens = torch.arange(9)
    with torch.no_grad():
        expected = eager.model(tokens[None])[0]
    # Float32 sums over other lengths: some units in the last place of logits around one.
    torch.testing.assert_close(Reader(eager).logits(tokens), expected, rtol=1e-4, atol=1e-5)


def test_generated_control_characters_do_not_reach_the_terminal():
    assert printable(b"a\x1b[2J\xff\tb\nc") == "a.[2J..b\nc"


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model, tokens = Gpt(num_layers=1, width=64), torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0, :8], model(changed)[0, :8])


CACHE = {"captures": {"hits": 1}, "hits": 1, "size": 2, "max_size": 100, "evictions": 0}


def counters():
    telemetry = Telemetry()
    for graph, rewritten in (("1.joint", 83), ("2.joint", 4)):
        refused = (("mm", "it is sensitive"),)
        place = Place("/x/site-packages/a/b.py:1 in f", "head (Linear)")
        telemetry.passed(graph, PassReport("cast_bf16", rewritten, refused, (), (place,)).to_dict())
        telemetry.passed(graph, PassReport("fold_views", 0).to_dict())
    return {"graphs": 2, "aot_traces": 1, "programs": 2, "fallbacks": {}, "seconds": {}, "passes": telemetry.passes}


def test_a_pass_is_one_row_of_the_summary():
    assert_expected_inline(
        what_was_done(counters(), CACHE),
        """\
graphs           2, from 1 runs of AOTAutograd
programs         2 compiled by XLA
cache            1 whole captures found again, 1 programs; 2 of 100 entries used, 0 evicted
CPU fallbacks    none
seconds
passes: 1, and 1 that found nothing to do
  pass       graphs  rewrote  refused
  cast_bf16       2       87        2
    refused 2: it is sensitive
      in head (Linear)""",
    )


def test_every_run_of_a_pass_is_shown_on_request():
    assert_expected_inline(
        what_was_done(counters(), CACHE, verbose=True).partition("passes")[2],
        """\
: 4
  graph    pass        rewrote  refused
  1.joint  cast_bf16        83        1
    refused mm: it is sensitive
      in head (Linear), at a/b.py:1 in f
  1.joint  fold_views        0        0
  2.joint  cast_bf16         4        1
    refused mm: it is sensitive
      in head (Linear), at a/b.py:1 in f
  2.joint  fold_views        0        0""",
    )
