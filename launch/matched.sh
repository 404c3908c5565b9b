#!/usr/bin/env bash
# Trains a recipe under several policies and seeds, from the same weights on the same batches, and compares them.
#
#   launch/matched.sh RECIPE --policies bf16,nvfp4_qk_fp8_pv --seeds 3 [options] [section.field=value ...]
#
#   --policies A,B,...  arms; the first one is the reference
#   --seeds N or a,b,.. seeds 1 to N, or those named (default 1)
#   --gpus N            as for launch/local.sh
#   --group NAME        wandb group of all arms (default <recipe name>_matched)
#   --gate GATE         a gate of fp4mega.tracking.compare, as final_loss_gap=2% or band; repeatable (default finite)
#   --launcher COMMAND  what starts an arm (default: launch/local.sh), such as "sbatch --wait launch/slurm.sbatch"
#   --jobs N            up to N arms at once, each on one of the visible GPUs in turn: small models leave most of a GPU idle.
#                       What an arm says goes to <its run>.log. Without a GPU one arm runs after another
#   --max-seconds T     after T seconds start no arm, and end those that run with a checkpoint (needs train.save_interval)
#
# An arm is the run <recipe name>_seed<seed>__<policy> under tracking.dir. An arm that finished, or whose loss or gradient
# became not finite, is not run again, and an unfinished one goes on from its last checkpoint, so the same command continues
# an interrupted study. The fingerprints of the arms' initial weights and batches are compared after each seed (with --jobs
# after all), and the study stops when they differ.
# Environment: PYTHON (.venv/bin/python, else python3), CUDA_VISIBLE_DEVICES; OMP_NUM_THREADS (with --jobs: the cores' share).
# Exit code: that of fp4mega.tracking.compare: 0 every gate passed, 1 one failed, 2 not comparable or bad input.
set -euo pipefail

usage() {
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}
fail() {
  echo "error: $*" >&2
  exit 2
}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export PYTHON
policies='' seeds=1 group='' recipe='' launcher='' jobs='' max_seconds=''
gates=() gpus=() overrides=()
while (($#)); do
  case $1 in
    --policies) policies=${2:?--policies needs names}; shift 2 ;;
    --seeds) seeds=${2:?--seeds needs a number or a list}; shift 2 ;;
    --gpus) gpus=(--gpus "${2:?--gpus needs a number}"); shift 2 ;;
    --group) group=${2:?--group needs a name}; shift 2 ;;
    --gate) gates+=("${2:?--gate needs a gate}"); shift 2 ;;
    --launcher) launcher=${2:?--launcher needs a command}; shift 2 ;;
    --jobs) jobs=${2:?--jobs needs a number}; shift 2 ;;
    --max-seconds) max_seconds=${2:?--max-seconds needs a number}; shift 2 ;;
    -*) usage ;;
    *=*) overrides+=("$1"); shift ;;
    *) [[ -z $recipe ]] || fail "$1: a second recipe"; recipe=$1; shift ;;
  esac
done
[[ -n $recipe && -n $policies ]] || usage
((${#gates[@]})) || gates=(finite)
[[ ${jobs:-1} =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs: expected 1 or more"
[[ ${max_seconds:-1} =~ ^[1-9][0-9]*$ ]] || fail "--max-seconds $max_seconds: expected a whole number of 1 or more"
[[ ${#gpus[@]} == 0 || ${gpus[1]} =~ ^[1-9][0-9]*$ ]] || fail "--gpus ${gpus[1]}: expected 1 or more"
[[ -z $jobs || ${#gpus[@]} == 0 ]] || fail "--gpus ${gpus[1]}: with --jobs an arm has one GPU"
if [[ $seeds =~ ^[1-9][0-9]*$ ]]; then
  mapfile -t seed_list < <(seq "$seeds")
elif [[ $seeds =~ ^[0-9]+(,[0-9]+)+$ ]]; then
  IFS=, read -ra seed_list <<<"$seeds"
else
  fail "--seeds $seeds: expected a number of seeds, or seeds separated by commas"
fi
IFS=, read -ra policy_list <<<"$policies"
((${#policy_list[@]} > 1)) || fail "--policies $policies: expected two or more, separated by commas"
for list in "$(printf '%s\n' "${policy_list[@]}" | sort | uniq -d)" "$(printf '%s\n' "${seed_list[@]}" | sort | uniq -d)"; do
  [[ -z $list ]] || fail "given twice: $list"
done
for override in "${overrides[@]}"; do
  case ${override%%=*} in
    name | train.seed | attention.policy | tracking.wandb.group | train.max_seconds) fail "$override: matched.sh sets this field itself" ;;
  esac
done
read -ra launch <<<"${launcher:-$(dirname "$0")/local.sh}"

# Every arm's recipe and every gate is checked, and the recipe's own names read, before the first arm starts.
named=$("$PYTHON" -c '
import sys
from pathlib import Path
from fp4mega.tracking.gates import BAND_SEEDS, parse_gate
from fp4mega.train import load_recipe
path, policies, seeds, group, max_seconds, count, *rest = sys.argv[1:]
gates, overrides = rest[: int(count)], rest[int(count) :]
policies, seeds = policies.split(","), seeds.split(",")
try:
    for gate in gates:
        if parse_gate(gate).name == "band" and len(seeds) < BAND_SEEDS:
            raise ValueError(f"--gate {gate}: needs {BAND_SEEDS} seeds or more; --seeds gives {len(seeds)}")
    base = load_recipe(path, [*overrides, f"attention.policy={policies[0]}"])
    group = group or f"{base.name}_matched"
    if Path(group).name != group:
        raise ValueError(f"--group {group}: names the files of the comparison; expected no folder in it")
    limit = [f"train.max_seconds={max_seconds}"] if max_seconds else []
    for policy in policies:
        for seed in seeds:
            arm = [f"name={base.name}_seed{seed}", f"train.seed={seed}", f"attention.policy={policy}"]
            arm += [f"tracking.wandb.group={group}", *limit]
            recipe = load_recipe(path, [*overrides, *arm])
            # YAML drops blanks: the run would not be in the folder looked for.
            for option, given, taken in (
                ("--policies", policy, recipe.attention.policy),
                ("--group", group, recipe.tracking.wandb.group),
            ):
                if given != taken:
                    raise ValueError(f"{option}: {given!r} is read as {taken!r}; expected it written like that")
except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
print(base.name, base.tracking.dir, group, sep="\n")' \
  "$recipe" "$policies" "$(IFS=,; echo "${seed_list[*]}")" "$group" "$max_seconds" "${#gates[@]}" "${gates[@]}" \
  ${overrides[@]+"${overrides[@]}"}) || exit 2
{ read -r name; read -r folder; read -r group; } <<<"$named"

run_of() { echo "$folder/${name}_seed$2__$1"; }
seconds_left() { echo $((${max_seconds:-0} - SECONDS)); }
time_is_up() { [[ -n $max_seconds ]] && (($(seconds_left) <= 0)); }

# The overrides that make an arm of the recipe, one a line.
arm() { # policy seed
  printf '%s\n' ${overrides[@]+"${overrides[@]}"} "name=${name}_seed$2" "train.seed=$2" "attention.policy=$1" \
    "tracking.wandb.group=$group"
  [[ -z $max_seconds ]] || printf 'train.max_seconds=%s\n' "$(seconds_left)"
}

# How every arm stands, into `state`: `diverged` when it ended at a loss or a gradient that was not finite, `begun` when it
# logged a step, `new`.
declare -A state=() # "policy seed"
look_at_arms() {
  local policy seed paths=() names=() found
  for seed in "${seed_list[@]}"; do
    for policy in "${policy_list[@]}"; do names+=("$policy $seed") paths+=("$(run_of "$policy" "$seed")"); done
  done
  found=$("$PYTHON" -c '
import sys
from pathlib import Path
from fp4mega.tracking import read_run
from fp4mega.tracking.summary import first_nonfinite
for path in map(Path, sys.argv[1:]):
    run = read_run(path) if (path / "events.jsonl").exists() else None
    begun = run is not None and run.of_type("train")
    print("diverged" if begun and run.status == "failed" and first_nonfinite(run) is not None else "begun" if begun else "new")
' "${paths[@]}") || exit 2
  mapfile -t found <<<"$found"
  for ((i = 0; i < ${#names[@]}; i++)); do state[${names[i]}]=${found[i]}; done
}

declare -A running=() # process -> "policy seed slot"
stop_all() { # signal, exit code
  for process in "${!running[@]}"; do kill -s "$1" "$process" 2>/dev/null || true; done
  wait
  exit "$2"
}
trap 'stop_all INT 130' INT
trap 'stop_all TERM 143' TERM

# The end of an arm: bad input and being stopped end the study, a failure may be a divergence and is a result.
ended() { # policy seed exit-code
  case $3 in
    0) echo "=== $1, seed $2: ended" ;;
    2 | 130 | 143)
      [[ -z $jobs ]] || tail -n 5 "$(run_of "$1" "$2").log" >&2
      stop_all TERM "$3"
      ;;
    *) echo "=== $1, seed $2: the arm failed with exit code $3; the comparison will say how far it came" >&2 ;;
  esac
}

# Exits when the runs of one seed did not begin from the same weights and batches.
check_matched() { # seed
  local arms=() policy status=0
  look_at_arms
  for policy in "${policy_list[@]}"; do
    [[ ${state["$policy $1"]} == new ]] || arms+=("$(run_of "$policy" "$1")")
  done
  ((${#arms[@]} > 1)) || return 0
  "$PYTHON" -m fp4mega.tracking.compare "${arms[@]}" >/dev/null || status=$?
  ((status == 0)) || exit "$status"
}

one_after_another() {
  local seed policy status fields
  read -ra launch <<<"${launcher:-$(dirname "$0")/local.sh}"
  for seed in "${seed_list[@]}"; do
    for policy in "${policy_list[@]}"; do
      ! time_is_up || return 0
      echo "=== $policy, seed $seed"
      [[ ${state["$policy $seed"]} != diverged ]] || { echo "diverged before, not run again"; continue; }
      mapfile -t fields < <(arm "$policy" "$seed")
      status=0
      "${launch[@]}" "${gpus[@]}" "$recipe" "${fields[@]}" || status=$?
      ended "$policy" "$seed" "$status"
    done
    check_matched "$seed"
  done
}

several_at_once() { # devices
  local devices=("$@") waiting=() free=() entry policy seed slot process status fields
  read -ra launch <<<"${launcher:-$PYTHON -m fp4mega.train}"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((jobs < $(nproc) ? $(nproc) / jobs : 1))}
  for seed in "${seed_list[@]}"; do
    for policy in "${policy_list[@]}"; do
      if [[ ${state["$policy $seed"]} == diverged ]]; then
        echo "=== $policy, seed $seed: diverged before, not run again"
      else
        waiting+=("$policy $seed")
      fi
    done
  done
  for ((slot = jobs - 1; slot >= 0; slot--)); do free+=("$slot"); done
  mkdir -p "$folder"
  while ((${#waiting[@]} || ${#running[@]})); do
    while ((${#waiting[@]} && ${#free[@]})) && ! time_is_up; do
      read -r policy seed <<<"${waiting[0]}"
      waiting=("${waiting[@]:1}")
      slot=${free[-1]}
      unset 'free[-1]'
      mapfile -t fields < <(arm "$policy" "$seed")
      echo "=== $policy, seed $seed: on GPU ${devices[slot % ${#devices[@]}]}"
      CUDA_VISIBLE_DEVICES=${devices[slot % ${#devices[@]}]} "${launch[@]}" "$recipe" "${fields[@]}" \
        >>"$(run_of "$policy" "$seed").log" 2>&1 &
      running[$!]="$policy $seed $slot"
    done
    ((${#running[@]})) || break
    status=0 process=''
    wait -n -p process "${!running[@]}" || status=$?
    if [[ -z $process ]]; then # bash no longer knows which one it was
      for process in "${!running[@]}"; do kill -0 "$process" 2>/dev/null || break; done
      status=0
      wait "$process" || status=$?
    fi
    entry=${running[$process]}
    unset "running[$process]"
    read -r policy seed slot <<<"$entry"
    free+=("$slot")
    ended "$policy" "$seed" "$status"
  done
  for seed in "${seed_list[@]}"; do check_matched "$seed"; done
}

devices=()
if [[ -n $jobs ]]; then
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
  else
    mapfile -t devices < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
  fi
  ((${#devices[@]})) || { echo "no GPU is visible: one arm after another"; jobs=''; }
fi
look_at_arms
if ((${#devices[@]})); then several_at_once "${devices[@]}"; else one_after_another; fi

look_at_arms
runs=()
for policy in "${policy_list[@]}"; do
  for seed in "${seed_list[@]}"; do
    if [[ ${state["$policy $seed"]} == new ]]; then
      echo "=== $policy, seed $seed: not begun; the same command runs it"
    else
      runs+=("$(run_of "$policy" "$seed")")
    fi
  done
done
if ((${#runs[@]} < 2)); then
  [[ -z $max_seconds ]] || fail "--max-seconds $max_seconds: too short to compare anything; the same command goes on"
  fail "fewer than two arms made a step, so there is nothing to compare; what they said is above"
fi
plot=(--plot "$folder/$group.png")
"$PYTHON" -c 'import matplotlib' 2>/dev/null || { echo "no plot: matplotlib is not installed"; plot=(); }
echo "=== comparison"
exec "$PYTHON" -m fp4mega.tracking.compare "${runs[@]}" "${gates[@]/#/--gate=}" ${plot[@]+"${plot[@]}"} --json "$folder/$group.json"
