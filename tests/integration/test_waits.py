"""What a rank is told whose wait() ends before its request: who is missing and what helps, whatever the cause."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tensorbus


@pytest.fixture
def connect(bus):
    clients = []

    def start(role: str, rank: int = 0, rank_count: int = 1, channel: str = "policy") -> tensorbus.Client:
        client = tensorbus.connect(channel, "trainer" if role == "producer" else "engine", role=role, rank=rank,
                                   rank_count=rank_count)
        clients.append(client)
        holding = tensorbus.Holding()
        part = 8 // rank_count
        holding.add("w", np.zeros(part, np.float32), shape=(8,), box=((part * rank, part * rank + part),))
        client.register(holding)
        client.start_service()
        return client

    yield start
    for client in clients:
        client.close()


def told(request: tensorbus.Request, seconds: float = 1.0) -> str:
    began = time.monotonic()
    with pytest.raises(tensorbus.DeadlineError) as caught:
        request.wait(timeout_s=seconds)
    assert seconds <= time.monotonic() - began < seconds + 5
    assert not request.done(), "the request was to go on"
    assert caught.value.reason == "missing_rank"
    return str(caught.value)


def test_no_trainer(connect):
    message = told(connect("consumer").update("next", timeout_s=60))
    assert "a producer of channel policy has not registered yet; start the trainer, or check the channel's name" in message
    assert re.search(r"policy/engine replica 0 rank 0 of 1 waited [0-9.]+ s for the next version", message)


def test_another_channel(connect):
    connect("producer")
    assert "a producer of channel polcy has not registered" in told(connect("consumer", channel="polcy").update("next"))


def test_a_missing_rank(connect):
    connect("producer")
    assert "rank 1 of 2 has not registered" in told(connect("consumer", 0, 2).update("next"))


def test_a_trainer_that_left(connect):
    trainer, engine = connect("producer"), connect("consumer")
    trainer.publish(1).wait()
    assert engine.update("next").wait().version == 1
    trainer.close()
    assert "policy/trainer rank 0 of 1" in told(engine.update("next"))


def test_a_trainer_that_publishes_nothing(connect):
    connect("producer")
    assert "has published nothing newer than version 0" in told(connect("consumer").update("next"))


def test_a_slow_engine_is_named_to_the_trainer(connect):
    trainer = connect("producer")
    connect("consumer")
    trainer.publish(1).wait()
    with pytest.raises(tensorbus.DeadlineError, match="policy/engine replica 0"):
        trainer.before_write(timeout_s=1)


def test_without_a_daemon(bus, connect):
    engine = connect("consumer")
    request = engine.update("next", timeout_s=60)
    os.kill(bus.pids["tensorbusd"], 9)
    time.sleep(0.5)
    with pytest.raises(tensorbus.DeadlineError, match="daemon"):
        request.wait(timeout_s=1)


def test_many_threads_may_wait_for_one_request(connect):
    trainer, engine = connect("producer"), connect("consumer")
    request = engine.update("next", timeout_s=30)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(request.wait) for _ in range(6)]
        trainer.publish(1).wait()
        assert [each.result().version for each in waiting] == [1] * 6


def test_an_answer_between_two_looks_is_no_deadline(connect):
    trainer, engine = connect("producer"), connect("consumer")
    request = engine.update("next", timeout_s=30)
    core, waits = request._core, []

    class Late:
        taken, done = property(lambda self: core.taken), core.done
        explain = core.explain

        def wait(self, timeout_s):
            waits.append(timeout_s)
            if len(waits) > 1:
                return core.wait(timeout_s)
            trainer.publish(1).wait()
            while not core.done():  # the service thread reads the answer
                time.sleep(0.01)
            raise tensorbus.DeadlineError("this look is over", code="DEADLINE_EXCEEDED")

    request._core = Late()
    assert request.wait(timeout_s=30).version == 1


def test_requests_of_a_lost_connection_are_told_from_later_ones(bus, connect):
    trainer = connect("producer")
    os.kill(bus.pids["tensorbus-agent"], signal.SIGSTOP)
    old = trainer.publish(1)
    os.kill(bus.pids["tensorbus-agent"], signal.SIGCONT)
    trainer.reconnect(timeout_s=30)
    new = trainer.publish(2)
    new.wait(timeout_s=30)
    with pytest.raises(tensorbus.CancelledError, match="connecting again"):
        old.wait(timeout_s=30)
    trainer.publish(3).wait(timeout_s=30)


def test_a_wait_without_a_time_ends_with_its_request(connect):
    engine = connect("consumer")
    request = engine.update("next", timeout_s=1)
    began = time.monotonic()
    with pytest.raises(tensorbus.DeadlineError, match="has not registered"):
        request.wait()
    assert request.done() and time.monotonic() - began < 5


def test_a_short_wait_asks_nothing_and_returns_at_once(connect):
    request = connect("consumer").update("next")
    began = time.monotonic()
    with pytest.raises(tensorbus.DeadlineError):
        request.wait(timeout_s=0)
    assert time.monotonic() - began < 0.5
