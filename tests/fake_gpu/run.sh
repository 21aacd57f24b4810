#!/usr/bin/env bash
# Run a command on the fake GPU: run.sh CMD...   e.g.  run.sh python -c "import cupy; print(cupy.arange(3).nbytes)"
# FAKE_GPU_ENV: the folder that build.sh was given (.venv-fake-gpu). Other options are listed at the top of runtime.cpp.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENV=${FAKE_GPU_ENV:-.venv-fake-gpu}
[ -e "$ENV/lib-fake/libfake_cuda.so" ] || { echo "run.sh: no fake GPU in $ENV: run build.sh first, or set FAKE_GPU_ENV" >&2; exit 2; }
[ $# -gt 0 ] || { echo "usage: run.sh CMD..." >&2; exit 2; }
ENV=$(cd "$ENV" && pwd)
export PATH=$ENV/bin:$PATH
export LD_LIBRARY_PATH=$ENV/lib-fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}  # libcuda.so.1, libcublas*.so.13
export PYTHONPATH=$HERE/hook${PYTHONPATH:+:$PYTHONPATH}
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$ENV/kernels}
export CUPY_COMPILE_WITH_PTX=1  # CuPy's own kernels too
export CUPY_ACCELERATORS=  # CUB's reductions would be compiled for minutes
unset CUDA_PATH CUDA_HOME CUDA_VISIBLE_DEVICES
LD_PRELOAD=libfake_cuda.so${LD_PRELOAD:+:$LD_PRELOAD} exec "$@"  # by name: no path with spaces is taken here
