#!/usr/bin/env bash
# Build the fake GPU: [NVRTC=13.5] build.sh [FOLDER], .venv-fake-gpu unless told; about 1 minute, 0.6 GB. Needs x86_64 Linux, Python 3.11 or
# later with its headers and venv, pip, gcc, g++, binutils, and PyPI. What is there already is not made again; remove the folder
# to start anew.
#
# CuPy's module `runtime`, the one with CUDA's runtime linked in, is compiled anew from PyPI's source of the same version. It,
# libcuda and cuBLAS are then served by the files beside this one, which run.sh loads first, and kernels are run by the
# interpreter in tests/ptx; compilers are NVIDIA's.
set -Eeuo pipefail

VERSION=14.2.0  # of CuPy
NVRTC=${NVRTC:-13.0}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
fail() { echo "build.sh: $*" >&2; exit 1; }
say() { echo "[$SECONDS s] $*"; }

mkdir -p "${1:-.venv-fake-gpu}"
ENV=$(cd "${1:-.venv-fake-gpu}" && pwd)
LOG=$ENV/build.log
trap 'fail "line $LINENO failed; the end of $LOG says why:"$'"'\n'"'"$(tail -n 15 "$LOG" 2>/dev/null)"' ERR

for tool in gcc g++ nm "$PYTHON"; do
    command -v "$tool" >/dev/null || fail "$tool is missing (Debian: apt-get install build-essential python3)"
done
[ "$(uname -m)" = x86_64 ] || fail "CUDA's wheels are taken for x86_64 only, this is $(uname -m)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$PYTHON is older than 3.11; set PYTHON to another"
[ -e "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    fail "Python.h is missing (Debian: apt-get install python3-dev)"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || fail "venv is missing (Debian: apt-get install python3-venv)"

if [ ! -x "$ENV/bin/pip" ]; then
    say "environment"
    "$PYTHON" -m venv "$ENV" >"$LOG" 2>&1
fi
pip() { "$ENV/bin/python" -m pip --disable-pip-version-check "$@"; }
SITE=$("$ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

if [ ! -e "$ENV/installed-$VERSION" ]; then
    say "wheels (170 MB)"
    # No [ctk]: its cuBLAS, cuFFT, cuSOLVER ... (2 GB) are not called. NVRTC and the headers are.
    pip install --no-compile "cupy-cuda13x==$VERSION" "nvidia-cuda-nvrtc==$NVRTC.*" "nvidia-cuda-runtime==13.0.*" "ml_dtypes>=0.5" \
        "numpy>=2.1.2" "array-api-compat>=1.15" "Cython>=3.2,<3.3" "setuptools>=77,<81" wheel >>"$LOG" 2>&1
    # For the compiler of the host only; apart, so that CuPy's kernels see what they would see elsewhere.
    pip install --no-deps --upgrade --target "$ENV/headers" "nvidia-cuda-crt==13.0.*" "nvidia-cuda-profiler-api==13.0.*" >>"$LOG" 2>&1
    touch "$ENV/installed-$VERSION"
fi
INCLUDE=("-I$SITE/nvidia/cu13/include" "-I$ENV/headers/nvidia/cu13/include")

SOURCE=$ENV/cupy-$VERSION
if [ ! -e "$SOURCE/setup.py" ]; then
    say "CuPy's sources"
    # pip asks setup.py for metadata; as a stub it looks for no CUDA.
    CUPY_INSTALL_USE_STUB=1 pip download --no-deps --no-build-isolation --no-binary cupy -d "$ENV" "cupy==$VERSION" >>"$LOG" 2>&1
    tar -xzf "$ENV/cupy-$VERSION.tar.gz" -C "$ENV" "cupy-$VERSION/cupy_backends" "cupy-$VERSION/setup.py"
fi

# The wheel's module for the runtime has CUDA's runtime linked in statically; this one takes what was loaded before it.
MODULE=$(echo "$SITE"/cupy_backends/cuda/api/runtime.*.so)
[ -e "$MODULE" ] || fail "no module $MODULE in the wheel"
if [ ! -e "$ENV/runtime.so" ]; then
    say "CuPy's module for the runtime"
    (cd "$SOURCE" && "$ENV/bin/python" - >>"$LOG" 2>&1 <<'PYTHON'
from Cython.Build import cythonize
from setuptools import Extension

name = "cupy_backends.cuda.api.runtime"
constants = {
    "CUPY_USE_CUDA_PYTHON": False,
    "CUPY_CUFFT_STATIC": False,
    "CUPY_CYTHON_VERSION": "3.2",
    "CUPY_CUDA_VERSION": 13000,
    "CUPY_HIP_VERSION": 0,
}
source = name.replace(".", "/") + ".pyx"
cythonize([Extension(name, [source], language="c++")], language_level=3, compile_time_env=constants)
PYTHON
    )
    g++ -O1 -w -std=c++17 -shared -fPIC "${INCLUDE[@]}" -I"$("$ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
        -I"$SOURCE/cupy_backends" -I"$SOURCE" "$SOURCE/cupy_backends/cuda/api/runtime.cpp" -o "$ENV/runtime.so.part" >>"$LOG" 2>&1
    mv "$ENV/runtime.so.part" "$ENV/runtime.so"
fi
cmp -s "$ENV/runtime.so" "$MODULE" || { cp "$ENV/runtime.so" "$MODULE.part" && mv "$MODULE.part" "$MODULE"; }

SOURCES=("$HERE"/*.cpp "$HERE"/../ptx/*.cpp)
NEWEST=$(ls -t "${SOURCES[@]}" "$HERE"/*.h "$HERE"/../ptx/*.h | head -n 1)
if [ ! -e "$ENV/lib-fake/libfake_cuda.so" ] || [ "$NEWEST" -nt "$ENV/lib-fake/libfake_cuda.so" ]; then
    say "fake GPU"
    WORK=$ENV/work
    mkdir -p "$WORK" "$ENV/lib-fake"
    rm -f "$WORK"/*.o
    FLAGS=(-O2 -march=native -Wall -Wextra -Wno-unused-parameter -std=c++17 -fPIC -ffp-contract=off -frounding-math)
    printf '%s\0' "${SOURCES[@]}" |
        (cd "$WORK" && xargs -0 -n 1 -P "$(nproc)" g++ "${FLAGS[@]}" "${INCLUDE[@]}" -c) >>"$LOG" 2>&1
    # Functions that CuPy's modules need and the fake does not have.
    nm -D --undefined-only "$MODULE" "$SITE"/cupy_backends/cuda/libs/cublas.*.so | awk '$1 == "U" {print $2}' |
        sed 's/@.*//' | grep -E '^(cuda[A-Z]|cublas)' | sort -u >"$WORK/needed"
    nm --defined-only "$WORK"/*.o | awk '$2 == "T" {print $3}' | sort -u >"$WORK/has"
    { echo 'int fake_gpu_rest(const char *);'
      comm -23 "$WORK/needed" "$WORK/has" | sed 's/.*/int &(void) { return fake_gpu_rest("&"); }/'; } >"$WORK/rest.c"
    gcc -O1 -fPIC -c "$WORK/rest.c" -o "$WORK/rest.o" >>"$LOG" 2>&1
    echo 'libcublas.so.13 { global: cublas*; };' >"$WORK/versions"  # the wheel asks for symbols of that version
    g++ -shared -Wl,--version-script="$WORK/versions" "$WORK"/*.o -o "$WORK/libfake_cuda.so" >>"$LOG" 2>&1
    for name in libcuda.so.1 libcublas.so.13 libcublasLt.so.13; do ln -sf libfake_cuda.so "$ENV/lib-fake/$name"; done
    mv "$WORK/libfake_cuda.so" "$ENV/lib-fake/libfake_cuda.so"
fi

say "trial"
FAKE_GPU_ENV=$ENV "$HERE/run.sh" python -c 'import cupy; assert (cupy.arange(3) + 1).get().tolist() == [1, 2, 3]' >>"$LOG" 2>&1
say "built in $ENV"
