#!/usr/bin/env bash
# Prefill on one host, decode and the proxy on another, with a cluster secret. Run on each host with its role:
#   SECRET_FILE=secret examples/two_hosts.sh prefill MODEL THIS_HOST
#   SECRET_FILE=secret examples/two_hosts.sh decode MODEL THIS_HOST PREFILL_HOST
# The secret is any text of at least 16 characters, the same on both hosts.
set -euo pipefail
ROLE=${1:?prefill or decode} MODEL=${2:?model} THIS_HOST=${3:?address of this host}
VLLM_MOONCAKE_ASCEND_SECRET=$(cat "${SECRET_FILE:?file with the cluster secret}")
export VLLM_MOONCAKE_ASCEND_SECRET VLLM_HOST_IP=$THIS_HOST
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

if [ "$ROLE" = prefill ]; then
    vllm-mooncake-ascend serve "$MODEL" --role prefill --host "$THIS_HOST" --port 8100 &
else
    PREFILL_HOST=${4:?address of the prefill host}
    vllm-mooncake-ascend serve "$MODEL" --role decode --host "$THIS_HOST" --port 8200 &
    vllm-mooncake-ascend proxy --prefill "http://$PREFILL_HOST:8100" --decode "http://$THIS_HOST:8200" --host 0.0.0.0 --port 8000 &
fi
wait -n
