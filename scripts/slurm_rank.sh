#!/usr/bin/env bash
# One task of Slurm as one rank of a job: sets the variables that torch reads, then runs the rest.
# The batch script exports MASTER_ADDR and MASTER_PORT.
#
#   srun scripts/slurm_rank.sh python scripts/pretrain_gpt.py FLAGS --dynatrain …
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_NNODES))}
exec "$@"
