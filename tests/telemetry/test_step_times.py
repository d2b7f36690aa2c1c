"""Times of steps: the median of the last 50, which step is slow, and where the loop was when it became slow."""

import threading

import pytest

from kp_dynamo.telemetry.step_times import NUM_KEPT, StepTimes


def ended_at(steps, times):
    return [steps.ended(time, "1.backward", 0) for time in times]


def test_a_step_over_the_factor_is_slow_and_one_at_it_is_not():
    steps = StepTimes("SGD.step", 2.0)
    assert ended_at(steps, range(11)) == [None] * 11
    at_it, over_it = ended_at(steps, (12, 14.5))
    assert at_it is None
    assert (over_it.number, over_it.kind, over_it.seconds, over_it.usual_s) == (13, "SGD.step", 2.5, 1.0)
    assert over_it.place[0] == __file__


def test_fewer_than_ten_times_have_no_median():
    assert not any(ended_at(StepTimes("backward", 2.0), [*range(10), 1000]))
    assert any(ended_at(StepTimes("backward", 2.0), [*range(11), 1000]))


def test_only_the_last_fifty_times_count():
    steps = StepTimes("backward", 2.0)
    ended_at(steps, [10.0 * number for number in range(60)])
    quick = [590 + number for number in range(1, NUM_KEPT + 1)]
    assert not any(ended_at(steps, quick))
    (found,) = ended_at(steps, [quick[-1] + 3])
    assert found.usual_s == 1.0


def test_without_a_factor_nothing_is_slow():
    steps = StepTimes("backward", None)
    assert not any(ended_at(steps, [*range(20), 1000]))
    assert steps.deadline is None


def test_a_look_after_the_deadline_notes_the_line_and_one_before_it_does_not():
    steps, middle = StepTimes("backward", 2.0), threading.Barrier(2)
    found = []

    def loop():
        ended_at(steps, range(11))
        middle.wait()
        middle.wait()  # the line that is noted
        found.extend(ended_at(steps, [15]))

    thread = threading.Thread(target=loop)
    thread.start()
    middle.wait()
    assert steps.deadline == 12
    steps.look(11.9)
    assert steps.deadline == 12
    steps.look(12.1)
    assert steps.deadline == pytest.approx(14.2)  # when the time of the step has doubled
    middle.wait()
    thread.join()
    assert found[0].place[2] == "loop"


def test_a_step_counts_the_programs_that_were_compiled_in_it():
    steps = StepTimes("backward", 2.0)
    for number in range(12):
        steps.ended(number, "1.backward", 7)
    assert steps.ended(20, "1.backward", 9).num_compiled == 2
