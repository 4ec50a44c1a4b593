#!/usr/bin/env bash
# What CI cannot do: the tests, the figures and the models on a machine with a GPU, before a release.
#
#   scripts/check_gpu.sh OUTPUT PART...      parts, in the order in which they shall run:
#     host     the host's time for a call of each op (a minute, on a machine that does nothing else)
#     tests    all tests that are not slow, JOBS processes (16) spread over the GPUs
#     bench    MINUTES (9) of benchmarks, leaving out what earlier runs of this OUTPUT have measured
#     models   `tilegym infer --compare` of MODELS at their real sizes with random weights
#     train    `tilegym train --compare` of TRAININGS, a line each, with Liger-Kernel beside it where that is installed
#     integrate, autokernel   these commands for MODELS
#
# Every part takes SECONDS_EACH (590) at most; what was done by then is kept. The exit status is that of the first part
# that failed. With several GPUs `CUDA_VISIBLE_DEVICES=0 ... bench` may run beside `CUDA_VISIBLE_DEVICES=1 ... tests`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 2 ] || { sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
out=$1
shift
python=${PYTHON:-.venv/bin/python}
models=${MODELS:-llama-3.1-8b qwen3.5-0.8b deepseek-v2-lite gpt-oss-20b}
trainings=${TRAININGS:-llama-3.2-1b
llama-3.1-8b --num_layers 4 --batch_size 1 --sequence_length 4096
qwen3-0.6b
gemma-3-4b --num_layers 6 --batch_size 2}
export PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0

# limited LOG COMMAND...: SIGINT ends a command that takes too long, so that it writes what it has.
limited() {
    local log=$out/$1 began=$SECONDS done
    shift
    timeout --signal=INT --kill-after=20 "${SECONDS_EACH:-590}" "$@" > "$log" 2>&1
    done=$?
    echo "==> $log: exit status $done after $((SECONDS - began)) s"
    tail -n 5 "$log"
    [ "$status" -ne 0 ] || status=$done
}

for part in "$@"; do
    case $part in
        host) limited host.log "$python" -m tilegym bench --host-only --output "$out/host" ;;
        tests)
            # Each test is named as it ends: what failed is known although the time ends before the tests do.
            OMP_NUM_THREADS=1 limited tests.log "$python" -m pytest -v -n "${JOBS:-16}" --dist worksteal \
                -m "not slow" --durations=20 --junitxml "$out/tests.xml" tests
            grep -oE "(FAILED|ERROR) tests/.*" "$out/tests.log" | sed -E 's/ - .*//; s/ *$//' | sort -u > "$out/failed.txt"
            ;;
        bench)
            earlier=()
            runs=0
            for folder in "$out"/bench-*/; do
                [ -e "$folder/results.json" ] || continue
                earlier+=(--skip "$folder")
                runs=$((runs + 1))
            done
            limited "bench-$runs.log" "$python" -m tilegym bench --minutes "${MINUTES:-9}" --no-host \
                "${earlier[@]}" --output "$out/bench-$runs"
            ;;
        models)
            for model in $models; do
                limited "infer-$model.log" "$python" -m tilegym infer --model_id "$model" --random_weights --compare \
                    --report_kernel_coverage --summary_file "$out/infer-$model.json"
            done
            ;;
        train)
            peer=()
            "$python" -c "import liger_kernel" 2> /dev/null && peer=(--peer liger)
            while read -ra training; do
                model=${training[0]}
                limited "train-$model.log" "$python" -m tilegym train --random_weights --compare "${peer[@]}" \
                    --report_kernel_coverage --summary_file "$out/train-$model.json" --model_id "${training[@]}" < /dev/null
            done <<< "$trainings"
            ;;
        integrate)
            for model in $models; do
                limited "integrate-$model.log" "$python" -m tilegym integrate "$model" --random_weights --force \
                    --restart --output "$out/integrate-$model"
            done
            ;;
        autokernel)
            for model in $models; do
                limited "autokernel-$model.log" "$python" -m tilegym autokernel "$model" --random-weights \
                    --minutes "${MINUTES:-9}" --out "$out/autokernel-$model"
            done
            ;;
        *)
            echo "unknown part $part: one of host, tests, bench, models, train, integrate, autokernel" >&2
            exit 2
            ;;
    esac
done
exit "$status"
