#!/usr/bin/env bash
# Trains a recipe on this machine: one process for each GPU, or one on the CPU.
#
#   launch/local.sh [--gpus N] [--restarts N] RECIPE [section.field=value ...]
#
#   --gpus N      processes; default: every GPU that CUDA_VISIBLE_DEVICES leaves visible, or 1 on a machine without.
#                 On such a machine N processes share the cores.
#   --restarts N  how often torchrun starts all processes anew, from the last good checkpoint, after one failed (default 0)
#
# SIGTERM and Ctrl-C end the run after a whole step and a checkpoint.
# Environment: PYTHON (.venv/bin/python, else python3).
# Exit code: that of `python -m fp4mega.train`; several processes: 0, or 1 when any of them failed.
set -euo pipefail

usage() {
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
gpus=''
restarts=0
while (($#)); do
  case $1 in
    --gpus) gpus=${2:?--gpus needs a number}; shift 2 ;;
    --restarts) restarts=${2:?--restarts needs a number}; shift 2 ;;
    -h | --help | -*) usage ;;
    *) break ;;
  esac
done
(($#)) || usage
[[ ${gpus:-1} =~ ^[1-9][0-9]*$ ]] || { echo "error: --gpus $gpus: expected 1 or more" >&2; exit 2; }
[[ $restarts =~ ^[0-9]+$ ]] || { echo "error: --restarts $restarts: expected 0 or more" >&2; exit 2; }

found=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
processes=${gpus:-$((found > 0 ? found : 1))}
if ((found > 0 && processes > found)); then
  echo "error: --gpus $processes: this machine has $found" >&2
  exit 2
fi

if ((processes == 1 && restarts == 0)); then
  exec "$PYTHON" -m fp4mega.train "$@"
fi
options=(--standalone --nproc-per-node "$processes" --max-restarts "$restarts")
# Each process next to its GPU's memory; torchrun of older releases cannot.
if ((found > 0)) && "$PYTHON" -m torch.distributed.run --help | grep -q -- --numa-binding; then
  options+=(--numa-binding node)
fi
# Seconds that torchrun leaves the processes for a last checkpoint when it is asked to stop.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# With the shared store (torch 2.13) the new processes of a restart would wait for addresses of the old ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$PYTHON" -m torch.distributed.run "${options[@]}" -m fp4mega.train "$@"
