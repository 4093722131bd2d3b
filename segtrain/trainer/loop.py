"""`segtrain train` on one rank: set up, the steps and what happens between them, leave."""

import time
from contextlib import ExitStack, suppress
from functools import partial
from signal import SIGUSR1, Signals

from segtrain.data.sample.loader import worker_failures
from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness, slurm
from segtrain.distributed.liveness import has_launcher, write_exit_status
from segtrain.distributed.machine import keep_freed_memory
from segtrain.distributed.process_group import process_group
from segtrain.distributed.signals import exit_code
from segtrain.errors import EXIT_OK
from segtrain.models.memory import memory_failures, training_failure
from segtrain.models.precision import float32_products
from segtrain.run import directory as run_directory
from segtrain.run.console import completion, score_text
from segtrain.run.receipts import Receipt, read_receipts
from segtrain.task.tasks import task_of
from segtrain.trainer import save
from segtrain.trainer.evaluation import evaluate
from segtrain.trainer.setup import TrainRequest, TrainRun, set_up
from segtrain.training.optim.optimizer import moments_bytes
from segtrain.training.receipt_meter import weights_lines


def run(request: TrainRequest) -> int:
    """Trains as requested and returns the exit code (collective)."""
    config, device = request.config, request.device
    if device.type == "cpu":
        keep_freed_memory()
    liveness.beat("setup", 0)
    group = process_group(device, timeout_s=config.train.timeout_s)
    enough = partial(memory_failures, lambda: training_failure(config, device))
    with group, enough(), float32_products(config.train), ExitStack() as stack:
        this = set_up(request, stack)
        with this.log, enough():  # the log has to know how the run ended
            if begin(this):
                with worker_failures():
                    train(this)
                finish(this)
            code = _leave(this) if this.step_sync.stopped else EXIT_OK
            is_complete = code == EXIT_OK and bool(_completion(this))
            asked = config.log.charts and request.report is not None
            asked = asked and task_of(config.task).has_classes
            reports = dist.is_main() and is_complete and asked
    # The other ranks have nothing left to do.
    if reports:
        request.report(this.directory, device)
    best, page = this.best, this.directory / run_directory.REPORT
    tag = "best/" + config.eval.best_tag.partition("/")[2]
    results = {} if best is None else {tag: best["score"], "best/step": best["step"]}
    files = [page] if reports and page.is_file() else []
    this.log.trackers.finish("FINISHED" if is_complete else "KILLED", results, files)
    return code


def train(run: TrainRun) -> None:
    """The steps of this process, and what happens between them (collective)."""
    for local in run.batches():
        with run.around():
            left = run.step(local)
            # Acts on the step before this one: what the device computes now is not waited for.
            result = run.step.done(local, left)
        with run.watched():  # what they read may wait for the device
            for part in run.parts:
                part.after_step(run, local, result)
        if _is_due(run):
            _between(run)
        # After all that a step may hang in, so a launcher can tell the last step that came through.
        liveness.beat("training", run.state.step)


def begin(run: TrainRun) -> bool:
    """Does what comes before the first step; whether there is anything left to do (collective)."""
    if lines := _nothing_left(run):
        if run.changes:
            lines.append("note: nothing was done: the changes above were not used and are not kept")
        run.log.lines(lines)
        return False
    saved, moments = save.checkpoint_of(run), moments_bytes(run.state.optimizer)
    dist.run_on_rank0(lambda: run.checkpoints.check_space(saved, later_bytes=moments))
    # From here on there is something to save. A signal before ends the process at once; a rank that
    # ends from here on without another status did not end in good order.
    run.signal_flags.install()
    if has_launcher():
        write_exit_status(None)
    # None trains while a signal would still end another at once: the others would lose it unsaved.
    dist.barrier()
    if _evaluation_is_left(run):
        _keep_cadences(run)
    if run.state.step < run.last_step and not run.step_sync.is_over:
        _begin_steps(run)
    return True


def _begin_steps(run: TrainRun) -> None:
    if run.receipts is not None and dist.is_main():
        path = run.directory / run_directory.RECEIPTS
        if run.state.step == 0 or run.changes or not path.exists():  # a branch has none yet
            run.receipts.take_start()
        else:  # receipts of another config are not of the same mean
            _count_unlogged(run)
    run.way.go_on(run)
    run.step_log.begin(run.state.step)
    liveness.beat("training", run.state.step)


def _nothing_left(run: TrainRun) -> list[str]:
    """What to log of a run that is complete, or has come to the step of --until; else empty."""
    if done := _completion(run):
        longer = f"to train longer: {_branch(run)}"
        return [f"already complete: {done}, {score_text(run.best)}", longer]
    is_paused = run.last_step <= run.state.step and run.last_step < run.config.train.steps
    if is_paused and not _evaluation_is_left(run):
        return [f"already at step {run.state.step}", _to_train_on(run)]
    return []


def _between(run: TrainRun) -> None:
    """Evaluates and saves, and does not count the time that it takes."""
    began = time.perf_counter()
    _keep_cadences(run)
    run.way.go_on(run)  # ways whose steps have no common sums wait for each other here
    run.step_log.go_on(run, began)


def finish(run: TrainRun) -> None:
    """Saves and evaluates what the last step left; a stopped or paused run only saves."""
    config, state = run.config, run.state
    if run.step_sync.ended and run.step_log.meter.num_steps:
        run.step_log.write(run)
    run.step_log.close()
    # The step of an evaluation that was left is saved already.
    if not _evaluation_is_left(run):
        save.save(run)  # before the last evaluation, which may be long
    if run.step_sync.stopped:
        return
    if state.step < config.train.steps and not run.step_sync.ended:
        run.log.lines([f"paused after step {state.step}, which is saved", _to_train_on(run)])
        return
    if run.evaluated < state.step:
        if not evaluate(run):
            return
        save.save(run)  # once more: now it knows the score
    if run.receipts is not None and dist.is_main():
        run.log.lines(weights_lines(state))
    if state.step < config.train.steps:  # a callback asked for it
        done = f"ended after {state.step} of {config.train.steps} steps"
        run.log.lines([done, _to_train_on(run), f"to let the rate come down: {_branch(run)}"])


def _evaluation_is_left(run: TrainRun) -> bool:
    """Whether the evaluation that fell on the current step was cut short or left out."""
    return run.evaluated < run.state.step and run.falls_on(run.config.eval.every_steps)


def _completion(run: TrainRun) -> str:
    """How far the run came if nothing is left to do; otherwise empty."""
    return completion(run.config.train.steps, run.state.step, run.evaluated)


def _branch(run: TrainRun) -> str:
    return f"segtrain train {run_directory.word_for(run.directory)} --finish STEPS"


def _to_train_on(run: TrainRun) -> str:
    """A line for a run that may go on."""
    return f"to train on: segtrain train {run_directory.word_for(run.directory)} --resume"


def _count_unlogged(run: TrainRun) -> None:
    """Lets the first line after an interruption be the mean of all steps since the line before."""
    every_steps, step = run.config.log.every_steps, run.state.step
    unlogged = range(step - step % every_steps + 1, step + 1)
    receipts: dict[int, Receipt] = {}
    with suppress(OSError):  # there is no file yet
        receipts = read_receipts(run.directory / run_directory.RECEIPTS)
    if all(number in receipts for number in unlogged):
        for each in (receipts[number] for number in unlogged):
            numbers = each.loss, "nan" if each.aux_loss is None else each.aux_loss, each.grad_norm
            run.step_log.meter.update_earlier(*map(float.fromhex, numbers))


def _keep_cadences(run: TrainRun) -> None:
    """Evaluates and saves, where the config or a signal asks for it after this step."""
    checkpoint = run.config.checkpoint
    save_requested = run.step_sync.pop_save_request()
    evaluation_due = run.falls_on(run.config.eval.every_steps)
    keep_due = run.falls_on(checkpoint.keep_every_steps)
    was_cut = False
    if evaluation_due:
        # Save first: an evaluation may take longer than a scheduler waits before it kills the run.
        save.save(run)
        # Saving reads the newest flags, which may tell that a rank was asked to stop.
        was_cut = run.step_sync.stopped or not evaluate(run)
    save_due = keep_due or evaluation_due or run.falls_on(checkpoint.every_steps)
    # After an evaluation that was cut short, the resumption comes here again.
    if (save_due or save_requested) and not was_cut:
        save.save(run, keep=keep_due)
    # A request of this very step arrives while it is saved.
    if run.step_sync.pop_save_request() or save_requested:
        run.log.lines([f"saved step {run.state.step}, as SIGUSR1 asked for"])
    if evaluation_due:
        # The device is idle here, so a signal since the step before needs no further step.
        asked = dist.all_gather_object(run.signal_flags.stop_requested())
        run.step_sync.ask(stop=any(asked))


def _is_due(run: TrainRun) -> bool:
    """Whether something besides training happens after this step."""
    step = run.state.step
    return run.way.have_met(step, due=run.is_due(step), is_last=step == run.last_step)


def _leave(run: TrainRun) -> int:
    """The exit code after a signal, which may have reached one rank only (collective)."""
    numbers = dist.all_gather_object(run.signal_flags.signal)
    # All leave with one code, that of the lowest rank that got a signal.
    number = next(number for number in numbers if number is not None)
    where = f"after step {run.state.step}, which is saved"
    run.log.lines([f"stopped by {Signals(number).name} {where}; go on with --resume"])
    if number == SIGUSR1:
        dist.run_on_rank0(slurm.requeue)
    return exit_code(number)
