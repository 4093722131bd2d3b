#!/bin/bash
# One training on several nodes, a task for each GPU:
#
#   sbatch slurm_nodes.sh mine.yaml --set train.batch_size=64
#
# The arguments are those of `segtrain train`. It starts the run, or goes on with it where there is
# a checkpoint, until it is complete. Leave more than 120 s where a step or a checkpoint takes
# longer.
#SBATCH --job-name=segtrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# Save and queue the job again two minutes before the time limit; go on after a preemption, too.
#SBATCH --signal=USR1@120
#SBATCH --requeue
# One log over all parts.
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

# srun does not take the cores of a task over from sbatch.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" segtrain train "$@" --resume --requeue
