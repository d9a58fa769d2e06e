#!/usr/bin/env bash
# The deepspeed launcher: the method is the "consensus" block of deepspeed.json, beside DeepSpeed's own keys.
# Several machines: --hostfile integrations/launch/hostfile with a line for each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/env.sh
exec deepspeed --num_accelerators "${WORKERS:-4}" --no_local_rank --master_port "${PORT:-29500}" \
    --module benchmarks.train --deepspeed-config integrations/launch/deepspeed.json "$@"
