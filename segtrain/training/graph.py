"""The step as a CUDA graph: one launch instead of some thousand, so the device waits for nobody.

In bfloat16 a step of PSPNet-R50 on 2 crops of 713 takes an H100 25 ms, and its host 106 to launch.
So the first steps run as they are, and then one is recorded: everything that `TrainStep` does, with
the sums over ranks and the update. From there on a step is a copy of its images and a replay.

A graph keeps addresses and Python numbers as they were. `StepNumbers` are tensors therefore, and a
graph whose tensors have moved is recorded again. What waits with a limit (a lost rank, NaN) stays
outside, in `StepSync.record`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from segtrain.config import Config
from segtrain.data.sample.loader import worker_failures
from segtrain.distributed import collectives as dist
from segtrain.norm.running import forget_batches
from segtrain.run.console import say
from segtrain.text import MAX_NAME, printable
from segtrain.training.local import LocalStep
from segtrain.training.state import TrainState
from segtrain.training.step import StepResult, StepTensors, TrainStep
from segtrain.types import Batch

# Libraries choose kernels, and optimizers and sums make their memory.
EAGER_STEPS = 3


def why_not(config: Config, state: TrainState, device: torch.device) -> str | None:
    """Why steps are not replayed, for the log; None: they are; empty: nothing is to be said."""
    if device.type != "cuda" or not config.train.graph:
        return ""
    if state.shares is not None:
        return "train.shares waits for the exponents of gradients"
    if config.train.virtual_ranks > 1:
        return "train.virtual_ranks computes in threads, which wait for each other"
    if not state.capturable:
        return "train.precision float16 lets the host leave out steps with Muon or such a decay"
    return None


class GraphStep:
    """As `TrainStep`, replayed: a graph for each shape of a step that this rank meets.

    Several microbatches, uneven splits and SAM make other shapes; they share one pool of memory.
    """

    def __init__(self, step: TrainStep, state: TrainState) -> None:
        self.eager, self._state = step, state
        self._layout = state.layout
        self._seen: Counter[Any] = Counter()  # steps that ran as they are, by shape
        self._graphs: dict[Any, _Recorded] = {}
        self._failed = False

    def local(self, batches: Sequence[Batch], data_s: float = 0.0) -> LocalStep:
        """The next step, from this rank's batch of each microbatch."""
        return self.eager.local(batches, data_s)

    def __call__(self, local: LocalStep) -> StepTensors:
        """One update."""
        if self._failed:
            return self.eager(local)
        if self._layout is not self._state.layout:  # other images: their memory is free again
            self._layout = self._state.layout
            self._seen.clear()
            self._graphs.clear()
        shape = local.shape
        if self._seen[shape] < EAGER_STEPS:
            self._seen[shape] += 1
            return self.eager(local)
        recorded = self._graphs.get(shape)
        if recorded is None or recorded.has_moved():
            self._graphs.pop(shape, None)
            pool = next((one.graph.pool() for one in self._graphs.values()), None)
            try:
                with worker_failures():  # torch raises them here too
                    recorded = self._graphs[shape] = _Recorded(self.eager, self._state, local, pool)
            except RuntimeError as error:  # out of memory, or an operation that waits
                self._give_up(error)
                return self.eager(local)
        return recorded.replay(local)

    def _give_up(self, error: RuntimeError) -> None:
        """Lets training go on without graphs: nothing of the step that failed has run."""
        if self._state.scaler.is_enabled():
            raise error  # it may have got as far as the loss scale, which counts on the host
        self._failed = True
        self._graphs.clear()
        self._state.optimizer.zero_grad(set_to_none=True)
        forget_batches(self._state.model)
        self.eager.step_sync.drop_flags()
        reason = printable(str(error).partition("\n")[0], 2 * MAX_NAME)
        say(
            f"warning: rank {dist.rank()}: a step cannot be recorded as a CUDA graph ({reason}); "
            "training goes on without, more slowly; train.graph=false says so from the start"
        )

    def done(self, local: LocalStep, left: StepTensors) -> StepResult:
        """Counts the step, and acts on the flags of the one before (collective)."""
        return self.eager.done(local, left)


class _Recorded:
    """One graph, with the tensors that it reads and writes."""

    def __init__(self, step: TrainStep, state: TrainState, local: LocalStep, pool: Any) -> None:
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
        # The next replay writes over them; logs read them later.
        losses, grad_norm, flags, digest = self._left
        return StepTensors(losses.clone(), grad_norm.clone(), flags.clone(), digest)


def kept_tensors(state: TrainState) -> list[Tensor]:
    """What steps change and go on from: a graph writes to the memory where it found them."""
    return [holder[name] for holder, name in _places(state)]


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
            shown=part.shown if part.shown is None else part.shown.clone(),
        )
        for part in local.microbatches
    ]
    numbers = type(local.numbers)(*(number.clone() for number in local.numbers))
    return local._replace(microbatches=parts, numbers=numbers)
