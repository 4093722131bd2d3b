"""A parameter server: rank 0 has the weights, and updates them by gradients that workers send.

A batch, which is a step, is cut into as many parts as there are workers when the run begins. A
worker gets the weights and the number of a part, sends its gradient, and gets the next part with
the newest weights. So a slow worker has fewer parts. One that dies loses its part, and the others
join anew where they meet: to evaluate, to save and to stop.

With `train.staleness` N above 0 each gradient is an update, with its part of the learning rate. At
most N updates lie between a worker's fetch of the weights and the update by its gradient: one that
would make another's older waits (stale synchronous parallel, Ho et al., NIPS 2013). With 0, the
mean gradient of a batch is one update: that of `sync` with the parts as microbatches.

To batch norm a part is a batch. A worker sends the mean and variance of each layer, and the server
moves the running ones toward them by the layer's momentum, as `sync` does for each microbatch.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from segtrain.config import Config, TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout
from segtrain.distributed.wires import GoneError, ready, to_rank0
from segtrain.errors import ConfigError, LostRanksError, NonFiniteError
from segtrain.norm import SyncBatchNorm
from segtrain.run.console import say
from segtrain.training.local import LocalStep, StepNumbers
from segtrain.training.share_rules import refuse_layers
from segtrain.training.state import TrainState
from segtrain.training.step import StepResult, StepTensors, TrainStep, gradient, update
from segtrain.training.step_sync import StepSync
from segtrain.training.ways import Requests, Way, by_process


class _Gradient(NamedTuple):
    """What a worker tells, and what the server knows of it."""

    is_bad: bool  # loss or gradient are not finite
    weight: float  # `SegLoss.label_weight` of the part
    losses: Sequence[float]  # (2,)
    wanted: Sequence[bool]  # whether the worker is asked to stop, save or end
    used: Sequence[bool]  # of each weight, whether it has a gradient
    batches: Sequence[int]  # that each norm layer has seen: 1, or 0 without values
    part: int = 0
    fetched: int = 0  # as `_Part`
    values: Tensor | None = None  # as `_End._sent`


class _Part(NamedTuple):
    """What a worker computes."""

    number: int  # from the first step of the run on
    fetched: int  # the updates that its weights had
    began: float  # by time.monotonic()


class _End(TrainStep, Way):
    """One end of the wire: a process that computes its steps alone.

    about: as for `TrainStep`.
    """

    def __init__(self, *about: Any, requests: Requests) -> None:
        TrainStep.__init__(self, *about)
        self.step, self._requests, model = self, requests, self._state.model
        self._parts = dist.world_size() - 1  # of a batch
        self._timeout_s = self._config.train.timeout_s
        self._wires = to_rank0(self._timeout_s)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        layers = (layer for layer in model.modules() if isinstance(layer, SyncBatchNorm))
        self._norms = [layer for layer in layers if layer.running_mean is not None]
        # A worker sends gradients of the weights and these statistics, and fetches all numbers.
        self._sent = list(self._weights)
        self._sent += (x for layer in self._norms for x in (layer.running_mean, layer.running_var))
        everything = (*model.parameters(), *model.buffers())
        self._fetched = [tensor for tensor in everything if tensor.is_floating_point()]

    @classmethod
    def begin(cls, state: TrainState, config: Config, requests: Requests) -> "_End":
        """Rank 0 is the server."""
        own = cls.config_of_update(config, dist.world_size())
        end = Server if dist.is_main() else Worker
        sync = StepSync(lambda: False)
        return end(state, own, torch.device("cpu"), sync, requests=requests)

    @staticmethod
    def config_of_update(config: Config, ranks: int) -> Config:
        """Where weights may be old, each gradient is an update."""
        return by_process(config, ranks) if config.train.staleness else config

    @staticmethod
    def prepare(model: nn.Module) -> None:
        """ConfigError: it has layers whose statistics workers would not send."""
        refuse_layers(model, "train.parallel: server")

    @staticmethod
    def lines(train: TrainConfig, processes: int) -> list[str]:
        """How old weights may be."""
        ages = f"at most {train.staleness} updates old, and another run ends with other weights"
        how = ages if train.staleness else "of whole batches"
        return [f"parallel   server: {processes - 1} workers send rank 0 gradients {how}"]

    @contextmanager
    def around(self, run: Any) -> Iterator[None]:
        """A step of this process alone."""
        with dist.alone():
            yield


class Server(_End):
    """Rank 0. A step takes in the gradients of all parts of a batch."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self._idle: list[int] = []  # wait for an order
        self._at_work: dict[int, _Part] = {}  # in the order in which they got their parts
        self._arrived: dict[int, _Gradient] = {}  # wait for their update
        self._handed = self._updates = self._until = 0  # parts; all meet after step `_until`
        self._wanted = [False] * 2
        self._ages: list[int] = []  # of the applied gradients since the last log line

    def __call__(self, local: LocalStep) -> StepTensors:
        """One step, of an update for each part or of one for all.

        Raises:
            NonFiniteError: a worker's loss or gradient was not finite.
            LostRanksError: no worker is left.
        """
        state, gradients, norms = self._state, [], []
        for _ in range(self._parts):
            grad = self._take()
            gradients += [] if grad is None else [grad]
            if grad is not None and self._config.train.staleness:
                norms.append(self._update([grad], local.numbers))
        if not self._config.train.staleness:
            # Whoever sent first: in the order of parts the mean has the same bits in every run.
            gradients.sort(key=lambda grad: grad.part)
            norms.append(self._update(gradients, local.numbers))
        if state.average is not None:
            state.average.update(state.model, local.numbers.toward)
        losses = torch.tensor([grad.losses for grad in gradients], dtype=torch.float64)
        means = (losses * _shares(gradients).unsqueeze(1)).sum(0)
        flags = torch.zeros(5, dtype=torch.float64)
        return StepTensors(means, torch.stack(norms).mean(), flags, None)

    def scalars(self) -> dict[str, float]:
        """How many updates old the weights of the applied gradients were."""
        ages, self._ages = self._ages, []
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}

    def have_met(self, step: int, *, due: bool, is_last: bool) -> bool:
        """Whether all meet after `step`: then no part has been handed out that is not done."""
        if step < self._until:
            return False
        # No part is out now, so every worker waits for an order, and this one reaches all.
        for worker in [*filter(self._is_gone, self._wires)]:
            self._lose(worker)
        ranks = [0, *sorted(self._wires)]
        for worker in ranks[1:]:
            self._order(worker, True, step, self._wanted, ranks)
        dist.go_on_with(ranks)
        self._wires = {new: self._wires[old] for new, old in enumerate(ranks) if old}
        self.step_sync.ask(*self._wanted)
        return True

    def go_on(self, run: Any) -> None:
        """All workers wait for a part (collective)."""
        dist.barrier()
        step = self._state.step
        # The next step after which the config asks for more than training; requests may come first.
        self._until = next(n for n in count(step + 1) if n >= run.last_step or run.is_due(n))
        self._handed, self._idle, self._wanted = step * self._parts, [*self._wires], [False] * 2

    def _take(self) -> _Gradient | None:
        """The next gradient to apply; None: its worker has died."""
        while True:
            self._hand_out()
            # The oldest weights first: each update makes the other gradients older by one.
            worker = min(self._arrived, key=lambda rank: self._arrived[rank].fetched, default=None)
            if worker is not None and self._keeps_bound(worker):
                self._idle.append(worker)
                return self._arrived.pop(worker)
            worker = self._next_to_tell()
            # The part of a worker that is gone is over too: the step must not wait for it.
            grad, part = self._read(worker), self._at_work.pop(worker)
            if grad is None:
                return None
            grad = grad._replace(part=part.number, fetched=part.fetched)
            self._arrived[worker] = grad
            self._want(grad.wanted)
            if grad.is_bad:
                step = part.number // self._parts + 1
                name = self._wires[worker].peer
                where = f"step {step}: the loss or the gradient of rank {name}"
                raise NonFiniteError(f"{where} is not finite; it names its images")

    def _hand_out(self) -> None:
        """Gives waiting workers parts, but none of a step after which all meet."""
        step = self._state.step
        self._want([requested() for requested in self._requests])
        if any(self._wanted):  # after the steps that have begun
            self._until = min(self._until, max(step + 1, -(-self._handed // self._parts)))
        # With staleness 0 a part of the next step would be computed by weights that are to change.
        last = self._until if self._config.train.staleness else step + 1
        while self._idle and self._handed < last * self._parts:
            worker = self._idle.pop(0)
            if self._is_gone(worker):  # another worker gets this part
                self._lose(worker)
                continue
            with suppress(GoneError):  # it ended just now, as `_read` will find
                self._order(worker, False, self._handed)
            self._at_work[worker] = _Part(self._handed, self._updates, time.monotonic())
            self._handed += 1

    def _is_gone(self, worker: int) -> bool:
        """Whether a worker has ended that waits for an order, and so has nothing to send."""
        return bool(ready([self._wires[worker]], 0.0))

    def _order(self, worker: int, *order: Any) -> None:
        """Sends weights, and: False and a part; or True and the step after which all meet."""
        self._wires[worker].send(order, _joined(self._fetched))

    def _next_to_tell(self) -> int:
        """Waits for a worker that sends its gradient or is gone; LostRanksError: none does."""
        oldest, part = next(iter(self._at_work.items()))
        wires = {wire: worker for worker, wire in self._wires.items() if worker in self._at_work}
        # The limit is that of each worker: others may have sent gradients meanwhile.
        left_s = part.began + self._timeout_s - time.monotonic()
        if found := ready([*wires], left_s):
            return wires[found[0]]
        what = f"did not send its gradient for {self._timeout_s:.0f} s"
        raise LostRanksError(f"rank {self._wires[oldest].peer} {what}")

    def _read(self, worker: int) -> _Gradient | None:
        """The gradient of `worker`; None: it is gone."""
        # Memory of its own: several gradients may wait for their update.
        values = _empty(self._sent)
        try:
            said = self._wires[worker].receive(values)
        except GoneError:
            self._lose(worker)
            return None
        return _Gradient(*said)._replace(values=values)

    def _keeps_bound(self, worker: int) -> bool:
        """Whether no other gradient must become too old by the update of `worker`'s.

        The others can follow one after another, the oldest first.
        """
        bound = self._config.train.staleness
        others = [part.fetched for part in self._at_work.values()]
        others += [grad.fetched for rank, grad in self._arrived.items() if rank != worker]
        ages = (self._updates + i - fetched for i, fetched in enumerate(sorted(others), start=1))
        return bound == 0 or all(age <= bound for age in ages)

    def _update(self, gradients: Sequence[_Gradient], numbers: StepNumbers) -> Tensor:
        """Moves weights and running statistics by the mean of gradients; returns its norm."""
        mean = sum(
            grad.values * share for grad, share in zip(gradients, _shares(gradients), strict=True)
        )
        # Without a gradient of any part, a weight must have none: torch would decay it otherwise.
        used = map(any, zip(*(grad.used for grad in gradients), strict=True))
        parts = _cut(mean, self._weights)
        for weight, part, is_used in zip(self._weights, parts, used, strict=True):
            weight.grad = torch.empty_like(weight).copy_(part) if is_used else None
        for grad in gradients:
            self._ages.append(self._updates - grad.fetched)
            statistics = iter(_cut(grad.values, self._sent)[len(self._weights) :])
            # One batch after the other, as in a process that computes them in turn.
            for layer, batches in zip(self._norms, grad.batches, strict=True):
                layer.move_running(next(statistics), next(statistics), batches > 0)
        self._updates += 1
        # The average of the weights goes on once a step.
        numbers = numbers._replace(toward=0.0)
        return update(self._state, numbers, self._config.optim.clip_grad_norm)

    def _want(self, wanted: Sequence[bool]) -> None:
        self._wanted = [*map(any, zip(self._wanted, wanted, strict=True))]

    def _lose(self, worker: int) -> None:
        """Goes on without `worker`; LostRanksError: it was the last."""
        wire = self._wires.pop(worker)
        wire.close()
        if not self._wires:
            raise LostRanksError(f"rank {wire.peer} is gone, the last worker")
        say(f"warning: rank {wire.peer} is gone with its part; workers left: {len(self._wires)}")


class Worker(_End):
    """Another rank. A step computes the gradient of one part, which the server has chosen."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        for layer in self._norms:
            layer.momentum = 1.0  # running statistics are those of the newest batch

    def __call__(self, local: LocalStep) -> StepTensors:
        """Sends the gradient of a part to the server."""
        state, sync = self._state, self.step_sync
        state.model.train()
        # From 0, so that it tells how many batches this part is to the layer.
        for layer in self._norms:
            layer.num_batches_tracked.zero_()
        losses = gradient(state, local.microbatches, local.numbers, sync)
        batches = [layer.num_batches_tracked.item() for layer in self._norms]
        if max(batches, default=0) > 1:
            raise ConfigError("train.parallel: server: a norm layer has two batches in a step")
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self._weights]
        grad_norm = nn.utils.get_total_norm(grads)
        flags = sync.take_flags(grad_norm)
        labels = state.criterion.labels(local.microbatches[0].labels)
        said = _Gradient(
            is_bad=bool(flags.any()),
            weight=state.criterion.label_weight(labels).item(),
            losses=losses.tolist(),
            wanted=[requested() for requested in self._requests],
            used=[weight.grad is not None for weight in self._weights],
            batches=batches,
        )
        self._wires[0].send(said, _joined([*grads, *self._sent[len(grads) :]]))
        state.optimizer.zero_grad(set_to_none=True)
        return StepTensors(losses, grad_norm, flags, None)

    def done(self, local: LocalStep, left: StepTensors) -> StepResult:
        """As a step of all; NonFiniteError: the loss or gradient of this part is not finite."""
        result = super().done(local, left)
        self.step_sync.check_finite()
        return result

    def after_step(self, run: Any, local: LocalStep, result: StepResult) -> None:
        """The next part may be any."""
        run.reopen()

    def have_met(self, step: int, *, due: bool, is_last: bool) -> bool:
        """Whether all meet now, by the server's order; this rank gets its weights and step."""
        return self._obey()

    def _obey(self) -> bool:
        """Waits for an order; false: it is a part to compute."""
        values, state = _empty(self._fetched), self._state
        # Weights come with every order, also where all meet: then all have the server's.
        meets, number, *about = self._wires[0].receive(values)
        with torch.no_grad():
            torch._foreach_copy_(self._fetched, _cut(values, self._fetched))
        if meets:
            wanted, ranks = about
            state.step = number
            dist.go_on_with(ranks)
            self.step_sync.ask(*wanted)
            return True
        state.step, part = divmod(number, self._parts)
        # What comes before it in the batch counts as rank 0's, and the rest as nobody's.
        split = [0] * (dist.world_size() + 1)
        split[0], split[dist.rank()], split[-1] = part, 1, self._parts - 1 - part
        state.layout = Layout.of(self._config.train, tuple(split))
        return False

    def go_on(self, run: Any) -> None:
        """Waits for a part, if there is one (collective)."""
        dist.barrier()
        if self._state.step < run.last_step and not self.step_sync.is_over:
            self._obey()


def _shares(gradients: Sequence[_Gradient]) -> Tensor:
    """What each gradient counts in their mean, by the weight of its labels."""
    weights = torch.tensor([grad.weight for grad in gradients], dtype=torch.float64)
    return weights / weights.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All values in one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _empty(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), requires_grad=False)


def _cut(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first values, in the shapes of `tensors`."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = zip(values[: sum(sizes)].split(sizes), tensors, strict=True)
    return [part.view(tensor.shape) for part, tensor in parts]


WAY = _End
