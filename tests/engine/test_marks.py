"""What a stream waited for is counted once it is over, and its events are used again."""

import pytest

from engine import marks


class Event:
    """Stands for a CUDA event: where the stream is when it gets there."""

    made = 0

    def __init__(self, stream: "Stream") -> None:
        Event.made += 1
        self.record(stream)

    def record(self, stream: "Stream") -> None:
        self.stream, self.at = stream, stream.now

    def query(self) -> bool:
        return self.at <= self.stream.reached

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class Stream:
    """Milliseconds: now, up to where work was enqueued; reached, up to where it ran."""

    now, reached = 0.0, 0.0


def test_waits_are_added_up_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_event", Event)
    monkeypatch.setattr(marks, "MOST_PENDING", 8)
    waits, stream = marks.Waits(), Stream()
    for number in range(1, 101):
        with waits.around(stream):
            stream.now += 2.0  # a wait
        stream.now += 5.0  # work
        stream.reached = stream.now - 20.0  # the device is three waits behind
        if number == 50:
            assert waits.seconds == pytest.approx(0.002 * 47)
    assert waits.seconds == pytest.approx(0.002 * 97)
    stream.reached = stream.now
    assert waits.seconds == pytest.approx(0.002 * 100)
    assert Event.made <= 2 * 9
