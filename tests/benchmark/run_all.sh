#!/usr/bin/env bash
# Runs every benchmark beside this file; options are those of `tilegym bench`:
#   bash tests/benchmark/run_all.sh --quick --output out/bench
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
command -v "$python" > /dev/null || python=python3
export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m tilegym.bench_cli --folder "$here" "$@"
