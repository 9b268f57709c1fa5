#!/usr/bin/env bash
# One prefill engine, one decode engine and the proxy on this host, each started by hand (`launch` does the same in one
# command). usage: examples/one_host.sh MODEL [vLLM options]; Ctrl-C ends all three.
set -euo pipefail
MODEL=${1:?usage: examples/one_host.sh MODEL [vLLM options]}
shift
export VLLM_HOST_IP=127.0.0.1
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

vllm-mooncake-ascend serve "$MODEL" --role prefill --port 8100 "$@" &
vllm-mooncake-ascend serve "$MODEL" --role decode --port 8200 "$@" &
vllm-mooncake-ascend proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000 &
wait -n
