"""All ranks replay or none does, in every order in which they can come to record a step.

The ranks are threads that run `GraphStep` itself; what it calls is made up. What a rank does next
follows from what the others have told it, not from when, so that one run gives its events; all
their interleavings are walked then.
"""

import threading
from contextlib import contextmanager
from itertools import combinations_with_replacement
from types import SimpleNamespace

import pytest
import torch

from segtrain.distributed import collectives as dist
from segtrain.training import graph
from segtrain.training.graph import GraphStep
from segtrain.training.step import StepTensors

CALLS, STEPS = 3, 3  # in a recording; taken
RECORDS, DIFFERS = "records", "differs"
BEHAVIOURS = [RECORDS, DIFFERS, *range(CALLS)]  # a number: fails at this call of the recording
MEETING = 1  # the call for which NCCL may let the ranks of a machine meet
here = threading.local()


class StuckError(Exception):
    """The ranks wait for each other in different places."""


class World:
    """Ranks in threads, which meet; `events` of each: what it did, and where it met the others."""

    def __init__(self, behaviours, *, meets):
        self.behaviours, self.meets = behaviours, meets
        self.events = [[] for _ in behaviours]
        self.modes = [[] for _ in behaviours]
        self.said, self.limited = [], [False] * len(behaviours)
        self._arrived, self._results, self._changed = {}, {}, threading.Condition()
        self._over, self.stuck = 0, False

    def act(self, what):
        self.events[here.rank].append((what, False))

    def meet(self, what, value=None):
        """What each rank has brought to its meeting of this number; all must mean the same one."""
        self.events[here.rank].append((what, True))
        with self._changed:
            self._arrived[here.rank] = what, value
            if len(self._arrived) == len(self.behaviours) and len(self._kinds()) == 1:
                values = [self._arrived[rank][1] for rank in range(len(self.behaviours))]
                for rank in self._arrived:
                    self._results[rank] = values
                self._arrived = {}
            self._look()
            self._changed.wait_for(lambda: here.rank in self._results or self.stuck)
            if here.rank not in self._results:
                raise StuckError
            return self._results.pop(here.rank)

    def _kinds(self):
        return {what for what, _ in self._arrived.values()}

    def _look(self):
        waiting = len(self._arrived)
        self.stuck |= waiting > 0 and waiting + self._over == len(self.behaviours)
        self._changed.notify_all()

    def run(self, tried):
        threads = [
            threading.Thread(target=self._rank, args=(rank, tried))
            for rank in range(len(self.behaviours))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _rank(self, rank, tried):
        here.rank, here.world = rank, self
        state = SimpleNamespace(layout=None)
        state.scaler = SimpleNamespace(is_enabled=lambda: False)
        state.optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None)
        state.model = torch.nn.Module()
        step = GraphStep(Eager(), state, Trial() if tried else None)
        try:
            for _ in range(STEPS):
                step(SimpleNamespace(shape="a shape"))
        except StuckError:
            pass
        with self._changed:
            self._over += 1
            self._look()


class Eager:
    step_sync = SimpleNamespace(drop_flags=lambda: None)

    def __call__(self, local):
        return left("eager")


def left(mode):
    here.world.meet("sum of a step")
    here.world.modes[here.rank].append(mode)
    return StepTensors(*torch.zeros(3).unbind(), None)


class Recorded:
    """A recording of some calls, of which this rank may fail in one."""

    def __init__(self, *_):
        world = here.world
        for call in range(CALLS):
            if world.behaviours[here.rank] == call:
                raise RuntimeError("out of memory")
            at = f"call {call}"
            world.meet(at) if world.meets and call == MEETING else world.act(at)
        self.graph = SimpleNamespace(reset=lambda: None, pool=lambda: None)

    def has_moved(self):
        return False

    def replay(self, local):
        return left("replay")


class Trial:
    @contextmanager
    def limited(self):
        here.world.limited[here.rank] = True
        yield
        here.world.limited[here.rank] = False

    def replays(self):
        here.world.act("all have recorded")

    def settle(self, *_):
        differs = here.world.behaviours[here.rank] == DIFFERS
        return "other bits" if any(here.world.meet("verdict", differs)) else None


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    monkeypatch.setattr(graph, "_Recorded", Recorded)
    monkeypatch.setattr(graph, "EAGER_STEPS", 1)
    monkeypatch.setattr(graph, "changed_tensors", lambda state: [torch.zeros(1)])
    monkeypatch.setattr(graph, "say", lambda line: here.world.said.append(line))
    monkeypatch.setattr(dist, "all_gather_object", lambda value: here.world.meet("gather", value))
    monkeypatch.setattr(dist, "is_main", lambda: here.rank == 0)


def walk(events):
    """All states that ranks with these events can be in, and those from which none goes on."""
    ends = tuple(map(len, events))
    seen, todo, stuck = {(0,) * len(ends)}, [(0,) * len(ends)], []
    while todo:
        state = todo.pop()
        following = [rank for rank, at in enumerate(state) if at < ends[rank]]
        nexts = {rank: events[rank][state[rank]] for rank in following}
        moves = [{rank} for rank in following if not nexts[rank][1]]
        if len(following) == len(ends) and len(set(nexts.values())) == 1 and not moves:
            moves = [set(following)]  # a meeting of all
        if not moves and following:
            stuck.append(state)
        for move in moves:
            new = tuple(at + (rank in move) for rank, at in enumerate(state))
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return seen, stuck


def worlds(*, meets, tried):
    for size in (2, 3):
        for behaviours in combinations_with_replacement(BEHAVIOURS, size):
            if tried or DIFFERS not in behaviours:
                world = World(behaviours, meets=meets)
                world.run(tried)
                yield world, *walk(world.events)


@pytest.mark.parametrize("tried", [False, True], ids=["proven", "new stack"])
def test_all_ranks_replay_or_none_does(tried):
    number = 0
    for world, states, stuck in worlds(meets=False, tried=tried):
        number += len(states)
        assert (stuck, world.stuck) == ([], False), world.behaviours
        modes = world.modes[0]
        assert all(other == modes for other in world.modes), world.behaviours
        assert len(modes) >= STEPS
        works = set(world.behaviours) == {RECORDS}
        assert modes[-1] == ("replay" if works else "eager")
        assert len(world.said) == (0 if works else 1)
        if any(isinstance(one, int) for one in world.behaviours):
            failed = next(i for i, one in enumerate(world.behaviours) if isinstance(one, int))
            assert f"rank {failed}: a step cannot be recorded" in world.said[0]
    assert number > 500


def test_where_a_recording_is_a_meeting_itself_only_the_limit_of_the_trial_ends_it():
    """NCCL lets ranks meet there to register buffers, which segtrain switches off."""
    found = set()
    for world, _, stuck in worlds(meets=True, tried=True):
        failing = [one for one in world.behaviours if one in range(MEETING + 1)]
        parts = 0 < len(failing) < len(world.behaviours)
        assert bool(stuck) == world.stuck == parts, world.behaviours
        if parts:
            assert all(world.limited)
            found.add(world.behaviours)
    assert len(found) > 10
