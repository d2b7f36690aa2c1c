"""`make demo`: train a byte-level GPT through kp_tpu, check it against eager, let it write, show what was done."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

import kp_dynamo
from demo import agreement, generation, speed, summary, uneven
from demo.agreement import EAGER, EAGER_BF16, EXACT, OURS, OURS_FLOAT32
from demo.text import Corpus, read_corpus
from demo.training import CONTEXT, NUM_ROWS, Training
from kp_dynamo.telemetry import counters as telemetry

DEFAULT_STEPS, NUM_COMPARED, NUM_WRITTEN, NUM_UNEVEN = 200, 10, 400, 40
PICTURE = Path("out/loss.png")


def main() -> int:
    arguments = _arguments()
    num_steps = arguments.steps
    # Dynamo warns that it leaves out the profiler mark in every optimizer's step, once for each training.
    logging.getLogger("torch._dynamo.variables.torch").setLevel(logging.ERROR)
    start = time.perf_counter()
    corpus = read_corpus()
    training = Training(OURS, corpus, num_steps)
    _introduce(corpus, training)
    losses = _first_steps(training, min(NUM_COMPARED, num_steps))
    judged = agreement.verdicts(losses)
    print(agreement.table(losses), *judged, sep="\n", end="\n\n")
    if not all(verdict.is_met for verdict in judged):
        print("The compiled model does not train as eager does: this is a bug of kp_tpu.", file=sys.stderr)
        return 1
    _train_on(training)
    _write_text(training)
    print("Fine-tuning on texts of uneven length, with buckets and checkpoint='auto'\n")
    print(uneven.fine_tune(training, corpus, min(NUM_UNEVEN, num_steps)), end="\n\n")
    _report(training, losses[EAGER.name], arguments.verbose)
    print(f"All of it took {time.perf_counter() - start:.0f} s.")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="training steps (default %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="show what every pass did to every graph")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"steps={arguments.steps} is invalid. Allowed: an int >= 1")
    return arguments


def _introduce(corpus: Corpus, training: Training) -> None:
    num_parameters = sum(p.numel() for p in training.model.parameters())
    print(
        f"A GPT of {num_parameters / 1e6:.1f} million parameters learns {len(corpus.train) / 1e6:.1f} MB of Python's "
        f"standard library ({corpus.num_files} files),\n{NUM_ROWS} x {CONTEXT} bytes a step, on {training.way.device}. "
        'Model and batches are moved there by .to("xla").\nLeft on the CPU they would work too: the backend then '
        "copies inputs,\nresults and changed weights in every call.\n"
    )


def _first_steps(training: Training, num_first: int) -> dict[str, list[float]]:
    """The losses of the first steps of `training`, and of the runs it is compared with."""
    others = (EAGER, EXACT, EAGER_BF16, OURS_FLOAT32)
    losses = {w.name: agreement.first_losses(w, training.corpus, training.num_steps, num_first) for w in others}
    for _ in tqdm(range(num_first), desc=f"first steps, {training.way.name}", leave=False):
        training.step()
    return {**losses, training.way.name: list(training.losses)}


def _train_on(training: Training) -> None:
    done = len(training.losses)
    with tqdm(total=training.num_steps, initial=done, desc="training", unit="step") as progress:
        for _ in range(done, training.num_steps):
            progress.set_postfix(loss=f"{training.step():.3f}")
            progress.update()


def _write_text(training: Training) -> None:
    reader = generation.Reader(training)
    last = training.losses[-25:]
    print(
        f"\nLoss {training.losses[0]:.2f} at first, {sum(last) / len(last):.2f} over the last {len(last)} steps, "
        f"{generation.held_out_loss(reader, training.corpus):.2f} nats per byte on held-out text. Generated text:\n"
    )
    print(generation.generate(reader, generation.PROMPT, NUM_WRITTEN), end="\n\n")


def _report(training: Training, eager_losses: list[float], verbose: bool) -> None:
    speeds = speed.measure(training.corpus)
    print("What the backend did\n")
    print(summary.what_was_done(telemetry.snapshot(), kp_dynamo.cache_stats(), verbose))
    print(f"\nA training step, medians of {speed.NUM_ROUNDS} in turns\n")
    print(summary.speed_table(speeds, OURS.name))
    summary.draw_losses(training.losses, eager_losses, PICTURE)
    print(f"\nThe loss curve is in {PICTURE}.", end=" ")


if __name__ == "__main__":
    sys.exit(main())
