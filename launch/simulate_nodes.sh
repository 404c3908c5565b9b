#!/usr/bin/env bash
# Two "nodes" on one machine: trains a recipe across two network namespaces, loses one of them on the way, and brings it back.
#
#   sudo launch/simulate_nodes.sh RECIPE [section.field=value ...]
#
# Each namespace has its own torchrun agent with one process, on the CPU; a veth pair is all that joins them. Once the run has
# saved a checkpoint at step KILL_AFTER or later, everything in the second namespace is killed with SIGKILL and its agent is
# started anew a second later. torchrun's rendezvous brings both together again, and training resumes from the last good
# checkpoint. Both share this machine's files, as nodes share a file system. No packet leaves the two namespaces.
#
# Environment: KILL_AFTER (1), LIMIT seconds for everything (90), LOGS folder for both nodes' output (a new one in /tmp),
# PYTHON (.venv/bin/python, else python3).
# Exit code: 0 trained to the end on both nodes, 77 not possible here (said in words), 1 otherwise.
set -euo pipefail

if (($# < 1)); then
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
KILL_AFTER=${KILL_AFTER:-1}
LIMIT=${LIMIT:-90}
LOGS=${LOGS:-$(mktemp -d /tmp/fp4mega-nodes.XXXXXX)}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
A=fp4mega-$$-a B=fp4mega-$$-b
ADDRESS_A=192.0.2.1 ADDRESS_B=192.0.2.2 # reserved for documentation: never a real network

skip() {
  echo "skipped: $*" >&2
  exit 77
}
((EUID == 0)) || skip "network namespaces need root"
command -v ip >/dev/null || skip "ip (iproute2) is not installed"

clean_up() {
  for space in "$A" "$B"; do
    ip netns pids "$space" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns delete "$space" 2>/dev/null || true # its end of the veth pair goes with it
  done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

{ ip netns add "$A" && ip netns add "$B"; } 2>/dev/null || skip "this system allows no network namespaces"
ip link add "fp4a$$" netns "$A" type veth peer name "fp4b$$" netns "$B" || skip "this system has no veth interfaces"
ip -n "$A" address add "$ADDRESS_A/30" dev "fp4a$$"
ip -n "$B" address add "$ADDRESS_B/30" dev "fp4b$$"
for end in "$A fp4a$$" "$B fp4b$$"; do
  read -r space device <<<"$end"
  ip -n "$space" link set lo up
  ip -n "$space" link set "$device" up
done

# One agent in a namespace. Only the first one, which is never lost, holds the rendezvous. The short heartbeat makes it notice
# the loss of the other in 3 s instead of 15 s. With a shared store the first agent would publish its address in the first round
# of the rendezvous only, and a node that comes later would wait for it in vain (torch 2.13).
start_node() { # namespace device address holds-the-rendezvous
  ip netns exec "$1" env CUDA_VISIBLE_DEVICES='' TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    GLOO_SOCKET_IFNAME="$2" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3 --monitor-interval 0.5 \
    --rdzv-backend c10d --rdzv-id "simulated-$$" --rdzv-endpoint "$ADDRESS_A:29400" --local-addr "$3" \
    --rdzv-conf "is_host=$4,keep_alive_interval=1,keep_alive_max_attempt=3" \
    -m fp4mega.train "${RECIPE[@]}" &
}
RECIPE=("$@")
RUN=$("$PYTHON" -c '
import sys
from fp4mega.train import load_recipe
recipe = load_recipe(sys.argv[1], sys.argv[2:])
print(f"{recipe.tracking.dir}/{recipe.run_name}")' "$@")
if [[ -e $RUN ]]; then
  echo "error: $RUN is there already; name another with name=... or tracking.dir=..." >&2
  exit 2
fi

mkdir -p "$LOGS"
echo "nodes' output: $LOGS"
start_node "$A" "fp4a$$" "$ADDRESS_A" 1 >"$LOGS/node_a.log" 2>&1
NODE_A=$!
start_node "$B" "fp4b$$" "$ADDRESS_B" 0 >"$LOGS/node_b.log" 2>&1
disown # its death is announced below

give_up() {
  echo "error: $*; the last lines of each node:" >&2
  tail -n 15 "$LOGS"/node_*.log >&2
  exit 1
}
saved_step() {
  local name
  name=$(cat "$RUN/checkpoints/latest" 2>/dev/null) || name=iter_0
  echo $((10#${name#iter_}))
}

until (($(saved_step) >= KILL_AFTER)); do
  ((SECONDS < LIMIT)) || give_up "no checkpoint of step $KILL_AFTER in $LIMIT s"
  kill -0 "$NODE_A" 2>/dev/null || give_up "training ended before a checkpoint of step $KILL_AFTER"
  sleep 0.1
done
mapfile -t LOST < <(ip netns pids "$B")
kill -9 "${LOST[@]}"
echo "after the checkpoint of step $(saved_step): killed ${#LOST[@]} processes of the second node"
sleep 1
start_node "$B" "fp4b$$" "$ADDRESS_B" 0 >"$LOGS/node_b_again.log" 2>&1
NODE_B=$!

for node in "$NODE_A" "$NODE_B"; do
  while kill -0 "$node" 2>/dev/null; do
    ((SECONDS < LIMIT)) || give_up "not finished in $LIMIT s"
    sleep 0.2
  done
  wait "$node" || give_up "a node's agent failed with exit code $?"
done
echo "both nodes finished after $SECONDS s: $RUN"
