"""The connection, against an agent played by hand."""

import asyncio
import os
import pickle
import struct
import threading

import numpy as np
import pytest

import tensorbus
from fake_agent import (BROKEN_OFF, CANCEL, CLAIM, CLAIMED, FENCE, FLIP_BEGIN, GOODBYE, LIVE, PUBLISH, RELEASE, RELEASED, REPLY,
                        UPDATE, FakeAgent, status)


@pytest.fixture
def agent(tmp_path):
    agent = FakeAgent(tmp_path)
    yield agent
    agent.close()


def connect(agent, role="producer", **options):
    return tensorbus.connect("policy", "job", role=role, agent=agent.path, **options)


@pytest.fixture
def bus(agent):
    agent.play(agent.accept_and_register)
    with connect(agent) as client:
        holding = tensorbus.Holding()
        holding.add("w", np.zeros(4, np.float32))
        client.register(holding)
        yield client


def test_no_agent_is_a_connection_error_with_a_remedy(tmp_path):
    with pytest.raises(ConnectionError) as caught:
        tensorbus.connect("policy", "job", role="producer", agent=tmp_path / "none.sock")
    error = caught.value
    assert isinstance(error, tensorbus.NotRunningError) and isinstance(error, tensorbus.Error)
    assert (error.code, error.reason) == ("UNAVAILABLE", "not_running")
    assert "tensorbusctl up" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and again.reason == "not_running"


def test_words_are_checked_before_anything_is_sent(agent):
    with pytest.raises(ValueError, match="'producer', 'consumer'"):
        connect(agent, role="trainer")


@pytest.mark.parametrize("bad", [{"rank": -1}, {"rank": 1.5}, {"rank": "0"}, {"rank_count": 1 << 32}, {"replica": -1},
                                 {"agent_uid": -1}, {"timeout_s": float("nan")}, {"timeout_s": None}])
def test_numbers_are_checked_before_anything_is_sent(agent, bad):
    with pytest.raises(tensorbus.InvalidError, match=repr(next(iter(bad.values())))):
        connect(agent, **bad)


@pytest.mark.parametrize("name", ["", "\ud800", "x" * 1025, 7, None])
def test_names_are_checked_before_anything_is_sent(agent, bus, name):
    for channel, job in ((name, "job"), ("policy", name)):
        with pytest.raises(tensorbus.InvalidError):
            tensorbus.connect(channel, job, role="producer", agent=agent.path)
    holding = tensorbus.Holding()
    holding.add(name, np.zeros(4, np.float32))
    with pytest.raises(tensorbus.InvalidError, match="tensor name"):
        bus.register(holding)


def test_arguments_of_requests_are_checked_before_anything_is_sent(bus):
    for version in (-1, 1.5, 1 << 64, "5", None):
        with pytest.raises(tensorbus.InvalidError, match="version"):
            bus.publish(version)
        with pytest.raises(tensorbus.InvalidError, match="version"):
            bus.update(version)
    with pytest.raises(tensorbus.InvalidError, match="no version can follow"):
        bus.publish((1 << 64) - 1)
    for bad in ({"min_replicas": -1}, {"keep_last": -1}, {"policy": []}):
        with pytest.raises(tensorbus.InvalidError, match=next(iter(bad))):
            bus.publish(1, **bad)
    for bad in (-1, "x", 1 << 64):
        with pytest.raises(tensorbus.InvalidError, match="bytes"):
            tensorbus.Arena(bad)
    with pytest.raises(tensorbus.InvalidError, match="dimension -1"):
        tensorbus.Arena(4096).array((-1, -4))


@pytest.mark.parametrize("timeout", [float("nan"), "soon", None])
def test_a_timeout_that_is_no_number_is_refused_instead_of_waited_for(agent, bus, timeout):
    agent.play(lambda: agent.send(REPLY, agent.expect(PUBLISH)[0], status()))
    request = bus.publish(1)
    calls = [bus.before_write, lambda t: bus.wait_released(1, t), bus.reconnect, lambda t: bus.update(timeout_s=t)]
    if timeout is not None:  # as long as the request itself
        calls.append(request.wait)
    for call in calls:
        with pytest.raises(tensorbus.InvalidError, match="timeout"):
            call(timeout)
    request.wait()


def test_memory_that_may_not_be_written_is_for_producers_only(agent):
    memory = np.zeros(4, np.float32)
    memory.flags.writeable = False
    holding = tensorbus.Holding()
    holding.add("w", memory)
    agent.play(agent.accept_and_register)
    with connect(agent) as client:
        client.register(holding)
    agent.play(agent.accept_and_register)
    with connect(agent, role="consumer") as client:
        with pytest.raises(tensorbus.InvalidError, match="tensor 'w': its memory is read-only"):
            client.register(holding)
    agent.forgive()


@pytest.mark.parametrize("code, reason, kind", [(4, 0, TimeoutError), (7, 0, PermissionError), (8, 14, MemoryError),
                                                (3, 2, ValueError), (14, 7, ConnectionError), (9, 1, RuntimeError)])
def test_failures_are_the_built_in_kinds(agent, bus, code, reason, kind):
    def script():
        request, _ = agent.expect(PUBLISH)
        agent.send(REPLY, request, status(code, reason, "why"))

    agent.play(script)
    request = bus.publish(1)
    with pytest.raises(kind, match="why") as caught:
        request.wait(timeout_s=10)
    assert isinstance(caught.value, tensorbus.Error)
    with pytest.raises(kind):
        request.wait(timeout_s=0)  # again, and the same


def test_registration_says_what_lies_where(agent):
    agent.play(agent.accept_and_register)
    with connect(agent) as client:
        arena = tensorbus.Arena(1 << 16)
        mapped = arena.array((4, 8), "float32")
        both = np.arange(24, dtype=np.int64)
        holding = tensorbus.Holding()
        holding.add("m", mapped.T, shape=(8, 4))
        holding.add("a", both[:12])
        holding.add("b", both[12:])
        client.attach(arena)
        registered = client.register(holding)
    assert registered == tensorbus.Registered("mapped", "because", 1.5, 2, 8, 0.1, 0.2)
    # The two halves touch: one stretch of private memory.
    assert agent.segments == [(True, 1 << 16, arena.address), (False, 24 * 8, both.ctypes.data)]
    body = agent.registrations[0]
    at = body.index(struct.pack("<QQ", 0, 8) + struct.pack("<QQ", 0, 4))
    offset, *strides = struct.unpack_from("<QQQ", body, at + 32)
    assert (offset, strides) == (mapped.ctypes.data - arena.address, [4, 32])


def test_a_wait_that_times_out_leaves_the_request_going(agent, bus):
    request = bus.publish(1)
    number, _ = agent.expect(PUBLISH)
    with pytest.raises(TimeoutError):
        request.wait(timeout_s=0.01)
    assert not request.done()
    agent.send(REPLY, number, status())
    assert request.wait(timeout_s=10) is None
    assert request.done()


def test_a_lost_agent_fails_what_is_pending(agent, bus):
    request = bus.publish(1)
    agent.drop()
    with pytest.raises(tensorbus.BusConnectionError):
        request.wait(timeout_s=10)
    with pytest.raises(ConnectionError):
        bus.check_connection()
    with pytest.raises(ConnectionError):
        bus.publish(2)


def test_a_worker_that_is_broken_off_hears_why(agent, bus):
    request = bus.publish(1)
    agent.send(BROKEN_OFF, 0, status(9, 11, "another job publishes"))
    agent.drop()
    for call in (lambda: request.wait(timeout_s=10), bus.check_connection, lambda: bus.publish(2)):
        with pytest.raises(tensorbus.BusConnectionError, match="policy/job rank 0 of 1 was broken off.*another job publishes.*connect again"):
            call()


def test_reconnects_with_the_same_memory(agent, bus):
    agent.drop()
    agent.play(agent.accept_and_register)
    bus.reconnect(timeout_s=10)
    first, second = agent.registrations
    # wire::Return comes last: what it was with the agent before. An epoch, and nothing published.
    new, back = (struct.pack("<3Q QBI?I Q", epoch, 0, 0, 0, 1, 1, False, 0, 0) for epoch in (0, 2))
    assert first.endswith(new) and second == first.removesuffix(new) + back
    bus.check_connection()


def test_an_agent_that_goes_while_it_may_write_leaves_the_rank_dirty(agent, bus):
    def script():
        agent.expect(UPDATE)
        agent.live(3)
        agent.hook(FENCE, 4)
        agent.drop()

    agent.play(script)
    with pytest.raises(tensorbus.StateError, match="mixture") as caught:
        bus.update().wait(timeout_s=10)
    assert caught.value.reason == "dirty" and bus.live_version == 0
    agent.play(agent.accept_and_register)
    bus.reconnect(timeout_s=10)
    first, second = agent.registrations
    assert (0, 1) in [(before, after) for before, after in zip(first, second, strict=True) if before != after]


def test_close_says_goodbye_and_ends_all_use(agent, bus):
    pending = bus.publish(1)
    agent.expect(PUBLISH)
    bus.close()
    bus.close()
    agent.expect(GOODBYE)
    with pytest.raises(RuntimeError, match="closed"):
        bus.publish(2)
    with pytest.raises(RuntimeError, match="closed"):
        pending.wait(timeout_s=1)


def test_update_runs_hooks_where_it_waits(agent, bus):
    seen = []
    bus.set_hook(lambda event: seen.append((event.kind, event.version, event.timeout_s, threading.get_ident())))

    def script():
        request, body = agent.expect(UPDATE)
        assert struct.unpack("<BQQ", body) == (2, 0, 5000)
        for kind in (FENCE, FLIP_BEGIN, LIVE):
            assert agent.hook(kind, 3) == status()
        agent.updated(request, 3)

    agent.play(script)
    outcome = bus.update("next", timeout_s=5).wait(timeout_s=10)
    assert outcome == tensorbus.Outcome(version=3, session=7, bytes=64, seconds=0.5, copy_seconds=0.25, digest=1 | 2 << 64)
    here = threading.get_ident()
    assert seen == [("fence", 3, 1.0, here), ("flip_begin", 3, 1.0, here), ("live", 3, 1.0, here)]


def test_a_hook_that_raises_refuses_and_shows_as_the_cause(agent, bus):
    def hook(event):
        raise KeyError("cache")

    bus.set_hook(hook)

    def script():
        request, _ = agent.expect(UPDATE)
        body = agent.hook(FENCE, 3)
        assert body[0] == 10 and b"cache" in body
        agent.updated(request, 0, status(10, 0, "refused"))

    agent.play(script)
    with pytest.raises(tensorbus.StateError, match="refused") as caught:
        bus.update(7).wait(timeout_s=10)
    assert isinstance(caught.value.__cause__, KeyError)


def test_requests_can_be_awaited_together(agent, bus):
    def script():
        update, body = agent.expect(UPDATE)
        assert struct.unpack("<BQQ", body) == (3, 5, 600_000)
        claim, _ = agent.expect(CLAIM)
        agent.send(CLAIMED, claim, status() + struct.pack("<Q", 4))
        agent.updated(update, 5)

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        update, claim = bus.update(5), bus.claim()
        agent.play(script)
        outcome, version = await asyncio.wait_for(asyncio.gather(update, claim), 10)
        ticker.cancel()
        return outcome.version, version, ticks

    outcome, version, ticks = asyncio.run(run())
    assert (outcome, version) == (5, 4)
    assert ticks > 0
    # A second loop works as well.
    agent.play(lambda: agent.send(CLAIMED, agent.expect(CLAIM)[0], status() + struct.pack("<Q", 6)))

    async def claim():
        return await bus.claim()

    assert asyncio.run(claim()) == 6


def test_close_ends_what_is_awaited(agent, bus):
    async def run():
        waiting = [asyncio.ensure_future(asyncio.wait_for(_await(bus.publish(version)), 10)) for version in (1, 2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bus.close()
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, tensorbus.StateError) and "closed" in str(ended)

    asyncio.run(run())


async def _await(request):
    return await request


def test_service_thread_answers_while_nobody_waits(agent, bus):
    seen = threading.Event()
    bus.set_hook(lambda event: seen.set())
    bus.start_service()
    assert agent.hook(FENCE, 1) == status()
    assert seen.is_set()
    bus.stop_service()


def test_cancel(agent, bus):
    def script():
        update, _ = agent.expect(UPDATE)
        cancel, _ = agent.expect(CANCEL)
        agent.send(REPLY, cancel, status())
        agent.updated(update, 0, status(1, 20, "stopped"))

    agent.play(script)
    update = bus.update()
    bus.cancel_update().wait(timeout_s=10)
    with pytest.raises(tensorbus.CancelledError):
        update.wait(timeout_s=10)


def test_the_fence_says_at_once_that_there_is_no_daemon(agent, bus):
    def script():
        agent.send(REPLY, agent.expect(PUBLISH)[0], status())
        request, _ = agent.expect(RELEASE)
        agent.send(RELEASED, request, struct.pack("<Q", 1) + status(14, 12, "no daemon answers"))  # UNAVAILABLE, not_running

    agent.play(script)
    bus.publish(1).wait(timeout_s=10)
    with pytest.raises(tensorbus.NotRunningError, match="no daemon answers"):
        bus.before_write(timeout_s=60)
    assert agent.write_count == 0


def test_the_fence_waits_and_counts(agent, bus):
    bus.before_write(timeout_s=1)
    assert agent.write_count == 1

    def script():
        agent.send(REPLY, agent.expect(PUBLISH)[0], status())
        request, _ = agent.expect(RELEASE)
        agent.send(RELEASED, request, struct.pack("<Q", 1) + status(4, 0, "engine rank 2 is slow"))
        request, _ = agent.expect(RELEASE)
        agent.release(1)
        agent.send(RELEASED, request, struct.pack("<Q", 1) + status())

    agent.play(script)
    bus.publish(1).wait(timeout_s=10)
    with pytest.raises(TimeoutError, match="engine rank 2"):
        bus.before_write(timeout_s=0.01)
    assert agent.write_count == 1
    bus.before_write(timeout_s=10)
    assert agent.write_count == 2
    assert bus.released_version == 1
    assert bus.blocked_seconds > 0
    bus.wait_released(1, timeout_s=0)


def test_a_forked_child_is_refused(bus):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            bus.publish(1)
        except tensorbus.StateError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
