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
#
# An arm is the run <recipe name>_seed<seed>__<policy> under tracking.dir. A finished arm is not run again, and an unfinished
# one goes on from its last checkpoint, so the same command continues an interrupted study. After each seed the fingerprints
# of its arms' initial weights and batches are compared, and the study stops when they differ.
# Environment: PYTHON (.venv/bin/python, else python3).
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
policies='' seeds=1 group='' recipe='' launcher=''
gates=() gpus=() overrides=()
while (($#)); do
  case $1 in
    --policies) policies=${2:?--policies needs names}; shift 2 ;;
    --seeds) seeds=${2:?--seeds needs a number or a list}; shift 2 ;;
    --gpus) gpus=(--gpus "${2:?--gpus needs a number}"); shift 2 ;;
    --group) group=${2:?--group needs a name}; shift 2 ;;
    --gate) gates+=(--gate "${2:?--gate needs a gate}"); shift 2 ;;
    --launcher) launcher=${2:?--launcher needs a command}; shift 2 ;;
    -*) usage ;;
    *=*) overrides+=("$1"); shift ;;
    *) [[ -z $recipe ]] || fail "$1: a second recipe"; recipe=$1; shift ;;
  esac
done
[[ -n $recipe && -n $policies ]] || usage
((${#gates[@]})) || gates=(--gate finite)
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
    name | train.seed | attention.policy | tracking.wandb.group) fail "$override: matched.sh sets this field itself" ;;
  esac
done
read -ra launch <<<"${launcher:-$(dirname "$0")/local.sh}"

# Every policy is checked, and the recipe's own names read, before the first arm starts.
named=$("$PYTHON" -c '
import sys
from fp4mega.train import RecipeError, load_recipe
path, policies, *overrides = sys.argv[1:]
try:
    for policy in policies.split(","):
        recipe = load_recipe(path, [*overrides, f"attention.policy={policy}"])
except (RecipeError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
print(recipe.name, recipe.tracking.dir, sep="\n")' "$recipe" "$policies" "${overrides[@]}") || exit 2
{ read -r name; read -r folder; } <<<"$named"
group=${group:-${name}_matched}

# The overrides that make an arm of the recipe, one a line.
arm() { # policy seed
  printf '%s\n' ${overrides[@]+"${overrides[@]}"} "name=${name}_seed$2" "train.seed=$2" "attention.policy=$1" \
    "tracking.wandb.group=$group"
}
run_of() { echo "$folder/${name}_seed$2__$1"; }

trap 'exit 130' INT
trap 'exit 143' TERM
for seed in "${seed_list[@]}"; do
  arms=()
  for policy in "${policy_list[@]}"; do
    echo "=== $policy, seed $seed"
    mapfile -t fields < <(arm "$policy" "$seed")
    status=0
    "${launch[@]}" "${gpus[@]}" "$recipe" "${fields[@]}" || status=$?
    case $status in
      0) ;;
      2 | 130 | 143) exit "$status" ;;                                           # bad input, or asked to stop
      *) echo "the arm failed with exit code $status; the comparison will say how far it came" >&2 ;; # may have diverged
    esac
    arms+=("$(run_of "$policy" "$seed")")
  done
  status=0
  "$PYTHON" -m fp4mega.tracking.compare "${arms[@]}" >/dev/null || status=$?
  ((status == 0)) || exit "$status"
done

runs=()
for policy in "${policy_list[@]}"; do
  for seed in "${seed_list[@]}"; do runs+=("$(run_of "$policy" "$seed")"); done
done
echo "=== comparison"
exec "$PYTHON" -m fp4mega.tracking.compare "${runs[@]}" "${gates[@]}" \
  --plot "$folder/$group.png" --json "$folder/$group.json"
