"""PyTorch's side: what is found in a module, and that moving it into shared memory changes nothing."""

import struct

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import tensorbus  # noqa: E402
import tensorbus.torch as bus  # noqa: E402
from fake_agent import FENCE, LIVE, PUBLISH, RELEASE, RELEASED, REPLY, UPDATE, FakeAgent, status  # noqa: E402


class Model(nn.Module):
    """An embedding with a tied head, a layer, and two buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.layer(self.embed(ids))) * self.scale)


def train(adopted: bool, steps: int = 5) -> tuple[list[float], Model]:
    torch.manual_seed(1)
    model = Model()
    if adopted:
        model.arena = bus.adopt(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def inside(arena, tensor):
    return arena.address <= tensor.data_ptr() < arena.address + arena.size


def test_training_in_shared_memory_is_the_same_bit_for_bit():
    plain, _ = train(adopted=False)
    moved, model = train(adopted=True)
    assert plain == moved and plain[0] != plain[-1]
    assert all(inside(model.arena, p) for p in model.parameters()) and inside(model.arena, model.scale)
    assert model.head.weight is model.embed.weight
    # One tensor's storage is its own, not the arena.
    assert model.layer.bias.untyped_storage().nbytes() == 32


@pytest.fixture
def agent(tmp_path):
    agent = FakeAgent(tmp_path)
    agent.play(agent.accept_and_register)
    yield agent
    agent.close()


def names_of(agent):
    body, out = agent.registrations[0], []
    (count,), at = struct.unpack_from("<I", body), 4
    for _ in range(count):
        (size,) = struct.unpack_from("<I", body, at)
        out.append(body[at + 4:at + 4 + size].decode())
        at += 4 + size + 1
        at += 1 + 8 * body[at]
    return out


def test_publishes_parameters_and_saved_buffers_once(agent):
    model = Model()
    with bus.publish(model, channel="policy", agent=agent.path) as publisher:
        assert publisher.aliases == {"head.weight": "embed.weight"}
        assert publisher.memory.mode == "mapped"
    assert names_of(agent) == ["scale", "embed.weight", "layer.weight", "layer.bias"]
    assert len(agent.segments) == 1 and agent.segments[0][0], "everything in one arena"


def test_publishes_a_named_part(agent):
    with bus.publish(Model(), channel="policy", agent=agent.path, include=["layer.*", "embed.weight"], exclude=["*.bias"]):
        pass
    assert names_of(agent) == ["embed.weight", "layer.weight"]


def test_a_name_that_is_not_there_shows_the_near_ones(agent):
    with pytest.raises(tensorbus.LayoutError, match="near are 'layer.weight'"):
        bus.publish(Model(), channel="policy", agent=agent.path, include=["layer.weigth"])
    agent.forgive()  # the connection ended before anything was registered


def test_private_memory_stays_where_it_is(agent):
    model = Model()
    before = model.layer.weight.data_ptr()
    with bus.publish(model, channel="policy", agent=agent.path, adopt=False, buffers=False):
        assert model.layer.weight.data_ptr() == before
    assert not any(mapped for mapped, _, _ in agent.segments)


@pytest.mark.parametrize("move", [
    lambda m: m.to(torch.bfloat16),
    lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    lambda m: setattr(m.layer, "weight", nn.Parameter(torch.zeros(8, 8))),
])
def test_moved_memory_is_an_error_that_names_the_parameter(agent, move):
    model = Model()
    with bus.publish(model, channel="policy", agent=agent.path) as publisher:
        move(model)
        with pytest.raises(tensorbus.MovedMemoryError, match="'(layer|embed|scale)[a-z.]*'"):
            publisher.publish(1)


def test_a_step_waits_for_the_release(agent):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with bus.publish(model, channel="policy", agent=agent.path) as publisher:
        publisher.fence(optimizer, timeout_s=5)

        def script():
            agent.send(REPLY, agent.expect(PUBLISH)[0], status())
            request, body = agent.expect(RELEASE)
            assert torch.equal(model.layer.bias, before), "written before the release"
            agent.send(RELEASED, request, struct.pack("<Q", 1) + status(4, 0, "engine is slow"))
            request, _ = agent.expect(RELEASE)
            agent.release(1)
            agent.send(RELEASED, request, struct.pack("<Q", 1) + status())

        before = model.layer.bias.detach().clone()
        model(torch.arange(3)).sum().backward()
        agent.play(script)
        publisher.publish(1).wait(timeout_s=10)
        with pytest.raises(TimeoutError, match="engine is slow"):
            optimizer.step()
        assert torch.equal(model.layer.bias, before) and agent.write_count == 0
        optimizer.step()
        assert not torch.equal(model.layer.bias, before) and agent.write_count == 1
        assert publisher.blocked_seconds > 0
    optimizer.step()  # the fence went with the publisher


def test_receives_into_tensors_in_place_with_hooks(agent):
    arena, weights = bus.tensors_in_arena({"a": ((3, 4), torch.bfloat16), "b": ((5,), torch.float32), "none": ((0, 4), torch.float32)})
    calls = []
    with bus.subscribe(weights, channel="policy", agent=agent.path, rank=0, rank_count=1, adopt=False, arenas=[arena],
                       before_flip=lambda v: calls.append(("before", v)), after_flip=lambda v: calls.append(("after", v))) as sub:
        assert [mapped for mapped, _, _ in agent.segments] == [True]

        def script():
            request, _ = agent.expect(UPDATE)
            for kind in (FENCE, LIVE):
                assert agent.hook(kind, 4) == status()
            agent.updated(request, 4)

        agent.play(script)
        assert sub.update("latest").wait(timeout_s=10).version == 4
    assert calls == [("before", 4), ("after", 4)]


def test_shards_of_plain_tensors(agent):
    local = {"w": torch.zeros(2, 4)}
    with bus.publish(local, channel="policy", agent=agent.path, shards={"w": bus.Shard((4, 4), ((2, 4), (0, 4)))}):
        pass
    assert struct.pack("<4Q", 2, 4, 0, 4) in agent.registrations[0]


def test_shards_of_unknown_names_are_refused(agent):
    with pytest.raises(tensorbus.LayoutError, match="no tensor 'v'"):
        bus.publish({"w": torch.zeros(2)}, channel="policy", agent=agent.path, shards={"v": bus.Shard((4,), ((2, 4),))})
    agent.forgive()
