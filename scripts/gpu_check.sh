#!/usr/bin/env bash
# Checks dtorch on this machine's GPU, in under 4 minutes: the demo, a slice of the tests, the benchmarks' table.
# Every part runs, also after one that failed. Exit status: 0 all passed, 1 a part failed, 2 there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

DEMO_LIMIT_S=60
TESTS_LIMIT_S=70
BENCH_LIMIT_S=100

if ! python - <<'PYTHON'
import sys
import torch

if not torch.cuda.is_available():
    print(f"no GPU here: torch {torch.__version__} sees no CUDA device, so nothing was checked", file=sys.stderr)
    sys.exit(2)
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
PYTHON
then
    exit 2
fi

failed=()

part() { # name, limit in seconds, command...
    local name=$1 limit_s=$2
    shift 2
    printf '\n== %s\n' "$name"
    timeout "$limit_s" "$@" || { echo "$name: exit status $? (124: it ran past $limit_s s)"; failed+=("$name"); }
}

part demo "$DEMO_LIMIT_S" dtorch demo --device cuda --mesh dp=1,tp=2,pp=2 --tokens 24
part tests "$TESTS_LIMIT_S" python -m pytest -q -p scripts.on_gpu tests/sharding/test_softmax.py tests/worker/test_devices.py
part benchmarks "$BENCH_LIMIT_S" python -m benchmarks --device cuda --quick --only add --only planning --only layer \
    --only prefill --only decode --json "${OUT:-benchmarks/results}/gpu.json"

if ((${#failed[@]})); then
    printf '\nfailed: %s\n' "${failed[*]}"
    exit 1
fi
printf '\nall passed\n'
