"""The step as a CUDA graph: one launch instead of some thousand, so the device waits for nobody.

In bfloat16 a step of PSPNet-R50 on 2 crops of 713 takes an H100 25 ms, and its host 106 to launch.
So the first steps run as they are, and then one is recorded: everything that `TrainStep` does, with
the sums over ranks and the update. From there on a step is a copy of its images and a replay.

A graph keeps addresses and Python numbers as they were. `StepNumbers` are tensors therefore, and a
graph whose tensors have moved is recorded again. What waits with a limit (a lost rank, NaN) stays
outside, in `StepSync.record`.

A graph refers to NCCL's communicators, which cannot be destroyed before it: leaving the groups
releases all graphs first.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segtrain.config import Config
from segtrain.data.sample.loader import worker_failures
from segtrain.distributed import collectives as dist
from segtrain.distributed.liveness import WITHOUT_GRAPHS
from segtrain.distributed.stack import stack_of_ranks, verdict_of_ranks
from segtrain.norm.running import forget_batches
from segtrain.run.console import say
from segtrain.text import MAX_NAME, printable
from segtrain.training.graph_trial import GraphTrial, copies, restore
from segtrain.training.local import LocalStep
from segtrain.training.state import TrainState, passes_of
from segtrain.training.step import StepResult, StepTensors, TrainStep
from segtrain.types import Batch

# Libraries choose kernels, and optimizers and sums make their memory.
EAGER_STEPS = 3


class GraphPlan(NamedTuple):
    """Whether steps are replayed.

    why_not: for the log; None: they are; empty: nothing is to be said.
    trial: of the first replay, where none was compared before.
    """

    why_not: str | None
    trial: GraphTrial | None = None


def plan_graphs(config: Config, state: TrainState, device: torch.device) -> GraphPlan:
    """How the steps of this run are taken (collective)."""
    reason = why_not(config, state, device)
    if reason is not None or dist.world_size() == 1:
        return GraphPlan(reason)  # a rank alone has no sums of NCCL in its graphs
    if any(dist.all_gather_object(WITHOUT_GRAPHS in os.environ)):
        return GraphPlan("a replay did not come back, so the ranks were started again")
    stack = stack_of_ranks()
    verdict = verdict_of_ranks(stack)
    if verdict in ("differs", "silent") and config.train.graph == "auto":
        what = "did not come back" if verdict == "silent" else "computed other numbers"
        return GraphPlan(f"a replay {what} on this stack before; train.graph=true tries again")
    trial = None if verdict == "proven" else GraphTrial(stack, config.train.timeout_s)
    return GraphPlan(None, trial)


def why_not(config: Config, state: TrainState, device: torch.device) -> str | None:
    """As `GraphPlan.why_not`, as far as the config decides it."""
    if device.type != "cuda" or not config.train.graph:
        return ""
    if (threads := passes_of(config.train).why_no_graph(config.train)) is not None:
        return threads
    if not state.capturable:
        return "train.precision float16 lets the host leave out steps with Muon or such a decay"
    return None


class GraphStep:
    """As `TrainStep`, replayed: a graph for each shape of a step that this rank meets.

    Several microbatches and uneven splits make other shapes; they share one pool of memory.
    On all ranks shapes change after the same steps, so all record the same ones.

    trial: compares the first replay with the step itself; None: that is known.
    """

    def __init__(self, step: TrainStep, state: TrainState, trial: GraphTrial | None = None) -> None:
        self.eager, self._state, self._trial = step, state, trial
        self._seen: Counter[Any] = Counter()  # steps that ran as they are, by shape
        self._graphs: dict[Any, _Recorded] = {}
        self._is_off = False
        dist.release_before_leaving(self)

    def local(self, batches: Sequence[Batch], data_s: float = 0.0) -> LocalStep:
        """The next step, from this rank's batch of each microbatch."""
        return self.eager.local(batches, data_s)

    def __call__(self, local: LocalStep) -> StepTensors:
        """One update (collective)."""
        if self._is_off:
            return self.eager(local)
        shape = local.shape
        # All ranks count alike, since their shapes change after the same steps; so the collectives
        # of a recording meet those of other recordings.
        if self._seen[shape] < EAGER_STEPS:
            self._seen[shape] += 1
            return self.eager(local)
        recorded = self._graphs.get(shape)
        if recorded is None or recorded.has_moved():
            self._graphs.pop(shape, None)
            if self._trial is not None:
                return self._tried(self._trial, local)
            if not self._record(local):
                return self.eager(local)
        return self._graphs[shape].replay(local)

    def done(self, local: LocalStep, left: StepTensors) -> StepResult:
        """Counts the step, and acts on the flags of the one before (collective)."""
        return self.eager.done(local, left)

    def release(self) -> None:
        """Destroys the graphs, and what they hold of NCCL; steps run as they are from now on."""
        for recorded in self._graphs.values():
            recorded.graph.reset()  # a traceback may still hold it
        self._graphs.clear()
        self._is_off = True

    def _record(self, local: LocalStep) -> bool:
        """Records the step; whether all ranks have (collective).

        A rank alone that goes on without would compute the same sums, but by kernels that NCCL may
        choose otherwise outside of a graph.
        """
        # Graphs are replayed one at a time, so all may use the same memory for what they compute.
        pool, failure = next((each.graph.pool() for each in self._graphs.values()), None), None
        try:
            with worker_failures():  # torch raises them here too
                self._graphs[local.shape] = _Recorded(self.eager, self._state, local, pool)
        except RuntimeError as error:  # out of memory, or an operation that waits
            if self._state.scaler.is_enabled():
                raise  # it may have got as far as the loss scale, which counts on the host
            failure = _first_line(error)
            # Nothing of the step that failed has run.
            self._state.optimizer.zero_grad(set_to_none=True)
            forget_batches(self._state.model)
            self.eager.step_sync.drop_flags()
        # Out of the handler, whose traceback holds the memory of what was recorded.
        failures = dist.all_gather_object(failure)
        failed = next((rank for rank, what in enumerate(failures) if what is not None), None)
        if failed is not None:
            why = f"rank {failed}: a step cannot be recorded as a CUDA graph ({failures[failed]})"
            self._go_on_without(why)
        return failed is None

    def _go_on_without(self, why: str) -> None:
        self.release()
        if dist.is_main():
            say(
                f"warning: {why}; training goes on without graphs, more slowly; "
                "train.graph=false says so from the start"
            )

    def _tried(self, trial: GraphTrial, local: LocalStep) -> StepTensors:
        """One update, by a replay that computes what the step itself does, or else by that."""
        self._trial, changed = None, changed_tensors(self._state)

        def outcome(left: StepTensors) -> tuple[StepTensors, list[Tensor]]:
            # On the host: the device may be full.
            return left, copies([left.losses, left.grad_norm, left.flags, *changed])

        before, runs = copies(changed), []
        # Twice: where kernels add in no fixed order, the distance of two runs is the measure.
        for _ in range(2):
            runs.append(outcome(self.eager(local)))
            restore(changed, before)
        with trial.limited():
            # The state is that of before, so the step can still be taken as it is.
            if not self._record(local):
                return self.eager(local)
            trial.replays()
            left, replayed = outcome(self._graphs[local.shape].replay(local))
        why = trial.settle(before, [numbers for _, numbers in runs], replayed)
        if why is not None:
            self._go_on_without(why)
            # Instead of what the replay has done: the step as its first run left it.
            left, numbers = runs[0]
            restore(changed, numbers[-len(changed) :])
        return left


def _first_line(error: BaseException) -> str:
    """The cause in a line: ending a capture that has failed fails again, in other words."""
    while error.__context__ is not None:
        error = error.__context__
    return printable(str(error).partition("\n")[0], 2 * MAX_NAME)


class _Recorded:
    """One graph, with the tensors that it reads and writes."""

    def __init__(self, step: TrainStep, state: TrainState, local: LocalStep, pool: Any) -> None:
        # Tensors that stay where they are: `replay` writes the images and numbers of a step there.
        self._inputs = _copy(local)
        self._state, self._places = state, _places(state)
        self._slots, self._addresses = state.optimizer.state, self._now()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (pinning, reading back) go on calling CUDA meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self._left = step(self._inputs)

    def has_moved(self) -> bool:
        """Whether what the graph changes lies elsewhere now."""
        # An optimizer's `load_state_dict` makes other dictionaries.
        return self._state.optimizer.state is not self._slots or self._now() != self._addresses

    def _now(self) -> list[int]:
        # A walk over all modules in each step would take the host longer than all the rest.
        return [holder[name].data_ptr() for holder, name in self._places]

    def replay(self, local: LocalStep) -> StepTensors:
        """One update, by the images and numbers of `local`."""
        torch._foreach_copy_(list(self._inputs.tensors()), list(local.tensors()))
        self.graph.replay()
        # The next replay writes over them; logs read them later. There is no digest: steps with
        # shares are never recorded.
        losses, grad_norm, flags, digest = self._left
        return StepTensors(losses.clone(), grad_norm.clone(), flags.clone(), digest)


def kept_tensors(state: TrainState) -> list[Tensor]:
    """What steps change and go on from: a graph writes to the memory where it found them."""
    return [holder[name] for holder, name in _places(state)]


def changed_tensors(state: TrainState) -> list[Tensor]:
    """All that a step changes."""
    scaler = state.scaler
    scale = [scaler._scale, scaler._growth_tracker] if scaler.is_enabled() else []
    return [*kept_tensors(state), *scale]


def _places(state: TrainState) -> list[tuple[Any, Any]]:
    """Where `kept_tensors` stand: dictionaries, with the key of each."""
    models = [state.model] if state.average is None else [state.model, state.average.model]
    modules = [module for model in models for module in model.modules()]
    holders = [held for module in modules for held in (module._parameters, module._buffers)]
    holders += [*state.optimizer.state.values(), *state.optimizer.param_groups]
    return [
        (holder, name)
        for holder in holders
        for name, value in holder.items()
        if isinstance(value, Tensor)
    ]


def _copy(local: LocalStep) -> LocalStep:
    """`local` with tensors of its own."""
    parts = [
        part._replace(
            images=part.images.clone(),
            labels=part.labels.clone(),
            dropout=type(part.dropout)(*(m if m is None else m.clone() for m in part.dropout)),
        )
        for part in local.microbatches
    ]
    numbers = type(local.numbers)(*(number.clone() for number in local.numbers))
    return local._replace(microbatches=parts, numbers=numbers)
