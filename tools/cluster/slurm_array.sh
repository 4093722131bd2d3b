#!/bin/bash
# One config with several seeds, or several configs, a task of an array each:
#
#   sbatch --array=0-4 slurm_array.sh mine.yaml            runs/mine_seed0 to runs/mine_seed4
#   sbatch --array=0-1 slurm_array.sh a.yaml b.yaml        runs/a and runs/b
#
# Two minutes before its time limit a task saves and is queued again; it then goes on by itself.
#SBATCH --job-name=segtrain
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out
set -euo pipefail

number=${SLURM_ARRAY_TASK_ID:?start this by sbatch --array=0-4}
if [ $# -gt 1 ]; then
    configs=("$@")
    options=("${configs[number]:?no config for this task}")
else
    name=$(basename "${1:?which config?}" .yaml)
    options=("$1" --set "seed=$number" --output "runs/${name}_seed$number")
fi
# srun does not take the cores of a task over from sbatch.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" segtrain train "${options[@]}" --resume --requeue
